"""simulate, on random steps: memory against a count, times against a second replay."""

import pytest
from hand_steps import Line, check_events, gather, pull, push, reduction, simulator
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.schedule.simulate import AtRest, Schedule


@st.composite
def cases(draw):
    """A simulator and a schedule that could be placed, with buckets issued anywhere it may be."""
    split, count = sorted(draw(st.tuples(st.integers(0, 6), st.integers(2, 6))))
    ends = (split, count) if 0 < split < count else (count,)
    seconds = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    size = st.sampled_from([2, 4, 10, 12])
    gathers, reductions = [], []
    for graph, (begin, end) in enumerate(zip((0, *ends), ends)):
        for name in draw(st.sets(st.sampled_from("abc"), min_size=1)):
            first = draw(st.integers(begin, end - 1))
            last = draw(st.integers(first, end))
            ready = draw(st.integers(begin, first))
            cast = draw(st.booleans())
            gathers.append(
                gather(name, first, last, graph=graph, ready=ready, size=draw(size), cast=cast)
            )
        for name in draw(st.sets(st.sampled_from("def"))):
            ready = draw(st.integers(begin, end))
            needed = draw(st.integers(ready, end))
            kind = draw(st.sampled_from(["reduce-scatter", "all-reduce"]))
            grad, result = draw(size), draw(size)
            reductions.append(
                reduction(name, ready, needed, graph=graph, size=draw(size), kind=kind,
                          grad_bytes=grad, result_bytes=result)
            )  # fmt: skip
    live = tuple(draw(st.integers(0, 9)) for _ in range(2 * count + 1))
    line = Line(
        draw(st.sampled_from([0.0, 0.25, 0.75])),
        draw(st.sampled_from([0, 0.5])),
        draw(st.integers(0, 1)),
    )
    world = draw(st.sampled_from([1, 2, 3]))
    sim = simulator(
        seconds, gathers, reductions, ends=ends, world=world, native=draw(st.booleans()),
        live=live, line=line, at_rest=AtRest(3, 5, 7),
    )  # fmt: skip
    kept = frozenset(name for name in sim.pairs if draw(st.booleans()))
    buckets = []
    for pack in packs(draw, sim.gathered(kept), lambda m: gathers[m].graph):
        wait = min(gathers[m].first for m in pack)
        ready = max(gathers[m].ready for m in pack)
        if ready <= wait:
            buckets.append(pull(pack, draw(st.integers(ready, wait)), wait, gathers[pack[0]].graph))
        else:
            buckets += [pull(m, gathers[m].first, gathers[m].first, gathers[m].graph) for m in pack]
    kind = lambda m: (reductions[m].graph, reductions[m].kind)
    for pack in packs(draw, range(len(reductions)), kind):
        ready = max(reductions[m].ready for m in pack)
        needed = min(reductions[m].needed for m in pack)
        for members in [pack] if ready <= needed else [(m,) for m in pack]:
            first = max(reductions[m].ready for m in members)
            wait = draw(st.integers(first, min(reductions[m].needed for m in members)))
            issue = draw(st.integers(first, wait))
            graph, name = kind(members[0])
            buckets.append(push(members, issue, wait, graph, name))
    return sim, Schedule(tuple(buckets), kept).ordered()


def packs(draw, members, kind):
    """Cut into buckets of one kind each."""
    made = {}
    for member in members:
        made.setdefault((kind(member), draw(st.sampled_from([0, 0, 0, 1]))), []).append(member)
    return [tuple(pack) for pack in made.values()]


