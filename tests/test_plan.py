"""A plan: its rows, exact bytes, its text, and what ranks compare of it."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from builders import BF16, F32, F64, Graph, aten, same

from zcompile import comm
from zcompile.passes import Bucket, Prefetch, Release
from zcompile.schedule.plan import Plan, plan_of

BIG = 10**6


def scheduled(gm, world, rank=0, max_bytes=BIG, depth=1):
    for each in (Bucket(max_bytes, world), Prefetch(depth), Release()):
        gm = each(gm)
    return gm


def mixed(world=3, rank=0, compute=F32):
    """Two gathers, a reduce-scatter of two uneven gradients, an all-reduce."""
    g = Graph(world, rank)
    x, bias = g.input("x", 2, 5, dtype=compute), g.input("bias", 3, dtype=compute)
    wa = g.unshard(g.shard("a", 5, 4), 5, compute, of="layer.a")
    wb = g.unshard(g.shard("b", 4, 3), 4, compute, of="layer.b")
    h = g.mm(x, wa)
    y = g.call(aten.add.Tensor, g.mm(h, wb), bias)
    return g.out(
        y,
        g.reduce(g.mm(g.call(aten.t.default, x), h), "layer.a"),
        g.reduce(g.mm(g.call(aten.t.default, h), y), "layer.b"),
        g.all_reduce(g.call(aten.sum.dim_IntList, y, [0]), "bias"),
    )


def plan(gm=None, world=3, rank=0, native=False, direction="forward", **options):
    gm = scheduled(gm or mixed(world, rank), world, rank, **options)
    return plan_of(gm, "000", direction, world, native)


def by_kind(made):
    return {row.kind: row for row in made.collectives}


def test_rows_follow_the_order_of_issue():
    made = plan(max_bytes=1)
    assert [(row.key, row.kind, row.parameters) for row in made.collectives] == [
        ("gather.0", "all-gather", ("layer.a",)),
        ("gather.1", "all-gather", ("layer.b",)),
        ("reduce.0", "reduce-scatter", ("layer.a",)),
        ("reduce.1", "reduce-scatter", ("layer.b",)),
        ("all_reduce.0", "all-reduce", ("bias",)),
    ]
    issued = [row.issue for row in made.collectives]
    assert issued == sorted(issued)


def test_positions_are_those_of_the_graph():
    gm = scheduled(mixed(), 3)
    nodes = list(gm.graph.nodes)
    made = plan_of(gm, "000", "forward", 3, False)
    assert made.nodes == len(nodes)
    ends = {
        row.key: [str(nodes[i].target) for i in (row.issue, row.wait)] for row in made.collectives
    }
    assert ends == {
        "gather.0": ["zero.gather_start.default", "zero.wait_.default"],
        "reduce.0": ["zero.reduce_start.default", "zero.reduce_finish.default"],
        "all_reduce.0": ["zero.all_reduce_start.default", "zero.all_reduce_finish.default"],
    }
    gather = made.collectives[0]
    assert str(nodes[gather.release].target) == "zero.release.default"
    assert gather.issue < gather.wait < gather.release
    assert [row.release for row in made.collectives[1:]] == [-1, -1]


def test_a_bucket_kept_for_backward_has_no_release():
    g = Graph()
    w = g.unshard(g.shard("w", 4), 4)
    (row,) = plan(g.out(g.neg(w), w), world=2).collectives
    assert row.release == -1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_names_the_node_that_needs_the_gather(depth):
    g = Graph()
    shards = [g.shard(f"w{i}", 4) for i in range(3)]
    uses = [g.neg(g.unshard(s, 4)) for s in shards]
    made = plan(g.out(*uses), world=2, max_bytes=1, depth=depth)
    assert [row.awaits for row in made.collectives] == [use.name for use in uses]


# Bytes


def test_bytes_point_to_point():
    rows = by_kind(plan())
    whole = (5 * 4 + 4 * 3) * 4
    for kind in ("all-gather", "reduce-scatter"):
        assert (rows[kind].bytes, rows[kind].dtype) == (whole, "float32")
        assert rows[kind].sent == whole * 2 // 3  # nothing is padded: an average over ranks
        assert rows[kind].primitive == "p2p"
    assert rows["all-reduce"].bytes == 3 * 4
    assert rows["all-reduce"].sent == 2 * (3 * 4) * 2 // 3
    assert rows["all-reduce"].primitive == "all_reduce"


def test_bytes_of_the_backends_own_collectives_include_padding():
    rows = by_kind(plan(native=True))
    chunks = (2 * 4 + 2 * 3) * 4  # the largest shard of each
    assert rows["all-gather"].bytes == rows["reduce-scatter"].bytes == (5 * 4 + 4 * 3) * 4
    assert rows["all-gather"].sent == rows["reduce-scatter"].sent == chunks * 2
    assert rows["all-gather"].primitive == "all_gather_into_tensor"
    assert rows["reduce-scatter"].primitive == "reduce_scatter_tensor"
    assert rows["all-reduce"].primitive == "all_reduce"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_sent_are_what_the_dialect_counts_on_paper(world):
    """The graph's own operations run, on groups that exist on paper; the plan is their average."""
    counted = {"all-gather": 0, "reduce-scatter": 0}
    for rank in range(world):
        gm = scheduled(mixed(world, rank), world, rank)
        before = comm.traffic()
        inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        gm(*[torch.zeros(v.shape) for v in inputs])
        moved = comm.traffic() - before
        counted["all-gather"] += moved.gather_bytes
        counted["reduce-scatter"] += moved.reduce_bytes
    rows = by_kind(plan(world=world))
    for kind, total in counted.items():
        assert rows[kind].sent == total // world


