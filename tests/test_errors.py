"""Bad input gets an error that names the value, the limit and the remedy."""

import time
import warnings

import pytest
import torch
from parity import options
from torch import nn

import zcompile
from zcompile import OptionError, ZeroError, ZeroWarning
from zcompile.control import first_difference


def test_a_misspelt_option_names_the_nearest(ranks):
    model = torch.compile(nn.Linear(4, 4), backend="zero", options={"sage": 3})
    with pytest.raises(Exception, match="unknown option 'sage'; did you mean 'stage'"):
        model(torch.ones(2, 4))


def test_a_stage_outside_the_range_names_the_limit():
    with pytest.raises(OptionError, match=r"option 'stage' = 4: .*less than or equal to 3"):
        zcompile.shard(nn.Linear(2, 2), stage=4)


def test_something_else_than_a_module_is_refused():
    with pytest.raises(ZeroError, match=r"needs a torch\.nn\.Module, got dict"):
        zcompile.shard({"weight": torch.ones(2)})


def test_a_mesh_that_leaves_a_rank_out_is_refused(ranks):
    texts = ranks(_rank_outside)
    assert "rank 1 is not in the mesh [0]" in texts[1]


def _rank_outside(rank, world):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0])
    if rank == 0:
        return ""
    with pytest.raises(ZeroError) as caught:
        zcompile.shard(nn.Linear(2, 2), mesh=mesh)
    return str(caught.value)


def _two_dimensions(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ZeroError, match=r"2 dimensions \(2, 1\).*Pass the data-parallel one"):
        zcompile.shard(nn.Linear(2, 2), mesh=mesh)
    model = zcompile.shard(nn.Linear(64, 64), mesh=mesh["dp"], persistence_threshold=0)
    assert tuple(model.weight.to_local().shape) == (32, 64)


def test_a_mesh_of_two_dimensions_is_refused_and_its_part_works(ranks):
    ranks(_two_dimensions)


def _replaced(rank, world):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    compiled = torch.compile(model, backend="zero", options=options(3))
    compiled(torch.ones(2, 8))
    model[1].weight = nn.Parameter(torch.ones(4, 8))
    with pytest.raises(ZeroError, match=r"'1\.weight' was sharded as \(8, 8\) and is now \(4, 8\)"):
        model[1](torch.ones(2, 8))
    # The next compilation meets a new parameter, and shards it like any other.
    compiled(torch.ones(2, 8)).sum().backward()
    assert tuple(model[1].weight.grad.full_tensor().shape) == (4, 8)


def test_a_parameter_of_another_shape_after_sharding_is_named_and_sharded_anew(ranks):
    ranks(_replaced)


class Clamps(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


def _writes(rank, world):
    compiled = torch.compile(Clamps(), backend="zero", options=options(3))
    with pytest.raises(Exception, match=r"writes into parameter 'inner\.weight' in place"):
        compiled(torch.ones(2, 8))


def test_a_write_into_a_gathered_parameter_is_refused_not_lost(ranks):
    ranks(_writes)


def _state_dicts(rank, world):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    model = zcompile.shard(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)), persistence_threshold=0)
    model.load_state_dict(plain.state_dict())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), plain.get_parameter(name), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"1\.bias\""):
        model.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "1.bias"})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**plain.state_dict(), "0.weight": torch.ones(5, 8)})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"2\.weight\""):
        model.load_state_dict({**plain.state_dict(), "2.weight": torch.ones(1)})


def test_a_whole_state_dict_loads_and_strict_errors_read_as_pytorchs(ranks):
    ranks(_state_dicts, world=3)


def test_nothing_that_initialises_a_meta_tensor_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.empty(4, 4))

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(ZeroError, match=r"table is on meta and Bare has no reset_parameters"):
        zcompile.shard(model)


