"""Options of the backend: `torch.compile(model, backend="zero", options={...})`.

One frozen, validated record. Dtypes may be given as `torch.bfloat16` or "bfloat16" / "bf16".
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from numbers import Integral
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch.distributed.device_mesh import DeviceMesh

from zcompile._torch import inductor_settings
from zcompile.errors import OptionError

MIB = 2**20

_DTYPE_NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp64": torch.float64,
    "float64": torch.float64,
}


_DEEPSPEED = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
    "zero_optimization scheduler fp16 bf16 amp steps_per_print wall_clock_breakdown".split()
)


def _as_dtype(value: Any) -> Any:
    if value is None or (isinstance(value, torch.dtype) and value in _DTYPE_NAMES.values()):
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in _DTYPE_NAMES:
        return _DTYPE_NAMES[value.removeprefix("torch.")]
    raise ValueError(f"{value!r} is not a floating dtype; use one of {', '.join(_DTYPE_NAMES)}")


def _as_budget(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        if value == 1:
            raise ValueError("that is one byte; for all that the device has write 1.0")
        return value
    if value is None or (isinstance(value, float) and 0 < value <= 1):
        return value
    if isinstance(value, float) and value > 1 and value.is_integer():
        raise ValueError(f"a float is a share up to 1.0; for bytes write {int(value)}")
    raise ValueError(
        "it is neither a positive number of bytes (an int, such as 8 * 10**9) nor a share of the "
        "device's memory (a float up to 1.0)"
    )


def _as_whole(value: Any) -> Any:
    """A whole number however it is spelt: 5e8, or numpy's."""
    whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    return int(value) if whole and not isinstance(value, bool) else value


def _as_inductor(value: Any) -> Any:
    if isinstance(value, Mapping) and value:
        known = inductor_settings()
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"torch._inductor.config has no entry {name!r}{hint}")
    return value


Whole = Annotated[int, BeforeValidator(_as_whole)]
Dtype = Annotated[torch.dtype | None, BeforeValidator(_as_dtype)]


