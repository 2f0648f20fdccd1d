"""Chooses a schedule: least simulated time with the peak of memory under a limit.

It starts from the leanest schedule (every parameter gathered at its use, every gradient reduced as
it appears, nothing in flight while anything runs) and spends memory where it buys most:

    residency   parameters kept from forward to backward, which saves their second gather
    bucket      collectives merged, which saves latency
    issue       gathers issued ahead of their use, reductions awaited behind their issue

A few numbers describe a whole schedule (`Knobs`); `construct` builds it within the limit, in time
linear in its collectives; a coordinate search over the numbers follows, then, on small steps, a
local search that moves single collectives. Nothing is random and nothing depends on the machine:
the same step, costs and limit give the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zcompile.errors import BudgetError
from zcompile.schedule.simulate import Bucket, Replay, Schedule, Simulator

MIB = 2**20
CAPS = (0, *(MIB << k for k in range(0, 10)))  # bytes a bucket holds; 0: each collective alone
AHEAD = (0.0, 1.0, 1.5, 2.5, 5.0, 16.0)  # a gather starts so many times its duration before its use
# Steps of more collectives than this are searched on a coarser grid.
LARGE = 200
# Local search is for small steps: there the last percents are worth their price.
SEARCH_WORK = 400_000  # evaluations times (collectives + operations)
# Times that differ by less are equal, and the schedule of less memory wins.
EQUAL = 1e-6


@dataclass(frozen=True)
class Knobs:
    """gather, reduce: bytes a bucket may hold; ahead: see AHEAD."""

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


def plan(
    sim: Simulator,
    limit: int | None = None,
    *,
    keep: frozenset[str] = frozenset(),
    may_keep: Iterable[str] = (),
    thrift: float = EQUAL,
) -> Found:
    """The best schedule found. limit: bytes of the peak, None for no limit; keep: parameters that
    must stay gathered from forward to backward; may_keep: those that may; thrift: a gain in time of
    less than this share of it is not worth any memory.

    Raises:
        BudgetError: the leanest schedule does not fit; with the shortfall, the largest contributors
            and what would fit.
    """
    roof = limit if limit is not None else 2**62
    keep = keep & frozenset(sim.pairs)
    search = _Search(sim, roof, [])
    best = search.knobs(keep, None)
    if best is None:
        raise _does_not_fit(sim, lean(sim, keep), roof)
    candidates = [name for name in may_keep if name in sim.pairs and name not in keep]
    if candidates:
        best = search.spend(best, candidates, keep)
    best = _improve(sim, best, frozenset(candidates), roof)
    near = [f for f in search.tried if f.replay.seconds <= best.replay.seconds * (1 + thrift)]
    return min([best, *near], key=lambda f: (f.replay.peak, f.replay.seconds))


def fixed(sim: Simulator, keep: frozenset[str], cap: int, depth: int) -> Found:
    """The schedule of two rules instead of a search: buckets of up to `cap` bytes, each gather
    issued where the one `depth` before it is awaited, each reduction awaited where the one `depth`
    behind it is issued. At most depth + 1 buckets of each are alive where each is used in turn."""
    keep = keep & frozenset(sim.pairs)
    gathers, reductions = _gather_buckets(sim, keep, cap), _reduce_buckets(sim, cap)
    if depth:
        gathers = list(_ahead_by(sim, gathers, depth))
        reductions = list(_behind_by(sim, reductions, depth))
    schedule = Schedule((*gathers, *reductions), keep).ordered()
    return Found(schedule, sim.replay(schedule), Knobs(cap, cap))


def _ahead_by(sim: Simulator, gathers: Sequence[Bucket], depth: int) -> Iterator[Bucket]:
    for graph in range(len(sim.step.ends)):
        row = [b for b in gathers if b.graph == graph]
        for index, bucket in enumerate(row):
            issue = row[max(index - depth, 0)].wait if index else sim.step.start(graph)
            yield bucket.at(issue=min(max(issue, _earliest(sim, bucket)), bucket.wait))


def _behind_by(sim: Simulator, reductions: Sequence[Bucket], depth: int) -> Iterator[Bucket]:
    for kind in ("reduce-scatter", "all-reduce"):
        row = [b for b in reductions if b.kind == kind]
        for index, bucket in enumerate(row):
            later = row[index + depth].issue if index + depth < len(row) else sim.end
            yield bucket.at(wait=max(min(later, _latest(sim, bucket)), bucket.issue))


def lean(sim: Simulator, keep: frozenset[str] = frozenset()) -> Schedule:
    """The schedule of least memory with this residency."""
    made = construct(sim, keep, Knobs(), 2**62)
    assert made is not None
    return made


# Building a schedule from few numbers


def construct(sim: Simulator, kept: frozenset[str], knobs: Knobs, roof: int) -> Schedule | None:
    """None where buckets of this size do not fit even with nothing ahead."""
    made = _construct(sim, kept, knobs, roof)
    return made[0] if made is not None else None


def _construct(
    sim: Simulator, kept: frozenset[str], knobs: Knobs, roof: int
) -> tuple[Schedule, np.ndarray] | None:
    """And its memory."""
    gathers = _gather_buckets(sim, kept, knobs.gather)
    reductions = _reduce_buckets(sim, knobs.reduce)
    schedule = Schedule((*gathers, *reductions), kept)
    curve = sim.memory(schedule)
    if int(curve.max()) > roof:
        return None
    if knobs.ahead:
        gathers = _advance(sim, kept, gathers, curve, knobs.ahead, roof)
        schedule = Schedule((*gathers, *reductions), kept).ordered()
        reductions = _delay(sim, schedule, reductions, curve, roof)
    return Schedule((*gathers, *reductions), kept).ordered(), curve


def _gather_buckets(sim: Simulator, kept: frozenset[str], cap: int) -> list[Bucket]:
    rows = sim.step.gathers
    packs = _pack(
        sim.gathered(kept),
        cap,
        size=lambda m: rows[m].bytes,
        kind=lambda m: (rows[m].graph, rows[m].dtype),
        # Every shard must exist where the bucket's first parameter is used.
        fits=lambda pack, m: rows[m].ready <= rows[pack[0]].first,
    )
    made = []
    for pack in packs:
        first = rows[pack[0]].first
        made.append(Bucket("all-gather", rows[pack[0]].graph, tuple(pack), first, first))
    return made


def _reduce_buckets(sim: Simulator, cap: int) -> list[Bucket]:
    rows = sim.step.reductions
    packs = _pack(
        sorted(range(len(rows)), key=lambda m: (rows[m].ready, m)),
        cap,
        size=lambda m: rows[m].bytes,
        kind=lambda m: (rows[m].graph, rows[m].kind, rows[m].mergeable),
        # No result may be needed before the bucket's last gradient is there.
        fits=lambda pack, m: all(rows[m].ready <= rows[n].needed for n in pack),
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
    fits: Callable[[Sequence[int], int], bool],
) -> list[list[int]]:
    """Cut a sequence into buckets, one open per kind."""
    packs: list[list[int]] = []
    open_: dict[object, tuple[list[int], int]] = {}
    for member in order:
        pack, filled = open_.get(kind(member), ([], 0))
        if not pack or filled + size(member) > cap or not fits(pack, member):
            pack, filled = [], 0
            packs.append(pack)
        pack.append(member)
        open_[kind(member)] = (pack, filled + size(member))
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
        wanted[index] = max(position, _earliest(sim, bucket))
    made, before = [], 0
    for bucket, want in zip(gathers, wanted, strict=True):
        want = min(max(want, before), bucket.wait)
        issue = _grant(curve, sim, bucket.at(issue=want), bucket, kept, roof)
        before = issue
        made.append(bucket.at(issue=issue))
    return made


def _earliest(sim: Simulator, bucket: Bucket) -> int:
    ready = max(sim.step.gathers[m].ready for m in bucket.members)
    return max(sim.step.start(bucket.graph), ready)


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
    latest = [b.at(wait=_latest(sim, b)) for b in reductions]
    free = Schedule(
        (*(b for b in schedule.buckets if b.kind == "all-gather"), *latest), schedule.kept
    ).ordered()
    replay = sim.time(free)
    over = {b.members: end for b, end in zip(free.buckets, replay.ends, strict=True)}
    reached = sim.reached(replay)
    made = []
    for bucket, last in zip(reductions, latest, strict=True):
        position = int(np.searchsorted(reached, over[last.members], "left"))
        want = min(max(position, bucket.wait), last.wait)
        if want > bucket.wait:
            held = sim.held(bucket, schedule.kept)
            results = sum(size for _, size, first, last in held if last > 2 * bucket.wait)
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


def _latest(sim: Simulator, bucket: Bucket) -> int:
    return min(sim.step.reductions[m].needed for m in bucket.members)


# Searching for the numbers


@dataclass(frozen=True)
class _Search:
    """tried: every schedule that fits."""

    sim: Simulator
    roof: int
    tried: list[Found]

    @property
    def large(self) -> bool:
        return len(self.sim.step.gathers) + len(self.sim.step.reductions) > LARGE

    def attempt(self, kept: frozenset[str], knobs: Knobs) -> Found | None:
        made = _construct(self.sim, kept, knobs, self.roof)
        if made is None:
            return None
        schedule, curve = made
        replay = self.sim.replay(schedule, curve=curve)
        if replay.peak > self.roof:
            return None
        self.tried.append(Found(schedule, replay, knobs))
        return self.tried[-1]

    def knobs(self, kept: frozenset[str], start: Found | None) -> Found | None:
        """Coordinate descent over the knobs, from `start`'s or the leanest."""
        best = start or self.attempt(kept, Knobs())
        if best is None:
            return None
        if start is None:
            best = self._ahead(best)
        for name in ("gather", "reduce"):
            last = -1
            for cap in CAPS[::3] if self.large else CAPS:
                made = self.attempt(kept, replace(best.knobs, **{name: cap}))
                best = _pick(best, made)
                count = len(made.schedule.buckets) if made else 0
                if made is None or (count == last and cap > 64 * MIB):
                    break
                last = count
        return self._ahead(best)

    def _ahead(self, best: Found) -> Found:
        for ahead in AHEAD[1:]:
            if ahead != best.knobs.ahead:
                knobs = replace(best.knobs, ahead=ahead)
                best = _pick(best, self.attempt(best.schedule.kept, knobs))
        return best

    def spend(self, best: Found, candidates: list[str], keep: frozenset[str]) -> Found:
        """Keep parameters where it buys most: in orders that differ in what they count as dear, as
        many as fit, found by bisection; then the knobs once more."""
        sim, gathers = self.sim, self.sim.step.gathers

        def held(name: str) -> float:
            forward, backward = sim.pairs[name]
            return float(sim.clock[gathers[backward].first] - sim.clock[gathers[forward].last])

        def wire(name: str) -> float:
            return sim.price(Bucket("all-gather", 0, (sim.pairs[name][1],), 0, 0))[1]

        def size(name: str) -> int:
            return gathers[sim.pairs[name][0]].bytes

        orders = (
            sorted(candidates, key=lambda n: (held(n), n)),  # briefly held: latest in forward
            sorted(candidates, key=lambda n: (-wire(n) / max(size(n), 1), n)),  # dear per byte
            sorted(candidates, key=lambda n: (-wire(n), n)),  # dear
        )
        fill = 4 if self.large else 16
        for order in orders[:1] if self.large else orders:
            low, high = 0, len(order)
            while low < high:
                middle = (low + high + 1) // 2
                found = self._keep(keep | frozenset(order[:middle]), best.knobs)
                if found is None:
                    high = middle - 1
                else:
                    low = middle
                    best = _pick(best, found)
            # What is left may still fit where the next in order did not.
            chosen = frozenset(order[:low])
            for name in order[low + 1 : low + 1 + fill]:
                found = self._keep(keep | chosen | {name}, best.knobs)
                if found is not None:
                    chosen |= {name}
                    best = _pick(best, found)
        again = self.knobs(best.schedule.kept, best)
        assert again is not None
        return again

    def _keep(self, kept: frozenset[str], knobs: Knobs) -> Found | None:
        """With the same buckets, or, where they do not fit, each collective alone."""
        found = self.attempt(kept, knobs)
        alone = Knobs(ahead=knobs.ahead)
        return found or (self.attempt(kept, alone) if knobs != alone else None)


