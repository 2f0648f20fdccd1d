"""extract: a Step of tiny graphs: what is gathered, reduced, at rest and computed."""

import operator
from dataclasses import replace

import pytest
import torch
from builders import BF16, F32, F64, Graph, aten, scheduled, two_gradients, two_layers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zcompile import comm
from zcompile.dialect import RELEASE
from zcompile.passes.extract import extract, operations
from zcompile.passes.graph import calls
from zcompile.schedule.step import Gather, Op, Owned, Reduction


def step(*graphs, world=2, native=False, fused=False):
    directions = ["forward", "backward"] if len(graphs) == 2 else ["forward"]
    return extract(list(zip(directions, graphs)), world=world, native=native, fused=fused)


def names(*graphs, **options):
    return [op.name for op in step(*graphs, **options).ops]


# Positions


def test_operations_are_all_but_inputs_collectives_and_views_of_shards():
    g = Graph()
    x, w, p = g.input("x", 4, 4), g.shard("w", 4, 4), g.input("p", 4, 4)
    whole = g.unshard(g.call(aten.alias.default, g.call(aten.view.default, w, [2, 4])), 4)
    y = g.mm(x, whole)
    y = g.call(aten.add.Tensor, y, g.replicate(p), name="total")
    gm = g.out(y, g.reduce(g.neg(y), "w"), g.all_reduce(y, "p"))
    assert names(gm) == [n.name for n in operations(gm)] == ["mm", "total", "neg"]


def test_two_graphs_stand_one_behind_the_other():
    made = step(two_layers(2), two_gradients(2))
    assert made.directions == ("forward", "backward")
    assert made.ends == (3, 6)
    assert [op.name for op in made.ops] == ["neg", "mm", "mm_1", "neg", "neg_1", "neg_2"]
    assert [g.graph for g in made.gathers] == [0, 0]
    assert [(r.graph, r.ready) for r in made.reductions] == [(1, 4), (1, 6)]
    assert [made.graph_of(p) for p in (0, 2, 3, 6)] == [0, 0, 1, 1]
    assert [made.start(g) for g in (0, 1)] == [0, 3]
    assert [made.anchor(0, p) for p in (0, 3)] == ["neg", ""]
    assert [made.anchor(1, p) for p in (3, 6)] == ["neg", ""]


# Gathers


