"""The schedule that bucket_bytes and prefetch ask for: what is merged, how far apart it stands."""

from collections import Counter

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
    placed,
    rows,
    rows_of,
    same,
    scheduled,
    simulate,
    text,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.dialect import ALL_REDUCE_START, GATHER_START, REDUCE_START, RELEASE, WAIT
from zcompile.passes.extract import operations
from zcompile.passes.graph import calls


def buckets(gm, target=GATHER_START):
    """The parameters of each bucket, in order of issue."""
    return [list(n.meta["parameters"]) for n in calls(gm.graph, target)]


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


def chain(*sizes, order=None, world=2):
    """neg(w0), neg(w1), ... of square fp32 parameters, used in `order`, defined in their own."""
    g = Graph(world)
    shards = [g.shard(f"w{i}", n, n) for i, n in enumerate(sizes)]
    wholes = [g.unshard(s, n) for s, n in zip(shards, sizes)]
    return g.out(*[g.neg(wholes[i]) for i in order or range(len(sizes))])


def in_turn(count, world=2):
    g = Graph(world)
    shards = [g.shard(f"w{i}", 4) for i in range(count)]
    return g.out(*[g.neg(g.unshard(s, 4)) for s in shards])


def reductions(count, op="reduce", *shape):
    g = Graph()
    x = g.input("x", *(shape or (4,)))
    return g.out(*[getattr(g, op)(g.neg(x), f"w{i}") for i in range(count)])


# What is merged


def test_gathers_are_merged_and_awaited_where_the_first_is_used():
    g = Graph(world=3)
    x, a, b = g.input("x", 2, 5), g.shard("a", 5, 4), g.shard("b", 4, 3)
    wa, wb = g.unshard(a, 5), g.unshard(b, 4)
    gm = g.out(g.mm(g.mm(g.neg(x), wa), wb))
    same(
        body(placed(gm, 3)),
        """
    neg: f32[2,5] = aten.neg(x)
    gather_start = zero.gather_start([a,b], [5,4], f32, 'g', 'gather.0')
    item: f32[5,4] = gather_start[0]
    item_1: f32[4,3] = gather_start[1]
    zero.wait_([item,item_1], [a,b], 'g', 'gather.0')
    mm: f32[2,4] = aten.mm(neg, item)
    mm_1: f32[2,3] = aten.mm(mm, item_1)
    return [mm_1]
    """,
    )


def test_reductions_are_merged_where_the_last_gradient_is_there():
    g = Graph(world=3)
    x, y = g.input("x", 5, 2), g.input("y", 4, 3)
    gm = placed(g.out(g.reduce(g.neg(x), "a"), g.reduce(g.neg(y), "b"), g.neg(y)), 3)
    assert order(gm) == ["use", "use", "reduce_start 0", "reduce_finish 0", "use"]
    assert buckets(gm, REDUCE_START) == [["a", "b"]]


def test_replicated_gradients_are_merged_apart_from_sharded_ones():
    g = Graph()
    x = g.input("x", 4)
    grads = [g.neg(x) for _ in range(4)]
    gm = placed(
        g.out(
            g.all_reduce(grads[0], "a"), g.reduce(grads[1], "b"), g.all_reduce(grads[2], "c"),
            g.reduce(grads[3], "d"),
        )
    )  # fmt: skip
    assert buckets(gm, ALL_REDUCE_START) == [["a", "c"]]
    assert buckets(gm, REDUCE_START) == [["b", "d"]]


def test_the_size_limit_counts_whole_parameters():
    # 4 * 4 * 4 B = 64 B each
    assert buckets(placed(chain(4, 4, 4), cap=192)) == [["w0", "w1", "w2"]]
    assert buckets(placed(chain(4, 4, 4), cap=191)) == [["w0", "w1"], ["w2"]]
    assert buckets(placed(chain(4, 4, 4), cap=127)) == [["w0"], ["w1"], ["w2"]]


def test_the_size_limit_counts_the_gathered_dtype():
    g = Graph()
    wholes = [g.unshard(g.shard(f"w{i}", 4, 4), 4, BF16) for i in range(3)]  # 32 B gathered
    assert buckets(placed(g.out(*map(g.neg, wholes)), cap=64)) == [["w0", "w1"], ["w2"]]