def _pick(a: Found, b: Found | None) -> Found:
    return b if b is not None and b.better(a) else a


# Moving single collectives


def _improve(sim: Simulator, best: Found, may: frozenset[str], roof: int) -> Found:
    """First-improvement local search, as long as the work that small steps are worth lasts."""
    size = len(best.schedule.buckets) + 2 * sim.end
    left = SEARCH_WORK // max(size, 1)
    if left < 20 * len(best.schedule.buckets):
        return best
    improved = True
    while improved and left > 0:
        improved = False
        for schedule in _moves(sim, best.schedule, may):
            left -= 1
            if left <= 0:
                break
            schedule = schedule.ordered()
            replay = sim.replay(schedule)
            if replay.peak > roof:
                continue
            found = Found(schedule, replay, best.knobs)
            if found.better(best):
                best, improved = found, True
                break
    return best


def _moves(sim: Simulator, schedule: Schedule, may: frozenset[str]) -> Iterator[Schedule]:
    yield from _move_residency(sim, schedule, may)
    yield from _move_issues(sim, schedule)
    yield from _move_cuts(sim, schedule)


def _move_issues(sim: Simulator, schedule: Schedule) -> Iterator[Schedule]:
    for index, bucket in enumerate(schedule.buckets):
        if bucket.kind == "all-gather":
            for issue in range(_earliest(sim, bucket), bucket.wait + 1):
                if issue != bucket.issue:
                    yield _with(schedule, index, bucket.at(issue=issue))
        else:
            ready = max(sim.step.reductions[m].ready for m in bucket.members)
            for wait in range(bucket.issue, _latest(sim, bucket) + 1):
                if wait != bucket.wait:
                    yield _with(schedule, index, bucket.at(wait=wait))
            for issue in range(ready, bucket.wait + 1):
                if issue != bucket.issue:
                    yield _with(schedule, index, bucket.at(issue=issue))