def counted(sim, schedule):
    """Bytes on each slot, one slot after the other, asking of each thing whether it is there."""
    step = sim.step
    curve = []
    for slot in range(2 * len(step.ops) + 1):
        total = 3 + 5 + 7 + step.live["activations"][slot]
        for bucket in schedule.buckets:
            issued, awaited = slot >= 2 * bucket.issue, slot >= 2 * bucket.wait
            in_flight = issued and slot <= 2 * bucket.wait
            rows = step.gathers if bucket.kind == "all-gather" else step.reductions
            members = [rows[m] for m in bucket.members]
            whole = sum(r.bytes for r in members)
            part = (whole + step.world - 1) // step.world
            flat = step.native and step.world > 1
            if bucket.kind == "all-gather":
                if flat and in_flight:
                    total += part + (whole if len(members) > 1 else 0)
                for row in members:
                    there = awaited if flat and len(members) > 1 else issued
                    last = row.last
                    if row.parameter in schedule.kept:
                        last = max(g.last for g in step.gathers if g.parameter == row.parameter)
                    exists = step.world > 1 or row.cast
                    total += row.bytes if exists and there and slot <= 2 * last + 1 else 0
                continue
            for row in members:
                total += row.grad_bytes if 2 * row.ready <= slot <= 2 * bucket.wait else 0
                total += row.result_bytes if awaited else 0
            if in_flight and step.world > 1:
                if bucket.kind == "all-reduce":
                    total += whole
                elif step.native:
                    total += whole + part
                else:
                    total += whole * (step.world - 1) // step.world
                    total += sum(r.bytes for r in members if r.bytes != r.grad_bytes)
        curve.append(total)
    return curve


def timed(sim, schedule):
    """Seconds of the step: what the lane has to do, as a list, and a queue of transfers, both
    served from one event to the next."""
    step, share = sim.step, sim.costs.link.share
    todo = []  # ("work", seconds), ("send", bucket), ("await", bucket)
    for graph, end in enumerate(step.ends):
        for position in range(step.start(graph), end + 1):
            here = [b for b in schedule.buckets if b.graph == graph]
            for bucket in here:
                if bucket.issue == position:
                    todo += [("work", sim.costs.link.host), ("send", bucket)]
            for bucket in here:
                if bucket.wait == position:
                    todo += [("await", bucket), ("work", sim.costs.link.after)]
            if position < end:
                todo.append(("work", step.ops[position].flops))
    now, queue, over = 0.0, [], {}
    for what, thing in todo:
        if what == "send":
            rows = step.gathers if thing.kind == "all-gather" else step.reductions
            sent = sum(rows[m].sent for m in thing.members) if step.world > 1 else 0
            queue.append([thing, float(sent)])
        left = thing if what == "work" else 0.0
        while left > 0 or (what == "await" and thing not in over):
            while queue and queue[0][1] <= 1e-12:
                over[queue.pop(0)[0]] = now
            speed = 1 - share if queue else 1.0
            if what == "await" and thing in over:
                break
            until = [left / speed] if what == "work" else []
            until += [queue[0][1]] if queue else []
            elapsed = min(until)
            now += elapsed
            if queue:
                queue[0][1] -= elapsed
            left = max(left - elapsed * speed, 0.0) if what == "work" else 0.0
            if left <= 1e-12:
                left = 0.0
    return now


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_memory_is_a_count(case):
    sim, schedule = case
    curve = counted(sim, schedule)
    assert [int(v) for v in sim.memory(schedule)] == curve
    replay = sim.replay(schedule)
    assert (replay.peak, replay.slot) == (max(curve), curve.index(max(curve)))
    assert max(sim.timeline(schedule).memory.total()) == max(curve)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_times_are_those_of_a_second_replay(case):
    sim, schedule = case
    replay = sim.replay(schedule)
    assert replay.seconds == pytest.approx(timed(sim, schedule))
    # The link: in order of issue, one after the other.
    assert all(a <= b + 1e-9 for a, b in zip(replay.ends, replay.starts[1:]))
    # The step: its work, the host's part, what the link took while both were busy, the stalls.
    host = sum(sum(sim.price(b)[::2]) for b in schedule.buckets)
    wire, stalls = sim.communication_seconds(schedule), sum(replay.stalls)
    share = sim.costs.link.share
    assert replay.seconds == pytest.approx(
        sim.compute_seconds + host + share * wire + (1 - share) * stalls
    )
    assert replay.seconds >= sim.bound(schedule) - 1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_timelines_agree_with_replays(case):
    sim, schedule = case
    made, replay = check_events(sim, schedule)
    assert sum(made.exposed.values()) <= made.exposed_seconds + 1e-9
    reached = list(sim.reached(replay))
    assert reached == sorted(reached)
    assert list(made.memory.times) == sorted(made.memory.times)
    assert reached[-1] == pytest.approx(made.seconds)