def _disjoint(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    torch.manual_seed(0)
    model = zcompile.shard(nn.Linear(8, 8), mesh=mesh["dp"], persistence_threshold=0)
    compiled = torch.compile(
        model, backend="zero", options=options(3, mesh=mesh["dp"], persistence_threshold=0)
    )
    for _ in range(2):
        model.zero_grad()
        compiled(torch.full((2, 8), float(rank))).sum().backward()
    return model.bias.grad.full_tensor()[0].item(), model.weight.grad.full_tensor()[0, 0].item()


def test_disjoint_meshes_average_each_over_its_own(ranks):
    low, _, high, _ = ranks(_disjoint, world=4)
    assert low == (2.0, 2 * 0.5) and high == (2.0, 2 * 2.5)


def _stale(rank, world):
    model = nn.Linear(8, 8)
    kept = {"pair": (model.weight, 1), "by": {model.bias: 2}}
    holder = type("Holder", (), {})()
    holder.weight = model.weight
    local = model.weight
    zcompile.shard(model, persistence_threshold=0)
    assert kept["pair"][0] is model.weight and kept["by"] == {model.bias: 2}
    assert holder.weight is model.weight
    with pytest.raises(ZeroError, match="this is parameter weight as it was before it was sharded"):
        local.sum()


def test_a_reference_that_could_not_follow_raises_when_used(ranks):
    ranks(_stale)


def _never_compiled(rank, world):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="zero", options=options(3))
    model(torch.full((2, 8), float(rank))).sum().backward()
    with pytest.raises(ZeroError, match="was never sharded: its gradient is this rank's alone"):
        optimizer.step()
    optimizer.zero_grad()
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that parameters are gathered outside of a graph
        compiled(torch.full((2, 8), float(rank))).sum().backward()
    mean = 2 * sum(range(world)) / world
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((8, 8), mean))


def test_a_model_that_nothing_compiled_does_not_train_unsynchronised(ranks):
    ranks(_never_compiled)


def _outside(rank, world):
    model, criterion = nn.Linear(8, 8), nn.Linear(8, 1)
    params = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
    compiled = torch.compile(model, backend="zero", options=options(3))
    criterion(compiled(torch.ones(2, 8))).sum().backward()
    with pytest.warns(zcompile.ZeroWarning, match="also holds 2 parameters of no sharded model"):
        optimizer.step()


def test_parameters_of_no_sharded_model_are_pointed_out(ranks):
    ranks(_outside)


def _caught(rank, world):
    model = nn.Embedding(8, 8)
    compiled = torch.compile(model, backend="zero", options=options(3))
    compiled(torch.tensor([1])).sum().backward()
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(torch.tensor([100]))
        time.sleep(1.5)
        compiled(torch.tensor([2])).sum().backward()


def test_an_exception_that_every_rank_catches_ends_nothing(ranks):
    ranks(_caught)


def test_a_model_that_is_sharded_again_in_another_way_is_told():
    model = zcompile.shard(nn.Linear(8, 8), stage=3, persistence_threshold=0)
    with pytest.warns(ZeroWarning, match=r"'param_dtype' = torch\.bfloat16 has no effect"):
        zcompile.shard(model, param_dtype="bf16")
    whole = zcompile.shard(nn.Linear(8, 8), stage=0)
    with pytest.warns(
        ZeroWarning, match=r"'stage' = 3 has no effect.*weight \(8, 8\) is replicated"
    ):
        zcompile.shard(whole, stage=3, persistence_threshold=8)
    assert model(torch.ones(2, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("mine", "yours", "advice"),
    [
        ("full_state_dict of w (2, 2)", "forward graph", "full_state_dict gathers from all ranks"),
        ("inference graph", "forward graph", "A rank evaluates the model while others do not"),
        ("all-gather w", "all-gather v", "take the same path through the model"),
    ],
)
def test_ranks_that_differ_are_told_what_to_look_for(mine, yours, advice):
    assert advice in first_difference([[mine], [mine], [yours]])


def _one_rank_steps(rank, world):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="zero", options=options(3))
    compiled(torch.ones(2, 8)).sum().backward()
    saved = zcompile.full_state_dict(model)
    if rank == 0:  # a loss that the other finds infinite
        optimizer.step()
    with pytest.raises(
        ZeroError, match=r"stepped on some ranks only: rank \d made \d+ steps; over all"
    ):
        compiled(torch.ones(2, 8))
    # Told once; what it asks for mends it.
    zcompile.load_full_state_dict(model, saved)
    compiled(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return zcompile.full_state_dict(model)["weight"]


def _one_rank_saves_before_the_step(rank, world):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="zero", options=options(3))
    for _ in range(2):
        compiled(torch.ones(2, 8)).sum().backward()
        if rank == 0:
            zcompile.full_state_dict(model)
        optimizer.step()


def test_a_rank_elsewhere_is_not_taken_for_one_that_did_not_step(ranks):
    with pytest.raises(AssertionError, match="full_state_dict gathers from all ranks: call it on"):
        ranks(_one_rank_saves_before_the_step)


def test_an_optimizer_that_steps_on_some_ranks_only_is_told(ranks):
    one, other = ranks(_one_rank_steps)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
