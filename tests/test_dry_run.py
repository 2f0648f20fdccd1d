"""Graphs traced for a world that does not exist: those of a real one, and nothing is made."""

import collections
import copy
import re
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zcompile
from zcompile import dry_run
from zcompile._torch import FakeStore, min_cut_rematerialization_partition
from zcompile.dialect import ALL_REDUCE_GRAD, REDUCE_GRAD, REPLICATE, UNSHARD
from zcompile.dry_run import Capture, trace
from zcompile.errors import BudgetError, OptionError, ZeroError
from zcompile.options import Options

WORLD = 4


class Attention(nn.Module):
    """(batch, seq, 32) -> same"""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout

    def forward(self, x):
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, 32))


class Language(nn.Module):
    """Tied weights, dropout, integer inputs, a buffer, a plain tensor; a scalar loss."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(50, 32)
        self.attention = Attention()
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(0.1)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scale", torch.ones(32))
        self.shift = torch.zeros(32)

    def forward(self, tokens):
        x = self.token(tokens) * self.scale + self.shift
        x = x + self.dropout(self.attention(self.norm(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def convolutions():
    """Buffers that forward writes."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())


class Broken(nn.Module):
    """Two graphs, with an uncompiled layer between them."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.first(x).relu()
        x = torch._dynamo.disable(self.middle)(x)
        return self.last(x)


TOKENS = torch.zeros(2, 16, dtype=torch.int64)
MODELS = {
    "language": (Language, TOKENS),
    "convolutions": (convolutions, torch.zeros(2, 3, 8, 8)),
    "broken": (Broken, torch.zeros(4, 8)),
}
EVERY = {"persistence_threshold": 64, "engine": "eager"}


def sharded_run(model, x, options):
    """The graphs of a model that is really sharded, in a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    zcompile.shard(model, options)
    torch._dynamo.reset()
    capture = Capture(options)
    torch.compile(model, backend=capture)(x)
    return capture.graphs


def is_shard(node):
    """An input, or the view by which a shard comes to its gather: backward makes it anew or finds
    it saved."""
    if node.target is not torch.ops.aten.view.default:
        return node.op == "placeholder"
    return node.args[0].op == "placeholder" and tuple(node.args[1]) == shape(node.args[0])


def shape(node):
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def lines(gm):
    """Operations by name, with shapes and what they read; inputs by their shapes."""
    found = []
    for node in gm.graph.nodes:
        if node.op == "output" or is_shard(node):
            continue
        shapes = {n.name: describe(n) for n in node.all_input_nodes if is_shard(n)}
        args = re.sub(r"zero\d+|paper\d+", "group", str((node.args, node.kwargs)))
        words = (shapes.get(word, word) for word in re.split(r"(\W+)", args))
        found.append(f"{node.name}: {describe(node)} = {node.target} {''.join(words)}")
    return found


def describe(node):
    value = node.meta.get("val")
    return f"{value.dtype}{shape(node)}" if isinstance(value, torch.Tensor) else "?"


@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_are_those_of_a_sharded_model(name, stage, engine):
    make, x = MODELS[name]
    options = Options.parse({**EVERY, "stage": stage, "engine": engine})
    on_paper = trace(make(), [x], world_size=WORLD, options=options)
    real = sharded_run(make(), x, options)
    assert len(on_paper) == len(real) == (2 if name == "broken" else 1)
    for mine, theirs in zip(on_paper, real):
        for each, other in zip(mine, theirs):
            assert lines(each) == lines(other)


def collectives(gm):
    wanted = (UNSHARD, REPLICATE, REDUCE_GRAD, ALL_REDUCE_GRAD)
    return collections.Counter(n.target for n in gm.graph.nodes if n.target in wanted)


def test_stages_decide_what_is_gathered_again():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.zeros(2, 64, requires_grad=True)
    for stage, again in ((3, 2), (2, 0)):
        options = {"stage": stage, "persistence_threshold": 1000}
        ((forward, backward),) = trace(model, [x], world_size=8, options=options)
        assert collectives(forward) == {UNSHARD: 2, REPLICATE: 2}
        found = collectives(backward)
        assert (found[UNSHARD], found[REDUCE_GRAD], found[ALL_REDUCE_GRAD]) == (again, 2, 2)


