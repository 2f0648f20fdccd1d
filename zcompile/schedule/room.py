"""Gets a schedule's memory down: below a limit, or as far as it goes.

Single collectives move away from where memory is over the limit: gathers are issued later,
reductions earlier or later, buckets are cut into their members. Greedy, by what is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zcompile.schedule.simulate import Bucket, Schedule, Simulator

# Positions tried for one collective's issue or wait, where the graph has more.
POSITIONS = 24


@dataclass
class Effort:
    """left: replays and memory curves of the whole step that may still be computed."""

    left: int


def make_room(
    sim: Simulator, schedule: Schedule, roof: int, effort: Effort, pinned: Bucket | None = None
) -> Schedule | None:
    """The schedule with collectives, but not the pinned one, moved so that memory is nowhere over
    `roof` bytes; None where moves that each leave less above it do not get there, or the effort is
    spent."""
    kept, row = schedule.kept, list(schedule.buckets)
    curve = sim.memory(schedule)
    over = _over(curve, roof)
    while over and effort.left > 0:
        best: tuple[int, list[Bucket], np.ndarray] | None = None
        for index, bucket, rest in _holding(sim, row, kept, curve, curve > roof):
            if bucket == pinned or _over(rest, roof) >= over:
                continue
            for others in _elsewhere(sim, bucket):
                after = rest + sim.curve([h for b in others for h in sim.held(b, kept)])
                left = _over(after, roof)
                effort.left -= 1
                if left < over:
                    best, over = (index, others, after), left
        if best is None:
            return None
        index, others, curve = best
        row[index : index + 1] = others
    return None if over else in_order(row, kept)


def lower(sim: Simulator, schedule: Schedule, may_keep: Iterable[str] = ()) -> Schedule:
    """The schedule with its peak as low as single moves get it. may_keep: parameters that may also
    stay gathered: one that is read again soon needs no second buffer."""
    names = sorted(may_keep)
    curve = sim.memory(schedule)
    while True:
        slot = int(curve.argmax())
        best, peak = None, (int(curve[slot]), int((curve == curve[slot]).sum()))
        at = np.zeros(len(curve), bool)
        at[slot] = True
        kept, row = schedule.kept, list(schedule.buckets)
        for index, bucket, rest in _holding(sim, row, kept, curve, at):
            for others in _elsewhere(sim, bucket):
                after = rest + sim.curve([h for b in others for h in sim.held(b, kept)])
                rank = (int(after.max()), int((after == after.max()).sum()))
                if rank < peak:
                    best, peak = (_replaced(row, index, others, kept), after), rank
        for name in names:
            forward, backward = sim.pairs[name]
            touched = sim.step.gathers[backward].first, sim.step.gathers[forward].last
            if name in kept or slot // 2 in touched:
                other = toggled(sim, schedule, name)
                after = sim.memory(other)
                rank = (int(after.max()), int((after == after.max()).sum()))
                if rank < peak:
                    best, peak = (other, after), rank
        if best is None:
            return schedule
        schedule, curve = best


def _replaced(
    row: Sequence[Bucket], index: int, others: Sequence[Bucket], kept: frozenset[str]
) -> Schedule:
    return in_order([*row[:index], *others, *row[index + 1 :]], kept)


def _over(curve: np.ndarray, roof: int) -> int:
    """Bytes times slots above a limit."""
    return int(np.maximum(curve - roof, 0).sum())


def _holding(
    sim: Simulator,
    row: Sequence[Bucket],
    kept: frozenset[str],
    curve: np.ndarray,
    where: np.ndarray,
) -> Iterator[tuple[int, Bucket, np.ndarray]]:
    """The collectives that hold something in any of these slots, and the memory without each."""
    counts = np.concatenate([[0], np.cumsum(where)]).tolist()
    last = len(counts) - 2
    for index, bucket in enumerate(row):
        held = sim.held(bucket, kept)
        if any(counts[min(end, last) + 1] > counts[first] for _, _, first, end in held):
            yield index, bucket, curve - sim.curve(held)


def _elsewhere(sim: Simulator, bucket: Bucket) -> Iterator[list[Bucket]]:
    """Places of one collective where it may hold less, then, cut in its members."""
    if bucket.kind == "all-gather":
        for issue in reversed(spread(bucket.issue, bucket.wait, bucket.wait)):
            if issue != bucket.issue:
                yield [bucket.at(issue=issue)]
    else:
        first, last = ready(sim, bucket), latest(sim, bucket)
        for issue in spread(first, last, bucket.issue):
            for wait in sorted({issue, max(issue, bucket.wait), last}):
                if (issue, wait) != (bucket.issue, bucket.wait):
                    yield [bucket.at(issue=issue, wait=wait)]
    if len(bucket.members) > 1:
        parts = [part(sim, bucket, (m,)) for m in bucket.members]
        yield parts
        yield [b.at(issue=b.wait) if b.kind == "all-gather" else b for b in parts]


# Where collectives may stand


def earliest(sim: Simulator, bucket: Bucket) -> int:
    """The first position at which a gather may be issued."""
    exist = max(sim.step.gathers[m].ready for m in bucket.members)
    return max(sim.step.start(bucket.graph), exist)


def ready(sim: Simulator, bucket: Bucket) -> int:
    """The first position at which all gradients of a reduction exist."""
    return max(sim.step.reductions[m].ready for m in bucket.members)


def latest(sim: Simulator, bucket: Bucket) -> int:
    """The last position at which a reduction may be awaited."""
    return min(sim.step.reductions[m].needed for m in bucket.members)


def spread(first: int, last: int, near: int, most: int = POSITIONS) -> Sequence[int]:
    """All positions of a range, or of a long one so many, those around `near` among them."""
    if last - first < most:
        return range(first, last + 1)
    reach = 2 if most >= 8 else 1
    around = range(max(near - reach, first), min(near + reach, last) + 1)
    even = np.linspace(first, last, max(most - len(around), 2)).astype(int).tolist()
    return sorted({*around, *even})


# Changing schedules


def when(bucket: Bucket) -> tuple[int, int]:
    return bucket.graph, bucket.issue


def in_order(row: Iterable[Bucket], kept: frozenset[str]) -> Schedule:
    """In order of issue; at one place in the order given."""
    return Schedule(tuple(sorted(row, key=when)), kept)


def part(sim: Simulator, bucket: Bucket, members: Sequence[int]) -> Bucket:
    """Some of a bucket's members as a collective of their own."""
    own = replace(bucket, members=tuple(members))
    if bucket.kind == "all-gather":
        wait = min(sim.step.gathers[m].first for m in members)
        return own.at(issue=min(bucket.issue, wait), wait=wait)
    return own


