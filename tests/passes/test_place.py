"""place: collectives stand where the rows of a plan say, or the rows are refused."""

from dataclasses import replace

import pytest
import torch
from builders import (
    BF16,
    F32,
    F64,
    ONE,
    Graph,
    all_reduction,
    aten,
    body,
    gather,
    reduction,
    rows,
    rows_of,
    same,
    simulate,
    targets,
    text,
    two_gradients,
    two_layers,
)

from zcompile.dialect import ALL_REDUCE_START, GATHER_START, REDUCE_START
from zcompile.passes import Place, verify
from zcompile.passes.extract import operations
from zcompile.passes.graph import calls


def place(gm, *plan, world=2):
    gm = Place(plan, world)(gm)
    verify(gm, "place")
    return gm


# Gathers


def test_gathers_at_their_use():
    plan = gather("a", "mm"), gather("b", "mm_1", key="gather.1")
    same(
        text(place(two_layers(), *plan, world=3)),
        """
    x: f32[2,5]
    a: f32[2,4]
    b: f32[2,3]
    neg: f32[2,5] = aten.neg(x)
    gather_start = zero.gather_start([a], [5], f32, 'g', 'gather.0')
    item: f32[5,4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    mm: f32[2,4] = aten.mm(neg, item)
    gather_start_1 = zero.gather_start([b], [4], f32, 'g', 'gather.1')
    item_1: f32[4,3] = gather_start_1[0]
    zero.wait_([item_1], [b], 'g', 'gather.1')
    mm_1: f32[2,3] = aten.mm(mm, item_1)
    return [mm_1]
    """,
    )


def test_gathers_merged_and_issued_early():
    same(
        body(place(two_layers(), gather("a b", "neg", "mm"), world=3)),
        """
    gather_start = zero.gather_start([a,b], [5,4], f32, 'g', 'gather.0')
    item: f32[5,4] = gather_start[0]
    item_1: f32[4,3] = gather_start[1]
    neg: f32[2,5] = aten.neg(x)
    zero.wait_([item,item_1], [a,b], 'g', 'gather.0')
    mm: f32[2,4] = aten.mm(neg, item)
    mm_1: f32[2,3] = aten.mm(mm, item_1)
    return [mm_1]
    """,
    )


def test_at_one_place_what_is_issued_comes_first_then_what_is_awaited():
    plan = gather("a", "neg", "mm"), gather("b", "mm", "mm_1", key="gather.1")
    same(
        body(place(two_layers(), *plan, world=3)),
        """
    gather_start = zero.gather_start([a], [5], f32, 'g', 'gather.0')
    item: f32[5,4] = gather_start[0]
    neg: f32[2,5] = aten.neg(x)
    gather_start_1 = zero.gather_start([b], [4], f32, 'g', 'gather.1')
    item_1: f32[4,3] = gather_start_1[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    mm: f32[2,4] = aten.mm(neg, item)
    zero.wait_([item_1], [b], 'g', 'gather.1')
    mm_1: f32[2,3] = aten.mm(mm, item_1)
    return [mm_1]
    """,
    )


def test_collectives_at_one_place_follow_the_order_of_the_rows():
    plan = gather("b", "neg", "mm"), gather("a", "neg", "mm", key="gather.1")
    gm = place(two_layers(), *plan, world=3)
    assert [n.args[4] for n in calls(gm.graph, GATHER_START)] == ["gather.0", "gather.1"]
    assert [n.meta["parameters"] for n in calls(gm.graph, GATHER_START)] == [["b"], ["a"]]
    assert [str(n.args[0]) for n in calls(gm.graph, GATHER_START)] == ["[b]", "[a]"]


def test_a_parameter_that_only_leaves_the_graph():
    g = Graph()
    gm = g.out(g.neg(g.input("x", 4)), g.unshard(g.shard("a", 4), 4))
    same(
        body(place(gm, gather("a", ""))),
        """
    neg: f32[4] = aten.neg(x)
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    return [neg,item]
    """,
    )


