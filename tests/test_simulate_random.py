"""simulate, on random steps: memory against a count, times against a second replay."""

import random
from collections import Counter

import pytest
from hand_steps import Line, check_events, gather, reduction, simulator

from zcompile.schedule.simulate import AtRest, Bucket, Schedule


def case(seed):
    """A simulator and a schedule that could be placed, with buckets issued anywhere it may be."""
    draw = random.Random(seed)
    count = draw.randint(2, 6)
    ends = (draw.randint(1, count - 1), count) if draw.random() < 0.7 else (count,)
    size = lambda: draw.choice([2, 4, 10, 12])
    gathers, reductions = [], []
    in_place = seed % 2 == 1
    for graph, (begin, end) in enumerate(zip((0, *ends), ends)):
        for name in draw.sample("abc", draw.randint(0, 3)):
            first = draw.randint(begin, end - 1)
            last, ready = draw.randint(first, end), draw.choice([begin, draw.randint(begin, first)])
            cast = draw.random() < 0.5
            gathers.append(
                gather(name, first, last, graph=graph, ready=ready, size=size(), cast=cast)
            )
        for name in draw.sample("def", draw.randint(0, 3)):
            ready = draw.randint(begin, end)
            needed = draw.choice([end, draw.randint(ready, end)])
            kind = draw.choice(["reduce-scatter", "all-reduce"])
            more = {"size": size(), "grad_bytes": size(), "result_bytes": size()}
            more["in_place"] = in_place and kind == "reduce-scatter"
            joins = kind == "all-reduce" and ready and (seed + len(reductions)) % 2 == 0
            more["joined"] = ready - 1 if joins else None
            more["update_bytes"] = draw.choice([0, 0, 1, 2])
            reductions.append(reduction(name, ready, needed, graph=graph, kind=kind, **more))
    sim = simulator(
        [draw.randint(0, 3) for _ in range(count)],
        gathers,
        reductions,
        ends=ends,
        world=draw.choice([1, 2, 2, 3]),
        native=draw.random() < 0.5,
        live=tuple(draw.randint(0, 9) for _ in range(2 * count + 1)),
        line=Line(draw.choice([0.0, 0.25, 0.75]), draw.choice([0, 0.5]), draw.choice([0, 1])),
        at_rest=AtRest(3, 5, 7),
    )
    kept = frozenset(name for name in sorted(sim.pairs) if draw.random() < 0.5)
    buckets = []
    for pack in packs(draw, sim.gathered(kept), lambda m: (gathers[m].graph, "all-gather")):
        ready, wait = (of(pack) for of in (latest_ready(gathers), first_use(gathers)))
        for members in [pack] if ready <= wait else [(m,) for m in pack]:
            ready, wait = (of(members) for of in (latest_ready(gathers), first_use(gathers)))
            graph = gathers[members[0]].graph
            buckets.append(Bucket("all-gather", graph, members, draw.randint(ready, wait), wait))
    kind = lambda m: (reductions[m].graph, reductions[m].kind)
    for pack in packs(draw, range(len(reductions)), kind):
        ready, needed = (of(pack) for of in (latest_ready(reductions), first_need(reductions)))
        for members in [pack] if ready <= needed else [(m,) for m in pack]:
            first = latest_ready(reductions)(members)
            wait = draw.randint(first, first_need(reductions)(members))
            graph, name = kind(members[0])
            buckets.append(Bucket(name, graph, members, draw.randint(first, wait), wait))
    return sim, Schedule(tuple(buckets), kept).ordered()


def packs(draw, members, kind):
    """Cut into buckets of one kind each."""
    made = {}
    for member in members:
        made.setdefault((kind(member), draw.choice([0, 0, 1])), []).append(member)
    return [tuple(pack) for pack in made.values()]


def latest_ready(rows):
    return lambda members: max(rows[m].ready for m in members)


def first_use(rows):
    return lambda members: min(rows[m].first for m in members)


