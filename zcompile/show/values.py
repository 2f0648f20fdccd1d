"""What the views have in common: the values of a plan, and how people read them."""

from __future__ import annotations

from collections.abc import Sequence

from zcompile.schedule.plan import CATEGORIES, Collective, Event, Graph, Plan, Timeline

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def amount(size: float) -> str:
    """Bytes with a decimal unit and three digits: 18.2 GB."""
    unit = 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(str(int(abs(size)))) + 1)
    return f"{size:,.{digits}f} {_UNITS[unit]}"


def ms(seconds: float) -> str:
    """Milliseconds, without the unit: 12.34."""
    return f"{seconds * 1e3:,.2f}"


def dtype(name: str) -> str:
    """As engineers write it: bf16 for bfloat16."""
    return name.replace("bfloat", "bf").replace("float", "fp")


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def exposed(plan: Plan, row: Collective) -> float:
    """Seconds the compute lane stands still for it; 0 where the plan holds no timeline."""
    return plan.timeline.exposed.get(f"{row.graph}/{row.key}", 0.0) if plan.timeline else 0.0


def categories(timeline: Timeline) -> tuple[str, ...]:
    """Those that hold anything, in the order in which curves are stacked, unknown ones last."""
    values = timeline.memory.values
    known = [name for name in CATEGORIES if any(values.get(name, ()))]
    return (*known, *(name for name in values if name not in CATEGORIES and any(values[name])))


def at_peak(timeline: Timeline) -> dict[str, int]:
    """Bytes by category at the peak of the memory curve; empty where there is no curve."""
    total = timeline.memory.total()
    if not total:
        return {}
    index = max(range(len(total)), key=total.__getitem__)
    return {name: timeline.memory.values[name][index] for name in categories(timeline)}


def lanes(timeline: Timeline, order: Sequence[str]) -> list[str]:
    """Lanes that have events, in `order`, unknown ones last."""
    found = dict.fromkeys(event.lane for event in timeline.events)
    return [*(n for n in order if n in found), *(n for n in found if n not in order)]


def start(timeline: Timeline) -> float:
    """The first moment of the events: measured ones need not begin at zero."""
    return min((event.start for event in timeline.events), default=0.0)


def operation(event: Event) -> str:
    """The first operation of a compute event."""
    return event.name.split(" ", 1)[0]


def positions(graph: Graph) -> dict[str, int]:
    """Of each operation, and of the end of the graph, which is named ""."""
    return {"": len(graph.nodes), **{name: index for index, name in enumerate(graph.nodes)}}


def few(names: Sequence[str], count: int = 1) -> str:
    """The first names, and how many more there are."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" +{more}" if more > 0 else "")


def titles(plans: Sequence[Plan]) -> list[str]:
    """What tells several plans apart: their names, "A: " and "B: " before them where there are two
    or more, and whether their times are simulated or measured."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return [
        (f"{letters[index % 26]}: " if len(plans) > 1 else "")
        + plan.name
        + (f" ({plan.timeline.source})" if plan.timeline else "")
        for index, plan in enumerate(plans)
    ]


def unknown_anchors(plan: Plan) -> list[str]:
    """What a plan that was edited by hand refers to and its graphs do not have."""
    known = {graph.direction: positions(graph) for graph in plan.graphs}
    found = []
    for row in plan.collectives:
        if row.graph not in known:
            found.append(f"{row.graph}/{row.key}: the plan has no graph {row.graph!r}")
            continue
        for field in ("issue", "wait", "release"):
            name = getattr(row, field)
            if name not in known[row.graph]:
                found.append(
                    f"{row.graph}/{row.key}: {field} names {name!r}, "
                    f"which is no operation of the {row.graph} graph"
                )
    return found