def test_a_parameter_that_is_gathered_twice_is_taken_up_in_order_of_use():
    g = Graph()
    a = g.shard("a", 4)
    late, early = g.unshard(a, 4, name="late"), g.unshard(a, 4, name="early")
    first = g.neg(early)
    gm = g.out(first, g.call(aten.exp.default, late))
    same(
        body(place(gm, gather("a", "neg"), gather("a", "exp", key="gather.1"))),
        """
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    neg: f32[4] = aten.neg(item)
    gather_start_1 = zero.gather_start([a], [4], f32, 'g', 'gather.1')
    item_1: f32[4] = gather_start_1[0]
    zero.wait_([item_1], [a], 'g', 'gather.1')
    exp: f32[4] = aten.exp(item_1)
    return [neg,exp]
    """,
    )


def test_an_unshard_that_nothing_uses_needs_no_row():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    g.unshard(a, 4)
    gm = place(g.out(g.neg(g.unshard(b, 4))), gather("b", "neg"))
    assert targets(gm) == ["zero.gather_start", "getitem", "zero.wait_", "aten.neg"]


def test_views_between_a_shard_and_its_gather_are_skipped():
    """What `to_local` leaves behind: an issue in front of the view is right."""
    g = Graph()
    x, b = g.input("x", 4, 2), g.shard("b", 4, 2)
    y = g.neg(x)
    late = g.call(aten.alias.default, g.call(aten.view.default, b, [2, 2]))
    gm = g.out(g.call(aten.add.Tensor, y, g.unshard(late, 4, of="b")))
    same(
        body(place(gm, gather("b", "neg", "add_tensor"))),
        """
    gather_start = zero.gather_start([b], [4], f32, 'g', 'gather.0')
    item: f32[4,2] = gather_start[0]
    neg: f32[4,2] = aten.neg(x)
    zero.wait_([item], [b], 'g', 'gather.0')
    add_tensor: f32[4,2] = aten.add.Tensor(neg, item)
    return [add_tensor]
    """,
    )


def test_a_view_that_changes_the_shape_is_an_operation():
    g = Graph()
    flat = g.input("flat", 4)
    gm = g.out(g.neg(g.unshard(g.call(aten.view.default, flat, [2, 2]), 4, of="a")))
    assert [n.name for n in operations(gm)] == ["view", "neg"]
    gm = place(gm, gather("a", "neg"))
    assert targets(gm)[:2] == ["aten.view", "zero.gather_start"]


# Reductions


def test_reductions_where_each_gradient_is_there():
    plan = reduction("a", "neg_1"), reduction("b", "", key="reduce.1")
    same(
        body(place(two_gradients(), *plan, world=3)),
        """
    neg: f32[5,2] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0')
    item: f32[2,2,2] = reduce_start[0]
    reduce_finish = zero.reduce_finish([neg], [item], f32, f32, 'g', 'reduce.0')
    item_2: f32[2,2] = reduce_finish[0]
    neg_1: f32[4,3] = aten.neg(y)
    neg_2: f32[4,3] = aten.neg(y)
    reduce_start_1 = zero.reduce_start([neg_2], f32, 'g', 'reduce.1')
    item_1: f32[2,2,3] = reduce_start_1[0]
    reduce_finish_1 = zero.reduce_finish([neg_2], [item_1], f32, f32, 'g', 'reduce.1')
    item_3: f32[2,3] = reduce_finish_1[0]
    return [item_2,neg_1,item_3]
    """,
    )


def test_a_reduction_awaited_late():
    plan = reduction("a", "neg_1", "neg_2"), reduction("b", "", key="reduce.1")
    lines = body(place(two_gradients(), *plan, world=3)).split("\n")
    calls_ = [line.split("= ")[-1].split("(")[0] for line in lines if "item" not in line[:5]]
    assert calls_[:5] == [
        "aten.neg", "zero.reduce_start", "aten.neg", "zero.reduce_finish", "aten.neg",
    ]  # fmt: skip


def test_reductions_merged():
    same(
        body(place(two_gradients(), reduction("a b", ""), world=3)),
        """
    neg: f32[5,2] = aten.neg(x)
    neg_1: f32[4,3] = aten.neg(y)
    neg_2: f32[4,3] = aten.neg(y)
    reduce_start = zero.reduce_start([neg,neg_2], f32, 'g', 'reduce.0')
    item: f32[2,2,2] = reduce_start[0]
    item_1: f32[2,2,3] = reduce_start[1]
    reduce_finish = zero.reduce_finish([neg,neg_2], [item,item_1], f32, f32, 'g', 'reduce.0')
    item_2: f32[2,2] = reduce_finish[0]
    item_3: f32[2,3] = reduce_finish[1]
    return [item_2,neg_1,item_3]
    """,
    )


