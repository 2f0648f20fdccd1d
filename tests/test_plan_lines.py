"""What ranks compare of their plans before anything is sent."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from builders import ONE, Graph, rows
from test_plan import plan

from zcompile.schedule.plan import lines


def test_lines():
    *listed, whole = lines("backward", plan().collectives)
    assert listed == [
        "backward graph",
        "all-gather ['layer.a', 'layer.b'] float32 128 B p2p",
        "reduce-scatter ['layer.a', 'layer.b'] float32 128 B p2p",
        "all-reduce ['bias'] float32 12 B all_reduce",
    ]
    # The last says what travels, however it is merged.
    merged, alone = plan().collectives, plan(cap=ONE).collectives
    assert whole == lines("backward", alone)[-1] and len(merged) < len(alone)
    assert whole != lines("backward", merged[1:])[-1]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("native", [False, True])
def test_the_plan_is_the_same_on_every_rank(world, native):
    """Shards differ: four and five ranks leave some without a row."""
    plans = [plan(world=world, rank=rank, native=native) for rank in range(world)]
    assert all(each == plans[0] for each in plans)
    assert len(plans[0].collectives) == 3


@pytest.mark.parametrize("other", [{"native": True}, {"cap": ONE}])
def test_lines_differ_where_ranks_would_do_different_things(other):
    assert lines("forward", plan(**other).collectives) != lines("forward", plan().collectives)
    assert lines("backward", plan().collectives) != lines("forward", plan().collectives)


def test_lines_do_not_say_where_in_a_ranks_own_graph():
    """A rank may run other operations around the same collectives."""
    near, far = plan(cap=ONE, depth=0), plan(cap=ONE, depth=1)
    assert near.collectives != far.collectives
    assert lines("forward", near.collectives) == lines("forward", far.collectives)


def test_lines_show_another_shape_or_parameter():
    def one(count, of):
        g = Graph()
        gm = g.out(g.neg(g.unshard(g.shard("w", count), count, of=of)))
        return lines("forward", rows(gm, 2))

    assert one(4, "w") != one(6, "w")
    assert one(4, "w") != one(4, "v")