def _move_cuts(sim: Simulator, schedule: Schedule) -> Iterator[Schedule]:
    """Merge neighbours of one kind, or cut one in two."""
    rows = list(enumerate(schedule.buckets))
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        same = [(i, b) for i, b in rows if b.kind == kind]
        same.sort(key=lambda row: (row[1].wait if kind == "all-gather" else row[1].issue, row[0]))
        for (i, a), (j, b) in zip(same, same[1:]):
            merged = _merged(sim, a, b)
            if merged is not None:
                rest = tuple(x for k, x in rows if k not in (i, j))
                yield Schedule((*rest, merged), schedule.kept)
        for i, bucket in same:
            for cut in range(1, len(bucket.members)):
                parts = (
                    _part(sim, bucket, bucket.members[:cut]),
                    _part(sim, bucket, bucket.members[cut:]),
                )
                rest = tuple(x for k, x in rows if k != i)
                yield Schedule((*rest, *parts), schedule.kept)


def _merged(sim: Simulator, a: Bucket, b: Bucket) -> Bucket | None:
    if a.graph != b.graph:
        return None
    members = (*a.members, *b.members)
    if a.kind == "all-gather":
        rows = sim.step.gathers
        wait = min(a.wait, b.wait)
        issue = max(rows[m].ready for m in members)
        if len({rows[m].dtype for m in members}) > 1 or issue > wait:
            return None
        return Bucket(a.kind, a.graph, members, min(max(min(a.issue, b.issue), issue), wait), wait)
    reductions = sim.step.reductions
    ready = max(reductions[m].ready for m in members)
    needed = min(reductions[m].needed for m in members)
    if len({reductions[m].mergeable for m in members}) > 1 or ready > needed:
        return None
    issue = max(a.issue, b.issue)
    return Bucket(a.kind, a.graph, members, issue, min(max(a.wait, b.wait, issue), needed))