def test_members_of_a_reduction_stand_in_the_order_of_the_row():
    same(
        body(place(two_gradients(), reduction("b a", ""), world=3)),
        """
    neg: f32[5,2] = aten.neg(x)
    neg_1: f32[4,3] = aten.neg(y)
    neg_2: f32[4,3] = aten.neg(y)
    reduce_start = zero.reduce_start([neg_2,neg], f32, 'g', 'reduce.0')
    item: f32[2,2,3] = reduce_start[0]
    item_1: f32[2,2,2] = reduce_start[1]
    reduce_finish = zero.reduce_finish([neg_2,neg], [item,item_1], f32, f32, 'g', 'reduce.0')
    item_2: f32[2,3] = reduce_finish[0]
    item_3: f32[2,2] = reduce_finish[1]
    return [item_3,neg_1,item_2]
    """,
    )


def test_a_rank_past_the_end_reduces_into_empty_rows():
    g = Graph(world=3, rank=2)
    gm = g.out(g.reduce(g.neg(g.input("x", 2, 4)), "a"))
    same(
        body(place(gm, reduction("a", ""), world=3)),
        """
    neg: f32[2,4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0')
    item: f32[2,0,4] = reduce_start[0]
    reduce_finish = zero.reduce_finish([neg], [item], f32, f32, 'g', 'reduce.0')
    item_1: f32[0,4] = reduce_finish[0]
    return [item_1]
    """,
    )


