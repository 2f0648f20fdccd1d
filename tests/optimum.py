"""The least time that any schedule of a small step takes: exact, and nothing of the planner in it.

Over positions, everything a schedule may decide there is tried: which collectives to issue, merged
how and in which order, and which of those in flight to await; outside of it, every set of kept
parameters. Two partial schedules that have the same collectives outstanding, in flight and done at
the same position have the same memory ahead of them, so one that is no later in any of its times
(host, link, each transfer in flight) makes the other superfluous. That holds for a link that shares
the processor too: all times grow with the times before them.

A schedule that cannot be faster than `bound` is left off early. This only assumes that two
transfers merged take no more than both and no less than either, and likewise on the host.

Memory and time are counted here anew, so that a mistake in the simulator shows as a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from random_steps import Case

from zcompile.schedule.simulate import Bucket, Schedule

SLACK = 1e-12


class TooLarge(Exception):
    """More partial schedules than the caller allowed."""


@dataclass(frozen=True)
class Label:
    """A partial schedule. pending: a bit per collective that is not issued; flying: the buckets in
    flight, in order of issue, with the time at which each is over; padded: a bit per gathered
    parameter that lives on in a padded buffer of its own; made: (bucket, position, whether it is
    its wait), newest first, as a linked list."""

    now: float
    free: float
    pending: int
    flying: tuple[tuple[int, float], ...]
    padded: int
    made: tuple | None

    def key(self) -> tuple[int, ...]:
        return (self.pending, self.padded, *(bucket for bucket, _ in self.flying))

    def no_later(self, other: Label) -> bool:
        return (
            self.now <= other.now + SLACK
            and self.free <= other.free + SLACK
            and all(a <= b + SLACK for (_, a), (_, b) in zip(self.flying, other.flying))
        )


@dataclass(frozen=True)
class Best:
    """seconds: inf where nothing is faster than the bound. labels: how many were looked at."""

    seconds: float
    schedule: Schedule | None
    labels: int


def optimum(
    case: Case, *, merge: bool = True, bound: float = float("inf"), most: int = 10**9
) -> Best:
    """The fastest schedule within the case's budget, if it takes less than `bound`.

    merge: whether collectives may be merged. most: labels, before giving up.

    Raises:
        TooLarge: it takes more.
    """
    best: tuple[float, Schedule | None] = (bound * (1 - 1e-9), None)
    labels = 0
    for count in range(len(case.may_keep), -1, -1):
        for kept in itertools.combinations(case.may_keep, count):
            search = _Search(case, frozenset(kept), merge, best[0], most - labels)
            found = search.run()
            labels += search.labels
            if found is not None and found.now < best[0]:
                best = (found.now, search.schedule(found))
    seconds = best[0] if best[1] is not None else float("inf")
    return Best(seconds, best[1], labels)


@dataclass
class _Item:
    """One collective. ready, due: the first position of its issue, the last of its wait."""

    kind: str
    graph: int
    index: int
    merges_with: object
    ready: int
    due: int
    last: int
    whole: int
    sent: int
    held: int  # a gathered parameter, or a whole gradient
    result: int  # a reduced gradient
    cast: bool
    padding: int = 0


@dataclass
class _Search:
    case: Case
    kept: frozenset[str]
    merge: bool
    bound: float
    most: int
    labels: int = 0
    items: list[_Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        step, costs = self.case.step, self.case.costs
        self.seconds = costs.compute(step)
        self.end = len(step.ops)
        self.after = [sum(self.seconds[p:]) for p in range(self.end + 1)]
        self.roof = self.case.budget if self.case.budget is not None else 2**62
        rest = self.case.at_rest.total()
        self.base = [rest + sum(curves) for curves in zip(*step.live.values())]
        self.packed = step.native and step.world > 1
        self._gathers()
        for index, r in enumerate(step.reductions):
            self.items.append(
                _Item(
                    r.kind, r.graph, index, (r.kind, r.graph, r.mergeable), r.ready, r.needed, 0,
                    r.bytes, r.sent, r.grad_bytes, r.result_bytes, r.bytes != r.grad_bytes,
                )
            )  # fmt: skip
        self.known: dict[int, tuple] = {}
        self.bounds: dict[tuple[int, int], tuple[float, float, float]] = {}

    def _gathers(self) -> None:
        step = self.case.step
        seen: dict[str, _Item] = {}
        for index, g in enumerate(step.gathers):
            if g.parameter in seen and g.parameter in self.kept:
                seen[g.parameter].last = g.last
                continue
            earliest = max(g.ready, step.ends[g.graph - 1] if g.graph else 0)
            padding = self.flat(g.bytes, g.sent) - g.bytes if self.packed else 0
            item = _Item(
                "all-gather", g.graph, index, ("all-gather", g.graph, g.dtype), earliest, g.first,
                g.last, g.bytes, g.sent, g.bytes, 0, g.cast, padding,
            )  # fmt: skip
            seen[g.parameter] = item
            self.items.append(item)

    # Buckets, by the bits of their members

    def flat(self, whole: int, sent: int) -> int:
        """Bytes of a flat buffer: what a rank sends and its own part."""
        return max(whole, sent // (self.case.step.world - 1) * self.case.step.world)

    def members(self, bucket: int) -> list[_Item]:
        return [item for bit, item in enumerate(self.items) if bucket >> bit & 1]

    def bucket(self, bits: int) -> tuple[float, float, float, int, int, int]:
        """(issue, transfer, finish seconds; due; bytes held in flight and from its wait on)."""
        if bits in self.known:
            return self.known[bits]
        members = self.members(bits)
        kind, step = members[0].kind, self.case.step
        whole, sent = sum(m.whole for m in members), sum(m.sent for m in members)
        world = step.world
        link = self.case.costs.link
        if kind == "all-gather" and self.packed:
            # A rank's own part and the flat buffer, out of which several are copied.
            flying = -(-self.flat(whole, sent) // world) + self.flat(whole, sent)
        elif kind == "all-gather":
            flying = sum(m.held for m in members if world > 1 or m.cast)
        elif world == 1:
            flying = 0
        elif kind == "all-reduce":
            flying = whole
        elif self.packed:
            flying = self.flat(whole, sent) + -(-self.flat(whole, sent) // world)
        else:
            flying = whole * (world - 1) // world + sum(m.whole for m in members if m.cast)
        self.known[bits] = (
            link.issue(kind, whole),
            link.transfer(kind, sent) if world > 1 else 0.0,
            link.finish(kind, whole),
            min(m.due for m in members),
            flying,
            sum(m.result for m in members),
        )
        return self.known[bits]

    def candidates(self, pending: int, position: int, graph: int) -> Iterator[int]:
        """What may be issued here."""
        classes: dict[object, list[int]] = {}
        for bit, item in enumerate(self.items):
            if pending >> bit & 1 and item.graph == graph and item.ready <= position <= item.due:
                classes.setdefault(item.merges_with, []).append(1 << bit)
        for bits in classes.values():
            for count in range(1, (len(bits) if self.merge else 1) + 1):
                yield from map(sum, itertools.combinations(bits, count))

    # Memory

    def fits(self, label: Label, slot: int, ending: Iterable[int] = ()) -> bool:
        """ending: buckets of those in flight that finish in this slot, so that what they held and
        what they leave are both alive."""
        position, total = slot // 2, self.base[slot]
        out = label.pending
        for bits, _ in label.flying:
            out |= bits
            total += self.bucket(bits)[4]
        for bits in ending:
            total += self.bucket(bits)[5]
            if bits & (bits - 1) and self.packed:
                total += sum(m.held for m in self.members(bits) if m.kind == "all-gather")
        for bit, item in enumerate(self.items):
            outstanding = out >> bit & 1
            if item.kind != "all-gather":
                if not outstanding:
                    total += item.result
                elif item.ready <= position:
                    total += item.held
            elif not outstanding and 2 * item.last + 1 >= slot:
                total += item.held if self.case.step.world > 1 or item.cast else 0
                total += item.padding if label.padded >> bit & 1 else 0
        return total <= self.roof

    # Time

    def work(self, label_now: float, free: float, seconds: float) -> float:
        share = self.case.costs.link.share
        if free <= label_now or seconds <= 0:
            return label_now + seconds
        slowed = (free - label_now) * (1 - share)
        if seconds < slowed:
            return label_now + seconds / (1 - share)
        return free + seconds - slowed

    def least(self, label: Label, position: int) -> float:
        """No continuation takes less."""
        key = (label.pending, position)
        if key not in self.bounds:
            self.bounds[key] = self._least(label.pending, position)
        host, link, later = self.bounds[key]
        share = self.case.costs.link.share
        finish = sum(self.bucket(bits)[2] for bits, _ in label.flying)
        busy = max(label.free - label.now, 0.0)
        return max(
            label.now + host + finish + share * busy,
            max(label.free, label.now) + link,
            label.now + later,
        )

    def _least(self, pending: int, position: int) -> tuple[float, float, float]:
        items = self.members(pending)
        issue, wire, finish = self._together(items)
        host = self.after[position] + issue + finish + self.case.costs.link.share * wire
        link, later = wire, 0.0
        for due in {i.due for i in items if i.kind == "all-gather"}:
            link = max(
                link, self._together([i for i in items if i.due <= due])[1] + self.after[due]
            )
            for start in self.case.step.ends[:-1]:
                behind = [i for i in items if i.ready >= start and i.due <= due]
                if position < start <= due:
                    run = self.after[position] - self.after[start]
                    later = max(later, run + self._together(behind)[1] + self.after[due])
        for ready in {i.ready for i in items if i.kind != "all-gather" and i.ready > position}:
            behind = [i for i in items if i.ready >= ready]
            run = self.after[position] - self.after[ready]
            later = max(later, run + self._together(behind)[1])
        return host, link, later

    def _together(self, items: list[_Item]) -> tuple[float, float, float]:
        """The least that these cost on host and link: alone, or all of a kind in one."""
        link, totals = self.case.costs.link, [0.0, 0.0, 0.0]
        groups: dict[object, list[_Item]] = {}
        for number, item in enumerate(items):
            groups.setdefault(item.kind if self.merge else number, []).append(item)
        for group in groups.values():
            kind, whole = group[0].kind, sum(i.whole for i in group)
            totals[0] += link.issue(kind, whole)
            if self.case.step.world > 1:
                totals[1] += link.transfer(kind, sum(i.sent for i in group))
            totals[2] += link.finish(kind, whole)
        return totals[0], totals[1], totals[2]

    # The search

    def run(self) -> Label | None:
        labels = [Label(0.0, 0.0, (1 << len(self.items)) - 1, (), 0, None)]
        ends = self.case.step.ends
        for position in range(self.end + 1):
            for graph in range(len(ends)):
                start = ends[graph - 1] if graph else 0
                if start <= position <= ends[graph]:
                    labels = self._issue(labels, position, graph)
                    labels = self._wait(labels, position, graph)
            if position < self.end:
                labels = self._compute(labels, position)
            if not labels:
                return None
        return min(labels, key=lambda label: label.now)

    def _add(self, into: dict[tuple[int, ...], list[Label]], label: Label, position: int) -> bool:
        if self.least(label, position) >= self.bound:
            return False
        same = into.setdefault(label.key(), [])
        if any(other.no_later(label) for other in same):
            return False
        self.labels += 1
        if self.labels > self.most:
            raise TooLarge
        same[:] = [other for other in same if not label.no_later(other)]
        same.append(label)
        return True

    def _issue(self, labels: list[Label], position: int, graph: int) -> list[Label]:
        into: dict[tuple[int, ...], list[Label]] = {}
        # By what is outstanding, most first: then every way to a set is known before it is left.
        layers: dict[int, set[tuple[int, ...]]] = {}
        for label in labels:
            if self._add(into, label, position):
                layers.setdefault(label.pending.bit_count(), set()).add(label.key())
        for count in range(len(self.items), -1, -1):
            for key in sorted(layers.get(count, ())):
                for label in into[key]:
                    for bits in self.candidates(label.pending, position, graph):
                        issued = self._issued(label, bits, position)
                        if self.fits(issued, 2 * position) and self._add(into, issued, position):
                            left = issued.pending.bit_count()
                            layers.setdefault(left, set()).add(issued.key())
        return [label for each in into.values() for label in each]

    def _issued(self, label: Label, bits: int, position: int) -> Label:
        issue, transfer, *_ = self.bucket(bits)
        now = self.work(label.now, label.free, issue)
        free = max(now, label.free) + transfer
        flying = (*label.flying, (bits, free))
        made = (bits, position, False, label.made)
        return Label(now, free, label.pending & ~bits, flying, label.padded, made)

    def _wait(self, labels: list[Label], position: int, graph: int) -> list[Label]:
        into: dict[tuple[int, ...], list[Label]] = {}
        due = sum(
            1 << bit
            for bit, item in enumerate(self.items)
            if item.due == position and item.graph == graph
        )
        for label in labels:
            if label.pending & due:
                continue
            must, may = [], []
            for bits, _ in label.flying:
                if self.bucket(bits)[3] == position:
                    must.append(bits)
                elif self.members(bits)[0].kind != "all-gather":
                    may.append(bits)
            for count in range(len(may) + 1):
                for more in itertools.combinations(may, count):
                    ending = {*must, *more}
                    if self.fits(label, 2 * position, ending):
                        self._add(into, self._waited(label, ending, position), position)
        return [label for each in into.values() for label in each]

    def _waited(self, label: Label, ending: set[int], position: int) -> Label:
        now, made, padded = label.now, label.made, label.padded
        for bits, over in label.flying:
            if bits in ending:
                now = self.work(max(now, over), label.free, self.bucket(bits)[2])
                made = (bits, position, True, made)
                if not bits & (bits - 1) and self.members(bits)[0].padding:
                    padded |= bits
        flying = tuple((b, over) for b, over in label.flying if b not in ending)
        return Label(now, label.free, label.pending, flying, padded, made)

    def _compute(self, labels: list[Label], position: int) -> list[Label]:
        into: dict[tuple[int, ...], list[Label]] = {}
        for label in labels:
            if self.fits(label, 2 * position + 1):
                now = self.work(label.now, label.free, self.seconds[position])
                # What is over is over: when does not matter any more.
                flying = tuple((bits, max(over, now)) for bits, over in label.flying)
                free = max(label.free, now)
                moved = Label(now, free, label.pending, flying, label.padded, label.made)
                self._add(into, moved, position + 1)
        return [label for each in into.values() for label in each]

    def schedule(self, label: Label) -> Schedule:
        waits: dict[int, int] = {}
        buckets, made = [], label.made
        while made is not None:
            bits, position, is_wait, made = made
            if is_wait:
                waits[bits] = position
                continue
            members = self.members(bits)
            indices = tuple(m.index for m in members)
            first = members[0]
            buckets.append(Bucket(first.kind, first.graph, indices, position, waits[bits]))
        return Schedule(tuple(reversed(buckets)), self.kept)