def test_the_size_limit_counts_whole_gradients():
    def made(cap):
        return buckets(placed(reductions(3, "reduce", 4, 4), cap=cap), REDUCE_START)  # 64 B each

    assert made(128) == [["w0", "w1"], ["w2"]]
    assert made(127) == [["w0"], ["w1"], ["w2"]]


def test_a_parameter_larger_than_the_limit_is_alone():
    assert buckets(placed(chain(2, 9, 2, 2), cap=64)) == [["w0"], ["w1"], ["w2", "w3"]]


def test_dtypes_are_not_mixed_and_one_bucket_of_each_stays_open():
    g = Graph()
    dtypes = [F32, BF16, F32, BF16]
    wholes = [g.unshard(g.shard(f"w{i}", 4), 4, d) for i, d in enumerate(dtypes)]
    assert buckets(placed(g.out(*map(g.neg, wholes)))) == [["w0", "w2"], ["w1", "w3"]]


def test_dtypes_of_reduction_and_of_gradient_shards_are_not_mixed():
    g = Graph()
    x = g.input("x", 4)
    kinds = [(F32, F32), (BF16, F32), (F32, F64), (F32, F32)]
    gm = g.out(*[g.reduce(g.neg(x), f"w{i}", *kind) for i, kind in enumerate(kinds)])
    # The first and the last are one bucket, issued when the last gradient is there.
    assert buckets(placed(gm), REDUCE_START) == [["w1"], ["w2"], ["w0", "w3"]]


def test_buckets_follow_the_order_of_use_not_of_definition():
    gm = placed(chain(4, 4, 4, 4, order=[2, 0, 3, 1]), cap=128)
    assert buckets(gm) == [["w2", "w0"], ["w3", "w1"]]
    assert order(gm) == [
        "gather_start 0", "wait_ 0", "use", "use", "gather_start 1", "wait_ 1", "use", "use",
    ]  # fmt: skip


def test_a_shard_that_is_made_late_waits_for_the_next_bucket():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    first = g.neg(g.unshard(a, 4))
    wb = g.unshard(g.neg(b), 4, of="b")
    gm = placed(g.out(first, g.neg(wb)))
    assert buckets(gm) == [["a"], ["b"]]
    assert order(gm) == [
        "gather_start 0", "wait_ 0", "use", "use", "gather_start 1", "wait_ 1", "use",
    ]  # fmt: skip


def test_a_shard_that_stands_behind_a_view_that_changes_nothing_is_there_from_the_beginning():
    g = Graph()
    a, b = g.shard("a", 4, 2), g.shard("b", 4, 2)
    first = g.neg(g.unshard(a, 4))
    late = g.call(aten.view.default, b, [2, 2])
    gm = placed(g.out(first, g.neg(g.unshard(late, 4, of="b"))))
    assert buckets(gm) == [["a", "b"]]


def test_an_unshard_that_nothing_uses_is_not_gathered():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    g.unshard(a, 4)
    assert buckets(placed(g.out(g.neg(g.unshard(b, 4))))) == [["b"]]


def test_a_parameter_that_only_leaves_the_graph_is_gathered_before_the_output():
    g = Graph()
    gm = placed(g.out(g.neg(g.input("x", 4)), g.unshard(g.shard("a", 4), 4)))
    assert order(gm) == ["use", "gather_start 0", "wait_ 0"]


def test_a_reduction_whose_result_is_used_early_splits_its_bucket():
    g = Graph()
    x = g.input("x", 4)
    norm = g.neg(g.reduce(g.neg(x), "a"))
    gm = placed(g.out(norm, g.reduce(g.neg(x), "b"), g.reduce(g.neg(x), "c")))
    assert buckets(gm, REDUCE_START) == [["a"], ["b", "c"]]
    assert order(gm) == [
        "use", "reduce_start 0", "reduce_finish 0", "use",
        "use", "use", "reduce_start 1", "reduce_finish 1",
    ]  # fmt: skip


def test_a_gradient_that_depends_on_a_reduced_one_is_not_in_its_bucket():
    g = Graph()
    a = g.reduce(g.neg(g.input("x", 4)), "a")
    gm = placed(g.out(a, g.reduce(g.call(aten.repeat.default, a, [2]), "b")))
    assert buckets(gm, REDUCE_START) == [["a"], ["b"]]


def test_a_graph_without_collectives_is_left_alone():
    g = Graph()
    gm = g.out(g.neg(g.input("x", 4)))
    before = text(gm)
    assert text(placed(gm)) == text(placed(gm, depth=1)) == before


# How far apart