def test_all_reduces_merged():
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(g.all_reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b"))
    same(
        body(place(gm, all_reduction("a b", ""))),
        """
    neg: f32[4] = aten.neg(x)
    neg_1: f32[4] = aten.neg(x)
    all_reduce_start: f32[8] = zero.all_reduce_start([neg,neg_1], f32, 'g', 'all_reduce.0')
    all_reduce_finish = zero.all_reduce_finish([neg,neg_1], all_reduce_start, f32, 'g', 'all_reduce.0')
    item: f32[4] = all_reduce_finish[0]
    item_1: f32[4] = all_reduce_finish[1]
    return [item,item_1]
    """,  # noqa: E501
    )


def test_an_all_reduce_awaited_late():
    g = Graph()
    x = g.input("x", 4)
    gm = place(g.out(g.all_reduce(g.neg(x), "a"), g.neg(x)), all_reduction("a", "neg_1", ""))
    assert targets(gm) == [
        "aten.neg", "zero.all_reduce_start", "aten.neg", "zero.all_reduce_finish", "getitem",
    ]  # fmt: skip


def test_a_reduction_that_nothing_reads_still_runs():
    """Every rank sends; which of them wants the result does not matter."""
    g = Graph()
    x = g.input("x", 4)
    g.reduce(g.neg(x), "a")
    gm = place(g.out(x), reduction("a", ""))
    assert [n.meta["parameters"] for n in calls(gm.graph, REDUCE_START)] == [["a"]]
    assert "zero.reduce_finish" in targets(gm)


def test_a_bf16_gradient_travels_as_bf16_and_becomes_fp32():
    g = Graph()
    gm = g.out(g.reduce(g.input("x", 4, 3, dtype=BF16), "a", F32, F32))
    same(
        body(place(gm, reduction("a", ""))),
        """
    reduce_start = zero.reduce_start([x], f32, 'g', 'reduce.0')
    item: bf16[1,2,3] = reduce_start[0]
    reduce_finish = zero.reduce_finish([x], [item], f32, f32, 'g', 'reduce.0')
    item_1: f32[2,3] = reduce_finish[0]
    return [item_1]
    """,
    )


def test_a_wide_gradient_travels_in_the_reduction_dtype():
    g = Graph()
    gm = place(g.out(g.reduce(g.input("x", 4, 3), "a", F32, BF16)), reduction("a", ""))
    (start,) = calls(gm.graph, REDUCE_START)
    assert [v.dtype for v in start.meta["val"]] == [BF16]
    g = Graph()
    gm = place(g.out(g.all_reduce(g.input("x", 4, 3), "a", F32, F64)), all_reduction("a", ""))
    (start,) = calls(gm.graph, ALL_REDUCE_START)
    assert start.meta["val"].dtype == F64


def test_a_graph_without_collectives_is_left_alone():
    g = Graph()
    gm = g.out(g.neg(g.input("x", 4)))
    before = text(gm)
    assert text(place(gm)) == before


# Plans edited by hand


def model(world, rank):
    """mm, mm_1, add; t, mm_2; t_1, mm_3; sum: two layers, a gradient each, and a bias."""
    g = Graph(world, rank)
    x, bias = g.input("x", 2, 5), g.input("bias", 7)
    wa = g.unshard(g.shard("a", 5, 3), 5)
    wb = g.unshard(g.shard("b", 3, 7), 3)
    h = g.mm(x, wa, name="h")
    y = g.call(aten.add.Tensor, g.mm(h, wb, name="hb"), bias, name="y")
    da = g.mm(g.call(aten.t.default, x, name="xt"), h, name="da")
    db = g.mm(g.call(aten.t.default, h, name="ht"), y, name="db")
    dbias = g.call(aten.sum.dim_IntList, y, [0], name="dbias")
    return g.out(y, g.reduce(da, "a"), g.reduce(db, "b"), g.all_reduce(dbias, "bias"))


EDITS = {
    "as the rules have it": lambda a, b, da, db, dbias: [a, b, da, db, dbias],
    "issues moved to the top": lambda a, b, da, db, dbias: [
        replace(a, issue="h"), replace(b, issue="h"), da, db, dbias,
    ],
    "an order of issue turned round": lambda a, b, da, db, dbias: [
        replace(b, issue="h"), a, da, db, dbias,
    ],
    "gathers merged": lambda a, b, da, db, dbias: [
        replace(a, parameters=("b", "a"), issue="h"), da, db, dbias,
    ],
    "reductions merged and awaited at the end": lambda a, b, da, db, dbias: [
        a, b, replace(db, parameters=("b", "a"), wait=""), replace(dbias, wait=""),
    ],
    "a reduction issued later than it could be": lambda a, b, da, db, dbias: [
        a, b, replace(da, issue="db", wait=""), db, dbias,
    ],
    "rows out of order": lambda a, b, da, db, dbias: [dbias, db, da, b, a],
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("world", [2, 3])
def test_an_edited_plan_computes_the_same(world, edit):
    draw = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(s, generator=draw) for s in [(5, 3), (3, 7), (7,)])
    inputs = [
        [torch.randn(2, 5, generator=draw), bias, rows_of(a, world, r), rows_of(b, world, r)]
        for r in range(world)
    ]
    before = simulate([model(world, r) for r in range(world)], inputs)
    plan = edit(*rows(model(world, 0), world, cap=ONE))
    graphs = [place(model(world, r), *plan, world=world) for r in range(world)]
    torch.testing.assert_close(simulate(graphs, inputs), before)
    torch.testing.assert_close(before[0][0], inputs[0][0] @ a @ b + bias)


def test_an_edit_that_moves_an_issue_moves_nothing_else():
    made = rows(model(2, 0), 2, cap=ONE)
    assert [(r.key, r.issue, r.wait) for r in made] == [
        ("gather.0", "h", "h"), ("gather.1", "hb", "hb"), ("reduce.0", "ht", "ht"),
        ("reduce.1", "dbias", "dbias"), ("all_reduce.0", "", ""),
    ]  # fmt: skip
    first = targets(place(model(2, 0), *made))
    moved = targets(place(model(2, 0), made[0], replace(made[1], issue="h"), *made[2:]))
    assert sorted(first) == sorted(moved)
    assert first[:6] == [
        "zero.gather_start", "getitem", "zero.wait_", "aten.mm", "zero.gather_start", "getitem",
    ]  # fmt: skip
    assert moved[:6] == [
        "zero.gather_start", "getitem", "zero.gather_start", "getitem", "zero.wait_", "aten.mm",
    ]  # fmt: skip