def first_need(rows):
    return lambda members: min(rows[m].needed for m in members)


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
                alone = row.joined is None or step.world == 1
                total += row.grad_bytes if alone and 2 * row.ready <= slot <= 2 * bucket.wait else 0
                there = issued and (awaited or row.in_place)
                gone = row.update_bytes and slot > 2 * bucket.wait
                total += row.result_bytes if there and not gone else 0
            if bucket.kind == "all-reduce" and step.world > 1 and not in_flight:
                first = min(
                    (2 * p + 1 for r in members if (p := r.joined) is not None), default=slot + 1
                )
                total += whole if first <= slot <= 2 * bucket.wait else 0
            if in_flight and step.world > 1:
                if bucket.kind == "all-reduce":
                    total += whole
                elif step.native:
                    total += whole + part
                else:
                    means = sum(r.result_bytes for r in members if r.in_place)
                    total += max(whole * (step.world - 1) // step.world - means, 0)
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
                    rows = step.gathers if bucket.kind == "all-gather" else step.reductions
                    # The toy device moves a byte a second.
                    update = sum(getattr(rows[m], "update_bytes", 0) for m in bucket.members)
                    todo += [("await", bucket), ("work", sim.costs.link.after + update)]
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


CASES = range(1000)


def test_the_cases_are_of_every_kind():
    seen = Counter()
    for seed in CASES:
        sim, schedule = case(seed)
        for b in schedule.buckets:
            seen[
                b.kind, len(b.members) > 1, b.issue < b.wait, sim.step.native, sim.step.world > 1
            ] += 1
        seen["kept"] += bool(schedule.kept)
        seen["empty"] += not schedule.buckets
        joined = [r.joined is not None for b in schedule.buckets if b.kind == "all-reduce"
                  for r in map(sim.step.reductions.__getitem__, b.members)]  # fmt: skip
        seen["joined"] += any(joined)
        seen["joined in part"] += any(joined) and not all(joined)
    assert len(seen) == 3 * 2**4 + 4 and all(seen.values())


@pytest.mark.parametrize("first", CASES[::250])
def test_memory_is_a_count(first):
    for seed in range(first, first + 250):
        sim, schedule = case(seed)
        curve = counted(sim, schedule)
        assert [int(v) for v in sim.memory(schedule)] == curve, seed
        replay = sim.replay(schedule)
        assert (replay.peak, replay.slot) == (max(curve), curve.index(max(curve))), seed
        assert max(sim.timeline(schedule).memory.total()) == max(curve), seed


@pytest.mark.parametrize("first", CASES[::250])
def test_times_are_those_of_a_second_replay(first):
    for seed in range(first, first + 250):
        sim, schedule = case(seed)
        replay = sim.replay(schedule)
        assert replay.seconds == pytest.approx(timed(sim, schedule)), seed
        assert replay.seconds == pytest.approx(sim.seconds(schedule.buckets)), seed
        # The link: in order of issue, one after the other.
        assert all(a <= b + 1e-9 for a, b in pairwise_times(replay)), seed
        # The step: its work, the host's part, what the link took while both were busy, the stalls.
        host = sum(sum(sim.price(b)[::2]) for b in schedule.buckets)
        wire, stalls = sim.communication_seconds(schedule), sum(replay.stalls)
        share = sim.costs.link.share
        parts = sim.compute_seconds + host + share * wire + (1 - share) * stalls
        assert replay.seconds == pytest.approx(parts), seed
        assert replay.seconds >= sim.bound(schedule) - 1e-9, seed


def pairwise_times(replay):
    """When each transfer ends and the next begins."""
    return zip(replay.ends, replay.starts[1:])


def test_timelines_agree_with_replays():
    for seed in CASES:
        sim, schedule = case(seed)
        made, replay = check_events(sim, schedule)
        assert sum(made.exposed.values()) <= made.exposed_seconds + 1e-9, seed
        reached = list(sim.reached(replay))
        assert reached == sorted(reached), seed
        assert list(made.memory.times) == sorted(made.memory.times), seed
        assert reached[-1] == pytest.approx(made.seconds), seed
