"""Measures one run of a scheduled graph: when each collective was issued, awaited and done.

What lies between two of them is compute, whatever engine ran it. Clocks are the host's, so this is
for devices whose operations the host itself runs (CPU).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.dialect import ALL_REDUCE, DRAIN, GATHER_START, REDUCE_START, WAIT
from zcompile.errors import ZeroError
from zcompile.schedule.plan import KINDS, Event, Memory, Timeline
from zcompile.schedule.simulate import Schedule, Simulator

_c10d = torch.ops._c10d_functional
_ISSUES = {
    GATHER_START,
    REDUCE_START,
    ALL_REDUCE,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_reduce.default,
}
_WAITS = {WAIT, _c10d.wait_tensor.default}


@dataclass(frozen=True)
class Mark:
    """kind: "issue" or "wait"; begin, end: seconds since the graph's run began."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Run:
    """One run of one graph. marks: in order; seconds: of all of it, but for waiting at its end."""

    marks: tuple[Mark, ...]
    seconds: float


class Marks(TorchDispatchMode):
    """Records the collectives that run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []
        self.begin = time.perf_counter()
        self.drained = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func is DRAIN:
            self.drained += time.perf_counter() - begin
        elif func in _ISSUES or func in _WAITS:
            kind = "issue" if func in _ISSUES else "wait"
            self.marks.append(Mark(kind, begin - self.begin, time.perf_counter() - self.begin))
        return result

    def run(self) -> Run:
        return Run(tuple(self.marks), time.perf_counter() - self.begin - self.drained)


def acts(sim: Simulator, schedule: Schedule, graph: int) -> list[tuple[str, int, int]]:
    """(issue or wait, bucket, position) of one graph, in the order in which they run."""
    found = []
    for index, bucket in enumerate(schedule.buckets):
        if bucket.graph == graph:
            found.append((bucket.issue, 0, index))
            found.append((bucket.wait, 1, index))
    return [(("issue", "wait")[w], index, position) for position, w, index in sorted(found)]


def mean(runs: Sequence[Run]) -> Run:
    """Of all ranks' runs of one graph.

    Raises:
        ZeroError: their collectives are not the same.
    """
    if len({tuple(m.kind for m in run.marks) for run in runs}) > 1:
        raise ZeroError("the ranks measured different collectives")
    marks = []
    for same in zip(*(run.marks for run in runs)):
        begin = sum(m.begin for m in same) / len(same)
        marks.append(Mark(same[0].kind, begin, sum(m.end for m in same) / len(same)))
    return Run(tuple(marks), sum(run.seconds for run in runs) / len(runs))


def operations(sim: Simulator, schedule: Schedule, runs: Mapping[int, Run]) -> dict[str, float]:
    """Seconds of each operation, by "direction/name". runs: by index of the graph.

    A stretch between two collectives is measured as a whole, and shared out as the cost model has
    it. From it is taken what the simulator adds by itself: the host's side of collectives that is
    compiled into the graph, and what a transfer in flight takes from the compute lane.
    """
    measured: dict[str, float] = {}
    share = sim.costs.link.share
    for graph, run in runs.items():
        order = acts(sim, schedule, graph)
        if len(order) != len(run.marks):
            raise ZeroError(f"{len(run.marks)} collectives were measured, {len(order)} planned")
        at, since, free, owed = sim.step.start(graph), 0.0, 0.0, 0.0
        end = sim.step.ends[graph]
        for (kind, index, position), mark in zip(order, run.marks, strict=True):
            work = _work(mark.begin - since, since, free, share, owed)
            if position > at:
                _share_out(sim, measured, graph, at, position, work)
                owed = 0.0
            at, since = position, mark.end
            _, wire, finish = sim.price(schedule.buckets[index])
            if kind == "issue":
                free = max(mark.end, free) + wire
            else:
                free = min(free, mark.end) if mark.end - mark.begin > 1e-5 else free
                owed += finish
        if end > at:
            work = _work(run.seconds - since, since, free, share, owed)
            _share_out(sim, measured, graph, at, end, work)
    return measured


def _work(elapsed: float, since: float, free: float, share: float, owed: float) -> float:
    busy = min(max(free - since, 0.0), elapsed)
    return max(elapsed - share * busy - owed, 0.0)


def _share_out(
    sim: Simulator, measured: dict[str, float], graph: int, at: int, end: int, work: float
) -> None:
    ops, direction = sim.step.ops, sim.step.directions[graph]
    model = [sim.costs.device.seconds(op) for op in ops[at:end]]
    total = sum(model)
    for op, seconds in zip(ops[at:end], model, strict=True):
        part = seconds / total if total else 1.0 / (end - at)
        measured[f"{direction}/{op.name}"] = work * part


def timeline(sim: Simulator, schedule: Schedule, runs: Mapping[int, Run]) -> Timeline:
    """What was measured, in the form of a simulated timeline. Transfers are seen only by their
    issue and their wait."""
    events: list[Event] = []
    keys = sim.keys(schedule)
    exposed: dict[str, float] = {}
    offset = 0.0
    for graph, run in sorted(runs.items()):
        direction, at, since = sim.step.directions[graph], sim.step.start(graph), offset
        issued: dict[int, float] = {}
        order = acts(sim, schedule, graph)
        for (kind, index, position), mark in zip(order, run.marks, strict=True):
            begin, end = offset + mark.begin, offset + mark.end
            if position > at:
                events.append(sim.compute_event(at, position, since, begin))
            at, since = position, end
            key, lane = keys[index], KINDS[schedule.buckets[index].kind]
            events.append(Event("compute", kind, f"{kind} {key}", direction, begin, end, key))
            if kind == "issue":
                issued[index] = end
            else:
                exposed[f"{direction}/{key}"] = end - begin
                span = (issued[index], end)
                events.append(Event(lane, "transfer", f"transfer {key}", direction, *span, key))
        offset += run.seconds
        if sim.step.ends[graph] > at:
            events.append(sim.compute_event(at, sim.step.ends[graph], since, offset))
    compute = sum(e.end - e.start for e in events if e.kind == "compute")
    known = sim.timeline(schedule)
    return Timeline(
        source="measured",
        seconds=offset,
        compute_seconds=compute,
        communication_seconds=known.communication_seconds,
        exposed_seconds=offset - compute,
        bound_seconds=known.bound_seconds,
        peak_bytes=known.peak_bytes,
        peak_seconds=known.peak_seconds,
        peak_node=known.peak_node,
        exposed=exposed,
        events=tuple(events),
        memory=Memory((), {}),
    )
