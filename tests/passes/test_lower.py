"""lower: what each collective becomes, and that it computes the same."""

import pytest
import torch
from builders import (
    BF16,
    BIG,
    F32,
    F64,
    ONE,
    Graph,
    aten,
    body,
    rows_of,
    same,
    scheduled,
    simulate,
    targets,
)

from zcompile import comm
from zcompile.dialect import ORDER
from zcompile.passes import Lower, verify
from zcompile.passes.graph import calls

ENGINES = [False, True]


def lowered(gm, world, rank=0, native=False, **rules):
    gm = Lower(world, rank, native, "pg")(scheduled(gm, world, **rules))
    verify(gm, "lower")
    return gm


# One rank


def test_with_one_rank_a_gather_is_its_shard():
    g = Graph(1)
    x, w = g.input("x", 2, 4), g.shard("w", 4, 3)
    same(
        body(lowered(g.out(g.mm(x, g.unshard(w, 4))), 1)),
        """
    mm: f32[2,3] = aten.mm(x, w)
    return [mm]
    """,
    )


def test_with_one_rank_a_gather_into_another_dtype_is_a_cast():
    g = Graph(1)
    x, w = g.input("x", 2, 4, dtype=BF16), g.shard("w", 4, 3)
    same(
        body(lowered(g.out(g.mm(x, g.unshard(w, 4, BF16))), 1)),
        """
    convert_element_type: bf16[4,3] = prims.convert_element_type(w, bf16)
    mm: bf16[2,3] = aten.mm(x, convert_element_type)
    return [mm]
    """,
    )


def test_with_one_rank_a_reduction_is_its_gradient():
    g = Graph(1)
    x = g.input("x", 4)
    gm = g.out(g.reduce(g.neg(x), "a"), g.all_reduce(g.call(aten.exp.default, x), "b"))
    same(
        body(lowered(gm, 1)),
        """
    neg: f32[4] = aten.neg(x)
    exp: f32[4] = aten.exp(x)
    return [neg,exp]
    """,
    )


def test_with_one_rank_a_bf16_gradient_is_cast():
    g = Graph(1)
    gm = g.out(g.reduce(g.neg(g.input("x", 4, dtype=BF16)), "a"))
    same(
        body(lowered(gm, 1)),
        """
    neg: bf16[4] = aten.neg(x)
    convert_element_type: f32[4] = prims.convert_element_type(neg, f32)
    return [convert_element_type]
    """,
    )


@pytest.mark.parametrize(
    "gradient",
    [
        lambda g, x: (x, ()),
        lambda g, x: (g.call(aten.t.default, x), ()),
        lambda g, x: (g.call(aten.view.default, g.neg(x), [8, 2]), ()),
        lambda g, x: ((n := g.neg(x)), (n,)),
    ],
    ids=["an input", "a view of an input", "a view", "also an output"],
)
@pytest.mark.parametrize("op", ["reduce", "all_reduce"])
def test_with_one_rank_a_gradient_that_something_else_holds_is_cloned(gradient, op):
    g = Graph(1)
    x = g.input("x", 4, 4)
    grad, more = gradient(g, x)
    gm = lowered(g.out(getattr(g, op)(grad, "w"), *more), 1)
    assert targets(gm)[-1] == "aten.clone"
    value = torch.randn(4, 4)
    result, *_ = gm(value)
    before = value.clone()
    result.zero_()  # what an optimizer or a clip does
    assert torch.equal(value, before)


@pytest.mark.parametrize("cap", [ONE, BIG])
@pytest.mark.parametrize("op", ["reduce", "all_reduce"])
def test_with_one_rank_two_parameters_of_one_gradient_get_two(op, cap):
    """y = x + a + b: the gradients of a and b are one value."""
    g = Graph(1)
    grad = g.neg(g.input("x", 4))
    gm = lowered(g.out(getattr(g, op)(grad, "a"), getattr(g, op)(grad, "b")), 1, cap=cap)
    a, b = gm(torch.randn(4))
    assert torch.equal(a, b)
    assert a.data_ptr() != b.data_ptr()


def test_with_one_rank_nothing_of_the_dialect_is_left():
    gm = lowered(model(1, 0), 1)
    assert not [t for t in targets(gm) if t.startswith(("zero.", "_c10d"))]
    assert not calls(gm.graph, ORDER)


# Messages


