"""One page of a plan, or of two beside each other: self-contained, it asks the network for nothing.

Python puts the data in; the page's own scripts (page/*.js) draw it with plotly.js. A large plan is
thinned as it is drawn: what is narrower than a pixel is merged, and comes apart when zoomed into.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from html import escape
from importlib.resources import files
from typing import Any

from zcompile.errors import ZeroError
from zcompile.schedule.plan import LANES, Plan, Timeline
from zcompile.show import values
from zcompile.show.diff import diff

_SCRIPTS = ("format.js", "timeline.js", "tables.js", "details.js", "app.js")


def page(plan: Plan, other: Plan | None = None) -> str:
    """HTML. Raises ZeroError where plotly, which brings plotly.js, is not installed."""
    plans = [plan] if other is None else [plan, other]
    title = " against ".join(values.titles(plans)) if other else plan.name
    folder = files("zcompile.show") / "page"
    scripts = "\n".join((folder / name).read_text("utf-8") for name in _SCRIPTS)
    parts = {
        "title": escape(f"{title} - zcompile"),
        "style": (folder / "page.css").read_text("utf-8"),
        "plotly": _plotly(),
        "data": _json(data(plans)),
        "script": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    before, *rest = (folder / "page.html").read_text("utf-8").split("{{")
    made = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        made += [parts[name], after]
    return "".join(made)


def data(plans: list[Plan]) -> dict[str, Any]:
    """What the page's scripts read: times in milliseconds from the first event, bytes."""
    found: dict[str, Any] = {"plans": [_plan(p, t) for p, t in zip(plans, values.titles(plans))]}
    if len(plans) == 2:
        difference = diff(*plans)
        found["diff"] = dataclasses.asdict(difference)
        for raw, total in zip(found["diff"]["totals"], difference.totals):
            raw["change"] = total.change()
    return found


def _plan(plan: Plan, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "name": plan.name,
        "world": plan.world,
        "device": plan.device,
        "budget": plan.budget,
        "costs": plan.costs,
        "notes": [*plan.notes, *values.unknown_anchors(plan)],
        "fingerprint": plan.fingerprint,
        "operations": sum(len(graph.nodes) for graph in plan.graphs),
        "sent": plan.sent(),
        "parameters": [dataclasses.asdict(each) for each in plan.parameters],
        "collectives": [
            {**dataclasses.asdict(row), "exposed": _ms(values.exposed(plan, row))}
            for row in plan.collectives
        ],
        "timeline": _timeline(plan, plan.timeline) if plan.timeline else None,
    }


def _timeline(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    begin = values.start(timeline)
    rows = {(row.graph, row.key): index for index, row in enumerate(plan.collectives)}
    lanes = values.lanes(timeline, LANES)
    categories = values.categories(timeline)
    return {
        "source": timeline.source,
        "seconds": _ms(timeline.seconds),
        "compute": _ms(timeline.compute_seconds),
        "communication": _ms(timeline.communication_seconds),
        "exposed": _ms(timeline.exposed_seconds),
        "bound": _ms(timeline.bound_seconds),
        "peak": timeline.peak_bytes,
        "peakAt": _ms(timeline.peak_seconds - begin),
        "peakNode": timeline.peak_node,
        "lanes": lanes,
        # [lane, kind, name, graph, start, end, row of the collective or -1]
        "events": [
            [
                lanes.index(event.lane),
                event.kind,
                event.name,
                event.graph,
                _ms(event.start - begin),
                _ms(event.end - begin),
                rows.get((event.graph, event.key), -1) if event.key else -1,
            ]
            for event in sorted(timeline.events, key=lambda e: (e.start, e.end))
        ],
        "categories": categories,
        "times": [_ms(time - begin) for time in timeline.memory.times],
        "memory": [timeline.memory.values[name] for name in categories],
    }


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 6)  # nanoseconds


def _json(value: Any) -> str:
    """JSON that cannot end the script element which it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _plotly() -> str:
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise ZeroError(
            "the HTML page is drawn by plotly, which is not installed: "
            "pip install 'zcompile[show]', or write --format svg, trace or text"
        ) from None
    return str(offline.get_plotlyjs())
