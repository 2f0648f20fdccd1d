"""What changed between two plans: residency, buckets, where collectives stand, and what it brings.

Keys of collectives are numbers in order of issue, so they shift when one is added. A collective is
the same in both plans if its graph, kind and parameters are; what is left over on both sides was
put into other buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zcompile.schedule.plan import Collective, Plan
from zcompile.show.values import amount, exposed, few, ms, positions, titles

_LISTED = 40  # changes of one sort that the text names
# Differences of a field that are worth a line, in the order in which they are listed.
_FIELDS = ("issue", "wait", "release", "primitive", "dtype", "bytes", "sent")


@dataclass(frozen=True)
class Total:
    """One figure of the whole step. unit: "s" or "B"."""

    name: str
    unit: str
    a: float
    b: float

    def value(self, of: float) -> str:
        return f"{ms(of)} ms" if self.unit == "s" else amount(of)

    def change(self) -> str:
        """+3.1 %, or "=" where both read the same."""
        if self.value(self.a) == self.value(self.b):
            return "="
        return f"{(self.b - self.a) / self.a:+.1%}" if self.a else self.value(self.b)


@dataclass(frozen=True)
class Change:
    """what: residency, bucket, or the field of a collective; a, b: before and after, "" where one
    plan has no such thing; note: how far it moved, or why B has it so."""

    what: str
    graph: str
    name: str
    a: str
    b: str
    note: str = ""


@dataclass(frozen=True)
class Difference:
    a: str
    b: str
    totals: tuple[Total, ...]
    residency: tuple[Change, ...]
    buckets: tuple[Change, ...]
    moves: tuple[Change, ...]

    def __bool__(self) -> bool:
        """Whether the schedules differ; times may differ without."""
        return bool(self.residency or self.buckets or self.moves)


def diff(a: Plan, b: Plan) -> Difference:
    pairs, only_a, only_b = _match(a, b)
    name_a, name_b = titles([a, b])
    return Difference(
        name_a,
        name_b,
        _totals(a, b),
        tuple(_residency(a, b)),
        tuple(_buckets(a, b, only_a, only_b)),
        tuple(_moves(a, b, pairs)),
    )


def report(found: Difference) -> RenderableType:
    parts: list[RenderableType] = [
        Text.assemble((found.a, "bold"), " against ", (found.b, "bold")),
        _table(
            ["", "A", "B", "change"],
            [[t.name, t.value(t.a), t.value(t.b), t.change()] for t in found.totals],
            right=3,
        ),
    ]
    if not found:
        parts.append(Text("The schedules are the same: residency, buckets and places."))
    for title, changes in (
        ("Residency", found.residency),
        ("Buckets", found.buckets),
        ("Collectives", found.moves),
    ):
        if changes:
            rows = [
                [
                    f"{c.graph} {c.name}".strip(),
                    *([c.what] if title == "Collectives" else []),
                    *(c.a or "-", c.b or "-", c.note),
                ]
                for c in changes[:_LISTED]
            ]
            if len(changes) > _LISTED:
                rows.append([f"and {len(changes) - _LISTED} more: see --format json"])
            what = [""] if title == "Collectives" else []
            parts += ["", _table([f"{title} ({len(changes)})", *what, "A", "B", ""], rows)]
    return Group(*parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if 0 < index <= right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _totals(a: Plan, b: Plan) -> tuple[Total, ...]:
    found = []
    if a.timeline and b.timeline:
        for name, field in (
            ("step", "seconds"),
            ("compute", "compute_seconds"),
            ("communication", "communication_seconds"),
            ("exposed", "exposed_seconds"),
            ("bound", "bound_seconds"),
        ):
            found.append(Total(name, "s", getattr(a.timeline, field), getattr(b.timeline, field)))
        found.append(Total("peak", "B", a.timeline.peak_bytes, b.timeline.peak_bytes))
    kinds = sorted({row.kind for row in (*a.collectives, *b.collectives)})
    found += [Total(f"sent, {kind}", "B", a.sent(kind), b.sent(kind)) for kind in kinds]
    return (*found, Total("sent", "B", a.sent(), b.sent()))


def _residency(a: Plan, b: Plan) -> Iterable[Change]:
    of_a, of_b = ({p.name: p for p in plan.parameters} for plan in (a, b))
    for name in dict.fromkeys([*of_a, *of_b]):
        before = of_a[name].residency if name in of_a else ""
        after = of_b[name].residency if name in of_b else ""
        if before != after:
            note = of_b[name].reason if name in of_b else f"{titles([a, b])[1]} has no such one"
            yield Change("residency", "", name, before, after, note)


Pair = tuple[Collective, Collective]


def _match(a: Plan, b: Plan) -> tuple[list[Pair], list[Collective], list[Collective]]:
    waiting: dict[object, list[Collective]] = defaultdict(list)
    for row in a.collectives:
        waiting[row.graph, row.kind, frozenset(row.parameters)].append(row)
    pairs, only_b = [], []
    for row in b.collectives:
        same = waiting[row.graph, row.kind, frozenset(row.parameters)]
        if same:
            pairs.append((same.pop(0), row))
        else:
            only_b.append(row)
    matched = {id(row) for row, _ in pairs}
    return pairs, [row for row in a.collectives if id(row) not in matched], only_b


def _buckets(
    a: Plan, b: Plan, only_a: list[Collective], only_b: list[Collective]
) -> Iterable[Change]:
    """Collectives that share parameters are one change: merged, split, added or gone."""
    shared: nx.Graph[tuple[object, ...]] = nx.Graph()
    for side, rows in enumerate((only_a, only_b)):
        for index, row in enumerate(rows):
            shared.add_node((side, index))
            shared.add_edges_from(
                ((side, index), (row.graph, row.kind, name)) for name in row.parameters
            )
    for found in nx.connected_components(shared):
        rows_a = [row for index, row in enumerate(only_a) if (0, index) in found]
        rows_b = [row for index, row in enumerate(only_b) if (1, index) in found]
        first = (rows_a or rows_b)[0]
        if rows_a and rows_b:
            note = next((row.reason for row in rows_b if row.reason), "")
        else:
            note = _alone(first, "A", b, "B") if rows_a else _alone(first, "B", a, "A")
        name = f"{first.kind} {few(first.parameters)}"
        yield Change("bucket", first.graph, name, _in(rows_a), _in(rows_b), note)


def _alone(row: Collective, here: str, other: Plan, there: str) -> str:
    """A gather is only in one plan because the other keeps what it gathers."""
    kept = set(row.parameters) <= other.kept()
    return f"only in {here}" + (f": {there} keeps them" if kept else "")


def _in(rows: list[Collective]) -> str:
    if not rows:
        return ""
    count = sum(len(row.parameters) for row in rows)
    size, keys = amount(sum(row.bytes for row in rows)), few([row.key for row in rows])
    return f"{count} parameter{'s' * (count > 1)} in {len(rows)} ({keys}), {size}"


def _moves(a: Plan, b: Plan, pairs: list[Pair]) -> Iterable[Change]:
    places = {graph.direction: positions(graph) for graph in (*b.graphs, *a.graphs)}
    for old, new in pairs:
        late = [ms(exposed(plan, row)) for plan, row in ((a, old), (b, new))]
        cost = f"exposed {late[0]} -> {late[1]} ms" if late[0] != late[1] else ""
        for field in _FIELDS:
            before, after = getattr(old, field), getattr(new, field)
            if before == after:
                continue
            note = ""
            if field in ("issue", "wait", "release"):
                note = _distance(places.get(new.graph, {}), field, before, after)
                before, after = (_place(field, value) for value in (before, after))
            elif field in ("bytes", "sent"):
                before, after = amount(before), amount(after)
            note = "; ".join(filter(None, (note, cost)))
            yield Change(field, new.graph, f"{new.kind} {few(new.parameters)}", before, after, note)
            cost = ""  # once a collective


def _place(field: str, operation: str) -> str:
    if field == "release":
        return operation or "not released"
    return operation or "the graph's end"


def _distance(places: dict[str, int], field: str, before: str, after: str) -> str:
    if before not in places or after not in places:
        return ""
    if field == "release" and not (before and after):
        return ""
    moved = places[after] - places[before]
    return f"{abs(moved)} op{'s' * (abs(moved) != 1)} {'later' if moved > 0 else 'earlier'}"
