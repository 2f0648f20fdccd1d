"""Local search: moves single collectives of a schedule as long as that helps.

    timing      one collective's issue and wait, the rest staying where it is (`_settle`)
    structure   a parameter kept or gathered again, two collectives merged, one cut in two; what
                then is over the limit is moved out of the way (`_make_room`), then timed anew

For steps with few collectives, where the last percents are worth the work: each evaluation replays
the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zcompile.schedule.construct import EQUAL, Found, earliest, latest, ready
from zcompile.schedule.simulate import Bucket, Schedule, Simulator

Row = list[Bucket]

# Positions tried for one collective's issue or wait, where the graph has more.
POSITIONS = 24


@dataclass
class Improver:
    """may_keep: parameters whose residency is free; roof: bytes of the peak; left: evaluations
    (replays of the step) that may still be made."""

    sim: Simulator
    may_keep: frozenset[str]
    roof: int
    left: int

    def improve(self, found: Found) -> Found:
        """A schedule that is no worse; of the same knobs."""
        best = self._settle(found.schedule)
        seconds = self._seconds(best)
        again = True
        while again and self.left > 0:
            again = False
            for candidate in self._structures(best):
                if self.left <= 0:
                    break
                if self.sim.bound(candidate) >= seconds * (1 - EQUAL):
                    continue
                roomy = self._make_room(candidate)
                if roomy is None:
                    continue
                settled = self._settle(roomy)
                took = self._seconds(settled)
                if took < seconds * (1 - EQUAL):
                    best, seconds, again = settled, took, True
                    break
        made = Found(best, self.sim.replay(best), found.knobs)
        return made if made.better(found) else found

    def _seconds(self, schedule: Schedule) -> float:
        self.left -= 1
        return self.sim.time(schedule).seconds

    # Timing

    def _settle(self, schedule: Schedule) -> Schedule:
        """Each collective where it is best for the others' places, until none moves."""
        kept, row = schedule.kept, list(schedule.buckets)
        seconds = self._seconds(schedule)
        curve = self.sim.memory(schedule)
        moved = True
        while moved and self.left > 0:
            moved = False
            for index, bucket in enumerate(row):
                rest = curve - self.sim.curve(self.sim.held(bucket, kept))
                best = bucket
                for other in self._places(bucket, rest, kept):
                    row[index] = other
                    took = self._seconds(Schedule(tuple(row), kept).ordered())
                    faster = took < seconds * (1 - EQUAL)
                    shorter = took <= seconds and _flight(other) < _flight(best)
                    if (faster or shorter) and self._fits(other, rest, kept):
                        best, seconds = other, took
                row[index] = best
                if best is not bucket:
                    curve = rest + self.sim.curve(self.sim.held(best, kept))
                    moved = True
        return Schedule(tuple(row), kept).ordered()

    def _places(self, bucket: Bucket, rest: np.ndarray, kept: frozenset[str]) -> Iterator[Bucket]:
        """Other places of one collective."""
        if bucket.kind == "all-gather":
            first = earliest(self.sim, bucket)
            alone = self.sim.held(bucket.at(issue=first), kept)
            need = sum(size for _, size, begin, _ in alone if begin == 2 * first)
            full = (rest[2 * first : 2 * bucket.wait] > self.roof - need).nonzero()[0]
            if full.size:
                first += int(full[-1]) // 2 + 1
            for issue in _spread(first, bucket.wait, bucket.issue):
                if issue != bucket.issue:
                    yield bucket.at(issue=issue)
            return
        first, last = ready(self.sim, bucket), latest(self.sim, bucket)
        for issue in _spread(first, last, bucket.issue):
            for wait in _spread(issue, last, bucket.wait):
                if (issue, wait) != (bucket.issue, bucket.wait):
                    yield bucket.at(issue=issue, wait=wait)

    def _fits(self, bucket: Bucket, rest: np.ndarray, kept: frozenset[str]) -> bool:
        return int((rest + self.sim.curve(self.sim.held(bucket, kept))).max()) <= self.roof

    # Room

    def _make_room(self, schedule: Schedule) -> Schedule | None:
        """Move collectives away from where memory is over the limit, one after the other; None
        where that does not get it below."""
        kept, row = schedule.kept, list(schedule.buckets)
        curve = self.sim.memory(schedule)
        while True:
            slot = int(curve.argmax())
            if curve[slot] <= self.roof:
                return Schedule(tuple(row), kept).ordered()
            best: tuple[int, int, int, Row, np.ndarray] | None = None
            for index, bucket in enumerate(row):
                for order, others in enumerate(self._away(bucket, slot)):
                    change = sum(
                        (self.sim.curve(self.sim.held(b, kept)) for b in others),
                        -self.sim.curve(self.sim.held(bucket, kept)),
                    )
                    after = curve + change
                    # The slot itself must gain, or this would not end.
                    if after[slot] < curve[slot]:
                        rank = (max(int(after.max()), self.roof), order, index)
                        if best is None or rank < best[:3]:
                            best = (*rank, others, after)
            self.left -= 1
            if best is None or best[0] > curve[slot] or self.left <= 0:
                return None
            row[best[2] : best[2] + 1] = best[3]
            curve = best[4]

    def _away(self, bucket: Bucket, slot: int) -> Iterator[Row]:
        """Ways in which one collective holds less in a slot."""
        between, behind = (slot - 1) // 2, slot // 2 + 1
        if bucket.kind == "all-gather":
            if 2 * bucket.issue <= slot < 2 * bucket.wait:
                yield [bucket.at(issue=min(behind, bucket.wait))]
            if len(bucket.members) > 1 and 2 * bucket.issue <= slot:
                yield [part(self.sim, bucket, (m,)) for m in bucket.members]
            return
        if 2 * ready(self.sim, bucket) > slot:
            return
        if 2 * bucket.issue <= slot <= 2 * bucket.wait:
            if bucket.issue <= between < bucket.wait:
                yield [bucket.at(wait=between)]
            if behind <= latest(self.sim, bucket):
                yield [bucket.at(issue=behind, wait=max(bucket.wait, behind))]
        if 2 * bucket.wait >= slot:
            first = ready(self.sim, bucket)
            if 2 * first < slot:
                yield [bucket.at(issue=first, wait=first)]
            if len(bucket.members) > 1:
                yield [part(self.sim, bucket, (m,)) for m in bucket.members]

    # Structure

    def _structures(self, schedule: Schedule) -> Iterator[Schedule]:
        yield from self._residencies(schedule)
        yield from self._cuts(schedule)

    def _residencies(self, schedule: Schedule) -> Iterator[Schedule]:
        names = sorted(self.may_keep)
        for name in names:
            yield self._toggled(schedule, name)
        for name in names:
            for other in names:
                if name in schedule.kept and other not in schedule.kept:
                    yield self._toggled(self._toggled(schedule, name), other)

    def _toggled(self, schedule: Schedule, name: str) -> Schedule:
        sim = self.sim
        backward = sim.pairs[name][1]
        if name in schedule.kept:
            gather = sim.step.gathers[backward]
            alone = Bucket("all-gather", gather.graph, (backward,), gather.first, gather.first)
            return Schedule((*schedule.buckets, alone), schedule.kept - {name}).ordered()
        row = []
        for bucket in schedule.buckets:
            if bucket.kind == "all-gather" and backward in bucket.members:
                left = tuple(m for m in bucket.members if m != backward)
                if left:
                    row.append(part(sim, bucket, left))
            else:
                row.append(bucket)
        return Schedule(tuple(row), schedule.kept | {name}).ordered()

    def _cuts(self, schedule: Schedule) -> Iterator[Schedule]:
        """Merge two of one kind, or cut one in two."""
        row = schedule.buckets
        for i, a in enumerate(row):
            for j in range(i + 1, len(row)):
                both = merged(self.sim, a, row[j])
                if both is not None:
                    rest = tuple(b for k, b in enumerate(row) if k not in (i, j))
                    yield Schedule((*rest, both), schedule.kept).ordered()
            for cut in range(1, len(a.members)):
                halves = (a.members[:cut], a.members[cut:])
                parts = tuple(part(self.sim, a, members) for members in halves)
                rest = tuple(b for k, b in enumerate(row) if k != i)
                yield Schedule((*rest, *parts), schedule.kept).ordered()


