"""Steps by hand for the simulator, on a device and a link whose times are easy to add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest

from zcompile.schedule.costs import Costs, Device
from zcompile.schedule.plan import KINDS, LANES
from zcompile.schedule.simulate import Bucket, Simulator
from zcompile.schedule.step import Gather, Op, Owned, Reduction, Step

# An operation takes as many seconds as it has FLOPs.
DEVICE = Device("toy", {"float32": 1.0}, 1.0, 10**9, 0.0, 1.0, "made up")


@dataclass(frozen=True)
class Line:
    """A transfer takes as many seconds as a rank sends bytes."""

    share: float = 0.0
    host: float = 0.0  # seconds to issue
    after: float = 0.0  # seconds to finish

    def primitive(self, kind, sent):
        return "wire"

    def transfer(self, kind, sent):
        return float(sent)

    def issue(self, kind, whole):
        return self.host

    def finish(self, kind, whole):
        return self.after


def gather(parameter, first, last=None, *, graph=0, ready=0, size=4, cast=False, sent=None):
    last = first if last is None else last
    sent = size // 2 if sent is None else sent
    return Gather(parameter, graph, first, last, ready, size, sent, "float32", cast)


def reduction(parameter, ready, needed, *, graph=0, size=4, kind="reduce-scatter", **more):
    given = {"bytes": size, "sent": size // 2, "grad_bytes": size, "result_bytes": size // 2}
    return Reduction(
        parameter, graph, kind, ready, needed, dtype="float32", **{**given, **more}, mergeable=kind
    )


def simulator(
    seconds, gathers=(), reductions=(), *, ends=None, world=2, native=False, live=None, line=None,
    at_rest=None,
):  # fmt: skip
    """ends: behind each graph; the second is called backward."""
    ends = (len(seconds),) if ends is None else ends
    ops = tuple(Op(f"op{i}", float(s), 0.0, "float32") for i, s in enumerate(seconds))
    live = {"activations": live or (0,) * (2 * len(seconds) + 1)}
    names = dict.fromkeys(row.parameter for row in (*gathers, *reductions))
    owned = tuple(Owned(n, (2, 2), "float32", 16, 8, True) for n in names)
    step = Step(
        world, native, ("forward", "backward")[: len(ends)], ends, ops, tuple(gathers),
        tuple(reductions), owned, live,
    )  # fmt: skip
    return Simulator(step, Costs(DEVICE, line or Line()), at_rest)


def pull(member, issue, wait, graph=0):
    members = member if isinstance(member, tuple) else (member,)
    return Bucket("all-gather", graph, members, issue, wait)


def push(member, issue, wait, graph=0, kind="reduce-scatter"):
    members = member if isinstance(member, tuple) else (member,)
    return Bucket(kind, graph, members, issue, wait)


def check_events(sim, schedule):
    """Assert that a timeline's events are those of the replay. -> both"""
    made, replay = sim.timeline(schedule), sim.replay(schedule)
    assert {e.lane for e in made.events} <= set(LANES)
    lane = [e for e in made.events if e.lane == "compute" and e.end > e.start]
    # The compute lane does one thing after the other and never nothing.
    if lane:
        assert lane[0].start == 0
        assert lane[-1].end == pytest.approx(made.seconds)
    assert all(a.end == pytest.approx(b.start) for a, b in pairwise(lane))
    transfers = [e for e in made.events if e.kind == "transfer"]
    assert [(e.start, e.end) for e in transfers] == list(zip(replay.starts, replay.ends))
    assert [e.lane for e in transfers] == [KINDS[b.kind] for b in schedule.buckets]
    assert [e.key for e in transfers] == sim.keys(schedule)
    waits = Counter()
    for event in made.events:
        if event.kind == "wait":
            waits[event.graph, event.key] += event.end - event.start
    stalls = {
        (sim.step.directions[b.graph], key): stall
        for b, key, stall in zip(schedule.buckets, sim.keys(schedule), replay.stalls)
        if stall
    }
    assert waits == pytest.approx(stalls)
    return made, replay