def test_dtypes_on_the_wire():
    """bf16 compute: gradients travel as bf16 point to point, as fp32 where the backend sums."""
    p2p, native = (by_kind(plan(mixed(compute=BF16), native=n)) for n in (False, True))
    assert {kind: row.dtype for kind, row in p2p.items()} == {
        "all-gather": "bfloat16", "reduce-scatter": "bfloat16", "all-reduce": "float32",
    }  # fmt: skip
    assert {kind: row.dtype for kind, row in native.items()} == {
        "all-gather": "bfloat16", "reduce-scatter": "float32", "all-reduce": "float32",
    }  # fmt: skip
    assert p2p["reduce-scatter"].bytes * 2 == native["reduce-scatter"].bytes == 32 * 4


def test_a_gradient_wider_than_the_reduction_travels_narrow():
    g = Graph()
    gm = g.out(g.reduce(g.neg(g.input("x", 4, dtype=F64)), "a", F64, F32))
    (row,) = plan(gm, world=2).collectives
    assert (row.dtype, row.bytes, row.sent) == ("float32", 16, 8)


def test_one_rank_sends_nothing():
    made = plan(world=1)
    assert {row.primitive for row in made.collectives} == {"none"}
    assert [row.sent for row in made.collectives] == [0, 0, 0]
    assert made.sent("all-gather") == 0


def test_sent_adds_up_by_kind():
    made = plan(max_bytes=1)
    assert made.sent("all-gather") == 20 * 4 * 2 // 3 + 12 * 4 * 2 // 3
    assert made.sent("all-reduce") == 16
    assert made.sent("broadcast") == 0


# Text


def test_text():
    same(
        plan(direction="backward").to_text(),
        """
    000: backward, 3 ranks, 27 nodes, 0.000 MB sent per rank
    #  collective      MB     sent MB  dtype    by          issue  wait  release  of
    0  all-gather      0.000  0.000    float32  p2p         4      7     10       layer.a +1
    1  reduce-scatter  0.000  0.000    float32  p2p         16     21    -        layer.a +1
    2  all-reduce      0.000  0.000    float32  all_reduce  20     24    -        bias
    """,
    )


def test_text_of_a_larger_one():
    g = Graph(4)
    shards = [g.shard(f"w{i}", 1024, 512) for i in range(2)]
    gm = g.out(*[g.neg(g.unshard(s, 1024, BF16)) for s in shards], g.unshard(shards[0], 1024))
    same(
        plan(gm, world=4, native=True, max_bytes=2**20).to_text(),
        """
    000: forward, 4 ranks, 16 nodes, 3.146 MB sent per rank
    #  collective  MB     sent MB  dtype     by                      issue  wait  release  of
    0  all-gather  1.049  0.786    bfloat16  all_gather_into_tensor  2      4     8        w0
    1  all-gather  1.049  0.786    bfloat16  all_gather_into_tensor  5      9     13       w1
    2  all-gather  2.097  1.573    float32   all_gather_into_tensor  10     14    -        w0
    """,
    )


def test_text_without_collectives():
    g = Graph()
    assert plan(g.out(g.neg(g.input("x", 4))), world=2).to_text() == (
        "000: forward, 2 ranks, 3 nodes, 0.000 MB sent per rank\n"
        "#  collective  MB  sent MB  dtype  by  issue  wait  release  of\n"
    )


# JSON


@pytest.mark.parametrize("native", [False, True])
def test_json_and_back(native):
    made = plan(native=native)
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.to_text() == made.to_text()
    assert isinstance(again.collectives[0].parameters, tuple)
    assert hash(again) == hash(made)


def test_json_says_its_version():
    assert json.loads(plan().to_json())["version"] == 1


def test_another_version_is_refused():
    raw = json.loads(plan().to_json())
    raw["version"] = 2
    with pytest.raises(ValueError, match=r"^this plan was not written by schema version 1$"):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["{}", '{"graph": "000"}'])
def test_json_without_a_version_is_refused(text):
    with pytest.raises(ValueError, match="schema version 1"):
        Plan.from_json(text)


def test_a_plan_cannot_be_changed():
    made = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.world = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.collectives[0].bytes = 2


# What ranks compare


def test_lines():
    assert plan(direction="backward").lines() == [
        "backward graph",
        "all-gather ['layer.a', 'layer.b'] float32 128 B p2p",
        "reduce-scatter ['layer.a', 'layer.b'] float32 128 B p2p",
        "all-reduce ['bias'] float32 12 B all_reduce",
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("native", [False, True])
def test_the_plan_is_the_same_on_every_rank(world, native):
    """Shards differ: four and five ranks leave some without a row."""
    plans = [plan(world=world, rank=rank, native=native) for rank in range(world)]
    assert all(each == plans[0] for each in plans)
    assert len(plans[0].lines()) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"direction": "backward"},
        {"native": True},
        {"max_bytes": 1},
    ],
)
def test_lines_differ_where_ranks_would_do_different_things(other):
    assert plan(**other).lines() != plan().lines()


def test_lines_do_not_say_where_in_a_ranks_own_graph():
    """A rank may run other nodes around the same collectives."""
    shallow, deep = plan(depth=0), plan(depth=1)
    assert shallow != deep
    assert shallow.lines() == deep.lines()


def test_lines_show_another_shape_or_parameter():
    def one(rows, of):
        g = Graph()
        return plan(g.out(g.neg(g.unshard(g.shard("w", rows), rows, of=of))), world=2).lines()

    assert one(4, "w") != one(6, "w")
    assert one(4, "w") != one(4, "v")
