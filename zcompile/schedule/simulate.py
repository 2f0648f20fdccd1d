"""Replays a schedule on a step: how long it takes, and what memory it holds when.

Time. One thread issues operations in order (the compute lane) and one link carries transfers in
the order in which they were issued, one after the other. A wait stands still until its transfer is
over. Where the link is driven by the same processor (gloo), a transfer takes `share` of the compute
lane's speed while both are busy.

Memory. Exact counts of bytes, on two slots per position p: slot 2p is "between", where collectives
are issued, awaited and finished, slot 2p + 1 is operation p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from zcompile.schedule.costs import Costs
from zcompile.schedule.plan import KINDS, Event, Memory, Timeline
from zcompile.schedule.step import Op, Step


@dataclass(frozen=True)
class Bucket:
    """One collective. members: indices into step.gathers (all-gather) or step.reductions.
    issue, wait: positions; a gather's wait stands at its first use, a reduction's may stand
    anywhere from its issue to the first use of its results."""

    kind: str
    graph: int
    members: tuple[int, ...]
    issue: int
    wait: int

    def at(self, issue: int | None = None, wait: int | None = None) -> Bucket:
        issue = self.issue if issue is None else issue
        wait = self.wait if wait is None else wait
        return Bucket(self.kind, self.graph, self.members, issue, wait)


@dataclass(frozen=True)
class Schedule:
    """buckets: in order of issue. kept: parameters that stay gathered from forward to backward;
    their backward gathers are in no bucket."""

    buckets: tuple[Bucket, ...]
    kept: frozenset[str] = frozenset()

    def ordered(self) -> Schedule:
        """The same with buckets in order of issue; at one position reductions first, as they have
        nothing to wait for, then gathers by their need."""
        key = lambda b: (b.graph, b.issue, b.kind == "all-gather", b.wait, b.members)
        return replace(self, buckets=tuple(sorted(self.buckets, key=key)))


@dataclass(frozen=True)
class Replay:
    """seconds: of the step; starts, ends: of each bucket's transfer; stalls: of each bucket's wait;
    stops: positions at which the schedule acts, and the times just before and behind; peak: bytes;
    slot: where."""

    seconds: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    stalls: tuple[float, ...]
    stops: tuple[tuple[int, float, float], ...]
    peak: int = 0
    slot: int = 0


@dataclass(frozen=True)
class AtRest:
    """Bytes that a rank holds throughout: its shards, its optimizer's state, what else is there,
    and gradients of earlier micro-batches."""

    parameters: int = 0
    optimizer: int = 0
    activations: int = 0
    gradients: int = 0

    def total(self) -> int:
        return self.parameters + self.optimizer + self.activations + self.gradients


class Simulator:
    """One step under given costs. Everything that does not depend on the schedule is done once."""

    def __init__(self, step: Step, costs: Costs, at_rest: AtRest | None = None) -> None:
        self.step, self.costs = step, costs
        self.at_rest = at_rest or AtRest()
        self.op_seconds = costs.compute(step)
        self.clock = np.concatenate([[0.0], np.cumsum(self.op_seconds)])
        self._clock: list[float] = self.clock.tolist()
        self.compute_seconds = self._clock[-1]
        self.end = len(step.ops)
        # Per (kind, members): link and host seconds. Buckets come again and again in a search.
        self._prices: dict[tuple[str, tuple[int, ...]], tuple[float, float, float]] = {}

    # Where parameters' two gathers are

    @cached_property
    def pairs(self) -> Mapping[str, tuple[int, int]]:
        """Parameters that are gathered once in forward and again in backward: both gathers."""
        seen: dict[str, list[int]] = {}
        for index, gather in enumerate(self.step.gathers):
            seen.setdefault(gather.parameter, []).append(index)
        return {
            name: (found[0], found[1])
            for name, found in seen.items()
            if len(found) == 2
            and self.step.gathers[found[0]].graph < self.step.gathers[found[1]].graph
        }

    def last(self, gather: int, kept: frozenset[str]) -> int:
        """The last position at which a gathered parameter is read."""
        g = self.step.gathers[gather]
        if g.parameter in kept and g.parameter in self.pairs:
            return self.step.gathers[self.pairs[g.parameter][1]].last
        return g.last

    def gathered(self, kept: frozenset[str]) -> list[int]:
        """The gathers that a schedule with this residency makes, in order of first use."""
        gone = {self.pairs[name][1] for name in kept if name in self.pairs}
        found = [i for i in range(len(self.step.gathers)) if i not in gone]
        return sorted(found, key=lambda i: (self.step.gathers[i].first, i))

    # Prices

    def price(self, bucket: Bucket) -> tuple[float, float, float]:
        """Seconds (issue on the compute lane, transfer on the link, finish on the compute lane)."""
        key = (bucket.kind, bucket.members)
        found = self._prices.get(key)
        if found is None:
            whole, sent = self.bytes_of(bucket), self.sent(bucket)
            link = self.costs.link
            found = (
                link.issue(bucket.kind, whole),
                link.transfer(bucket.kind, sent) if self.step.world > 1 else 0.0,
                link.finish(bucket.kind, whole) + self._update_seconds(bucket),
            )
            self._prices[key] = found
        return found

    def _update_seconds(self, bucket: Bucket) -> float:
        """Of the optimizer's update behind the wait of a reduction."""
        if bucket.kind == "all-gather":
            return 0.0
        moved = sum(self.step.reductions[m].update_bytes for m in bucket.members)
        return self.costs.device.seconds(Op("update", 0.0, float(moved), ""))

    def primitive(self, bucket: Bucket) -> str:
        """What carries it."""
        if self.step.world == 1:
            return "none"
        return self.costs.link.primitive(bucket.kind, self.sent(bucket))

    def bytes_of(self, bucket: Bucket) -> int:
        rows = self.step.gathers if bucket.kind == "all-gather" else self.step.reductions
        return sum(rows[m].bytes for m in bucket.members)

    def sent(self, bucket: Bucket) -> int:
        rows = self.step.gathers if bucket.kind == "all-gather" else self.step.reductions
        return sum(rows[m].sent for m in bucket.members)

    def communication_seconds(self, schedule: Schedule) -> float:
        return sum(self.price(b)[1] for b in schedule.buckets)

    def bound(self, schedule: Schedule) -> float:
        """No order of these collectives takes less: the compute lane has to do its work, the host
        side of each collective, and give the link its share; the link has to carry everything."""
        wire = self.communication_seconds(schedule)
        host = sum(self.price(b)[0] + self.price(b)[2] for b in schedule.buckets)
        return max(self.compute_seconds + host + self.costs.link.share * wire, wire)

    # Memory

    @cached_property
    def base(self) -> np.ndarray:
        """Bytes on each slot that no schedule changes."""
        return self.at_rest.total() + np.sum(list(self.base_by_category.values()), axis=0)

    @cached_property
    def base_by_category(self) -> dict[str, np.ndarray]:
        found = {name: np.array(curve, np.int64) for name, curve in self.step.live.items()}
        workspace = np.array([op.workspace for op in self.step.ops], np.int64)
        if workspace.any():
            found["workspace"] = np.zeros(2 * self.end + 1, np.int64)
            found["workspace"][1::2] = workspace * self.costs.device.threads
        return found

    def intervals(self, schedule: Schedule) -> list[tuple[str, int, int, int]]:
        """(category, bytes, first slot, last slot) of everything that collectives hold."""
        held = []
        for bucket in schedule.buckets:
            held += self.held(bucket, schedule.kept)
        return held

    def held(self, bucket: Bucket, kept: frozenset[str]) -> list[tuple[str, int, int, int]]:
        """(category, bytes, first slot, last slot) of what one collective holds."""
        first, between = 2 * bucket.issue, 2 * bucket.wait
        if bucket.kind == "all-gather":
            return self._held_by_gather(bucket, kept, first, between)
        world, native = self.step.world, self.step.native
        out, whole, cast, in_place, filled = [], 0, 0, 0, first
        for m in bucket.members:
            r = self.step.reductions[m]
            whole += r.bytes
            cast += r.bytes if r.bytes != r.grad_bytes else 0
            in_place += r.result_bytes if r.in_place else 0
            if r.joined is not None and world > 1:
                filled = min(filled, 2 * r.joined + 1)
            else:
                out.append(("gradients", r.grad_bytes, 2 * r.ready, between))
            last = between if r.update_bytes else 2 * self.end
            out.append(("gradients", r.result_bytes, first if r.in_place else between, last))
        if world == 1:
            return out
        if bucket.kind == "all-reduce":
            parts = whole
        elif native:
            parts = sum(_flat(whole, self.sent(bucket), world))
        else:
            parts = max(whole * (world - 1) // world - in_place, 0) + cast
        out.append(("communication", parts, filled, between))
        return out

    def _held_by_gather(
        self, bucket: Bucket, kept: frozenset[str], first: int, between: int
    ) -> list[tuple[str, int, int, int]]:
        step, out = self.step, []
        flat = step.native and step.world > 1
        # A single parameter's flat buffer becomes the parameter; several are cut out of theirs.
        alone = len(bucket.members) == 1
        begin = between if flat and not alone else first
        buffer, part = 0, 0
        if flat:
            buffer, part = _flat(self.bytes_of(bucket), self.sent(bucket), step.world)
        for m in bucket.members:
            g = step.gathers[m]
            # Nothing moves with one rank: a gather is a cast, or the parameter itself.
            if step.world > 1 or g.cast:
                size = buffer if flat and alone else g.bytes
                out.append(("gathered", size, begin, 2 * self.last(m, kept) + 1))
        if flat:
            out.append(("communication", part if alone else buffer + part, first, between))
        return out

    def memory(self, schedule: Schedule) -> np.ndarray:
        """Bytes on each slot."""
        return self.base + self.curve(self.intervals(schedule))

    def curve(self, held: Sequence[tuple[str, int, int, int]]) -> np.ndarray:
        change = np.zeros(2 * self.end + 2, dtype=np.int64)
        if held:
            sizes = np.array([h[1] for h in held], dtype=np.int64)
            np.add.at(change, np.array([h[2] for h in held]), sizes)
            after = np.array([min(h[3], 2 * self.end) + 1 for h in held])
            np.add.at(change, after, -sizes)
        return np.cumsum(change)[:-1]

    # Time

    def replay(
        self,
        schedule: Schedule,
        record: list[Event] | None = None,
        curve: np.ndarray | None = None,
    ) -> Replay:
        """Run the schedule. record: is given the timeline's events; curve: its memory, if known."""
        found = self.time(schedule, record)
        curve = self.memory(schedule) if curve is None else curve
        slot = int(curve.argmax())
        return replace(found, peak=int(curve[slot]), slot=slot)

    def time(self, schedule: Schedule, record: list[Event] | None = None) -> Replay:
        """Run the schedule without looking at memory."""
        buckets, clock, share = schedule.buckets, self._clock, self.costs.link.share
        prices = [self.price(b) for b in buckets]
        keys = self.keys(schedule) if record is not None else []
        # By graph and position: one graph ends where the next begins.
        acts: dict[tuple[int, int], tuple[list[int], list[int]]] = {
            (graph, end): ([], []) for graph, end in enumerate(self.step.ends)
        }
        for index, bucket in enumerate(buckets):
            acts.setdefault((bucket.graph, bucket.issue), ([], []))[0].append(index)
            acts.setdefault((bucket.graph, bucket.wait), ([], []))[1].append(index)
        starts, ends, stalls = ([0.0] * len(buckets) for _ in range(3))
        stops: list[tuple[int, float, float]] = []
        now = free = 0.0
        at = 0
        for place in sorted(acts):
            position = place[1]
            work = clock[position] - clock[at]
            if work:
                begin, now = now, _work(now, work, free, share)
                if record is not None:
                    record.append(self.compute_event(at, position, begin, now))
            at, before = position, now
            issues, waits = acts[place]
            for index in issues:
                issue, wire, _ = prices[index]
                begin, now = now, _work(now, issue, free, share)
                starts[index] = max(now, free)
                ends[index] = free = starts[index] + wire
                if record is not None:
                    bucket, key = buckets[index], keys[index]
                    self._record(record, bucket, key, "issue", begin, now)
                    self._record(record, bucket, key, "transfer", starts[index], free)
            for index in waits:
                finish = prices[index][2]
                begin, now = now, max(now, ends[index])
                stalls[index] = now - begin
                if record is not None and now > begin:
                    self._record(record, buckets[index], keys[index], "wait", begin, now)
                begin, now = now, _work(now, finish, free, share)
                if record is not None and now > begin:
                    self._record(record, buckets[index], keys[index], "finish", begin, now)
            stops.append((position, before, now))
        return Replay(now, tuple(starts), tuple(ends), tuple(stalls), tuple(stops))

    def seconds(self, buckets: Sequence[Bucket]) -> float:
        """Of the step, as `time` gives it, and nothing else: what a search asks for most."""
        count, length = len(buckets), self.end + 1
        prices, acts = [], []
        for index, b in enumerate(buckets):
            prices.append(self.price(b))
            # (graph, position, issue or wait, bucket) as one number.
            acts.append((b.graph * length + b.issue) * 2 * count + index)
            acts.append(((b.graph * length + b.wait) * 2 + 1) * count + index)
        acts.sort()
        clock, share = self._clock, self.costs.link.share
        ends = [0.0] * count
        now = free = done = 0.0
        for act in acts:
            place, index = divmod(act, count)
            until = clock[(place >> 1) % length]
            # Beside an idle link work takes its own time: most calls of `_work` are not needed.
            work = until - done
            now = now + work if free <= now else _work(now, work, free, share)
            done = until
            issue, wire, finish = prices[index]
            waits = place & 1
            if waits and ends[index] > now:
                now = ends[index]
            work = finish if waits else issue
            now = now + work if free <= now else _work(now, work, free, share)
            if not waits:
                ends[index] = free = (now if now > free else free) + wire
        return _work(now, clock[-1] - done, free, share)

    def reached(self, replay: Replay) -> np.ndarray:
        """When the operation at each position begins: exact where the schedule acts, and in
        proportion to the clock in between."""
        positions, before, behind = (np.array(row) for row in zip((0, 0.0, 0.0), *replay.stops))
        positions = positions.astype(np.int64)
        last = np.searchsorted(positions, np.arange(self.end + 1), "right") - 1
        worked = np.diff(self.clock[positions], append=self.clock[-1])
        took = np.append(before[1:], behind[-1]) - behind
        pace = np.divide(took, worked, out=np.zeros_like(took), where=worked > 0)
        since = self.clock - self.clock[positions[last]]
        return np.asarray(behind[last] + since * pace[last])

    def compute_event(self, at: int, position: int, begin: float, end: float) -> Event:
        """The operations from one position up to another, on the compute lane."""
        graph = self.step.graph_of(at)
        names = self.step.ops[at].name
        if position - at > 1:
            names += f" .. {self.step.ops[position - 1].name}"
        return Event("compute", "compute", names, self.step.directions[graph], begin, end)

    def _record(
        self, record: list[Event], bucket: Bucket, key: str, kind: str, begin: float, end: float
    ) -> None:
        lane = KINDS[bucket.kind] if kind == "transfer" else "compute"
        graph = self.step.directions[bucket.graph]
        record.append(Event(lane, kind, f"{kind} {key}", graph, begin, end, key))

    @staticmethod
    def keys(schedule: Schedule) -> list[str]:
        """gather.0, reduce.1, ...: of each bucket, numbered per graph in order of issue."""
        counts: dict[tuple[int, str], int] = {}
        keys = []
        for bucket in schedule.buckets:
            name = _KEYS[bucket.kind]
            number = counts.get((bucket.graph, name), 0)
            counts[bucket.graph, name] = number + 1
            keys.append(f"{name}.{number}")
        return keys

    def timeline(self, schedule: Schedule) -> Timeline:
        """Everything there is to see of a schedule."""
        events: list[Event] = []
        replay = self.replay(schedule, events)
        keys = self.keys(schedule)
        exposed: dict[str, float] = {}
        for bucket, key, stall in zip(schedule.buckets, keys, replay.stalls, strict=True):
            exposed[f"{self.step.directions[bucket.graph]}/{key}"] = stall
        times, memory = self._memory_over_time(schedule, replay)
        position = min(replay.slot // 2, self.end - 1)
        return Timeline(
            source="simulated",
            seconds=replay.seconds,
            compute_seconds=self.compute_seconds,
            communication_seconds=self.communication_seconds(schedule),
            exposed_seconds=replay.seconds - self.compute_seconds,
            bound_seconds=self.bound(schedule),
            peak_bytes=replay.peak,
            peak_seconds=times[replay.slot],
            peak_node=self.step.ops[position].name if self.step.ops else "",
            exposed=exposed,
            events=tuple(events),
            memory=memory,
        )

    def _memory_over_time(self, schedule: Schedule, replay: Replay) -> tuple[list[float], Memory]:
        """When each slot is reached, and the curve by category, one point per change."""
        slots = 2 * self.end + 1
        reached = self.reached(replay)
        times = np.empty(slots)
        times[0::2] = reached
        times[1::2] = reached[:-1]
        for position, before, _ in reversed(replay.stops):
            times[2 * position] = before
        curves = {name: curve.copy() for name, curve in self.base_by_category.items()}
        held = self.intervals(schedule)
        for name in ("gradients", "gathered", "communication"):
            curves[name] = self.curve([h for h in held if h[0] == name]) + curves.get(name, 0)
        rest = self.at_rest
        curves["parameters"] = np.full(slots, rest.parameters)
        curves["optimizer"] = np.full(slots, rest.optimizer)
        curves["gradients"] = curves["gradients"] + rest.gradients
        curves["activations"] = (
            curves.get("activations", np.zeros(slots, np.int64)) + rest.activations
        )
        change = np.zeros(slots, dtype=bool)
        change[0] = True
        for curve in curves.values():
            change[1:] |= np.diff(curve) != 0
        where = np.flatnonzero(change)
        values = {name: tuple(int(v) for v in curve[where]) for name, curve in curves.items()}
        return [float(t) for t in times], Memory(tuple(float(t) for t in times[where]), values)

    @cached_property
    def _positions(self) -> dict[tuple[int, str], int]:
        found = {}
        for graph in range(len(self.step.ends)):
            for index in range(self.step.start(graph), self.step.ends[graph]):
                found[graph, self.step.ops[index].name] = index
        return found

    def position(self, graph: int, anchor: str) -> int:
        """Where a plan's anchor stands. Raises KeyError for a name that is not in the graph."""
        return self._positions[graph, anchor] if anchor else self.step.ends[graph]


_KEYS = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "all_reduce"}


def _flat(whole: int, sent: int, world: int) -> tuple[int, int]:
    """Bytes of the flat buffer of a backend's collective, and of one rank's part of it. Padding is
    read off what a rank sends: its part to every other rank."""
    part = sent // (world - 1)
    return max(whole, part * world), max(-(-whole // world), part)


def _work(now: float, work: float, free: float, share: float) -> float:
    """When `work` seconds of the compute lane are done that begin `now`, the link being busy until
    `free` (without a gap, as everything on it was issued before)."""
    busy = free - now
    if busy <= 0.0 or share <= 0.0 or work <= 0.0:
        return now + work
    during = busy * (1.0 - share)
    if work < during:
        return now + work / (1.0 - share)
    return free + (work - during)
