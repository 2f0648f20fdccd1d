"""A plan on a terminal: its collectives, residency, memory, and the step as lanes of characters.

compute  ████████x███████████      x: the lane stands still for a collective
gather   ▓█ ▒█ ▒█ ▒█               the darker, the busier
memory   ▃▄▅▅▆▆▇█▇▆▅▄▃▃            of the budget, or of the peak where that is higher
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zcompile.schedule.plan import LANES, Plan, Timeline
from zcompile.show import values
from zcompile.show.values import amount, ms, share

_SHADES = " ░▒▓█"
_BARS = " ▁▂▃▄▅▆▇█"
_LABEL = 9  # columns for the name of a lane
_NARROW = 100
_LEAST = 5  # columns for a name, however narrow the terminal
_NOTHING = 5e-6  # seconds: reads as 0.00 ms
_STANDS_STILL = 0.25  # of a column: from here on it is drawn as a wait
_COLOURS = {"compute": "bright_black", "gather": "blue", "reduce": "green"}


def text(plan: Plan, width: int = 120) -> str:
    """Plain text, the same on every terminal. width: columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(report(plan, width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def report(plan: Plan, width: int = 120) -> RenderableType:
    """What text() writes, for a rich console. The summary comes last: it stays in view."""
    parts: list[RenderableType] = [_collectives(plan, width), "", _residency(plan)]
    if plan.timeline is not None:
        parts += ["", _memory(plan.timeline), "", *lanes(plan, width)]
    parts += ["", _summary(plan)]
    parts += [Text(line, style="dim") for line in (*plan.costs, *plan.notes)]
    return Group(*parts)


def lanes(plan: Plan, width: int) -> list[Text]:
    """The step from left to right, one line a lane, and the memory curve below."""
    timeline = plan.timeline
    if timeline is None or not timeline.events:
        return []
    columns = max(width - _LABEL - 1, 20)
    begin, seconds = values.start(timeline), timeline.seconds or 1.0
    found = [_graphs(plan, columns)]
    for lane in values.lanes(timeline, LANES):
        busy, still = [0.0] * columns, [0.0] * columns
        for event in timeline.events:
            if event.lane == lane:
                into = still if event.kind == "wait" else busy
                _spread(into, (event.start - begin) / seconds, (event.end - begin) / seconds)
        line = Text(lane.ljust(_LABEL))
        for used, waited in zip(busy, still):
            if waited >= _STANDS_STILL:
                line.append("x", style="bold red")
            else:
                shade = _SHADES[min(len(_SHADES) - 1, int(used * 4 + 0.75))]
                line.append(shade, style=_COLOURS.get(lane, ""))
        found.append(line)
    if timeline.memory.times:
        found.append(_curve(plan, timeline, columns))
    end = f"{ms(seconds)} ms"
    found.append(Text(" " * _LABEL + "0" + end.rjust(columns - 1), style="dim"))
    return found


def _spread(columns: list[float], start: float, end: float) -> None:
    """Add to each column the share of it that lies between start and end (0 to 1 of all)."""
    count = len(columns)
    first, last = max(start, 0.0) * count, min(end, 1.0) * count
    for index in range(int(first), min(int(last) + 1, count)):
        columns[index] += max(0.0, min(last, index + 1) - max(first, index))


def _graphs(plan: Plan, columns: int) -> Text:
    """The names of the graphs, where each begins."""
    timeline = plan.timeline
    assert timeline is not None
    line = [" "] * columns
    for graph in plan.graphs:
        starts = [e.start for e in timeline.events if e.graph == graph.direction]
        if starts:
            share_of = (min(starts) - values.start(timeline)) / (timeline.seconds or 1.0)
            first = min(int(share_of * columns), columns - 1)
            line[first : first + len(graph.direction)] = graph.direction
    return Text(" " * _LABEL + "".join(line[:columns]).rstrip(), style="dim")


def _curve(plan: Plan, timeline: Timeline, columns: int) -> Text:
    total, times = timeline.memory.total(), timeline.memory.times
    top = max(plan.budget or 0, *total)
    highest, begin = [0] * columns, values.start(timeline)
    for index, size in enumerate(total):
        after = times[index + 1] if index + 1 < len(times) else begin + timeline.seconds
        first, last = (
            min(max(int((t - begin) / (timeline.seconds or 1.0) * columns), 0), columns - 1)
            for t in (times[index], after)
        )
        for column in range(first, last + 1):
            highest[column] = max(highest[column], size)
    line = Text("memory".ljust(_LABEL))
    for size in highest:
        over = plan.budget is not None and size > plan.budget
        bar = max(round(share(size, top) * (len(_BARS) - 1)), size > 0)  # never nothing for some
        line.append(_BARS[bar], style="red" if over else "cyan")
    return line


def _grid(head: Sequence[str], right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def _collectives(plan: Plan, width: int) -> Table:
    """In order of issue. MB: of whole values; exposed: how much longer the step is for it. Where
    there is no room for names, they lose their middle, and under 100 columns two columns go."""
    head = [
        "graph",
        "key",
        "of",
        "MB",
        "sent",
        "dtype",
        "by",
        "issue",
        "wait",
        "release",
        "exposed ms",
    ]
    rows, before = [], ""
    for row in plan.collectives:
        rows.append(
            [
                row.graph if row.graph != before else "",
                row.key,
                values.few(row.parameters),
                _megabytes(row.bytes),
                _megabytes(row.sent),
                values.dtype(row.dtype),
                row.primitive,
                row.issue or "end",
                row.wait or "end",
                row.release or "-",
                ms(values.exposed(plan, row)),
            ]
        )
        before = row.graph
    gone = {"by", "release"} if width < _NARROW else set()
    gone |= set() if plan.timeline else {"exposed ms"}
    shown = [index for index, name in enumerate(head) if name not in gone]
    widths = {i: max(len(head[i]), *(len(row[i]) for row in rows), 0) for i in shown}
    named = [i for i in shown if head[i] in ("of", "by", "issue", "wait", "release")]
    room = width - 2 * (len(shown) - 1) - sum(w for i, w in widths.items() if i not in named)
    widths |= dict(zip(named, _fit([widths[i] for i in named], room)))
    table = _grid([head[i] for i in shown], {"MB", "sent", "exposed ms"})
    for row_cells, row in zip(rows, plan.collectives):
        cells = [Text(_shorten(row_cells[i], widths[i])) for i in shown]
        if plan.timeline:
            cells[-1].stylize("red" if values.exposed(plan, row) > _NOTHING else "dim")
        table.add_row(*cells)
    return table


def _fit(wanted: list[int], room: int) -> list[int]:
    """Widths that add up to `room` at most: the widest give way first, and the first of them, which
    says what the row is of, may be twice as wide as the rest."""
    limit = max(wanted, default=0)
    fitted = wanted
    while limit > _LEAST and sum(fitted) > room:
        limit -= 1
        fitted = [min(w, limit * (2 if i == 0 else 1)) for i, w in enumerate(wanted)]
    return fitted


def _shorten(name: str, width: int) -> str:
    """Names differ at their ends: the middle goes."""
    if len(name) <= width:
        return name
    tail = (width - 1) * 2 // 3
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f}" if size < 1e7 else f"{size / 1e6:,.1f}"


def _residency(plan: Plan) -> Table:
    table = _grid(
        ["residency", "parameters", "whole", "at rest"], {"parameters", "whole", "at rest"}
    )
    for kind in dict.fromkeys(p.residency for p in plan.parameters):
        rows = [p for p in plan.parameters if p.residency == kind]
        whole, rest = sum(p.bytes for p in rows), sum(p.shard_bytes for p in rows)
        table.add_row(kind, str(len(rows)), amount(whole), amount(rest))
    return table


def _memory(timeline: Timeline) -> Table:
    table = _grid(["at the peak", "", "share"], {"", "share"})
    held = values.at_peak(timeline)
    for name, size in held.items():
        table.add_row(name, amount(size), f"{share(size, sum(held.values())):.0%}")
    return table


def _summary(plan: Plan) -> Text:
    place = f"{plan.world} rank{'s' * (plan.world != 1)} of {plan.device}"
    lines = [
        Text.assemble((plan.name, "bold"), f": {place}, {amount(plan.sent())} sent per rank"),
    ]
    timeline = plan.timeline
    if timeline is None:
        return lines[0]
    lines.append(
        Text.assemble(
            f"{timeline.source} step ",
            (f"{ms(timeline.seconds)} ms", "bold"),
            f": compute {ms(timeline.compute_seconds)}, "
            f"communication {ms(timeline.communication_seconds)}, exposed ",
            (f"{ms(timeline.exposed_seconds)}", "red" if timeline.exposed_seconds else ""),
            f" ({share(timeline.exposed_seconds, timeline.seconds):.1%}); "
            f"bound {ms(timeline.bound_seconds)} "
            f"({share(timeline.seconds, timeline.bound_seconds):.3f} of it)",
        )
    )
    where = f" in {timeline.peak_node}" if timeline.peak_node else ""
    budget = "no budget stated"
    if plan.budget is not None:
        used = share(timeline.peak_bytes, plan.budget)
        budget = f"{used:.0%} of the budget of {amount(plan.budget)}"
    lines.append(
        Text.assemble(
            "peak ",
            (amount(timeline.peak_bytes), "bold"),
            f"{where} at {ms(timeline.peak_seconds - values.start(timeline))} ms, {budget}",
        )
    )
    return Text("\n").join(lines)