def test_rank_0_holds_the_largest_shards():
    ((forward, _),) = trace(nn.Linear(4, 10), [torch.zeros(1, 4)], world_size=4, options=EVERY)
    shapes = {tuple(n.meta["val"].shape) for n in forward.graph.nodes if n.op == "placeholder"}
    assert shapes == {(1, 4), (10,), (10, 4)}  # 40 elements stay whole
    options = {**EVERY, "persistence_threshold": 0}
    ((forward, _),) = trace(nn.Linear(4, 10), [torch.zeros(1, 4)], world_size=4, options=options)
    shapes = {tuple(n.meta["val"].shape) for n in forward.graph.nodes if n.op == "placeholder"}
    assert shapes == {(1, 4), (3,), (3, 4)}


def test_mixed_precision_gathers_and_casts():
    options = {**EVERY, "param_dtype": "bf16"}
    ((forward, _),) = trace(nn.Linear(16, 16), [torch.zeros(2, 16)], world_size=2, options=options)
    by_target = {n.target: n.meta["val"].dtype for n in forward.graph.nodes if "val" in n.meta}
    assert by_target[UNSHARD] == by_target[torch.ops.aten.addmm.default] == torch.bfloat16


# What is left behind


def everything(model):
    """Each module's class and attributes, tensors by identity."""
    return {
        name: (type(m), {k: {n: id(v) for n, v in d.items()} for k, d in vars(m).items()
                         if isinstance(d, dict)}, dict(vars(m)))
        for name, m in model.named_modules()
    }  # fmt: skip


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_model_is_left_as_it_was(device):
    with torch.device(device):
        model = Language()
    before, values = everything(model), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    trace(model, [TOKENS], world_size=WORLD, options=EVERY)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), random)
    after = everything(model)
    assert {n: (k, d) for n, (k, d, _) in before.items()} == {
        n: (k, d) for n, (k, d, _) in after.items()
    }
    for name, (_, _, attributes) in before.items():
        assert list(attributes) == list(after[name][2])
        assert all(value is after[name][2][key] for key, value in attributes.items())
    if device == "cpu":
        assert all(torch.equal(v, model.state_dict()[n]) for n, v in values.items())
        model(TOKENS).backward()


def test_shapes_of_a_dry_run_do_not_make_a_run_dynamic():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    shapes = []

    def backend(gm, inputs):
        shapes.extend(
            n.meta["example_value"].shape for n in gm.graph.nodes if n.op == "placeholder"
        )
        return gm.forward

    for rows in (4, 6):
        trace(model, [torch.zeros(rows, 8)], world_size=2, options=EVERY)
    torch.compile(model, backend=backend)(torch.zeros(5, 8))
    assert all(type(size) is int for shape in shapes for size in shape)


def test_any_number_of_dry_runs():
    model = Broken()
    for world in range(1, 11):  # Dynamo compiles a function 8 times
        graphs = trace(model, [torch.zeros(world, 8)], world_size=world, options=EVERY)
        (value,) = (n.meta["val"] for n in graphs[0][0].graph.nodes if n.name == "relu")
        assert (len(graphs), value.shape) == (2, (world, 8))