def merged(sim: Simulator, a: Bucket, b: Bucket) -> Bucket | None:
    """Two collectives as one, None where they cannot be."""
    if a.graph != b.graph or a.kind != b.kind:
        return None
    members = (*a.members, *b.members)
    if a.kind == "all-gather":
        rows = sim.step.gathers
        if len({rows[m].dtype for m in members}) > 1:
            return None
        wait = min(a.wait, b.wait)
        both = Bucket(a.kind, a.graph, members, wait, wait)
        issue = max(earliest(sim, both), min(a.issue, b.issue))
        return both.at(issue=min(issue, wait)) if earliest(sim, both) <= wait else None
    if len({sim.step.reductions[m].mergeable for m in members}) > 1:
        return None
    both = Bucket(a.kind, a.graph, members, max(a.issue, b.issue), max(a.wait, b.wait))
    if ready(sim, both) > latest(sim, both):
        return None
    last = latest(sim, both)
    issue = min(both.issue, last)
    return both.at(issue=issue, wait=max(min(both.wait, last), issue))


def part(sim: Simulator, bucket: Bucket, members: Sequence[int]) -> Bucket:
    """Some of a bucket's members as a collective of their own."""
    own = replace(bucket, members=tuple(members))
    if bucket.kind == "all-gather":
        wait = min(sim.step.gathers[m].first for m in members)
        return own.at(issue=min(bucket.issue, wait), wait=wait)
    return own


def _flight(bucket: Bucket) -> int:
    return bucket.wait - bucket.issue


def _spread(first: int, last: int, near: int) -> Sequence[int]:
    """All positions of a range, or of a long one every so many and those around `near`."""
    if last - first <= POSITIONS:
        return range(first, last + 1)
    around = range(max(near - 2, first), min(near + 2, last) + 1)
    even = np.linspace(first, last, POSITIONS - len(around)).astype(int).tolist()
    return sorted({*around, *even})
