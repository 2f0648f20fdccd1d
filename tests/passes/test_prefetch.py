"""prefetch: where gathers are issued and reductions awaited, and how much is alive meanwhile."""

from collections import Counter

import pytest
import torch
from builders import F32, Graph, aten, body, rows_of, same, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.dialect import GATHER_START, RELEASE, WAIT
from zcompile.passes import Bucket, Prefetch, Release, verify
from zcompile.passes.graph import calls

ONE = 1  # byte: every parameter is its own bucket


def order(gm):
    """The schedule in short: `start 0`, `wait 0`, `use` ..."""
    lines = []
    for node in gm.graph.nodes:
        name = str(node.target)
        if node.op != "call_function" or "getitem" in name:
            continue
        keys = [a for a in node.args if isinstance(a, str) and "." in a]
        verb = "use" if not keys else name.split(".")[1]
        lines.append(f"{verb} {keys[0].split('.')[1]}" if keys else verb)
    return lines


def in_turn(count, world=2):
    g = Graph(world)
    shards = [g.shard(f"w{i}", 4) for i in range(count)]
    gm = g.out(*[g.neg(g.unshard(s, 4)) for s in shards])
    return Bucket(ONE, world)(gm)


def reductions(count, op="reduce"):
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(*[getattr(g, op)(g.neg(x), f"w{i}") for i in range(count)])
    return Bucket(ONE, 2)(gm)


def prefetched(gm, depth):
    gm = Prefetch(depth)(gm)
    verify(gm, "prefetch")
    return gm


def test_gathers_are_issued_one_bucket_ahead():
    same(
        body(prefetched(in_turn(3), 1)),
        """
    gather_start = zero.gather_start([w0], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    zero.wait_([item], [w0], 'g', 'gather.0')
    gather_start_1 = zero.gather_start([w1], [4], f32, 'g', 'gather.1')
    item_1: f32[4] = gather_start_1[0]
    neg: f32[4] = aten.neg(item)
    zero.wait_([item_1], [w1], 'g', 'gather.1')
    gather_start_2 = zero.gather_start([w2], [4], f32, 'g', 'gather.2')
    item_2: f32[4] = gather_start_2[0]
    neg_1: f32[4] = aten.neg(item_1)
    zero.wait_([item_2], [w2], 'g', 'gather.2')
    neg_2: f32[4] = aten.neg(item_2)
    return [neg,neg_1,neg_2]
    """,
    )


def test_depth_0_issues_at_the_use():
    gm = in_turn(3)
    before = body(gm)
    assert body(prefetched(gm, 0)) == before
    assert order(gm)[:6] == [
        "gather_start 0", "wait_ 0", "use", "gather_start 1", "wait_ 1", "use",
    ]  # fmt: skip


def test_depth_2_issues_two_buckets_ahead():
    assert order(prefetched(in_turn(5), 2)) == [
        "gather_start 0",
        "wait_ 0", "gather_start 1", "gather_start 2", "use",
        "wait_ 1", "gather_start 3", "use",
        "wait_ 2", "gather_start 4", "use",
        "wait_ 3", "use",
        "wait_ 4", "use",
    ]  # fmt: skip


def test_a_depth_beyond_the_last_bucket_issues_all_behind_the_first():
    assert order(prefetched(in_turn(3), 9))[:5] == [
        "gather_start 0", "wait_ 0", "gather_start 1", "gather_start 2", "use",
    ]  # fmt: skip


def test_the_first_gather_is_issued_at_the_top():
    g = Graph()
    x, w = g.input("x", 4), g.shard("w", 4)
    y = g.neg(g.neg(x))
    gm = Bucket(ONE, 2)(g.out(g.call(aten.add.Tensor, y, g.unshard(w, 4))))
    assert order(prefetched(gm, 1)) == ["gather_start 0", "use", "use", "wait_ 0", "use"]


def test_a_gather_is_not_issued_before_its_shard_exists():
    g = Graph()
    w, v = g.shard("w", 4), g.shard("v", 4)
    first = g.neg(g.unshard(w, 4))
    scaled = g.neg(g.neg(v))
    gm = Bucket(ONE, 2)(g.out(first, g.neg(g.unshard(scaled, 4, of="v"))))
    assert order(prefetched(gm, 1)) == [
        "gather_start 0", "wait_ 0", "use", "use", "use", "gather_start 1", "wait_ 1", "use",
    ]  # fmt: skip


def test_gathers_behind_a_late_one_keep_their_order():
    """Ranks match collectives by order: bucket 2 could start early but must not overtake 1."""
    g = Graph()
    w, v, u = g.shard("w", 4), g.shard("v", 4), g.shard("u", 4)
    first = g.neg(g.unshard(w, 4))
    second = g.neg(g.unshard(g.neg(v), 4, of="v"))
    gm = Bucket(ONE, 2)(g.out(first, second, g.neg(g.unshard(u, 4))))
    starts = [line for line in order(prefetched(gm, 2)) if "start" in line]
    assert starts == ["gather_start 0", "gather_start 1", "gather_start 2"]


