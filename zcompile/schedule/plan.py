"""A plan is read off a scheduled graph: one row per collective, over node names.

It holds nothing that differs between ranks, so that ranks can compare it.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from zcompile.collectives import all_reduce_bytes, wire_dtype
from zcompile.dialect import (
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    GATHER_START,
    REDUCE_FINISH,
    REDUCE_START,
    RELEASE,
    WAIT,
)
from zcompile.layout import chunk_rows

VERSION = 1


@dataclass(frozen=True)
class Collective:
    """One row. kind: all-gather, reduce-scatter or all-reduce. `bytes` is of the whole values on
    the wire, `sent` what each rank sends of them, padding included. issue, wait and release are
    positions in the graph, counted in nodes; -1 where there is none (kept for backward, or not a
    gather). `awaits` names the node whose need the wait serves."""

    key: str
    kind: str
    parameters: tuple[str, ...]
    dtype: str
    bytes: int
    sent: int
    primitive: str
    issue: int
    wait: int
    release: int
    awaits: str

    def line(self) -> str:
        """The row as ranks compare it: what is sent, not where in a rank's own graph."""
        return f"{self.kind} {list(self.parameters)} {self.dtype} {self.bytes} B {self.primitive}"


@dataclass(frozen=True)
class Plan:
    """The collectives of one graph in their order of issue. direction: forward, backward or
    inference. nodes: length of the graph."""

    graph: str
    direction: str
    world: int
    nodes: int
    collectives: tuple[Collective, ...]

    def lines(self) -> list[str]:
        return [f"{self.direction} graph", *(row.line() for row in self.collectives)]

    def sent(self, kind: str) -> int:
        return sum(row.sent for row in self.collectives if row.kind == kind)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError for another version of the schema."""
        raw = json.loads(text)
        if raw.pop("version", None) != VERSION:
            raise ValueError(f"this plan was not written by schema version {VERSION}")
        rows = (
            Collective(**{**r, "parameters": tuple(r["parameters"])}) for r in raw["collectives"]
        )
        return Plan(**{**raw, "collectives": tuple(rows)})

    def to_text(self) -> str:
        """A table: one row per collective."""
        head = ("#", "collective", "MB", "sent MB", "dtype", "by", "issue", "wait", "release", "of")
        table = [head]
        for index, row in enumerate(self.collectives):
            more = f" +{len(row.parameters) - 1}" if len(row.parameters) > 1 else ""
            table.append(
                (
                    str(index), row.kind, f"{row.bytes / 1e6:.3f}", f"{row.sent / 1e6:.3f}",
                    row.dtype, row.primitive, str(row.issue), str(row.wait),
                    "-" if row.release < 0 else str(row.release), row.parameters[0] + more,
                )
            )  # fmt: skip
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in table]
        total = sum(row.sent for row in self.collectives) / 1e6
        title = f"{self.graph}: {self.direction}, {self.world} ranks, {self.nodes} nodes, "
        return "\n".join([f"{title}{total:.3f} MB sent per rank", *text]) + "\n"


def plan_of(gm: fx.GraphModule, graph: str, direction: str, world: int, native: bool) -> Plan:
    """Read the plan off a graph between the release and the lower pass."""
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    ends = _ends(gm.graph)
    rows = []
    for node in gm.graph.nodes:
        if node.target not in (GATHER_START, REDUCE_START, ALL_REDUCE_START):
            continue
        key = node.args[4] if node.target is GATHER_START else node.args[3]
        wait, release = ends[key]
        values = _values(node)
        dtype = _dtype(node, native)
        whole = sum(math.prod(v.shape) for v in values) * dtype.itemsize
        rows.append(
            Collective(
                key=key,
                kind=_KINDS[node.target],
                parameters=tuple(node.meta.get("parameters", ())),
                dtype=str(dtype).removeprefix("torch."),
                bytes=whole,
                sent=_sent(node, values, dtype.itemsize, world, native),
                primitive=_primitive(node.target, native) if world > 1 else "none",
                issue=position[node],
                wait=position[wait],
                release=-1 if release is None else position[release],
                awaits=_first_need(node, wait, position),
            )
        )
    return Plan(graph, direction, world, len(position), tuple(rows))


def _first_need(start: fx.Node, wait: fx.Node, position: dict[fx.Node, int]) -> str:
    """The first node that reads what was awaited; "" where nothing does."""
    source = start if start.target is GATHER_START else wait
    items = [u for u in source.users if u.target is operator.getitem]
    uses = {u for item in items for u in item.users if u.target not in (WAIT, RELEASE)}
    return min(uses, key=position.__getitem__).name if uses else ""


_KINDS = {
    GATHER_START: "all-gather",
    REDUCE_START: "reduce-scatter",
    ALL_REDUCE_START: "all-reduce",
}


def _ends(graph: fx.Graph) -> dict[Any, tuple[fx.Node, fx.Node | None]]:
    waits: dict[Any, fx.Node] = {}
    releases: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is WAIT:
            waits[node.args[3]] = node
        elif node.target is REDUCE_FINISH:
            waits[node.args[5]] = node
        elif node.target is ALL_REDUCE_FINISH:
            waits[node.args[4]] = node
        elif node.target is RELEASE:
            releases[node.args[1]] = node
    return {key: (wait, releases.get(key)) for key, wait in waits.items()}


def _values(node: fx.Node) -> list[Any]:
    """Whole values: gathered parameters, or gradients before they are reduced."""
    if node.target is GATHER_START:
        return list(node.meta["val"])
    return [grad.meta["val"] for grad in node.args[0]]


def _dtype(node: fx.Node, native: bool) -> Any:
    if node.target is GATHER_START:
        return node.args[2]
    reduce_dtype = node.args[1]
    if node.target is ALL_REDUCE_START or native:
        return reduce_dtype
    return wire_dtype(_values(node)[0].dtype, reduce_dtype)


def _sent(node: fx.Node, values: list[Any], itemsize: int, world: int, native: bool) -> int:
    """Bytes each rank sends, an average where shards are uneven and travel point to point."""
    if node.target is ALL_REDUCE_START:
        return all_reduce_bytes(sum(math.prod(v.shape) for v in values) * itemsize, world)
    total = 0
    for value in values:
        row = math.prod(value.shape[1:]) * itemsize
        rows = chunk_rows(value.shape[0], world) * world if native else value.shape[0]
        total += rows * row * (world - 1)
    return total // world


def _primitive(target: Any, native: bool) -> str:
    if target is ALL_REDUCE_START:
        return "all_reduce"
    if not native:
        return "p2p"
    return "all_gather_into_tensor" if target is GATHER_START else "reduce_scatter_tensor"