def test_p2p():
    g = Graph(world=3)
    x, w = g.input("x", 5, 2), g.shard("w", 2, 4)
    gm = g.out(g.mm(x, g.unshard(w, 2)), g.reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b"))
    same(
        body(lowered(gm, 3)),
        """
    order: u8[1] = zero.order()
    zero.publish_([w], [1], ['gather.0'], f32, 'g', True, order)
    gather_start = zero.gather_start([w], [2], f32, 'g', 'gather.0', order)
    item: f32[2,4] = gather_start[0]
    zero.wait_([item], [w], 'g', 'gather.0', order)
    mm: f32[5,4] = aten.mm(x, item)
    neg: f32[5,2] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0', order)
    item_1: f32[2,2,2] = reduce_start[0]
    zero.wait_([item_1], [neg], 'g', 'reduce.0', order)
    mean = zero.mean([neg], [item_1], f32, f32, 'g')
    item_4: f32[2,2] = mean[0]
    neg_1: f32[5,2] = aten.neg(x)
    view: f32[10] = aten.view(neg_1, [-1])
    clone: f32[10] = aten.clone(view)
    zero.all_reduce_(clone, 'g', 'all_reduce.0', order)
    zero.wait_([clone], [], 'g', 'all_reduce.0', order)
    slice_1: f32[10] = aten.slice.Tensor(clone, 0, 0, 10)
    view_1: f32[5,2] = aten.view(slice_1, [5,2])
    mul: f32[5,2] = aten.mul.Tensor(view_1, 0.3333333333333333)
    zero.drain_('g', order)
    return [mm,item_4,mul]
    """,
    )


def test_p2p_bf16_on_the_wire_is_summed_in_fp32():
    g = Graph(world=2)
    gm = g.out(g.reduce(g.neg(g.input("x", 4, dtype=BF16)), "a", F32, F32))
    same(
        body(lowered(gm, 2)),
        """
    order: u8[1] = zero.order()
    neg: bf16[4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0', order)
    item: bf16[1,2] = reduce_start[0]
    zero.wait_([item], [neg], 'g', 'reduce.0', order)
    mean = zero.mean([neg], [item], f32, f32, 'g')
    item_2: f32[2] = mean[0]
    return [item_2]
    """,
    )


def test_p2p_a_wide_gradient_is_cast_before_it_is_sent():
    g = Graph(world=2)
    gm = g.out(g.reduce(g.neg(g.input("x", 4)), "a", F32, BF16))
    same(
        body(lowered(gm, 2)),
        """
    order: u8[1] = zero.order()
    neg: f32[4] = aten.neg(x)
    convert_element_type: bf16[4] = prims.convert_element_type(neg, bf16)
    reduce_start = zero.reduce_start([convert_element_type], bf16, 'g', 'reduce.0', order)
    item: bf16[1,2] = reduce_start[0]
    zero.wait_([item], [convert_element_type], 'g', 'reduce.0', order)
    mean = zero.mean([convert_element_type], [item], f32, bf16, 'g')
    item_2: f32[2] = mean[0]
    return [item_2]
    """,
    )


def test_p2p_two_ranks_average_without_a_cast_in_place():
    g = Graph(world=2)
    same(
        body(lowered(g.out(g.reduce(g.neg(g.input("x", 4)), "a")), 2)),
        """
    order: u8[1] = zero.order()
    neg: f32[4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0', order)
    item: f32[1,2] = reduce_start[0]
    zero.wait_([item], [neg], 'g', 'reduce.0', order)
    zero.mean_([item], [neg], 'g')
    select: f32[2] = aten.select.int(item, 0, 0)
    return [select]
    """,
    )


@pytest.mark.parametrize(("rank", "rows"), [(0, 2), (1, 2), (2, 1)])
def test_p2p_a_rank_keeps_its_own_rows(rank, rows):
    g = Graph(3, rank)
    gm = lowered(g.out(g.reduce(g.neg(g.input("x", 5)), "a")), 3, rank)
    assert f"item_2: f32[{rows}] = mean[0]" in body(gm)


# The backend's own


def test_native():
    g = Graph(world=3)
    x, w = g.input("x", 5, 2), g.shard("w", 2, 4)
    gm = g.out(g.mm(x, g.unshard(w, 2)), g.reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b"))
    same(
        body(lowered(gm, 3, native=True)),
        """
    view: f32[4] = aten.view(w, [-1])
    all_gather_into_tensor: f32[12] = _c10d_functional.all_gather_into_tensor(view, 3, 'pg')
    wait_tensor: f32[12] = _c10d_functional.wait_tensor(all_gather_into_tensor)
    view_1: f32[3,4] = aten.view(wait_tensor, [3,-1])
    slice_1: f32[3,4] = aten.slice.Tensor(view_1, 1, 0, 4)
    view_2: f32[12] = aten.view(slice_1, [-1])
    slice_2: f32[8] = aten.slice.Tensor(view_2, 0, 0, 8)
    view_3: f32[2,4] = aten.view(slice_2, [2,4])
    mm: f32[5,4] = aten.mm(x, view_3)
    neg: f32[5,2] = aten.neg(x)
    view_4: f32[10] = aten.view(neg, [-1])
    constant_pad_nd: f32[12] = aten.constant_pad_nd(view_4, [0,2], 0.0)
    view_5: f32[3,4] = aten.view(constant_pad_nd, [3,-1])
    view_6: f32[12] = aten.view(view_5, [-1])
    reduce_scatter_tensor: f32[4] = _c10d_functional.reduce_scatter_tensor(view_6, 'sum', 3, 'pg')
    wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
    slice_3: f32[4] = aten.slice.Tensor(wait_tensor_1, 0, 0, 4)
    view_7: f32[2,2] = aten.view(slice_3, [2,2])
    mul: f32[2,2] = aten.mul.Tensor(view_7, 0.3333333333333333)
    neg_1: f32[5,2] = aten.neg(x)
    view_8: f32[10] = aten.view(neg_1, [-1])
    clone: f32[10] = aten.clone(view_8)
    all_reduce: f32[10] = _c10d_functional.all_reduce(clone, 'sum', 'pg')
    wait_tensor_2: f32[10] = _c10d_functional.wait_tensor(all_reduce)
    slice_4: f32[10] = aten.slice.Tensor(wait_tensor_2, 0, 0, 10)
    view_9: f32[5,2] = aten.view(slice_4, [5,2])
    mul_1: f32[5,2] = aten.mul.Tensor(view_9, 0.3333333333333333)
    return [mm,mul,mul_1]
    """,
    )


def flats(gm, name):
    """Elements and dtypes of what is handed to a native collective."""
    nodes = [n for n in gm.graph.nodes if name in str(n.target)]
    return [(n.args[0].meta["val"].numel(), n.args[0].meta["val"].dtype) for n in nodes]


def test_native_sizes_are_padded_to_the_largest_shard_and_not_more():
    g = Graph(3)
    a, b, c = g.shard("a", 5, 4), g.shard("b", 2, 3), g.shard("c", 6)
    wholes = [g.unshard(s, n) for s, n in ((a, 5), (b, 2), (c, 6))]
    grads = [g.neg(w) for w in wholes]
    gm = g.out(*[g.reduce(d, n) for d, n in zip(grads, "abc")], g.all_reduce(grads[0], "d"))
    gm = lowered(gm, 3, native=True)
    # chunks of 2, 1 and 2 rows
    chunk = 2 * 4 + 1 * 3 + 2
    assert flats(gm, "all_gather_into_tensor") == [(chunk, F32)]
    assert flats(gm, "reduce_scatter_tensor") == [(3 * chunk, F32)]
    assert flats(gm, "_c10d_functional.all_reduce") == [(20, F32)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_native_sizes_are_the_same_on_every_rank(rank):
    gm = lowered(model(3, rank), 3, rank, native=True)
    first = lowered(model(3, 0), 3, 0, native=True)
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        assert flats(gm, name) == flats(first, name) != []


def test_native_travels_in_the_reduction_dtype():
    g = Graph(2)
    x = g.input("x", 4, dtype=BF16)
    w = g.unshard(g.shard("w", 4), 4, BF16)
    gm = g.out(g.reduce(g.call(aten.mul.Tensor, x, w), "w", F32, F32))
    gm = lowered(gm, 2, native=True)
    assert flats(gm, "all_gather_into_tensor") == [(2, BF16)]
    assert flats(gm, "reduce_scatter_tensor") == [(4, F32)]


def test_an_even_single_parameter_is_neither_padded_nor_concatenated():
    g = Graph(2)
    w = g.unshard(g.shard("w", 4), 4)
    gm = lowered(g.out(g.reduce(g.neg(w), "w")), 2, native=True)
    assert not [t for t in targets(gm) if "pad" in t or t.startswith("aten.cat")]


# Replicated parameters


@pytest.mark.parametrize("world", [1, 2])
def test_a_replicated_parameter_is_cast_or_itself(world):
    g = Graph(world)
    p, q = g.input("p", 4), g.input("q", 4)
    gm = g.out(g.neg(g.replicate(p)), g.neg(g.replicate(q, BF16)))
    same(
        body(lowered(gm, world)),
        """
    neg: f32[4] = aten.neg(p)
    convert_element_type: bf16[4] = prims.convert_element_type(q, bf16)
    neg_1: bf16[4] = aten.neg(convert_element_type)
    return [neg,neg_1]
    """,
    )


# Values: ranks are threads, what a collective brings is NaN until it was awaited


def model(world, rank, compute=F32, reduce=F32):
    """Two layers with uneven rows, a replicated bias, a gradient for each."""
    g = Graph(world, rank)
    x, bias = g.input("x", 2, 5, dtype=compute), g.input("bias", 7)
    a, b = g.shard("a", 5, 3), g.shard("b", 3, 7)
    h = g.mm(x, g.unshard(a, 5, compute))
    y = g.mm(h, g.unshard(b, 3, compute))
    y = g.call(aten.add.Tensor, y, g.replicate(bias, compute))
    da = g.reduce(g.mm(g.call(aten.t.default, x), h), "a", F32, reduce)
    db = g.reduce(g.mm(g.call(aten.t.default, h), y), "b", F32, reduce)
    dbias = g.all_reduce(g.call(aten.sum.dim_IntList, y, [0]), "bias", F32, reduce)
    return g.out(y, da, db, dbias)


def inputs(world, compute=F32):
    draw = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(s, generator=draw) for s in [(5, 3), (3, 7), (7,)])
    xs = [torch.randn(2, 5, generator=draw).to(compute) for _ in range(world)]
    return [[xs[r], bias, rows_of(a, world, r), rows_of(b, world, r)] for r in range(world)]


def expected(world):
    """Plain arithmetic on whole parameters."""
    given = inputs(world)
    a, b = (torch.cat([each[i] for each in given]) for i in (2, 3))
    ys, das, dbs, dbiases = [], [], [], []
    for x, bias, *_ in given:
        h = x @ a
        ys.append(h @ b + bias)
        das.append(x.T @ h)
        dbs.append(h.T @ ys[-1])
        dbiases.append(ys[-1].sum(0))
    da, db, dbias = (sum(d) / world for d in (das, dbs, dbiases))
    return [(ys[r], rows_of(da, world, r), rows_of(db, world, r), dbias) for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize(("cap", "depth"), [(ONE, 1), (BIG, 2)])
def test_values_are_those_of_plain_arithmetic(world, native, cap, depth):
    options = {"native": native, "cap": cap, "depth": depth}
    graphs = [lowered(model(world, r), world, r, **options) for r in range(world)]
    torch.testing.assert_close(simulate(graphs, inputs(world)), expected(world))


@pytest.mark.parametrize("native", ENGINES)
@pytest.mark.parametrize(("compute", "reduce"), [(BF16, F32), (F32, F64), (BF16, BF16)])
def test_values_are_those_before_lowering_in_every_dtype(native, compute, reduce):
    world = 3
    before = simulate(
        [scheduled(model(world, r, compute, reduce), world) for r in range(world)],
        inputs(world, compute),
    )
    after = simulate(
        [lowered(model(world, r, compute, reduce), world, r, native) for r in range(world)],
        inputs(world, compute),
    )
    # Sums over ranks are in another order; a BF16 sum rounds every time.
    tolerance = 2e-2 if reduce == BF16 else 1e-6
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)


def test_one_rank_on_paper_computes_the_same_before_and_after():
    """Here the dialect's own operations run, not this test's stand-ins."""
    comm.register(comm.Group("g", rank=0, world=1))
    given = inputs(1)[0]
    before = model(1, 0)(*given)
    planned = scheduled(model(1, 0), 1)(*given)
    after = lowered(model(1, 0), 1)(*given)
    torch.testing.assert_close(planned, before)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(before, expected(1)[0])


def test_a_p2p_graph_runs_on_paper_with_nothing_received():
    """Three ranks that do not exist send zeros."""
    gm = lowered(model(3, 0), 3)
    comm.register(comm.Group("g", rank=0, world=3))
    given = inputs(3)[0]
    y, da, *_ = gm(*given)
    a, b = torch.zeros(5, 3), torch.zeros(3, 7)
    a[:2], b[:1] = given[2], given[3]
    torch.testing.assert_close(y, given[0] @ a @ b + given[1])
    torch.testing.assert_close(da, (given[0].T @ (given[0] @ a))[:2] / 3)
