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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zcompile.errors import BudgetError
from zcompile.schedule.construct import (
    EQUAL,
    Found,
    Knobs,
    construct,
    gather_buckets,
    lean,
    reduce_buckets,
)
from zcompile.schedule.improve import Improver
from zcompile.schedule.room import Effort, earliest, latest
from zcompile.schedule.simulate import Bucket, Schedule, Simulator

__all__ = ["EQUAL", "Found", "Knobs", "fixed", "frontier", "lean", "plan"]

AHEAD = (0.0, 1.0, 1.5, 2.5, 5.0, 16.0)  # see Knobs
# Steps of more collectives than this are searched on a coarser grid, and buckets that do not fit
# are not moved out of the way one by one.
LARGE = 200
ROOM_EFFORT = 500  # memory curves
# Local search is for small steps: there the last percents are worth their price. Evaluations: up to
# SEARCH_WORK / collectives of the schedule, and SEARCH_SQUARE / (collectives of the step)^2 or
# FEWEST. A dozen collectives are searched until nothing moves, more of them for half a second; a
# caller may ask for less (`steps`).
SEARCH_WORK = 400_000
SEARCH_SQUARE = 8_000_000
FEWEST = 3_000
EVALUATION = 1e-4  # seconds of one evaluation of a dozen collectives, on a slow core


def plan(
    sim: Simulator,
    limit: int | None = None,
    *,
    keep: frozenset[str] = frozenset(),
    may_keep: Iterable[str] = (),
    thrift: float = EQUAL,
    steps: float | None = None,
) -> Found:
    """The best schedule found. limit: bytes of the peak, None for no limit; keep: parameters that
    must stay gathered from forward to backward; may_keep: those that may; thrift: a gain in time of
    less than this share of it is not worth any memory; steps: local search may take as long as
    so many steps take beyond their compute, which is the most time that it could save in them.

    Raises:
        BudgetError: the leanest schedule does not fit; with the shortfall, the largest contributors
            and what would fit.
    """
    roof = limit if limit is not None else 2**62
    keep = keep & frozenset(sim.pairs)
    search = _Search(sim, roof, [])
    candidates = [name for name in may_keep if name in sim.pairs and name not in keep]
    best = search.knobs(keep, None)
    if best is None:
        leanest = lean(sim, keep, candidates)
        best = Found(leanest, sim.replay(leanest), Knobs())
        if best.replay.peak > roof:
            raise _does_not_fit(sim, leanest, roof)
    if candidates:
        best = search.spend(best, candidates, keep)
    count = len(best.schedule.buckets) + 8
    if count <= LARGE:
        square = (len(sim.step.gathers) + len(sim.step.reductions) + 8) ** 2
        most = min(SEARCH_WORK // count, max(SEARCH_SQUARE // square, FEWEST))
        if steps is not None:  # by rounding, a step that communicates nothing may end below compute
            beyond = max(best.replay.seconds - sim.compute_seconds, 0.0)
            most = int(min(most, steps * beyond / EVALUATION))
        best = Improver(sim, frozenset(candidates), roof, Effort(most)).improve(best)
    near = [f for f in search.tried if f.replay.seconds <= best.replay.seconds * (1 + thrift)]
    # Of two with one peak, the one that holds less beside it: allocators keep what was used.
    held = lambda f: int(sim.memory(f.schedule).sum())
    return min([best, *near], key=lambda f: (f.replay.peak, held(f), f.replay.seconds))


def frontier(
    sim: Simulator,
    limits: Sequence[int],
    *,
    keep: frozenset[str] = frozenset(),
    may_keep: Iterable[str] = (),
) -> list[Found]:
    """The best schedule found for each limit, which must ascend: a larger one is never slower.

    Raises:
        BudgetError: see plan.
    """
    names, found = tuple(may_keep), list[Found]()
    for limit in limits:
        best = plan(sim, limit, keep=keep, may_keep=names)
        found.append(_pick(found[-1], best) if found else best)
    return found


def fixed(sim: Simulator, keep: frozenset[str], cap: int, depth: int) -> Found:
    """The schedule of two rules instead of a search: buckets of up to `cap` bytes, each gather
    issued where the one `depth` before it is awaited, each reduction awaited where the one `depth`
    behind it is issued. At most depth + 1 buckets of each are alive where each is used in turn."""
    keep = keep & frozenset(sim.pairs)
    gathers, reductions = gather_buckets(sim, keep, cap), reduce_buckets(sim, cap)
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
            yield bucket.at(issue=min(max(issue, earliest(sim, bucket)), bucket.wait))


def _behind_by(sim: Simulator, reductions: Sequence[Bucket], depth: int) -> Iterator[Bucket]:
    for kind in ("reduce-scatter", "all-reduce"):
        row = [b for b in reductions if b.kind == kind]
        for index, bucket in enumerate(row):
            later = row[index + depth].issue if index + depth < len(row) else sim.end
            yield bucket.at(wait=max(min(later, latest(sim, bucket)), bucket.issue))


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
        effort = 0 if self.large else ROOM_EFFORT
        made = construct(self.sim, kept, knobs, self.roof, effort)
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
        for name, rows in (("gather", self.sim.step.gathers), ("reduce", self.sim.step.reductions)):
            for cap in _caps([r.bytes for r in rows], 4 if self.large else 2):
                made = self.attempt(kept, replace(best.knobs, **{name: cap}))
                best = _pick(best, made)
                if made is None:
                    break
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
        return self.knobs(best.schedule.kept, best) or best

    def _keep(self, kept: frozenset[str], knobs: Knobs) -> Found | None:
        """With the same buckets, or, where they do not fit, each collective alone."""
        found = self.attempt(kept, knobs)
        alone = Knobs(ahead=knobs.ahead)
        return found or (self.attempt(kept, alone) if knobs != alone else None)


def _caps(sizes: Sequence[int], factor: int) -> list[int]:
    """Bytes of buckets, from each collective alone to all in one."""
    caps, total = [0], sum(sizes)
    cap = 2 * max(sorted(sizes)[len(sizes) // 2], total // 1024, 1) if sizes else 1
    while cap < total:
        caps.append(cap)
        cap *= factor
    return [*caps, total]


def _pick(a: Found, b: Found | None) -> Found:
    return b if b is not None and b.better(a) else a


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
        (rest.gradients, "gradients of earlier micro-batches"),
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
        f"the step does not fit: the leanest schedule needs {_amount(peak)} at its peak (at "
        f"{where}), memory_budget allows {_amount(roof)}, {_amount(peak - roof)} too "
        f"little. The largest contributors there:\n{listed}\n"
        f"It fits with memory_budget={peak} (bytes) or more. Otherwise: more ranks (each holds "
        f"{at_rest:.3f} MB at rest on {sim.step.world}), a smaller batch or sequence, "
        "torch.utils.checkpoint around the layers, or stage 3 if the stage is lower."
    )


def _amount(size: int) -> str:
    return f"{size / 1e6:.3f} MB" if size >= 1e5 else f"{size} bytes"