def test_nothing_is_allocated():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300_000, 300_000), nn.Linear(300_000, 10))
        x = torch.empty(1000, 300_000)
    trace(nn.Linear(2, 2), [torch.zeros(1, 2)], world_size=1, options=EVERY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ((forward, _),) = trace(model, [x], world_size=1, options=EVERY)  # 360 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10  # in KiB
    (weight,) = (n for n in forward.graph.nodes if n.target is UNSHARD and n.args[1] == 300_000
                 and n.meta["val"].dim() == 2)  # fmt: skip
    assert weight.meta["val"].shape == (300_000, 300_000)


def test_beside_a_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mine = dist.group.WORLD
    ((_, backward),) = trace(nn.Linear(32, 32), [torch.zeros(2, 32)], world_size=64, options=EVERY)
    assert collectives(backward)[REDUCE_GRAD] == 1
    assert dist.group.WORLD is mine and dist.get_world_size() == 1


def test_a_model_that_is_sharded_already():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = zcompile.shard(nn.Linear(32, 32), EVERY)
    ((forward, _),) = trace(model, [torch.zeros(2, 32)], world_size=4, options=EVERY)
    shapes = {tuple(n.meta["val"].shape) for n in forward.graph.nodes if n.op == "placeholder"}
    assert (8, 32) in shapes
    assert model.weight.to_local().shape == (32, 32)


# What the graphs are


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_attention_is_one_operation(device):
    with torch.device(device):
        model, x = Attention(), torch.zeros(2, 24, 32)
    ((forward, backward),) = trace(model, [x], world_size=2, options={"engine": "inductor"})
    nodes = [*forward.graph.nodes, *backward.graph.nodes]
    assert sum("attention" in str(n.target) for n in nodes) == 2
    values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert {v.device.type for v in values} == {"cpu"}
    assert not any(v.shape[-2:] == (24, 24) for v in values)


def test_attention_with_dropout_is_one_operation_on_a_gpu():
    def fused(gpu):
        inputs = [torch.zeros(2, 24, 32)]
        ((forward, _),) = trace(Attention(0.1), inputs, world_size=2, options=EVERY, gpu=gpu)
        return sum("attention" in str(n.target) for n in forward.graph.nodes)

    assert (fused(False), fused(True)) == (0, 1)


def test_keywords_and_what_is_no_tensor():
    class Scaled(nn.Linear):
        def forward(self, x, *, by, twice):
            return super().forward(x) * by * (2 if twice else 1)

    by = torch.tensor(2.0)
    ((forward, backward),) = trace(
        Scaled(4, 4), (torch.zeros(3, 4),), {"by": by, "twice": True}, world_size=2, options=EVERY
    )
    assert sum(n.target is torch.ops.aten.mul.Tensor for n in forward.graph.nodes) == 2
    assert backward is not None


def test_a_frozen_model_has_no_backward():
    model = nn.Linear(4, 4).requires_grad_(False)
    for engine in ("eager", "inductor"):
        options = {"engine": engine}
        ((_, backward),) = trace(model, [torch.zeros(2, 4)], world_size=2, options=options)
        assert backward is None


def test_without_gradients_outside_training_is_traced():
    with torch.no_grad():
        ((_, backward),) = trace(nn.Linear(4, 4), [torch.zeros(2, 4)], world_size=2, options=EVERY)
    assert backward is not None


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_a_partition_of_ones_own(engine):
    calls = []

    def partition(joint, inputs, **kwargs):
        calls.append(kwargs["num_fwd_outputs"])
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    options = {**EVERY, "engine": engine}
    inputs = [torch.zeros(2, 16, requires_grad=True)]
    ((_, backward),) = trace(
        nn.Linear(16, 16), inputs, world_size=2, options=options, partition=partition
    )
    assert calls == [1]
    assert collectives(backward)[UNSHARD] == 0  # without tags it is kept


# What is refused


class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Skipped(nn.Linear):
    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("not me")


@pytest.mark.parametrize(
    ("make", "world", "text"),
    [
        (lambda: Reads(4, 4), 2, "cannot be traced without values"),
        (lambda: Uncopied(4, 4), 2, r"Uncopied cannot be copied \(TypeError: not me\)"),
        (lambda: nn.LazyLinear(4), 2, "'weight' has no shape yet: call the lazy module once"),
        (lambda: nn.Linear(4, 4), 0, "world_size must be at least 1, got 0"),
        (lambda: Skipped(4, 4), 2, "traced no part of the model"),
    ],
)
def test_refused_with_a_remedy(make, world, text):
    with pytest.raises(ZeroError, match=text):
        trace(make(), [torch.zeros(2, 4)], world_size=world, options=EVERY)


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_what_a_partition_refuses_is_said_as_it_is(engine):
    def partition(joint, inputs, **kwargs):
        raise BudgetError("too large")

    options = {**EVERY, "engine": engine}
    with pytest.raises(BudgetError, match=r"^too large$"):
        trace(
            nn.Linear(4, 4), [torch.zeros(2, 4)], world_size=2, options=options, partition=partition
        )


def test_a_write_into_a_parameter_is_refused():
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)

    with pytest.raises(zcompile.GraphError, match="writes into parameter 'weight' in place"):
        trace(Writes(4, 4), [torch.zeros(2, 4)], world_size=2, options=EVERY)


def test_the_group_stays_for_what_runs_on_the_graphs():
    trace(nn.Linear(4, 4), [torch.zeros(2, 4)], world_size=3, options=EVERY)
    group = zcompile.comm.find(dry_run.paper_group(3).name)
    assert (group.rank, group.world, group.pg) == (0, 3, None)


def test_inputs_that_are_no_tuple_are_refused():
    with pytest.raises(OptionError, match="give a tuple of what the model is called with"):
        zcompile.plan(nn.Linear(4, 4), torch.ones(2, 4), world_size=2)