def _part(sim: Simulator, bucket: Bucket, members: tuple[int, ...]) -> Bucket:
    if bucket.kind == "all-gather":
        wait = min(sim.step.gathers[m].first for m in members)
        return Bucket(bucket.kind, bucket.graph, members, min(bucket.issue, wait), wait)
    ready = max(sim.step.reductions[m].ready for m in members)
    needed = min(sim.step.reductions[m].needed for m in members)
    return Bucket(bucket.kind, bucket.graph, members, ready, min(max(bucket.wait, ready), needed))


def _move_residency(sim: Simulator, schedule: Schedule, may: frozenset[str]) -> Iterator[Schedule]:
    for name in sorted(may):
        forward, backward = sim.pairs[name]
        if name in schedule.kept:
            first = sim.step.gathers[backward].first
            alone = Bucket(
                "all-gather", sim.step.gathers[backward].graph, (backward,), first, first
            )
            yield Schedule((*schedule.buckets, alone), schedule.kept - {name})
            continue
        buckets = []
        for bucket in schedule.buckets:
            if bucket.kind == "all-gather" and backward in bucket.members:
                left = tuple(m for m in bucket.members if m != backward)
                if left:
                    buckets.append(_part(sim, bucket, left))
            else:
                buckets.append(bucket)
        yield Schedule(tuple(buckets), schedule.kept | {name})