def test_gathers_are_issued_one_bucket_ahead():
    same(
        body(placed(in_turn(3), cap=ONE, depth=1)),
        """
    gather_start = zero.gather_start([w0], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    gather_start_1 = zero.gather_start([w1], [4], f32, 'g', 'gather.1')
    item_1: f32[4] = gather_start_1[0]
    zero.wait_([item], [w0], 'g', 'gather.0')
    neg: f32[4] = aten.neg(item)
    gather_start_2 = zero.gather_start([w2], [4], f32, 'g', 'gather.2')
    item_2: f32[4] = gather_start_2[0]
    zero.wait_([item_1], [w1], 'g', 'gather.1')
    neg_1: f32[4] = aten.neg(item_1)
    zero.wait_([item_2], [w2], 'g', 'gather.2')
    neg_2: f32[4] = aten.neg(item_2)
    return [neg,neg_1,neg_2]
    """,
    )


def test_depth_0_issues_at_the_use():
    assert order(placed(in_turn(3), cap=ONE))[:6] == [
        "gather_start 0", "wait_ 0", "use", "gather_start 1", "wait_ 1", "use",
    ]  # fmt: skip


def test_depth_2_issues_two_buckets_ahead():
    assert order(placed(in_turn(5), cap=ONE, depth=2)) == [
        "gather_start 0", "gather_start 1", "gather_start 2", "wait_ 0", "use",
        "gather_start 3", "wait_ 1", "use",
        "gather_start 4", "wait_ 2", "use",
        "wait_ 3", "use",
        "wait_ 4", "use",
    ]  # fmt: skip


def test_a_depth_beyond_the_last_bucket_issues_all_at_the_first():
    assert order(placed(in_turn(3), cap=ONE, depth=9))[:5] == [
        "gather_start 0", "gather_start 1", "gather_start 2", "wait_ 0", "use",
    ]  # fmt: skip


def test_the_first_gather_is_issued_at_the_top():
    g = Graph()
    x, w = g.input("x", 4), g.shard("w", 4)
    y = g.neg(g.neg(x))
    gm = placed(g.out(g.call(aten.add.Tensor, y, g.unshard(w, 4))), cap=ONE, depth=1)
    assert order(gm) == ["gather_start 0", "use", "use", "wait_ 0", "use"]


def test_a_gather_is_not_issued_before_its_shard_exists():
    g = Graph()
    w, v = g.shard("w", 4), g.shard("v", 4)
    first = g.neg(g.unshard(w, 4))
    scaled = g.neg(g.neg(v))
    gm = placed(g.out(first, g.neg(g.unshard(scaled, 4, of="v"))), cap=ONE, depth=1)
    assert order(gm) == [
        "gather_start 0", "wait_ 0", "use", "use", "use", "gather_start 1", "wait_ 1", "use",
    ]  # fmt: skip


def test_reductions_are_awaited_one_bucket_late():
    same(
        body(placed(reductions(3), cap=ONE, depth=1)),
        """
    neg: f32[4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0')
    item: f32[1,2] = reduce_start[0]
    neg_1: f32[4] = aten.neg(x)
    reduce_start_1 = zero.reduce_start([neg_1], f32, 'g', 'reduce.1')
    item_1: f32[1,2] = reduce_start_1[0]
    reduce_finish = zero.reduce_finish([neg], [item], f32, f32, 'g', 'reduce.0')
    item_3: f32[2] = reduce_finish[0]
    neg_2: f32[4] = aten.neg(x)
    reduce_start_2 = zero.reduce_start([neg_2], f32, 'g', 'reduce.2')
    item_2: f32[1,2] = reduce_start_2[0]
    reduce_finish_1 = zero.reduce_finish([neg_1], [item_1], f32, f32, 'g', 'reduce.1')
    item_4: f32[2] = reduce_finish_1[0]
    reduce_finish_2 = zero.reduce_finish([neg_2], [item_2], f32, f32, 'g', 'reduce.2')
    item_5: f32[2] = reduce_finish_2[0]
    return [item_3,item_4,item_5]
    """,
    )


@pytest.mark.parametrize("op", ["reduce", "all_reduce"])
def test_depth_2_awaits_reductions_two_buckets_late(op):
    assert order(placed(reductions(4, op), cap=ONE, depth=2)) == [
        "use", f"{op}_start 0",
        "use", f"{op}_start 1",
        "use", f"{op}_start 2", f"{op}_finish 0",
        "use", f"{op}_start 3", f"{op}_finish 1",
        f"{op}_finish 2", f"{op}_finish 3",
    ]  # fmt: skip