class Options(BaseModel):
    """How a model is partitioned, scheduled and compiled.

    Raises:
        OptionError: through `Options.parse`, for an unknown name or a value out of range.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=True
    )

    stage: Whole = Field(
        3,
        ge=0,
        le=3,
        description="0: replicate, all-reduce gradients. 1, 2: shard at rest, gather once a step. "
        "3: gather per use, again in backward.",
    )
    param_dtype: Dtype = Field(
        None, description="Dtype of gathered parameters and of compute; None keeps each one's own."
    )
    reduce_dtype: Dtype = Field(
        None, description="Dtype gradients are summed in; None means float32 or wider."
    )
    persistence_threshold: Whole | None = Field(
        None,
        ge=0,
        description="Parameters with fewer elements stay replicated. None: 16,384, as gathering "
        "64 KiB costs more latency than bytes, or fewer where all of them together would add more "
        "than a percent to what a rank holds.",
    )
    memory_budget: Annotated[int | float | None, BeforeValidator(_as_budget)] = Field(
        None,
        description="What a rank may hold at its peak: bytes (an int), or a share of the device's "
        "memory (a float up to 1.0). With stage 3 the planner spends it on parameters kept for "
        "backward. None: the residency that the stage says, within what the device has free.",
    )
    bucket_bytes: Whole | None = Field(
        None,
        ge=1,
        description="Rules in place of the planner: collectives are merged up to this many bytes.",
    )
    prefetch: Whole | None = Field(
        None,
        ge=0,
        description="Rules in place of the planner: how many buckets ahead of its use a gather is "
        "issued.",
    )
    plan: str | None = Field(
        None, description="A plan to follow: the JSON file that a dump wrote, edited or not."
    )
    replan_after: Whole = Field(
        3,
        ge=0,
        description="Steps after which times are measured and the step is planned again; 0: never. "
        "On CPU, with check=True, and where the graph's sizes are constant.",
    )
    replan_gain: float = Field(
        0.03,
        ge=-1,
        description="A new plan is compiled where it is predicted to take this share less time; "
        "-1: always.",
    )
    calibrate: bool = Field(
        True,
        description="Measure the links between the ranks once per set of hosts, for about a "
        "second; False: published figures.",
    )
    engine: Literal["inductor", "eager"] = Field(
        "inductor", description="What runs the final graph; eager interprets it (quick, for tests)."
    )
    primitive: Literal["auto", "p2p", "native"] = Field(
        "auto",
        description="What carries a collective: point-to-point messages straight into place, the "
        "backend's own all-gather and reduce-scatter, or (auto) what suits the group: on gloo "
        "reads of each other's memory on one host, else messages; elsewhere the backend's own.",
    )
    param_copy: bool = Field(
        True,
        description="With param_dtype, where ranks read each other's memory: keep each shard in "
        "it as well, so that gathers neither cast nor wait; costs its bytes an element.",
    )
    cast_inputs: bool = Field(
        True, description="With param_dtype, cast floating inputs of the model to it."
    )
    sync: bool = Field(True, description="Start from rank 0's parameters and buffers.")
    check: bool = Field(
        True, description="Before a graph runs, compare its plan with every other rank's."
    )
    check_timeout: float = Field(
        3600.0, gt=0, description="Seconds to wait for the slowest rank's compilation."
    )
    verify: bool = Field(True, description="Verify the graph between passes.")
    disable: tuple[str, ...] = Field(
        (), strict=False, description="Optional passes to leave out, by name."
    )
    dump: str | None = Field(
        None, description="Folder for graphs and schedule; default: $ZCOMPILE_DUMP."
    )
    optimizer: torch.optim.Optimizer | None = Field(
        None, description="Whose step becomes a fused kernel, as by zcompile.fuse(optimizer)."
    )
    stochastic_rounding: bool = Field(
        False, description="How that step rounds what is kept in bfloat16; see zcompile.fuse."
    )
    step: str | None = Field(
        None, description="Which step takes the gradients; zcompile.compile_step sets it."
    )
    mesh: DeviceMesh | None = Field(
        None, description="One-dimensional data-parallel mesh; default: all ranks."
    )
    inductor: Annotated[Mapping[str, Any], BeforeValidator(_as_inductor)] = Field(
        default_factory=dict, description="Extra torch._inductor.config entries for this model."
    )

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | Options | None) -> Options:
        """Validate a user's dict.

        Raises:
            OptionError: names the option, the value, and the nearest known name or the limit.
        """
        if isinstance(raw, Options):
            return raw
        if not isinstance(raw, Mapping | None):
            raise OptionError(f"options are a dict, such as {{'stage': 3}}, not {raw!r:.80}")
        values = dict(raw or {})
        for name in values:
            if name not in cls.model_fields:
                raise OptionError(_unknown(str(name), [n for n in cls.model_fields if n != "step"]))
        if values.get("dump") is None:
            values["dump"] = os.environ.get("ZCOMPILE_DUMP") or None
        try:
            made = cls(**values)
        except ValidationError as error:
            raise OptionError(_invalid(error)) from None
        rules = [n for n in ("bucket_bytes", "prefetch") if getattr(made, n) is not None]
        if made.memory_budget is not None and rules:
            raise OptionError(
                f"option {rules[0]!r} is a rule in place of the planner, which alone knows of "
                f"memory_budget={made.memory_budget!r}; give one of both"
            )
        return made


def _unknown(name: str, known: list[str]) -> str:
    if name in _DEEPSPEED:
        return (
            f"{name!r} is an entry of DeepSpeed's configuration, which is not read: its "
            "zero_optimization.stage is the option 'stage', bf16 and fp16 are 'param_dtype', "
            "gradient_clipping and gradient_accumulation_steps are arguments of compile_step"
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown option {name!r}{hint} Known options: {', '.join(sorted(known))}."


def _invalid(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        name = str(item["loc"][0])
        about = Options.model_fields[name].description
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"option {name!r} = {item['input']!r}: {message}. ({about})")
    return "\n".join(lines)
