"""A plan's timeline as trace events, which ui.perfetto.dev and chrome://tracing open.

One process per plan, one thread per lane, counters of memory by category, and arrows from where a
collective is issued over its transfer to where it is awaited. Simulated and measured timelines have
the same form and begin at zero, so two of them can be laid over each other.

Format: "Trace Event Format" (Google, 2016): X slices, M metadata, C counters, s/t/f flows;
microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from zcompile.schedule.plan import LANES, Collective, Event, Plan
from zcompile.show import values

_MICRO = 1e6
_ORDER = {"issue": 0, "transfer": 1, "wait": 2, "finish": 2}
Row = dict[str, Any]


def trace(plans: Sequence[Plan]) -> str:
    """JSON. Raises ValueError where a plan holds no timeline."""
    return json.dumps(to_events(plans), separators=(",", ":"))


def to_events(plans: Sequence[Plan]) -> dict[str, Any]:
    rows: list[Row] = []
    for index, (plan, title) in enumerate(zip(plans, values.titles(plans)), start=1):
        rows += _process(plan, title, index)
    about = {title: list(plan.costs) for plan, title in zip(plans, values.titles(plans))}
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about}


def _process(plan: Plan, title: str, pid: int) -> Iterator[Row]:
    timeline = plan.timeline
    if timeline is None:
        raise ValueError(f"the plan {plan.name!r} holds no timeline: plan it, or measure a step")
    threads = {lane: tid for tid, lane in enumerate(values.lanes(timeline, LANES), start=1)}
    yield _named("process_name", pid, 0, name=title)
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    for lane, tid in threads.items():
        yield _named("thread_name", pid, tid, name=lane)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)
    begin = values.start(timeline)
    rows = {(row.graph, row.key): row for row in plan.collectives}
    chains: dict[tuple[str, str], list[Event]] = defaultdict(list)
    starts = {}  # of stretches of compute, by their first operation
    for event in timeline.events:
        yield {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": pid,
            "tid": threads[event.lane],
            "ts": (event.start - begin) * _MICRO,
            "dur": (event.end - event.start) * _MICRO,
            "args": _arguments(plan, rows.get((event.graph, event.key)), event),
        }
        if event.key and event.kind in _ORDER:
            chains[event.graph, event.key].append(event)
        if event.kind == "compute":
            starts[event.graph, values.operation(event)] = event
    for number, (name, chain) in enumerate(chains.items(), start=1):
        # A wait that never stood still leaves no event: the arrow then ends where it is awaited.
        if name in rows and not any(e.kind in ("wait", "finish") for e in chain):
            awaited = starts.get((name[0], rows[name].wait))
            chain = [*chain, awaited] if awaited else chain
        yield from _arrow(chain, pid, pid * 1_000_000 + number, threads, begin)
    times, held = timeline.memory.times, timeline.memory.values
    for index, time in enumerate(times):
        at = {"ph": "C", "pid": pid, "tid": 0, "ts": (time - begin) * _MICRO}
        by_category = {name: held[name][index] for name in values.categories(timeline)}
        yield {**at, "name": "memory (bytes)", "args": by_category}
        total = {"in use": sum(by_category.values())}
        if plan.budget is not None:
            total["budget"] = plan.budget
        yield {**at, "name": "memory in all (bytes)", "args": total}


def _named(what: str, pid: int, tid: int, **values: Any) -> Row:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": values}


def _arguments(plan: Plan, row: Collective | None, event: Event) -> Row:
    if row is None:
        return {"graph": event.graph, **({"key": event.key} if event.key else {})}
    return {
        "graph": row.graph,
        "key": row.key,
        "kind": row.kind,
        "parameters": ", ".join(row.parameters),
        "dtype": row.dtype,
        "bytes": row.bytes,
        "sent": row.sent,
        "primitive": row.primitive,
        "issue": row.issue or "end",
        "wait": row.wait or "end",
        "release": row.release or "-",
        "exposed_ms": values.exposed(plan, row) * 1e3,
        "reason": row.reason,
    }


def _arrow(
    chain: Sequence[Event], pid: int, number: int, threads: dict[str, int], begin: float
) -> Iterator[Row]:
    """s at the first, t between, f at the last; a finish beside a wait gets no arrow of its own."""
    ends: dict[int, Event] = {}
    for event in sorted(chain, key=lambda e: (e.start, e.end)):
        ends.setdefault(_ORDER.get(event.kind, 2), event)
    stops = [ends[order] for order in sorted(ends)]
    if len(stops) < 2:
        return
    for index, event in enumerate(stops):
        last = index == len(stops) - 1
        yield {
            "ph": "s" if index == 0 else "f" if last else "t",
            "name": "collective",
            "cat": "collective",
            "id": number,
            "pid": pid,
            "tid": threads[event.lane],
            # Arrows attach to the slice around their time. An arrow may not point back in time, so
            # it leaves at the end of nothing but the issue's beginning.
            "ts": (event.start - begin) * _MICRO,
            **({"bp": "e"} if last else {}),
        }
