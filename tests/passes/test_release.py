"""release: the mark stands behind the last use, through every chain of views."""

import operator

import pytest
import torch
from builders import BIG, ONE, Graph, aten, body, same, scheduled, target, targets

from zcompile.dialect import RELEASE
from zcompile.passes.graph import calls


def released(gm, cap=BIG):
    return scheduled(gm, cap=cap)


def behind(gm):
    """What stands right before each release."""
    return [node.prev.name for node in calls(gm.graph, RELEASE)]


def test_a_bucket_is_released_behind_its_last_use():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    wa, wb = g.unshard(a, 4), g.unshard(b, 4)
    x = g.call(aten.add.Tensor, wa, wb)
    y = g.neg(wa)
    same(
        body(released(g.out(g.neg(x), y, g.neg(y)))),
        """
    gather_start = zero.gather_start([a,b], [4,4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    item_1: f32[4] = gather_start[1]
    zero.wait_([item,item_1], [a,b], 'g', 'gather.0')
    add_tensor: f32[4] = aten.add.Tensor(item, item_1)
    neg: f32[4] = aten.neg(item)
    zero.release([item,item_1], 'gather.0')
    neg_1: f32[4] = aten.neg(add_tensor)
    neg_2: f32[4] = aten.neg(neg)
    return [neg_1,neg,neg_2]
    """,
    )


def test_each_bucket_has_a_mark_of_its_own():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    gm = g.out(g.neg(g.unshard(a, 4)), g.neg(g.unshard(b, 4)))
    same(
        body(released(gm, ONE)),
        """
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    neg: f32[4] = aten.neg(item)
    zero.release([item], 'gather.0')
    gather_start_1 = zero.gather_start([b], [4], f32, 'g', 'gather.1')
    item_1: f32[4] = gather_start_1[0]
    zero.wait_([item_1], [b], 'g', 'gather.1')
    neg_1: f32[4] = aten.neg(item_1)
    zero.release([item_1], 'gather.1')
    return [neg,neg_1]
    """,
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda g, w: g.call(aten.t.default, w),
        lambda g, w: g.call(aten.view.default, w, [16]),
        lambda g, w: g.call(aten.expand.default, w, [2, 4, 4]),
        lambda g, w: g.call(aten.slice.Tensor, w, 0, 0, 2),
        lambda g, w: g.call(aten.reshape.default, w, [2, 8]),
        lambda g, w: g.call(operator.getitem, g.call(aten.split.Tensor, w, 2), 0),
        lambda g, w: g.call(operator.getitem, g.call(aten.unbind.int, w), 1),
        lambda g, w: g.call(aten.view.default, g.call(aten.t.default, w), [4, 2, 2]),
    ],
    ids=["t", "view", "expand", "slice", "reshape", "split", "unbind", "chain"],
)
def test_a_use_of_a_view_is_a_use(view):
    g = Graph()
    w = g.unshard(g.shard("w", 4, 4), 4)
    late = view(g, w)
    x = g.neg(w)
    last = g.call(aten.exp.default, late)
    gm = released(g.out(g.neg(x), last))
    assert behind(gm) == [last.name]


@pytest.mark.parametrize(
    "compute",
    [
        lambda g, w: g.neg(w),
        lambda g, w: g.mm(w, w),
        lambda g, w: g.call(aten.clone.default, w),
        lambda g, w: g.call(aten.cat.default, [w, w]),
        lambda g, w: g.call(operator.getitem, g.call(aten.max.dim, w, 0), 0),
    ],
    ids=["neg", "mm", "clone", "cat", "max"],
)
def test_what_is_computed_from_it_is_not(compute):
    g = Graph()
    w = g.unshard(g.shard("w", 4, 4), 4)
    used = compute(g, w)
    gm = released(g.out(g.neg(used)))
    (mark,) = calls(gm.graph, RELEASE)
    rest = [target(n) for n in gm.graph.nodes if mark < n and n.op == "call_function"]
    assert rest in (["aten.neg"], ["getitem", "aten.neg"])


def test_an_operation_without_a_schema_is_taken_to_share():
    g = Graph()
    w = g.unshard(g.shard("w", 4), 4)
    opaque = g.call(torch.relu, w)
    last = g.neg(opaque)
    gm = released(g.out(g.neg(last)))
    assert behind(gm) == [last.name]


@pytest.mark.parametrize("viewed", [False, True])
def test_a_bucket_that_leaves_the_graph_has_no_mark(viewed):
    g = Graph()
    w = g.unshard(g.shard("w", 4, 4), 4)
    v = g.unshard(g.shard("v", 4, 4), 4)
    out = g.call(aten.t.default, w) if viewed else w
    gm = released(g.out(g.neg(w), g.neg(v), out), ONE)
    assert [n.args[1] for n in calls(gm.graph, RELEASE)] == ["gather.1"]


def test_a_read_by_another_operations_second_argument_is_not_a_view():
    """`x.expand_as(w)` is a view of x; w is only looked at."""
    g = Graph()
    x, w = g.input("x", 1), g.unshard(g.shard("w", 4), 4)
    like = g.call(aten.expand_as.default, x, w)
    gm = released(g.out(g.neg(g.neg(like))))
    assert behind(gm) == [like.name]


def test_reductions_have_no_mark():
    g = Graph()
    x = g.input("x", 4)
    gm = released(g.out(g.reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b")))
    assert "zero.release" not in targets(gm)


def test_marks_stay_behind_the_wait_when_gathers_are_prefetched():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    gm = g.out(g.neg(g.unshard(a, 4)), g.neg(g.unshard(b, 4)))
    same(
        body(scheduled(gm, cap=ONE, depth=1)),
        """
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    gather_start_1 = zero.gather_start([b], [4], f32, 'g', 'gather.1')
    item_1: f32[4] = gather_start_1[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    neg: f32[4] = aten.neg(item)
    zero.release([item], 'gather.0')
    zero.wait_([item_1], [b], 'g', 'gather.1')
    neg_1: f32[4] = aten.neg(item_1)
    zero.release([item_1], 'gather.1')
    return [neg,neg_1]
    """,
    )