def test_reductions_are_awaited_one_bucket_late():
    same(
        body(prefetched(reductions(3), 1)),
        """
    neg: f32[4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0')
    item: f32[1,2] = reduce_start[0]
    neg_1: f32[4] = aten.neg(x)
    reduce_finish = zero.reduce_finish([neg], [item], f32, f32, 'g', 'reduce.0')
    item_1: f32[2] = reduce_finish[0]
    reduce_start_1 = zero.reduce_start([neg_1], f32, 'g', 'reduce.1')
    item_2: f32[1,2] = reduce_start_1[0]
    neg_2: f32[4] = aten.neg(x)
    reduce_finish_1 = zero.reduce_finish([neg_1], [item_2], f32, f32, 'g', 'reduce.1')
    item_3: f32[2] = reduce_finish_1[0]
    reduce_start_2 = zero.reduce_start([neg_2], f32, 'g', 'reduce.2')
    item_4: f32[1,2] = reduce_start_2[0]
    reduce_finish_2 = zero.reduce_finish([neg_2], [item_4], f32, f32, 'g', 'reduce.2')
    item_5: f32[2] = reduce_finish_2[0]
    return [item_1,item_3,item_5]
    """,
    )


@pytest.mark.parametrize("op", ["reduce", "all_reduce"])
def test_depth_2_awaits_reductions_two_buckets_late(op):
    assert order(prefetched(reductions(4, op), 2)) == [
        "use", f"{op}_start 0",
        "use", f"{op}_start 1",
        "use", f"{op}_finish 0", f"{op}_start 2",
        "use", f"{op}_finish 1", f"{op}_start 3",
        f"{op}_finish 2", f"{op}_finish 3",
    ]  # fmt: skip


def test_a_reduction_is_awaited_before_its_result_is_used():
    g = Graph()
    x = g.input("x", 4)
    a = g.reduce(g.neg(x), "a")
    norm = g.call(aten.add.Tensor, a, a)
    b = g.reduce(g.neg(x), "b")
    gm = Bucket(ONE, 2)(g.out(norm, b))
    assert order(prefetched(gm, 2)) == [
        "use", "reduce_start 0", "reduce_finish 0", "use", "use", "reduce_start 1",
        "reduce_finish 1",
    ]  # fmt: skip


def test_reductions_and_all_reductions_are_delayed_apart():
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(
        g.reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b"), g.reduce(g.neg(x), "c"),
    )  # fmt: skip
    assert order(prefetched(Bucket(ONE, 2)(gm), 1)) == [
        "use", "reduce_start 0",
        "use", "all_reduce_start 0",
        "use", "reduce_finish 0", "reduce_start 1",
        "reduce_finish 1", "all_reduce_finish 0",
    ]  # fmt: skip


def test_a_graph_without_collectives_is_left_alone():
    g = Graph()
    gm = g.out(g.neg(g.input("x", 4)))
    before = body(gm)
    assert body(prefetched(gm, 1)) == before


def test_a_graph_without_inputs_is_left_alone():
    g = Graph()
    gm = g.out(g.call(aten.ones.default, [2]))
    assert order(prefetched(gm, 1)) == ["use"]


# Properties


@st.composite
def programs(draw):
    """A straight line of parameters used in turn: (rows, uses, views, other work, reduced?)."""
    step = st.tuples(
        st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 2), st.booleans()
    )
    return draw(st.lists(step, min_size=1, max_size=7))


def build(program, world=3, rank=0):
    g = Graph(world, rank)
    x = g.input("x", 2)
    shards = [g.shard(f"w{i}", step[0], 2) for i, step in enumerate(program)]
    results = []
    for shard, (rows, uses, viewed, work, reduced) in zip(shards, program):
        whole = g.unshard(shard, rows)
        for _ in range(uses):
            read = g.call(aten.t.default, whole) if viewed else whole
            x = g.call(aten.add.Tensor, x, g.call(aten.sum.dim_IntList, read, [int(viewed)]))
        for _ in range(work):
            x = g.neg(x)
        if reduced:
            results.append(g.reduce(x, shard.name))
            results.append(g.all_reduce(x, f"{shard.name}.bias"))
    return g.out(x, *results)


def most_alive(gm):
    """Gathers issued and not yet released, at most, reading the printed graph downward."""
    alive, most = set(), 0
    for node in gm.graph.nodes:
        if node.target is GATHER_START:
            alive.add(node.args[4])
        elif node.target is RELEASE:
            alive.remove(node.args[1])
        most = max(most, len(alive))
    assert not alive
    return most


@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 3), st.sampled_from([1, 20, 40, 10**6]))
def test_no_more_than_depth_and_one_buckets_are_alive(program, depth, max_bytes):
    gm = Bucket(max_bytes, 3)(build(program))
    nodes = Counter((n.op, n.target, str(n.args)) for n in gm.graph.nodes)
    starts = [n.args[4] for n in calls(gm.graph, GATHER_START)]
    gm = Prefetch(depth)(gm)
    verify(gm, "prefetch")
    assert Counter((n.op, n.target, str(n.args)) for n in gm.graph.nodes) == nodes
    assert [n.args[4] for n in calls(gm.graph, GATHER_START)] == starts
    assert [n.args[3] for n in calls(gm.graph, WAIT)] == starts
    gm = Release()(gm)
    verify(gm, "release")
    assert most_alive(gm) <= depth + 1
    # The bound is reached: gathers are issued as early as it allows.
    assert most_alive(gm) == min(depth + 1, len(starts))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 3), st.sampled_from([1, 40]))
def test_values_are_those_of_the_graph_before(program, depth, max_bytes):
    world = 3
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randn(step[0], 2, generator=draw) for step in program]
    inputs = [
        [torch.randn(2, generator=draw), *(rows_of(w, world, rank) for w in wholes)]
        for rank in range(world)
    ]

    def scheduled(rank):
        gm = Bucket(max_bytes, world)(build(program, world, rank))
        return Release()(Prefetch(depth)(gm))

    before = simulate([build(program, world, rank) for rank in range(world)], inputs)
    after = simulate([scheduled(rank) for rank in range(world)], inputs)
    assert after[0][0].dtype == F32
    torch.testing.assert_close(after, before)
