"""A plan as a graph: what stands between collectives, the collectives, and their buckets.

Operations with nothing of the schedule between them are one node. A collective is a table of its
bucket: its kind on top, one line a parameter below, coloured by residency. Solid edges follow the
order of operations; dashed ones lead from where a collective is issued to where it is awaited.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from html import escape
from typing import Any

import networkx as nx

from zcompile.errors import ZeroError
from zcompile.schedule.plan import Collective, Graph, Plan
from zcompile.show.values import amount, exposed, ms, positions

KIND_COLOURS = {"all-gather": "#2f6fdb", "reduce-scatter": "#0b8a6f", "all-reduce": "#7d55c7"}
RESIDENCY_COLOURS = {"gathered": "#dbe7fb", "kept": "#fde9c4", "replicated": "#e4e6ea"}
EXPOSED = "#d0342c"
_SHOWN = 6  # parameters of a bucket that are named
_TIMEOUT = 300.0  # seconds; 800 collectives take about 2


def graph(plan: Plan) -> nx.DiGraph[str]:
    """Nodes carry kind ("operations" or a collective's), direction, label, and DOT attributes;
    edges carry kind (order, issue, wait)."""
    made: nx.DiGraph[str] = nx.DiGraph(name=plan.name)
    residency = {p.name: p.residency for p in plan.parameters}
    before: str | None = None
    for each in plan.graphs:
        before = _one(made, plan, each, residency, before)
    return made


def _one(
    made: nx.DiGraph[str], plan: Plan, each: Graph, residency: dict[str, str], before: str | None
) -> str | None:
    """Add one graph behind `before`. Returns its last stretch of operations."""
    place, rows = positions(each), plan.of(each.direction)
    end = len(each.nodes)
    at = {row: [place.get(name, end) for name in (row.issue, row.wait)] for row in rows}
    cuts = sorted({0, end, *(p for pair in at.values() for p in pair)})
    stretch: dict[int, str] = {}  # by the position at which it begins
    for first, last in zip(cuts, [*cuts[1:], end]):
        if first == last and first != end:
            continue
        name = f"{each.direction}/{first}"
        label = _span(each.nodes[first:last]) if first < last else f"end of {each.direction}"
        made.add_node(name, kind="operations", direction=each.direction, label=label, shape="box")
        if before is not None:
            made.add_edge(before, name, kind="order")
        stretch[first], before = name, name
    ends = sorted(stretch)
    for row in rows:
        name = f"{row.graph}/{row.key}"
        made.add_node(
            name,
            kind=row.kind,
            direction=each.direction,
            label=_bucket(plan, row, residency),
            shape="plain",
        )
        issued, awaited = at[row]
        behind = [first for first in ends if first < issued]
        colour = KIND_COLOURS.get(row.kind, "black")
        if behind:
            made.add_edge(stretch[behind[-1]], name, kind="issue", style="dashed", color=colour)
        late = exposed(plan, row) > 0
        made.add_edge(
            name, stretch[awaited], kind="wait", style="dashed", color=EXPOSED if late else colour
        )
    return before


def _span(nodes: tuple[str, ...]) -> str:
    if len(nodes) == 1:
        return nodes[0]
    return f"{nodes[0]} .. {nodes[-1]}\n{len(nodes)} operations"


def _bucket(plan: Plan, row: Collective, residency: dict[str, str]) -> str:
    """An HTML-like label."""
    cells = [f"{row.kind} {row.key}", f"{amount(row.bytes)}, {row.dtype}, {row.primitive}"]
    late = exposed(plan, row)
    if late:
        cells.append(f"exposed {ms(late)} ms")
    head = "<BR/>".join(escape(cell) for cell in cells)
    colour = KIND_COLOURS.get(row.kind, "black")
    lines = [f'<TR><TD BGCOLOR="{colour}"><FONT COLOR="white">{head}</FONT></TD></TR>']
    for name in row.parameters[:_SHOWN]:
        fill = RESIDENCY_COLOURS.get(residency.get(name, ""), "white")
        lines.append(f'<TR><TD BGCOLOR="{fill}">{escape(name)}</TD></TR>')
    more = len(row.parameters) - _SHOWN
    if more > 0:
        lines.append(f"<TR><TD>and {more} more</TD></TR>")
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0">{"".join(lines)}</TABLE>'


def dot(plan: Plan) -> str:
    """DOT source, one cluster a graph, and a legend."""
    made = graph(plan)
    return "\n".join(_lines(plan, made)) + "\n"


def _lines(plan: Plan, made: nx.DiGraph) -> Iterator[str]:
    yield f"digraph {_quoted(plan.name)} {{"
    yield '  graph [fontname="Helvetica", rankdir=TB, nodesep=0.3, ranksep=0.3, newrank=true];'
    yield '  node [fontname="Helvetica", fontsize=10, color="#5f6670"];'
    yield '  edge [fontname="Helvetica", fontsize=9, color="#5f6670", arrowsize=0.6];'
    for index, each in enumerate(plan.graphs):
        yield f"  subgraph cluster_{index} {{"
        yield f'    label={_quoted(each.direction)}; color="#c9ccd1"; style=rounded;'
        for name, data in made.nodes(data=True):
            if data["direction"] == each.direction:
                yield f"    {_quoted(name)} [{_attributes(data)}];"
        yield "  }"
    for a, b, data in made.edges(data=True):
        yield f"  {_quoted(a)} -> {_quoted(b)} [{_attributes(data)}];"
    yield "  subgraph cluster_legend {"
    yield '    label="legend"; color="#c9ccd1"; style=rounded;'
    yield f'    "legend" [shape=plain, label=<{_legend()}>];'
    yield "  }"
    yield "}"


def _legend() -> str:
    rows = [
        *((kind, colour, "white") for kind, colour in KIND_COLOURS.items()),
        ("awaited while the step stands still", EXPOSED, "white"),
        ("parameter gathered per use", RESIDENCY_COLOURS["gathered"], "black"),
        ("parameter kept for backward", RESIDENCY_COLOURS["kept"], "black"),
        ("parameter whole at rest", RESIDENCY_COLOURS["replicated"], "black"),
    ]
    cells = (
        f'<TR><TD BGCOLOR="{fill}"><FONT COLOR="{ink}">{escape(name)}</FONT></TD></TR>'
        for name, fill, ink in rows
    )
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0">{"".join(cells)}</TABLE>'


def _attributes(data: dict[str, Any]) -> str:
    """`kind` and `direction` say what a node is: they mean nothing to Graphviz, and stay for
    whoever reads the graph back."""
    return ", ".join(
        f"{key}=<{value}>" if str(value).startswith("<TABLE") else f"{key}={_quoted(value)}"
        for key, value in data.items()
    )


def _quoted(text: str) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def svg(plan: Plan) -> str:
    """Raises ZeroError where Graphviz is not installed, or cannot lay the plan out."""
    program = shutil.which("dot")
    if program is None:
        raise ZeroError(
            "SVG is drawn by Graphviz, and there is no program `dot`: install it "
            "(apt install graphviz, brew install graphviz), or write --format dot, or html"
        )
    try:
        # nslimit: without it, the placing of a thousand nodes takes minutes for a little less ink.
        done = subprocess.run(
            [program, "-Tsvg", "-Gnslimit=1", "-Gnslimit1=1"],
            input=dot(plan),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise ZeroError(
            f"Graphviz did not place {len(plan.collectives)} collectives within {_TIMEOUT:.0f} s: "
            "write --format html, which is made for large plans"
        ) from None
    if done.returncode:
        raise ZeroError(f"Graphviz failed: {done.stderr.strip()[:500]}")
    return done.stdout