def _with(schedule: Schedule, index: int, bucket: Bucket) -> Schedule:
    buckets = list(schedule.buckets)
    buckets[index] = bucket
    return replace(schedule, buckets=tuple(buckets))


# When nothing fits


def _does_not_fit(sim: Simulator, leanest: Schedule, roof: int) -> BudgetError:
    curve = sim.memory(leanest)
    slot = int(curve.argmax())
    peak = int(curve[slot])
    rest = sim.at_rest
    parts = [
        (rest.parameters, "parameters at rest"),
        (rest.optimizer, "optimizer state"),
        (rest.activations, "inputs and buffers"),
    ]
    parts += [(int(c[slot]), name) for name, c in sim.base_by_category.items()]
    for bucket in leanest.buckets:
        for category, size, first, last in sim.held(bucket, leanest.kept):
            if first <= slot <= last:
                rows = sim.step.gathers if bucket.kind == "all-gather" else sim.step.reductions
                names = ", ".join(rows[m].parameter for m in bucket.members[:2])
                parts.append((size, f"{category} of {names}"))
    parts.sort(key=lambda p: -p[0])
    where = sim.step.ops[min(slot // 2, sim.end - 1)].name if sim.end else "nothing"
    listed = "\n".join(f"  {size / 1e6:12.3f} MB  {what}" for size, what in parts[:6] if size)
    at_rest = rest.total() / 1e6
    return BudgetError(
        f"the step does not fit: the leanest schedule needs {peak / 1e6:.3f} MB at its peak (at "
        f"{where}), memory_budget allows {roof / 1e6:.3f} MB, {(peak - roof) / 1e6:.3f} MB too "
        f"little. The largest contributors there:\n{listed}\n"
        f"It fits with memory_budget={peak} (bytes) or more. Otherwise: more ranks (each holds "
        f"{at_rest:.3f} MB at rest on {sim.step.world}), a smaller batch or sequence, "
        "torch.utils.checkpoint around the layers, or stage 3 if the stage is lower."
    )