def test_a_gather():
    made = step(two_layers(3), world=3)
    assert made.gathers == (
        Gather("a", 0, 1, 1, 0, bytes=80, sent=80 * 2 // 3, dtype="float32"),
        Gather("b", 0, 2, 2, 0, bytes=48, sent=48 * 2 // 3, dtype="float32"),
    )


def test_what_a_backends_own_gather_sends_includes_padding():
    made = step(two_layers(3), world=3, native=True)
    # The largest shard of (5, 4) has 2 rows, that of (4, 3) as well; each goes to two others.
    assert [(g.bytes, g.sent) for g in made.gathers] == [(80, 2 * 4 * 4 * 2), (48, 2 * 3 * 4 * 2)]


def test_one_rank_sends_nothing():
    made = step(two_layers(1), two_gradients(1), world=1)
    assert {row.sent for row in (*made.gathers, *made.reductions)} == {0}


def test_a_gather_into_another_dtype_has_its_bytes_and_a_cast():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4, dtype=BF16)
    gm = g.out(g.neg(g.unshard(a, 4, BF16)), g.neg(g.unshard(b, 4, BF16)))
    assert [(r.bytes, r.sent, r.dtype, r.cast) for r in step(gm).gathers] == [
        (8, 4, "bfloat16", True),
        (8, 4, "bfloat16", False),
    ]


def test_a_gathered_parameter_is_read_through_views():
    g = Graph()
    whole = g.unshard(g.shard("w", 4, 4), 4)
    turned = g.call(aten.t.default, whole)
    x = g.neg(whole)
    gm = g.out(g.mm(x, turned), g.neg(x))
    (row,) = step(gm).gathers
    assert (row.first, row.last) == (0, 2)


def test_a_shard_that_is_computed_is_ready_behind_that():
    g = Graph()
    x, w = g.input("x", 4), g.shard("w", 4)
    whole = g.unshard(g.neg(w), 4, of="w")
    gm = g.out(g.neg(x), g.neg(whole))
    (row,) = step(gm).gathers
    assert (row.ready, row.first) == (1, 2)


@pytest.mark.parametrize("viewed", [False, True])
def test_a_parameter_that_leaves_the_graph_is_read_by_its_end(viewed):
    g = Graph()
    w = g.unshard(g.shard("w", 4, 4), 4)
    read = g.neg(w)
    gm = g.out(g.call(aten.t.default, w) if viewed else w, g.neg(read))
    made = step(gm)
    assert made.gathers[0].last == made.ends[0] == len(made.ops)


def test_a_parameter_that_only_leaves_is_gathered_for_the_end():
    g = Graph()
    made = step(g.out(g.neg(g.input("x", 4)), g.unshard(g.shard("w", 4), 4)))
    assert (made.gathers[0].first, made.gathers[0].last, made.ends) == (1, 1, (1,))


@pytest.mark.parametrize(("reads", "last"), [(True, 2), (False, 1)])
def test_a_parameter_that_is_kept_is_one_gather_that_backward_reads(reads, last):
    g = Graph()
    w = g.unshard(g.shard("w", 4), 4, name="whole")
    forward = g.out(g.neg(w), w)
    h = Graph()
    kept, t = h.input("whole", 4), h.input("tangent", 4)
    x = h.neg(t)
    backward = h.out(h.call(aten.mul.Tensor, x, kept if reads else x))
    made = step(forward, backward)
    (row,) = made.gathers
    assert (row.graph, row.first, row.last) == (0, 0, last)
    assert len(made.parameters) == 1


def test_a_parameter_that_is_gathered_again_is_two_gathers():
    made = step(two_layers(2), two_layers(2))
    assert [(g.parameter, g.graph, g.first) for g in made.gathers] == [
        ("a", 0, 1), ("b", 0, 2), ("a", 1, 4), ("b", 1, 5),
    ]  # fmt: skip
    assert len(made.parameters) == 2


def test_an_unshard_that_nothing_uses_is_no_gather():
    g = Graph()
    g.unshard(g.shard("w", 4), 4)
    assert step(g.out(g.neg(g.input("x", 4)))).gathers == ()


def test_the_last_reading_is_where_release_has_its_mark():
    g = Graph()
    a, b = g.shard("a", 4, 4), g.shard("b", 4, 4)
    wa, wb = g.unshard(a, 4), g.unshard(b, 4)
    turned = g.call(aten.t.default, wa)
    x = g.mm(wa, wb)
    gm = g.out(g.mm(g.neg(x), turned), g.neg(x))
    made = step(gm)
    last = {r.parameter: made.ops[r.last].name for r in made.gathers}
    marks = calls(scheduled(gm, cap=1).graph, RELEASE)
    behind = {n.args[0][0].args[0].meta["parameters"][0]: n.prev.name for n in marks}
    assert last == behind == {"a": "mm_1", "b": "mm"}


# Reductions


def test_a_reduction():
    g = Graph(world=3)
    x = g.input("x", 5, 2)
    gm = g.out(g.reduce(g.neg(x), "a"), g.neg(x), g.all_reduce(g.neg(x), "b"))
    kinds = ("zero.reduce_grad.default", "zero.all_reduce_grad.default")
    dtypes = "torch.float32 torch.float32 torch.float32"
    assert step(gm, world=3).reductions == (
        Reduction(
            "a", 0, "reduce-scatter", 1, 3, bytes=40, sent=40 * 2 // 3, dtype="float32",
            grad_bytes=40, result_bytes=2 * 2 * 4, mergeable=f"{kinds[0]} {dtypes}",
        ),
        Reduction(
            "b", 0, "all-reduce", 3, 3, bytes=40, sent=2 * 40 * 2 // 3, dtype="float32",
            grad_bytes=40, result_bytes=40, mergeable=f"{kinds[1]} {dtypes}",
        ),
    )  # fmt: skip


def test_a_mean_is_needed_where_it_is_first_read():
    g = Graph()
    x = g.input("x", 4)
    mean = g.reduce(g.neg(x), "a")
    y = g.neg(x)
    gm = g.out(y, g.call(aten.exp.default, mean), g.neg(mean))
    (row,) = step(gm).reductions
    assert (row.ready, row.needed) == (1, 2)


def test_an_input_is_there_from_the_beginning():
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(g.reduce(x, "a"), g.neg(x))
    assert [r.ready for r in step(gm).reductions] == [0]


def test_a_gradient_made_early_may_be_reduced_early():
    g = Graph()
    x = g.input("x", 4)
    grad, rest = g.neg(x), g.neg(x)
    assert [r.ready for r in step(g.out(g.reduce(grad, "a"), rest)).reductions] == [1]


@pytest.mark.parametrize("native", [False, True])
def test_dtypes_on_the_wire(native):
    """bf16 gradients travel as bf16 point to point, as fp32 where the backend sums."""
    g = Graph()
    x = g.input("x", 4, dtype=BF16)
    gm = g.out(g.reduce(g.neg(x), "a", F32, F32), g.all_reduce(g.neg(x), "b", F32, F32))
    scatter, whole = step(gm, native=native).reductions
    width = 4 if native else 2
    assert (scatter.dtype, scatter.bytes) == ("float32" if native else "bfloat16", 4 * width)
    assert (scatter.grad_bytes, scatter.result_bytes) == (8, 8)  # bf16 whole, fp32 half
    assert (whole.dtype, whole.bytes, whole.grad_bytes, whole.result_bytes) == (
        "float32",
        16,
        8,
        16,
    )


def test_a_gradient_wider_than_the_reduction_travels_narrow():
    g = Graph()
    gm = g.out(g.reduce(g.neg(g.input("x", 4, dtype=F64)), "a", F64, F32))
    (row,) = step(gm).reductions
    assert (row.dtype, row.bytes, row.sent, row.grad_bytes) == ("float32", 16, 8, 32)


def test_what_a_backends_own_reduction_sends_includes_padding():
    g = Graph(world=3)
    gm = g.out(g.reduce(g.neg(g.input("x", 5, 2)), "a"), g.all_reduce(g.input("y", 5), "b"))
    scatter, whole = step(gm, world=3, native=True).reductions
    assert (scatter.bytes, scatter.sent) == (40, 2 * 2 * 4 * 2)
    assert (whole.bytes, whole.sent) == (20, 2 * 20 * 2 // 3)


def test_what_may_be_merged():
    g = Graph()
    x, y = g.input("x", 4), g.input("y", 4, dtype=BF16)
    kinds = [(x, F32, F32), (x, BF16, F32), (x, F32, F64), (y, F32, F32), (x, F32, F32)]
    gm = g.out(*[g.reduce(grad, f"w{i}", *kind) for i, (grad, *kind) in enumerate(kinds)])
    classes = [r.mergeable for r in step(gm).reductions]
    assert classes[0] == classes[4]
    assert len(set(classes)) == 4


# Parameters at rest


def test_parameters_at_rest():
    g = Graph(world=3, rank=2)
    x, p = g.input("x", 2, 5), g.input("p", 4)
    wa = g.unshard(g.shard("a", 5, 4), 5, BF16, of="layer.a")
    y = g.call(aten.add.Tensor, g.mm(g.call(aten._to_copy.default, x), g.neg(wa)), g.replicate(p))
    assert step(g.out(y), world=3).parameters == (
        # The largest shard, two of five rows, in its own dtype: the same on every rank.
        Owned("layer.a", (5, 4), "bfloat16", bytes=40, shard_bytes=2 * 4 * 4, sharded=True),
        Owned("p", (4,), "float32", bytes=16, shard_bytes=16, sharded=False),
    )


def test_one_rank_holds_everything():
    (a, b) = step(two_layers(1), world=1).parameters
    assert (a.shard_bytes, b.shard_bytes) == (a.bytes, b.bytes) == (80, 48)


# What is computed


def test_an_operation_moves_what_it_reads_and_what_it_makes():
    ops = {op.name: op for op in step(two_layers(2)).ops}
    assert ops["neg"] == Op("neg", 0.0, 40 + 40, "float32")
    assert ops["mm"] == Op("mm", 2.0 * 2 * 5 * 4, 40 + 80 + 32, "float32")
    assert ops["mm_1"] == Op("mm_1", 2.0 * 2 * 4 * 3, 32 + 48 + 24, "float32")


def test_a_view_that_is_smaller_than_its_storage_is_read_in_part():
    g = Graph()
    part = g.call(aten.slice.Tensor, g.input("x", 8, 4), 0, 0, 2)
    gm = g.out(g.neg(part))
    assert step(gm).ops[-1].bytes == 32 + 32


def flops(g, node):
    return {op.name: op.flops for op in step(g.out(node)).ops}[node.name]


def test_flops_of_products_and_convolutions():
    g = Graph()
    a, b = g.input("a", 3, 2, 5), g.input("b", 3, 5, 4)
    assert flops(g, g.call(aten.bmm.default, a, b)) == 2 * 3 * 2 * 5 * 4
    g = Graph()
    bias, x, w = g.input("bias", 4), g.input("x", 2, 5), g.input("w", 5, 4)
    assert flops(g, g.call(aten.addmm.default, bias, x, w)) == 2 * 2 * 5 * 4
    g = Graph()
    x, w = g.input("x", 2, 3, 8, 8), g.input("w", 6, 3, 3, 3)
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert flops(g, g.call(aten.convolution.default, *args)) == 2 * 2 * 6 * 64 * 3 * 9


def test_flops_of_attention_on_a_cpu():
    """(batch, heads, queries, width): 2 products forward, 5 backward, keys may be more."""
    g = Graph()
    q, k, v = g.input("q", 2, 3, 8, 4), g.input("k", 2, 3, 16, 4), g.input("v", 2, 3, 16, 4)
    both = g.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    out, lse = (g.call(operator.getitem, both, i) for i in (0, 1))
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grads = g.call(back, out, q, k, v, out, lse, 0.0, False)
    made = step(g.out(g.call(operator.getitem, grads, 0)))
    counted = {op.name: op.flops for op in made.ops if op.flops}
    product = 2 * (2 * 3 * 8 * 4) * 16
    assert counted == {both.name: 2 * product, grads.name: 5 * product}


def test_an_operation_without_a_formula_computes_nothing():
    g = Graph()
    assert flops(g, g.call(aten.exp.default, g.input("x", 4))) == 0


def test_symbolic_sizes_count_as_they_were_when_the_graph_was_made():
    g = Graph()
    x = g.graph.placeholder("x")
    g.mode = FakeTensorMode(shape_env=ShapeEnv())
    with g.mode:
        x.meta["val"] = g.mode.from_tensor(torch.empty(7, 3))
    w = g.input("w", 3, 5)
    gm = g.out(g.mm(x, w))
    (op,) = step(gm).ops
    assert (op.flops, op.bytes) == (2 * 7 * 3 * 5, 4 * (21 + 15 + 35))
    assert type(op.flops) is float
    inputs, result = 4 * (21 + 15), 4 * 35
    assert step(gm).live["activations"] == (inputs, inputs + result, inputs + result)


# Its fingerprint


def model(world=4, rank=0, rows=5, of="a"):
    g = Graph(world, rank)
    x = g.input("x", 2, rows)
    h = g.mm(x, g.unshard(g.shard("a", rows, 4), rows, of=of))
    comm.register(comm.Group("g", rank, world))
    return g.out(h, g.reduce(g.mm(g.call(aten.t.default, x), h), of))


def test_the_step_is_the_same_on_every_rank():
    """Five rows on four ranks: the last has none."""
    steps = [step(model(rank=rank), world=4) for rank in range(4)]
    assert all(each == steps[0] for each in steps)


def test_a_fingerprint_tells_steps_apart():
    made = {
        "itself": step(model(), world=4).fingerprint,
        "another world": step(model(2), world=2).fingerprint,
        "another shape": step(model(rows=6), world=4).fingerprint,
        "another parameter": step(model(of="b"), world=4).fingerprint,
        "another operation": step(two_layers(4), world=4).fingerprint,
    }
    assert len(set(made.values())) == len(made)
    assert all(len(each) == 32 for each in made.values())
    again = step(model(), world=4)
    assert again.fingerprint == made["itself"]
    assert replace(again, fingerprint="") != again