def merged(sim: Simulator, a: Bucket, b: Bucket) -> Bucket | None:
    """Two collectives as one, None where they cannot be."""
    if a.graph != b.graph or a.kind != b.kind:
        return None
    members = (*a.members, *b.members)
    if a.kind == "all-gather":
        if len({sim.step.gathers[m].dtype for m in members}) > 1:
            return None
        wait = min(a.wait, b.wait)
        both = Bucket(a.kind, a.graph, members, wait, wait)
        issue = max(earliest(sim, both), min(a.issue, b.issue))
        return both.at(issue=min(issue, wait)) if earliest(sim, both) <= wait else None
    if len({sim.step.reductions[m].mergeable for m in members}) > 1:
        return None
    both = Bucket(a.kind, a.graph, members, max(a.issue, b.issue), max(a.wait, b.wait))
    last = latest(sim, both)
    if ready(sim, both) > last:
        return None
    issue = min(both.issue, last)
    return both.at(issue=issue, wait=max(min(both.wait, last), issue))


def toggled(sim: Simulator, schedule: Schedule, name: str) -> Schedule:
    """The schedule with one parameter kept, or gathered again."""
    backward = sim.pairs[name][1]
    if name in schedule.kept:
        gather = sim.step.gathers[backward]
        alone = Bucket("all-gather", gather.graph, (backward,), gather.first, gather.first)
        return in_order((*schedule.buckets, alone), schedule.kept - {name})
    row = []
    for bucket in schedule.buckets:
        if bucket.kind == "all-gather" and backward in bucket.members:
            left = tuple(m for m in bucket.members if m != backward)
            if left:
                row.append(part(sim, bucket, left))
        else:
            row.append(bucket)
    return in_order(row, schedule.kept | {name})
