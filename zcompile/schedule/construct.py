"""Builds a schedule from a few numbers, within a limit of memory.

buckets   gathers in order of use, reductions in order of readiness, cut by bytes
ahead     gathers issued before their use, as far as memory allows
behind    reductions awaited when their transfer is over, as far as memory allows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from zcompile.schedule.room import Effort, earliest, latest, lower, make_room
from zcompile.schedule.simulate import Bucket, Replay, Schedule, Simulator

# Times that differ by less are equal, and the schedule of less memory wins.
EQUAL = 1e-6


@dataclass(frozen=True)
class Knobs:
    """gather, reduce: bytes a bucket may hold, 0: each collective alone; ahead: a gather starts so
    many times its duration before its use."""

    gather: int = 0
    reduce: int = 0
    ahead: float = 0.0


@dataclass(frozen=True)
class Found:
    schedule: Schedule
    replay: Replay
    knobs: Knobs

    def better(self, other: Found | None) -> bool:
        if other is None:
            return True
        mine, theirs = self.replay, other.replay
        slack = EQUAL * theirs.seconds
        if abs(mine.seconds - theirs.seconds) > slack:
            return mine.seconds < theirs.seconds
        return mine.peak < theirs.peak


def lean(
    sim: Simulator, keep: frozenset[str] = frozenset(), may_keep: Iterable[str] = ()
) -> Schedule:
    """The schedule of least memory that is known. keep, may_keep: parameters that must, or may,
    stay gathered from forward to backward."""
    alone = Schedule((*gather_buckets(sim, keep, 0), *reduce_buckets(sim, 0)), keep).ordered()
    free = [name for name in may_keep if name in sim.pairs and name not in keep]
    return lower(sim, alone, free)


def construct(
    sim: Simulator, kept: frozenset[str], knobs: Knobs, roof: int, effort: int
) -> tuple[Schedule, np.ndarray] | None:
    """A schedule and its memory; None where buckets of this size do not fit even with nothing
    ahead. effort: memory curves that may be computed to make them fit."""
    gathers = gather_buckets(sim, kept, knobs.gather)
    reductions = reduce_buckets(sim, knobs.reduce)
    schedule = Schedule((*gathers, *reductions), kept).ordered()
    curve = sim.memory(schedule)
    if int(curve.max()) > roof:
        roomy = make_room(sim, schedule, roof, Effort(effort))
        if roomy is None:
            return None
        schedule, curve = roomy, sim.memory(roomy)
    if not knobs.ahead:
        return schedule, curve
    gathers = sorted((b for b in schedule.buckets if b.kind == "all-gather"), key=_first_use)
    reductions = [b for b in schedule.buckets if b.kind != "all-gather"]
    gathers = _advance(sim, kept, gathers, curve, knobs.ahead, roof)
    schedule = Schedule((*gathers, *reductions), kept).ordered()
    reductions = _delay(sim, schedule, reductions, curve, roof)
    return Schedule((*gathers, *reductions), kept).ordered(), curve


def _first_use(bucket: Bucket) -> tuple[int, int, tuple[int, ...]]:
    return bucket.graph, bucket.wait, bucket.members


def gather_buckets(sim: Simulator, kept: frozenset[str], cap: int) -> list[Bucket]:
    rows = sim.step.gathers
    packs = _pack(
        sim.gathered(kept),
        cap,
        size=lambda m: rows[m].bytes,
        kind=lambda m: (rows[m].graph, rows[m].dtype),
        # Every shard must exist where the bucket's first parameter is used.
        span=lambda m: (rows[m].ready, rows[m].first),
    )
    made = []
    for pack in packs:
        first = rows[pack[0]].first
        made.append(Bucket("all-gather", rows[pack[0]].graph, tuple(pack), first, first))
    return made


def reduce_buckets(sim: Simulator, cap: int) -> list[Bucket]:
    rows = sim.step.reductions
    packs = _pack(
        sorted(range(len(rows)), key=lambda m: (rows[m].ready, m)),
        cap,
        size=lambda m: rows[m].bytes,
        kind=lambda m: (rows[m].graph, rows[m].kind, rows[m].mergeable),
        # No result may be needed before the bucket's last gradient is there.
        span=lambda m: (rows[m].ready, rows[m].needed),
    )
    made = []
    for pack in packs:
        ready = max(rows[m].ready for m in pack)
        made.append(Bucket(rows[pack[0]].kind, rows[pack[0]].graph, tuple(pack), ready, ready))
    return made


def _pack(
    order: Iterable[int],
    cap: int,
    size: Callable[[int], int],
    kind: Callable[[int], object],
    span: Callable[[int], tuple[int, int]],
) -> list[list[int]]:
    """Cut a sequence into buckets, one open per kind. span: the first and last position at which
    a member may travel; those of a bucket meet."""
    packs: list[list[int]] = []
    open_: dict[object, tuple[list[int], int, int]] = {}
    for member in order:
        first, last = span(member)
        pack, filled, until = open_.get(kind(member), ([], 0, last))
        if not pack or filled + size(member) > cap or first > until:
            pack, filled, until = [], 0, last
            packs.append(pack)
        pack.append(member)
        open_[kind(member)] = (pack, filled + size(member), min(until, last))
    return packs


def _advance(
    sim: Simulator, kept: frozenset[str], gathers: list[Bucket], curve: np.ndarray, ahead: float,
    roof: int,
) -> list[Bucket]:  # fmt: skip
    """Issue gathers before their use: as late as lets each be there in time, `ahead` times over,
    as far as memory allows. Changes `curve`."""
    clock, hidden = sim.clock, 1.0 - sim.costs.link.share
    wanted = [0] * len(gathers)
    following = math.inf
    for index in range(len(gathers) - 1, -1, -1):
        bucket = gathers[index]
        wire = sim.price(bucket)[1] * hidden
        following = min(float(clock[bucket.wait]), following)
        position = int(np.searchsorted(clock, following - wire * ahead, "right")) - 1
        following -= wire
        wanted[index] = max(position, earliest(sim, bucket))
    made, before = [], 0
    for bucket, want in zip(gathers, wanted, strict=True):
        want = min(max(want, before), bucket.wait)
        issue = _grant(curve, sim, bucket.at(issue=want), bucket, kept, roof)
        before = issue
        made.append(bucket.at(issue=issue))
    return made


def _grant(
    curve: np.ndarray, sim: Simulator, want: Bucket, have: Bucket, kept: frozenset[str], roof: int
) -> int:
    """The earliest issue between what is wanted and what is there that memory allows; takes it."""
    low, high = 2 * want.issue, 2 * have.issue
    if low >= high:
        return have.issue
    need = sum(size for _, size, first, _ in sim.held(want, kept) if first == low)
    window, issue = curve[low:high], want.issue
    if window.max() > roof - need:
        full = (window > roof - need).nonzero()[0]
        issue = min(want.issue + int(full[-1]) // 2 + 1, have.issue)
    curve[2 * issue : high] += need
    return issue


def _delay(
    sim: Simulator, schedule: Schedule, reductions: list[Bucket], curve: np.ndarray, roof: int
) -> list[Bucket]:
    """Await reductions where they are over, so that nothing stands still for them, as far as
    memory allows. Changes `curve`."""
    late = [b.at(wait=latest(sim, b)) for b in reductions]
    free = Schedule(
        (*(b for b in schedule.buckets if b.kind == "all-gather"), *late), schedule.kept
    ).ordered()
    replay = sim.time(free)
    over = {(b.kind, b.members): end for b, end in zip(free.buckets, replay.ends, strict=True)}
    reached = sim.reached(replay)
    made = []
    for bucket, last in zip(reductions, late, strict=True):
        position = int(np.searchsorted(reached, over[last.kind, last.members], "left"))
        want = min(max(position, bucket.wait), last.wait)
        if want > bucket.wait:
            held = sim.held(bucket, schedule.kept)
            rows = [sim.step.reductions[m] for m in bucket.members]
            # Means that lie where they were received are there from the issue on.
            there = sum(r.result_bytes for r in rows if r.in_place and not r.update_bytes)
            results = sum(size for _, size, _, last in held if last > 2 * bucket.wait) - there
            flight = sum(size for _, size, _, last in held if last == 2 * bucket.wait)
            want = _wait_granted(curve, bucket.wait, want, flight, results, roof)
        made.append(bucket.at(wait=want))
    return made


def _wait_granted(
    curve: np.ndarray, have: int, want: int, flight: int, results: int, roof: int
) -> int:
    """The latest wait between the two that memory allows; takes it. In between `flight` bytes are
    alive instead of `results`, and where it finishes both are."""
    window = curve[2 * have + 1 : 2 * want + 1]
    if window.max() > roof - (flight - results):
        full = (window > roof - (flight - results)).nonzero()[0]
        want = have + (int(full[0]) + 1) // 2
    while want > have and curve[2 * want] + flight > roof:
        want -= 1
    if want > have:
        curve[2 * have] -= results
        curve[2 * have + 1 : 2 * want] += flight - results
        curve[2 * want] += flight
    return want