def test_a_reduction_is_awaited_before_its_result_is_used():
    g = Graph()
    x = g.input("x", 4)
    a = g.reduce(g.neg(x), "a")
    norm = g.call(aten.add.Tensor, a, a)
    gm = placed(g.out(norm, g.reduce(g.neg(x), "b")), cap=ONE, depth=2)
    assert order(gm) == [
        "use", "reduce_start 0", "reduce_finish 0", "use", "use", "reduce_start 1",
        "reduce_finish 1",
    ]  # fmt: skip


def test_reductions_and_all_reductions_are_delayed_apart():
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(g.reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b"), g.reduce(g.neg(x), "c"))
    assert order(placed(gm, cap=ONE, depth=1)) == [
        "use", "reduce_start 0",
        "use", "all_reduce_start 0",
        "use", "reduce_start 1", "reduce_finish 0",
        "all_reduce_finish 0", "reduce_finish 1",
    ]  # fmt: skip


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
    for shard, (count, uses, viewed, work, reduced) in zip(shards, program):
        whole = g.unshard(shard, count)
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
@given(programs(), st.integers(0, 3), st.sampled_from([1, 20, 40, BIG]))
def test_no_more_than_depth_and_one_buckets_are_alive(program, depth, cap):
    gm = build(program)
    work = Counter((n.target, n.name) for n in operations(gm))
    plain = [n.args[4] for n in calls(placed(build(program), 3, cap=cap).graph, GATHER_START)]
    gm = scheduled(gm, 3, cap=cap, depth=depth)
    starts = [n.args[4] for n in calls(gm.graph, GATHER_START)]
    assert starts == plain == [n.args[3] for n in calls(gm.graph, WAIT)]
    left = Counter(
        (n.target, n.name)
        for n in operations(gm)
        if getattr(n.target, "namespace", "") != "zero" and "getitem" not in n.name
    )
    assert left == work
    # The bound is reached: gathers are issued as early as it allows.
    assert most_alive(gm) == min(depth + 1, len(starts))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 3), st.sampled_from([1, 40]))
def test_values_are_those_of_the_graph_before(program, depth, cap):
    world = 3
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randn(step[0], 2, generator=draw) for step in program]
    inputs = [
        [torch.randn(2, generator=draw), *(rows_of(w, world, rank) for w in wholes)]
        for rank in range(world)
    ]
    before = simulate([build(program, world, rank) for rank in range(world)], inputs)
    after = simulate(
        [scheduled(build(program, world, r), world, cap=cap, depth=depth) for r in range(world)],
        inputs,
    )
    assert after[0][0].dtype == F32
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("cap", [ONE, 100, BIG])
def test_values_of_a_model_are_those_before(world, cap):
    torch.manual_seed(0)
    a, b, c = torch.randn(5, 3), torch.randn(3, 7), torch.randn(2)

    def model(rank):
        g = Graph(world, rank)
        x, bias = g.input("x", 2, 5), g.input("bias", 7)
        wa = g.unshard(g.shard("a", 5, 3), 5)
        wb = g.unshard(g.shard("b", 3, 7), 3)
        wc = g.unshard(g.shard("c", 2), 2)
        h = g.mm(x, wa)
        y = g.call(aten.add.Tensor, g.mm(h, wb), bias)
        da = g.reduce(g.mm(g.call(aten.t.default, x), h), "a")
        db = g.reduce(g.mm(g.call(aten.t.default, h), y), "b")
        return g.out(y, g.neg(wc), da, db, g.all_reduce(g.call(aten.sum.dim_IntList, y, [0]), "e"))

    bias = torch.randn(7)
    inputs = [
        [torch.randn(2, 5), bias, *(rows_of(w, world, r) for w in (a, b, c))] for r in range(world)
    ]
    before = simulate([model(r) for r in range(world)], inputs)
    after = simulate([placed(model(r), world, cap=cap) for r in range(world)], inputs)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(before[0][0], inputs[0][0] @ a @ b + bias)


def test_every_rank_makes_the_same_plan():
    program = [(5, 2, True, 1, True), (1, 1, False, 0, True), (4, 3, True, 2, False)]
    plans = [rows(build(program, 4, rank), 4, cap=40, depth=1) for rank in range(4)]
    assert all(each == plans[0] for each in plans)
