"""Options: defaults, spellings, and the text of every refusal."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import zcompile
from zcompile.backend import zero
from zcompile.errors import OptionError
from zcompile.options import Options
from zcompile.specs import with_threshold


def refusal(**options):
    with pytest.raises(OptionError) as error:
        Options.parse(options)
    assert isinstance(error.value, ValueError), "so that `except ValueError` catches it"
    return str(error.value)


KNOWN = "Known options: " + ", ".join(sorted(set(Options.model_fields) - {"step"})) + "."


def test_defaults():
    options = Options.parse(None)
    assert options == Options.parse({}) == Options()
    assert (options.stage, options.prefetch, options.engine) == (3, None, "inductor")
    assert options.bucket_bytes is None
    assert options.param_dtype is None
    assert options.disable == ()


@pytest.mark.parametrize("budget", [2, 8 * 2**30, 1.0, 0.5, None])
def test_a_budget_is_bytes_or_a_share(budget):
    stated = Options.parse({"memory_budget": budget}).memory_budget
    assert (stated, type(stated)) == (budget, type(budget))


def test_options_are_passed_through():
    options = Options(stage=1)
    assert Options.parse(options) is options


def test_a_record_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Options().stage = 1


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("fp32", torch.float32),
        ("float64", torch.float64),
        (None, None),
    ],
)
def test_dtypes_by_any_spelling(spelling, dtype):
    options = Options.parse({"param_dtype": spelling, "reduce_dtype": spelling})
    assert options.param_dtype is dtype
    assert options.reduce_dtype is dtype


def test_an_unknown_option_is_told_the_nearest_name():
    assert refusal(stge=2) == f"unknown option 'stge'; did you mean 'stage'? {KNOWN}"
    assert refusal(bucket_byte=2).startswith(
        "unknown option 'bucket_byte'; did you mean 'bucket_bytes'? Known options: "
    )


def test_an_unknown_option_that_is_near_to_none():
    assert refusal(quux=2) == f"unknown option 'quux'. {KNOWN}"


def test_deepspeeds_configuration_is_told_apart():
    said = refusal(zero_optimization={"stage": 2}, bf16={"enabled": True})
    assert "entry of DeepSpeed's configuration" in said and "is the option 'stage'" in said


def test_a_whole_number_may_be_spelt_as_another_kind():
    made = Options.parse({"bucket_bytes": 5e8, "stage": np.int64(2)})
    assert (made.bucket_bytes, made.stage) == (500_000_000, 2)
    assert refusal(prefetch=1.5).startswith("option 'prefetch' = 1.5: Input should be a valid int")


def test_a_setting_of_inductors_with_another_name_is_one():
    Options.parse({"inductor": {"force_disable_caches": True, "triton.cudagraphs": False}})


def test_options_that_are_no_dict():
    with pytest.raises(OptionError, match=r"a dict, such as \{'stage': 3\}, not 'ds\.json'"):
        Options.parse("ds.json")


def test_a_stage_out_of_range():
    about = Options.model_fields["stage"].description
    assert refusal(stage=4) == (
        f"option 'stage' = 4: Input should be less than or equal to 3. ({about})"
    )
    assert refusal(stage=-1) == (
        f"option 'stage' = -1: Input should be greater than or equal to 0. ({about})"
    )


def test_a_dtype_that_is_none():
    about = Options.model_fields["param_dtype"].description
    names = "fp32, float32, fp16, float16, half, bf16, bfloat16, fp64, float64"
    assert refusal(param_dtype="int8") == (
        "option 'param_dtype' = 'int8': 'int8' is not a floating dtype; use one of "
        f"{names}. ({about})"
    )
    assert "torch.int64 is not a floating dtype" in refusal(reduce_dtype=torch.int64)


def test_every_wrong_option_is_named():
    lines = refusal(stage=4, prefetch=-1).split("\n")
    assert [line.split(":")[0] for line in lines] == [
        "option 'stage' = 4",
        "option 'prefetch' = -1",
    ]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("engine", "cuda", "Input should be 'inductor' or 'eager'"),
        ("primitive", "nccl", "Input should be 'auto', 'p2p' or 'native'"),
        ("bucket_bytes", 0, "Input should be greater than or equal to 1"),
        ("persistence_threshold", -1, "Input should be greater than or equal to 0"),
        ("check_timeout", 0, "Input should be greater than 0"),
        ("disable", "release", "Input should be a valid tuple"),
        ("memory_budget", 0, "it is neither a positive number of bytes (an int, such as"),
        ("memory_budget", -5, "it is neither a positive number of bytes"),
        ("memory_budget", 1.5, "it is neither a positive number of bytes"),
        ("memory_budget", float("nan"), "it is neither a positive number of bytes"),
        ("memory_budget", True, "it is neither a positive number of bytes"),
        ("memory_budget", "1 GB", "it is neither a positive number of bytes"),
        ("memory_budget", 1, "that is one byte; for all that the device has write 1.0"),
        ("memory_budget", 8e9, "a float is a share up to 1.0; for bytes write 8000000000"),
        ("replan_after", -1, "Input should be greater than or equal to 0"),
        ("replan_gain", -1.1, "Input should be greater than or equal to -1"),
        ("calibrate", "no", "Input should be a valid boolean"),
        ("stage", "3", "Input should be a valid integer"),
        ("stage", True, "Input should be a valid integer"),
        (
            "inductor",
            {"max_autotunee": True},
            "torch._inductor.config has no entry 'max_autotunee'; did you mean 'max_autotune'?",
        ),
    ],
)
def test_values_out_of_range(option, value, says):
    assert refusal(**{option: value}).startswith(f"option {option!r} = {value!r}: {says}")


def test_dump_can_be_given_by_the_environment(monkeypatch):
    monkeypatch.delenv("ZCOMPILE_DUMP", raising=False)
    assert Options.parse({}).dump is None
    monkeypatch.setenv("ZCOMPILE_DUMP", "/there")
    assert Options.parse({}).dump == "/there"
    assert Options.parse({"dump": "/here"}).dump == "/here"
    monkeypatch.setenv("ZCOMPILE_DUMP", "")
    assert Options.parse({}).dump is None


# Through the backend


def graph():
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    return gm, [torch.zeros(1)]


@pytest.mark.parametrize("name", ["partition", "residency", "place", "lower", "none"])
def test_a_pass_that_cannot_be_disabled(name):
    with pytest.raises(OptionError) as error:
        zero(*graph(), options={"disable": (name,)})
    assert str(error.value) == (f"pass {name!r} cannot be disabled; optional ones: ('release',)")


def test_the_backend_refuses_an_unknown_option():
    with pytest.raises(OptionError, match="unknown option 'prefetsch'; did you mean 'prefetch'"):
        zero(*graph(), options={"prefetsch": 2})


def test_torch_compile_shows_the_refusal():
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="zero", options={"stage": 4})
    with pytest.raises(Exception, match="option 'stage' = 4: Input should be less than or equal"):
        compiled(torch.zeros(1, 2))


def test_an_option_that_comes_too_late_is_named():
    model = torch.nn.Linear(6, 30)
    zcompile.shard(model, persistence_threshold=8)
    late = {"param_dtype": "bf16", "persistence_threshold": 8, "engine": "eager"}
    with pytest.warns(zcompile.ZeroWarning, match="'param_dtype' = torch.bfloat16 has no effect"):
        y = torch.compile(model, backend="zero", options=late)(torch.ones(2, 6))
    assert y.dtype == torch.float32


@pytest.mark.parametrize(
    ("world", "replicated"),
    [(1, [1, 9_000, 10_000]), (4, [1, 9_000, 10_000]), (64, [1, 9_000]), (256, [1])],
)
def test_small_parameters_stay_whole_while_they_cost_a_rank_a_percent(world, replicated):
    sizes = [10_000, 16_384, 60_000_000, 9_000, 1]
    params = [torch.empty(size, device="meta") for size in sizes]
    threshold = with_threshold(Options(), params, world).persistence_threshold
    assert sorted(size for size in sizes if size < threshold) == replicated
    per_rank = sum(size / world if size >= threshold else size for size in sizes)
    assert per_rank <= 1.01 * sum(sizes) / world


def test_what_is_replicated_may_be_said():
    options = Options(persistence_threshold=100_000)
    assert with_threshold(options, [torch.empty(50_000)], 1024) is options


def test_a_small_model_is_sharded_all_the_same():
    params = list(torch.nn.Linear(8, 8).parameters())
    assert with_threshold(Options(), params, 2).persistence_threshold == 0
