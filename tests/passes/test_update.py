"""update: gradients go to the optimizer where they are complete, behind all reads of the shard."""

import pytest
from builders import ONE, Graph, aten, body, placed, same

from zcompile.dialect import UPDATE
from zcompile.passes import Update, verify
from zcompile.passes.graph import calls


def updated(gm, *names, world=2, **rules):
    gm = placed(gm, world, direction="backward", **rules)
    gm = Update("step.0", frozenset(names), world)(gm)
    verify(gm, "update")
    return gm


def two_layers(world=2):
    """y = x b a; their gradients, in the order in which AOTAutograd gives them."""
    g = Graph(world)
    a, b = g.shard("a", 4, 4), g.shard("b", 4, 4)
    x, h, dy = g.input("x", 4, 4), g.input("h", 4, 4), g.input("dy", 4, 4)
    dh = g.mm(dy, g.call(aten.t.default, g.unshard(a, 4)))
    da = g.reduce(g.mm(g.call(aten.t.default, h), dy), "a")
    dx = g.mm(dh, g.call(aten.t.default, g.unshard(b, 4)))
    db = g.reduce(g.mm(g.call(aten.t.default, x), dh), "b")
    return g, a, b, dx, da, db


def test_each_update_stands_behind_its_reduction():
    g, _, _, dx, da, db = two_layers()
    same(
        body(updated(g.out(dx, da, db), "a", "b", cap=ONE)),
        """
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4,4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    t: f32[4,4] = aten.t(item)
    mm: f32[4,4] = aten.mm(dy, t)
    t_1: f32[4,4] = aten.t(h)
    mm_1: f32[4,4] = aten.mm(t_1, dy)
    reduce_start = zero.reduce_start([mm_1], f32, 'g', 'reduce.0')
    item_1: f32[1,2,4] = reduce_start[0]
    gather_start_1 = zero.gather_start([b], [4], f32, 'g', 'gather.1')
    item_2: f32[4,4] = gather_start_1[0]
    reduce_finish = zero.reduce_finish([mm_1], [item_1], f32, f32, 'g', 'reduce.0')
    item_4: f32[2,4] = reduce_finish[0]
    empty: f32[0,4] = aten.empty.memory_format([0,4], dtype=f32, layout=torch.strided, device=cpu, pin_memory=False)
    zero.update_([item_4], [a], [empty], ['a'], 'step.0')
    zero.wait_([item_2], [b], 'g', 'gather.1')
    t_2: f32[4,4] = aten.t(item_2)
    mm_2: f32[4,4] = aten.mm(mm, t_2)
    t_3: f32[4,4] = aten.t(x)
    mm_3: f32[4,4] = aten.mm(t_3, mm)
    reduce_start_1 = zero.reduce_start([mm_3], f32, 'g', 'reduce.1')
    item_3: f32[1,2,4] = reduce_start_1[0]
    reduce_finish_1 = zero.reduce_finish([mm_3], [item_3], f32, f32, 'g', 'reduce.1')
    item_5: f32[2,4] = reduce_finish_1[0]
    empty_1: f32[0,4] = aten.empty.memory_format([0,4], dtype=f32, layout=torch.strided, device=cpu, pin_memory=False)
    zero.update_([item_5], [b], [empty_1], ['b'], 'step.0')
    return [mm_2,empty,empty_1]
    """,  # noqa: E501
    )


def late(world):
    """A parameter that is gathered again behind the reduction of its gradient, and another one."""
    g = Graph(world)
    a, b = g.shard("a", 4, 4), g.shard("b", 4, 4)
    x = g.input("x", 4, 4)
    da = g.reduce(g.neg(x), "a")
    read = g.mm(x, g.unshard(a, 4))
    db = g.reduce(g.mm(read, read), "b")
    return g.out(da, db, b), read


def names(gm):
    return [node.args[3] for node in calls(gm.graph, UPDATE)]


def test_other_ranks_may_still_read_a_shard_until_they_reduce_something_later():
    gm, _ = late(2)
    gm = updated(gm, "a", "b", cap=ONE)
    assert names(gm) == [["a", "b"]]
    (update,) = calls(gm.graph, UPDATE)
    assert update.args[1] == [gm.graph.find_nodes(op="placeholder")[0]]


def test_a_gradient_that_no_later_reduction_clears_is_returned():
    gm, _ = late(2)
    before = gm.graph.output_node().args[0][0].name
    assert before == "reduce_grad"
    gm = updated(gm, "a", cap=10**6)  # both travel together, behind the gather
    assert names(gm) == [["a"]]
    g = Graph(2)
    a, x = g.shard("a", 4, 4), g.input("x", 4, 4)
    da = g.reduce(g.neg(x), "a")
    gm = updated(g.out(da, g.mm(x, g.unshard(a, 4))), "a", cap=ONE)
    assert names(gm) == [] and gm.graph.output_node().args[0][0].meta["val"].shape == (2, 4)


def test_with_one_rank_the_shard_is_read_by_what_reads_the_parameter():
    gm, read = late(1)
    gm = updated(gm, "a", cap=ONE, world=1)
    (update,) = calls(gm.graph, UPDATE)
    assert read < update


@pytest.mark.parametrize("more", ["read", "unknown"])
def test_what_the_graph_reads_or_the_step_does_not_know_is_returned(more):
    g, _, _, dx, da, db = two_layers()
    out = g.out(dx, da, g.neg(da), db) if more == "read" else g.out(dx, da, db)
    gm = updated(out, *(("a", "b") if more == "read" else ("b",)), cap=ONE)
    assert names(gm) == [["b"]]


def test_a_replicated_parameter_is_updated_behind_its_reads():
    g = Graph(2)
    p, x = g.input("p", 4), g.input("x", 4)
    dp = g.all_reduce(g.neg(x), "p")
    read = g.call(aten.mul.Tensor, x, g.replicate(p))
    gm = updated(g.out(dp, read), "p")
    (update,) = calls(gm.graph, UPDATE)
    assert read < update and update.args[1] == [p]
