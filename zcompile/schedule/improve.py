"""Local search: moves single collectives of a schedule as long as that helps.

    timing      one collective's issue and wait, the rest staying where it is (`_settle`)
    structure   a parameter kept or gathered again, two collectives merged, one cut in two; what
                then is over the limit is moved out of the way (room.py), then timed anew

For steps with few collectives, where the last percents are worth the work: each evaluation replays
the whole step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from zcompile.schedule.construct import EQUAL, Found
from zcompile.schedule.room import (
    POSITIONS,
    Effort,
    earliest,
    in_order,
    latest,
    make_room,
    merged,
    part,
    ready,
    spread,
    toggled,
    when,
)
from zcompile.schedule.simulate import Bucket, Schedule, Simulator

Row = list[Bucket]

NEAR = 24  # collectives that are merged stand no further apart in the order of issue
ROUNDING = 1e-12  # of sums of seconds in another order
# A candidate that after its first round takes so many times the best one's time is left alone.
HOPELESS = 1.03
# Of the places that a collective would like best, so many are looked at.
WISHES = 4


@dataclass
class Improver:
    """may_keep: parameters whose residency is free; roof: bytes of the peak."""

    sim: Simulator
    may_keep: frozenset[str]
    roof: int
    effort: Effort
    positions: int = POSITIONS  # looked at for one issue or wait

    def improve(self, found: Found) -> Found:
        """A schedule that is no worse; of the same knobs."""
        # A reduction has two positions to choose. Looking at all collectives once leaves effort.
        most = math.isqrt(self.effort.left // (2 * len(found.schedule.buckets) + 1))
        self.positions = min(max(most, 4), POSITIONS)
        best, seconds = self._settle(found.schedule)
        seen: set[object] = set()
        thorough = False
        while self.effort.left > 0:
            better = self._better(best, seconds, seen, thorough)
            if better is not None:
                best, seconds = better
            elif thorough:
                break
            thorough = better is None
        best, _ = self._settled(best, seconds, short=True)
        made = Found(best, self.sim.replay(best), found.knobs)
        return made if made.better(found) else found

    def _better(
        self, schedule: Schedule, seconds: float, seen: set[object], thorough: bool
    ) -> tuple[Schedule, float] | None:
        """The first candidate that is better. seen: what was looked at already; grows. thorough:
        look for room from everywhere, and not only from where it is found first."""
        least = self.sim.bound(schedule) * (1 - EQUAL)
        for candidate, pinned in self._candidates(schedule, seconds):
            merges = tuple((b.kind, b.members) for b in candidate.buckets)
            look = (candidate.kept, merges, pinned, thorough)
            self.effort.left -= 1
            if self.effort.left <= 0:
                break
            if look in seen:
                continue
            seen.add(look)
            if (bound := self.sim.bound(candidate)) >= seconds * (1 - EQUAL):
                continue
            rooms: list[Schedule] = []
            for base in self._bases(candidate, pinned):
                roomy = make_room(self.sim, base, self.roof, self.effort, pinned)
                if roomy is None or roomy in rooms:
                    continue
                rooms.append(roomy)
                settled, took = self._settle(roomy, seconds, pinned)
                faster = took < seconds * (1 - EQUAL)
                # As fast with less to do leads on to what is faster.
                if faster or (took <= seconds * (1 + ROUNDING) and bound < least):
                    return settled, took
                if not thorough:
                    break
        return None

    def _seconds(self, schedule: Schedule) -> float:
        self.effort.left -= 1
        return self.sim.seconds(schedule.buckets)

    # Timing

    def _settle(
        self, schedule: Schedule, target: float = math.inf, pinned: Bucket | None = None
    ) -> tuple[Schedule, float]:
        """Each collective where it is best for the others' places, until none moves, and the
        step's seconds. Of places that are equally good, those of short flights leave memory, those
        of long ones time, for the next: in turn, as long as that helps and the target is near.
        pinned: what the others made room for; it moves after they have, for they stand where they
        are small, not where they are best."""
        best, seconds = schedule, self._seconds(schedule)
        while self.effort.left > 0:
            again, took = self._settled(best, seconds, True, pinned)
            again, took = self._settled(again, took, False)
            gain, best, seconds = seconds - took, again, took
            if gain <= seconds * EQUAL or seconds > target * HOPELESS:
                break
        return best, seconds

    def _settled(
        self, schedule: Schedule, seconds: float, short: bool, pinned: Bucket | None = None
    ) -> tuple[Schedule, float]:
        kept, row = schedule.kept, list(schedule.buckets)
        curve = self.sim.memory(schedule)
        moved = True
        while moved and self.effort.left > 0:
            moved = False
            for bucket in sorted(row, key=lambda b: b == pinned):
                others = [b for b in row if b is not bucket]
                rest = curve - self.sim.curve(self.sim.held(bucket, kept))
                best, found = bucket, row
                for place in self._places(bucket, rest, kept):
                    for tried in _inserted(others, place):
                        took = self._seconds(Schedule(tuple(tried), kept))
                        faster = took < seconds * (1 - EQUAL)
                        gain = _taste(place, short) > _taste(best, short)
                        if not faster and (took > seconds * (1 + ROUNDING) or not gain):
                            continue
                        if self._fits(place, rest, kept):
                            best, found, seconds = place, tried, took
                            moved |= faster
                if best is not bucket or found is not row:
                    row = found
                    curve = rest + self.sim.curve(self.sim.held(best, kept))
        return Schedule(tuple(row), kept), seconds

    def _places(
        self, bucket: Bucket, rest: np.ndarray | None, kept: frozenset[str]
    ) -> Iterator[Bucket]:
        """Other places of one collective. rest: the memory of all others, which limits them."""
        if bucket.kind == "all-gather":
            first = earliest(self.sim, bucket)
            if rest is not None:
                alone = self.sim.held(bucket.at(issue=first), kept)
                need = sum(size for _, size, begin, _ in alone if begin == 2 * first)
                full = (rest[2 * first : 2 * bucket.wait] > self.roof - need).nonzero()[0]
                first += int(full[-1]) // 2 + 1 if full.size else 0
            for issue in spread(first, bucket.wait, bucket.issue, self.positions):
                yield bucket.at(issue=issue)
            return
        first, last = ready(self.sim, bucket), latest(self.sim, bucket)
        held = self.sim.held(bucket, kept)
        # Beside what ends with the wait, means that lie where they were received; other means begin
        # there, and end there as well where nothing follows.
        means = [self.sim.step.reductions[m] for m in bucket.members]
        flight = sum(size for _, size, _, end in held if end == 2 * bucket.wait)
        if bucket.wait == self.sim.end:
            flight -= sum(r.result_bytes for r in means if not r.in_place)
        else:
            flight += sum(r.result_bytes for r in means if r.in_place)
        for issue in spread(first, last, bucket.issue, self.positions):
            longest = last
            if rest is not None:
                full = (rest[2 * issue : 2 * last + 1] > self.roof - flight).nonzero()[0]
                longest = max(issue + (int(full[0]) - 1) // 2, issue) if full.size else last
            for wait in sorted({issue, max(issue, bucket.wait), max(longest - 1, issue), longest}):
                yield bucket.at(issue=issue, wait=wait)
        for wait in spread(bucket.issue, last, bucket.wait, self.positions):
            yield bucket.at(wait=wait)

    def _fits(self, bucket: Bucket, rest: np.ndarray, kept: frozenset[str]) -> bool:
        return int((rest + self.sim.curve(self.sim.held(bucket, kept))).max()) <= self.roof

    # Room

    def _bases(self, schedule: Schedule, pinned: Bucket | None) -> Iterator[Schedule]:
        """Where to look for room from: as it is, or with nothing in flight while anything runs and
        reductions as early, or as late, as can be."""
        yield schedule
        for place in (ready, latest):
            row = []
            for bucket in schedule.buckets:
                if bucket == pinned:
                    row.append(bucket)
                elif bucket.kind == "all-gather":
                    row.append(bucket.at(issue=bucket.wait))
                else:
                    at = place(self.sim, bucket)
                    row.append(bucket.at(issue=at, wait=at))
            yield in_order(row, schedule.kept)

    # Candidates

    def _candidates(
        self, schedule: Schedule, seconds: float
    ) -> Iterator[tuple[Schedule, Bucket | None]]:
        """Schedules that may be over the limit, and the collective that must then stay."""
        for candidate in self._residencies(schedule):
            yield candidate, None
        for candidate in self._cuts(schedule):
            yield candidate, None
        yield from self._wishes(schedule, seconds)
        # A parameter kept in a buffer that it shares needs no padding of its own.
        for candidate in self._residencies(schedule):
            for again in self._cuts(candidate):
                yield again, None

    def _wishes(
        self, schedule: Schedule, seconds: float
    ) -> Iterator[tuple[Schedule, Bucket | None]]:
        """One collective where it would be best if memory were no matter."""
        for bucket in schedule.buckets:
            others = [b for b in schedule.buckets if b is not bucket]
            fastest: dict[float, tuple[Schedule, Bucket]] = {}
            for place in self._places(bucket, None, schedule.kept):
                for tried in _inserted(others, place):
                    moved = Schedule(tuple(tried), schedule.kept)
                    took = self._seconds(moved)
                    if took < seconds * (1 - EQUAL):
                        known = fastest.get(took)
                        if known is None or _flight(place) < _flight(known[1]):
                            fastest[took] = (moved, place)
            for took in sorted(fastest)[:WISHES]:
                yield fastest[took]

    def _residencies(self, schedule: Schedule) -> Iterator[Schedule]:
        names = sorted(self.may_keep)
        for name in names:
            yield toggled(self.sim, schedule, name)
        for name in names:
            for other in names:
                if name in schedule.kept and other not in schedule.kept:
                    yield toggled(self.sim, toggled(self.sim, schedule, name), other)

    def _cuts(self, schedule: Schedule) -> Iterator[Schedule]:
        """Two collectives of one kind merged, one cut in two, a member moved to another."""
        row = schedule.buckets
        for i, a in enumerate(row):
            near = [j for j in range(max(i - NEAR, 0), min(i + NEAR, len(row))) if j != i]
            for j in near:
                both = merged(self.sim, a, row[j]) if j > i else None
                if both is not None:
                    yield _changed(schedule, (i, j), (both,))
            for cut in range(1, len(a.members)):
                halves = (a.members[:cut], a.members[cut:])
                yield _changed(schedule, (i,), [part(self.sim, a, half) for half in halves])
            for m in a.members if len(a.members) > 1 else ():
                rest = part(self.sim, a, [n for n in a.members if n != m])
                alone = part(self.sim, a, [m])
                yield _changed(schedule, (i,), (rest, alone))
                for j in near:
                    other = merged(self.sim, row[j], alone)
                    if other is not None:
                        yield _changed(schedule, (i, j), (rest, other))


def _changed(schedule: Schedule, without: Collection[int], new: Iterable[Bucket]) -> Schedule:
    left = [b for k, b in enumerate(schedule.buckets) if k not in without]
    return in_order([*left, *new], schedule.kept)


def _inserted(row: Row, bucket: Bucket) -> Iterator[Row]:
    """A row in order of issue with one more: behind those of the same place, and in front."""
    high = bisect_right(row, when(bucket), key=when)
    yield [*row[:high], bucket, *row[high:]]
    low = bisect_left(row, when(bucket), key=when)
    if low < high:
        yield [*row[:low], bucket, *row[low:]]


def _taste(bucket: Bucket, short: bool) -> tuple[int, int]:
    """Of equally good places the one with the larger figures is taken."""
    return (-_flight(bucket) if short else _flight(bucket)), bucket.issue


def _flight(bucket: Bucket) -> int:
    return bucket.wait - bucket.issue
