"""bucket: what is merged, in which order, and what stays apart."""

import pytest
import torch
from builders import BF16, F32, F64, Graph, aten, body, rows_of, same, simulate, targets, text

from zcompile.dialect import ALL_REDUCE_START, GATHER_START, REDUCE_START
from zcompile.passes import Bucket, verify
from zcompile.passes.graph import calls

BIG = 10**6


def bucketed(gm, max_bytes=BIG, world=2, rank=0):
    gm = Bucket(max_bytes, world)(gm)
    verify(gm, "bucket")
    return gm


def buckets(gm, target=GATHER_START):
    """The parameters of each bucket, in order of issue."""
    return [list(n.meta["parameters"]) for n in calls(gm.graph, target)]


def chain(*sizes, order=None, world=2):
    """neg(w0), neg(w1), ... of square fp32 parameters, used in `order`, defined in their own."""
    g = Graph(world)
    shards = [g.shard(f"w{i}", n, n) for i, n in enumerate(sizes)]
    wholes = [g.unshard(s, n) for s, n in zip(shards, sizes)]
    return g.out(*[g.neg(wholes[i]) for i in order or range(len(sizes))])


def test_gathers_are_merged_and_awaited_where_the_first_is_used():
    g = Graph(world=3)
    x, a, b = g.input("x", 2, 5), g.shard("a", 5, 4), g.shard("b", 4, 3)
    wa, wb = g.unshard(a, 5), g.unshard(b, 4)
    gm = g.out(g.mm(g.mm(g.neg(x), wa), wb))
    same(
        text(bucketed(gm, world=3)),
        """
    x: f32[2,5]
    a: f32[2,4]
    b: f32[2,3]
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
    gm = g.out(g.reduce(g.neg(x), "a"), g.neg(y), g.reduce(g.neg(y), "b"))
    same(
        text(bucketed(gm, world=3)),
        """
    x: f32[5,2]
    y: f32[4,3]
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


def test_a_rank_past_the_end_reduces_into_empty_rows():
    g = Graph(world=3, rank=2)
    gm = g.out(g.reduce(g.neg(g.input("x", 2, 4)), "a"))
    same(
        body(bucketed(gm, world=3, rank=2)),
        """
    neg: f32[2,4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0')
    item: f32[2,0,4] = reduce_start[0]
    reduce_finish = zero.reduce_finish([neg], [item], f32, f32, 'g', 'reduce.0')
    item_1: f32[0,4] = reduce_finish[0]
    return [item_1]
    """,
    )


def test_replicated_gradients_are_merged_apart_from_sharded_ones():
    g = Graph()
    x = g.input("x", 4)
    grads = [g.neg(x) for _ in range(4)]
    gm = g.out(
        g.all_reduce(grads[0], "a"), g.reduce(grads[1], "b"), g.all_reduce(grads[2], "c"),
        g.reduce(grads[3], "d"),
    )  # fmt: skip
    gm = bucketed(gm)
    assert buckets(gm, ALL_REDUCE_START) == [["a", "c"]]
    assert buckets(gm, REDUCE_START) == [["b", "d"]]
    same(
        body(gm),
        """
    neg: f32[4] = aten.neg(x)
    neg_1: f32[4] = aten.neg(x)
    neg_2: f32[4] = aten.neg(x)
    neg_3: f32[4] = aten.neg(x)
    all_reduce_start: f32[8] = zero.all_reduce_start([neg,neg_2], f32, 'g', 'all_reduce.0')
    all_reduce_finish = zero.all_reduce_finish([neg,neg_2], all_reduce_start, f32, 'g', 'all_reduce.0')
    item_4: f32[4] = all_reduce_finish[0]
    item_5: f32[4] = all_reduce_finish[1]
    reduce_start = zero.reduce_start([neg_1,neg_3], f32, 'g', 'reduce.0')
    item: f32[1,2] = reduce_start[0]
    item_1: f32[1,2] = reduce_start[1]
    reduce_finish = zero.reduce_finish([neg_1,neg_3], [item,item_1], f32, f32, 'g', 'reduce.0')
    item_2: f32[2] = reduce_finish[0]
    item_3: f32[2] = reduce_finish[1]
    return [item_4,item_2,item_5,item_3]
    """,  # noqa: E501
    )


def test_the_size_limit_counts_whole_parameters():
    # 4 * 4 * 4 B = 64 B each
    assert buckets(bucketed(chain(4, 4, 4), 192)) == [["w0", "w1", "w2"]]
    assert buckets(bucketed(chain(4, 4, 4), 191)) == [["w0", "w1"], ["w2"]]
    assert buckets(bucketed(chain(4, 4, 4), 127)) == [["w0"], ["w1"], ["w2"]]


def test_the_size_limit_counts_the_gathered_dtype():
    g = Graph()
    wholes = [g.unshard(g.shard(f"w{i}", 4, 4), 4, BF16) for i in range(3)]  # 32 B gathered
    gm = g.out(*map(g.neg, wholes))
    assert buckets(bucketed(gm, 64)) == [["w0", "w1"], ["w2"]]


def test_the_size_limit_counts_whole_gradients():
    def grads():
        g = Graph()
        x = g.input("x", 4, 4)  # 64 B
        return g.out(*[g.reduce(g.neg(x), f"w{i}") for i in range(3)])

    assert buckets(bucketed(grads(), 128), REDUCE_START) == [["w0", "w1"], ["w2"]]
    assert buckets(bucketed(grads(), 127), REDUCE_START) == [["w0"], ["w1"], ["w2"]]


def test_a_parameter_larger_than_the_limit_is_alone():
    assert buckets(bucketed(chain(2, 9, 2, 2), 64)) == [["w0"], ["w1"], ["w2", "w3"]]


def test_dtypes_are_not_mixed_and_one_bucket_of_each_stays_open():
    g = Graph()
    dtypes = [F32, BF16, F32, BF16]
    wholes = [g.unshard(g.shard(f"w{i}", 4), 4, d) for i, d in enumerate(dtypes)]
    gm = g.out(*map(g.neg, wholes))
    assert buckets(bucketed(gm)) == [["w0", "w2"], ["w1", "w3"]]


def test_dtypes_of_reduction_and_of_gradient_shards_are_not_mixed():
    g = Graph()
    x = g.input("x", 4)
    kinds = [(F32, F32), (BF16, F32), (F32, F64), (F32, F32)]
    gm = g.out(*[g.reduce(g.neg(x), f"w{i}", *kind) for i, kind in enumerate(kinds)])
    # The first and the last are one bucket, issued when the last gradient is there.
    assert buckets(bucketed(gm), REDUCE_START) == [["w1"], ["w2"], ["w0", "w3"]]


def test_groups_are_not_mixed():
    from zcompile import comm

    g = Graph()
    comm.register(comm.Group("other", 0, 2))
    a, b = g.shard("a", 4), g.shard("b", 4)
    gm = g.out(g.neg(g.unshard(a, 4)), g.neg(g.unshard(b, 4, group="other")))
    gm = bucketed(gm)
    assert buckets(gm) == [["a"], ["b"]]
    assert [n.args[3] for n in calls(gm.graph, GATHER_START)] == ["g", "other"]


def test_buckets_follow_the_order_of_use_not_of_definition():
    gm = bucketed(chain(4, 4, 4, 4, order=[2, 0, 3, 1]), 128)
    assert buckets(gm) == [["w2", "w0"], ["w3", "w1"]]
    same(
        body(gm),
        """
    gather_start = zero.gather_start([w2,w0], [4,4], f32, 'g', 'gather.0')
    item: f32[4,4] = gather_start[0]
    item_1: f32[4,4] = gather_start[1]
    zero.wait_([item,item_1], [w2,w0], 'g', 'gather.0')
    neg: f32[4,4] = aten.neg(item)
    neg_1: f32[4,4] = aten.neg(item_1)
    gather_start_1 = zero.gather_start([w3,w1], [4,4], f32, 'g', 'gather.1')
    item_2: f32[4,4] = gather_start_1[0]
    item_3: f32[4,4] = gather_start_1[1]
    zero.wait_([item_2,item_3], [w3,w1], 'g', 'gather.1')
    neg_2: f32[4,4] = aten.neg(item_2)
    neg_3: f32[4,4] = aten.neg(item_3)
    return [neg,neg_1,neg_2,neg_3]
    """,
    )


def test_a_shard_that_is_made_late_waits_for_the_next_bucket():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    wa = g.unshard(a, 4)
    first = g.neg(wa)
    wb = g.unshard(g.neg(b), 4, of="b")
    gm = bucketed(g.out(first, g.neg(wb)))
    assert buckets(gm) == [["a"], ["b"]]
    same(
        body(gm),
        """
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    neg: f32[4] = aten.neg(item)
    neg_1: f32[2] = aten.neg(b)
    gather_start_1 = zero.gather_start([neg_1], [4], f32, 'g', 'gather.1')
    item_1: f32[4] = gather_start_1[0]
    zero.wait_([item_1], [neg_1], 'g', 'gather.1')
    neg_2: f32[4] = aten.neg(item_1)
    return [neg,neg_2]
    """,
    )


def test_views_that_change_nothing_are_skipped():
    g = Graph()
    a, b = g.shard("a", 4, 2), g.shard("b", 4, 2)
    first = g.neg(g.unshard(a, 4))
    # What `to_local` leaves behind, after the bucket's first use: the shard itself is ready.
    late = g.call(aten.view.default, b, [2, 2])
    gm = bucketed(g.out(first, g.neg(g.unshard(late, 4, of="b"))))
    same(
        body(gm),
        """
    gather_start = zero.gather_start([a,b], [4,4], f32, 'g', 'gather.0')
    item: f32[4,2] = gather_start[0]
    item_1: f32[4,2] = gather_start[1]
    zero.wait_([item,item_1], [a,b], 'g', 'gather.0')
    neg: f32[4,2] = aten.neg(item)
    neg_1: f32[4,2] = aten.neg(item_1)
    return [neg,neg_1]
    """,
    )


def test_a_view_that_changes_the_shape_is_kept():
    g = Graph()
    flat = g.input("flat", 4)
    gm = bucketed(g.out(g.neg(g.unshard(g.call(aten.view.default, flat, [2, 2]), 4, of="a"))))
    assert targets(gm)[0] == "aten.view"


def test_an_unshard_that_nothing_uses_is_not_gathered():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    g.unshard(a, 4)
    gm = bucketed(g.out(g.neg(g.unshard(b, 4))))
    assert buckets(gm) == [["b"]]


def test_a_parameter_that_only_leaves_the_graph_is_gathered_before_the_output():
    g = Graph()
    gm = bucketed(g.out(g.unshard(g.shard("a", 4), 4)))
    same(
        body(gm),
        """
    gather_start = zero.gather_start([a], [4], f32, 'g', 'gather.0')
    item: f32[4] = gather_start[0]
    zero.wait_([item], [a], 'g', 'gather.0')
    return [item]
    """,
    )


def test_a_reduction_whose_result_is_used_early_splits_its_bucket():
    g = Graph()
    x = g.input("x", 4)
    a = g.reduce(g.neg(x), "a")
    norm = g.neg(a)
    gm = g.out(norm, g.reduce(g.neg(x), "b"), g.reduce(g.neg(x), "c"))
    gm = bucketed(gm)
    assert buckets(gm, REDUCE_START) == [["a"], ["b", "c"]]
    same(
        body(gm),
        """
    neg: f32[4] = aten.neg(x)
    reduce_start = zero.reduce_start([neg], f32, 'g', 'reduce.0')
    item: f32[1,2] = reduce_start[0]
    reduce_finish = zero.reduce_finish([neg], [item], f32, f32, 'g', 'reduce.0')
    item_1: f32[2] = reduce_finish[0]
    neg_1: f32[2] = aten.neg(item_1)
    neg_2: f32[4] = aten.neg(x)
    neg_3: f32[4] = aten.neg(x)
    reduce_start_1 = zero.reduce_start([neg_2,neg_3], f32, 'g', 'reduce.1')
    item_2: f32[1,2] = reduce_start_1[0]
    item_3: f32[1,2] = reduce_start_1[1]
    reduce_finish_1 = zero.reduce_finish([neg_2,neg_3], [item_2,item_3], f32, f32, 'g', 'reduce.1')
    item_4: f32[2] = reduce_finish_1[0]
    item_5: f32[2] = reduce_finish_1[1]
    return [neg_1,item_4,item_5]
    """,
    )


def test_a_gradient_that_depends_on_a_reduced_one_is_not_in_its_bucket():
    g = Graph()
    x = g.input("x", 4)
    a = g.reduce(g.neg(x), "a")
    gm = bucketed(g.out(a, g.reduce(g.call(aten.repeat.default, a, [2]), "b")))
    assert buckets(gm, REDUCE_START) == [["a"], ["b"]]


def test_a_reduction_that_nothing_reads_still_runs():
    """Every rank sends; which of them wants the result does not matter."""
    g = Graph()
    x = g.input("x", 4)
    g.reduce(g.neg(x), "a")
    gm = bucketed(g.out(x))
    assert buckets(gm, REDUCE_START) == [["a"]]
    assert "zero.reduce_finish" in targets(gm)


def test_a_bf16_gradient_travels_as_bf16_and_becomes_fp32():
    g = Graph()
    gm = bucketed(g.out(g.reduce(g.input("x", 4, 3, dtype=BF16), "a", F32, F32)))
    same(
        body(gm),
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
    gm = bucketed(g.out(g.reduce(g.input("x", 4, 3), "a", F32, BF16)))
    (start,) = calls(gm.graph, REDUCE_START)
    assert [v.dtype for v in start.meta["val"]] == [BF16]


def test_a_graph_without_collectives_is_left_alone():
    g = Graph()
    gm = g.out(g.neg(g.input("x", 4)))
    before = text(gm)
    assert text(bucketed(gm)) == before


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("max_bytes", [1, 100, BIG])
def test_values_are_those_of_the_graph_before(world, max_bytes):
    torch.manual_seed(0)
    a, b, c = torch.randn(5, 3), torch.randn(3, 7), torch.randn(2)

    def build(rank):
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
    before = simulate([build(r) for r in range(world)], inputs)
    after = simulate([bucketed(build(r), max_bytes, world, r) for r in range(world)], inputs)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(before[0][0], inputs[0][0] @ a @ b + bias)
