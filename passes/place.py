"""place: merges collectives and puts them where a plan says.

    w = zero.unshard(shard, ...)        ->   g = zero.gather_start([shard, ...], rows, ...)
    use(w)                                   w = g[0]
                                             ...                         (other operations)
                                             zero.wait_([w, ...], ...)
                                             use(w)

    d = zero.reduce_grad(grad, ...)     ->   r = zero.reduce_start([grad, ...], ...)
                                             ...
                                             f = zero.reduce_finish([grad, ...], [r[0], ...], ...)
                                             d = f[0]

A row of the plan is one collective. It names its parameters, and the operations in front of which
it is issued and awaited ("" is the end of the graph). A parameter that the graph gathers several
times is taken up in order of use. Whatever the rows are, the graph computes the same, or the pass
refuses: a collective that is missing, that comes before its inputs or behind the need for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from zcompile.dialect import (
    ALL_REDUCE_FINISH,
    ALL_REDUCE_GRAD,
    ALL_REDUCE_START,
    GATHER_START,
    REDUCE_FINISH,
    REDUCE_GRAD,
    REDUCE_START,
    UNSHARD,
    WAIT,
    received_like,
)
from zcompile.errors import PlanError
from zcompile.passes.extract import operations
from zcompile.passes.graph import add, calls, first_user, items, trivial_source
from zcompile.schedule.plan import Collective

_TARGETS = {"all-gather": UNSHARD, "reduce-scatter": REDUCE_GRAD, "all-reduce": ALL_REDUCE_GRAD}


@dataclass(frozen=True)
class Place:
    """rows: the collectives of this graph, in order of issue."""

    rows: tuple[Collective, ...]
    world: int
    name: ClassVar[str] = "place"
    after: ClassVar[tuple[str, ...]] = ("residency",)

    def __repr__(self) -> str:
        return f"Place({len(self.rows)} collectives, world={self.world})"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Raises PlanError for rows that do not fit the graph; names the row and the remedy."""
        graph = gm.graph
        for node in calls(graph, UNSHARD):
            if not node.users:
                graph.erase_node(node)
        members = self._members(graph)
        anchors = {node.name: node for node in operations(gm)}
        anchors[""] = graph.find_nodes(op="output")[0]
        places = [
            (_anchor(anchors, row, row.issue, "issue"), _anchor(anchors, row, row.wait, "wait"))
            for row in self.rows
        ]
        for row, bucket, (issue, wait) in zip(self.rows, members, places, strict=True):
            _check(row, bucket, issue, wait)
        started = [
            self._start(graph, row, bucket, issue)
            for row, bucket, (issue, _) in zip(self.rows, members, places, strict=True)
        ]
        for row, bucket, start, (_, wait) in zip(self.rows, members, started, places, strict=True):
            self._finish(graph, row, bucket, start, wait)
        for bucket in members:
            for node in bucket:
                graph.erase_node(node)
        graph.eliminate_dead_code(is_impure_node=_is_impure)
        gm.recompile()
        return gm

    def _members(self, graph: fx.Graph) -> list[list[fx.Node]]:
        """The dialect nodes of each row."""
        found: dict[tuple[Any, str], list[fx.Node]] = {}
        for kind, target in _TARGETS.items():
            order = calls(graph, target)
            if target is UNSHARD:
                order.sort(key=first_user)
            for node in order:
                found.setdefault((kind, str(node.args[-1])), []).append(node)
        members = []
        for row in self.rows:
            bucket = []
            for name in row.parameters:
                waiting = found.get((row.kind, name))
                if not waiting:
                    raise PlanError(
                        f"{row.key} ({row.kind} of {name}): the {row.graph} graph has no such "
                        "collective, or the plan has it more than once"
                    )
                bucket.append(waiting.pop(0))
            members.append(bucket)
        for (kind, name), left in found.items():
            if left:
                raise PlanError(
                    f"the plan has no row for the {kind} of {name}, which the graph needs: add it "
                    "to a row of that kind"
                )
        return members

    def _start(
        self, graph: fx.Graph, row: Collective, bucket: list[fx.Node], issue: fx.Node
    ) -> fx.Node:
        values: Any
        with graph.inserting_before(issue):
            if row.kind == "all-gather":
                shards = [trivial_source(n.args[0]) for n in bucket]
                rows = [n.args[1] for n in bucket]
                dtype, group = bucket[0].args[2], bucket[0].args[4]
                values = [n.meta["val"] for n in bucket]
                start = add(graph, GATHER_START, (shards, rows, dtype, group, row.key), values)
                items(graph, start, values)
            else:
                _, reduce_dtype, group = bucket[0].args[1:4]
                grads = [n.args[0] for n in bucket]
                if row.kind == "reduce-scatter":
                    values = [_received(n, self.world) for n in bucket]
                    start = add(graph, REDUCE_START, (grads, reduce_dtype, group, row.key), values)
                    items(graph, start, values)
                else:
                    results = [n.meta["val"] for n in bucket]
                    size = sum(r.numel() for r in results)
                    values = results[0].new_empty(size, dtype=reduce_dtype)
                    args = (grads, reduce_dtype, group, row.key)
                    start = add(graph, ALL_REDUCE_START, args, values)
        start.meta["parameters"] = list(row.parameters)
        return start

    def _finish(
        self, graph: fx.Graph, row: Collective, bucket: list[fx.Node], start: fx.Node, wait: fx.Node
    ) -> None:
        made: Sequence[fx.Node] = list(start.users)  # the items, in order; none of an all-reduce
        with graph.inserting_before(wait):
            if row.kind == "all-gather":
                shards, _, _, group, _ = start.args
                add(graph, WAIT, (list(made), shards, group, row.key), None)
            else:
                dtype, reduce_dtype, group = bucket[0].args[1:4]
                grads, results = start.args[0], [n.meta["val"] for n in bucket]
                if row.kind == "reduce-scatter":
                    args: Any = (grads, list(made), dtype, reduce_dtype, group, row.key)
                    finish = add(graph, REDUCE_FINISH, args, results)
                else:
                    args = (grads, start, dtype, group, row.key)
                    finish = add(graph, ALL_REDUCE_FINISH, args, results)
                made = items(graph, finish, results)
        for old, new in zip(bucket, made, strict=True):
            old.replace_all_uses_with(new)


def _anchor(anchors: dict[str, fx.Node], row: Collective, name: str, what: str) -> fx.Node:
    if name not in anchors:
        raise PlanError(
            f"{row.key} ({row.graph}): {what}={name!r} is not an operation of the graph. The plan "
            "lists them under graphs; a plan of another model, shape or version has other names"
        )
    return anchors[name]


def _check(row: Collective, bucket: list[fx.Node], issue: fx.Node, wait: fx.Node) -> None:
    """Inputs first, then the issue, then the wait, then the first use."""
    first = _travels_as(bucket[0])
    for node in bucket:
        if _travels_as(node) != first:
            raise PlanError(
                f"{row.key} ({row.graph}): {node.args[-1]} ({_travels_as(node)}) cannot travel "
                f"with {bucket[0].args[-1]} ({first}); give it a row of its own"
            )
    inputs = [n.args[0] for n in bucket]
    if row.kind == "all-gather":
        inputs = [trivial_source(n) for n in inputs]
    late = [n for n in inputs if not n < issue]
    if late:
        raise PlanError(
            f"{row.key} ({row.graph}): issue={row.issue!r} comes before {late[0]}, which it sends; "
            "issue it further down"
        )
    if wait < issue:
        raise PlanError(
            f"{row.key} ({row.graph}): wait={row.wait!r} comes before issue={row.issue!r}"
        )
    for node in bucket:
        if node.users and first_user(node) < wait:
            raise PlanError(
                f"{row.key} ({row.graph}): wait={row.wait!r} comes behind {first_user(node)}, "
                f"which needs {node.args[-1]}; await it further up"
            )


def _travels_as(node: fx.Node) -> str:
    """What collectives of one bucket have in common: dtypes and the group."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is UNSHARD:
        common = (node.args[2], node.args[4])
    else:
        common = (source.meta["val"].dtype, *node.args[1:4])
    return ", ".join(str(each).removeprefix("torch.") for each in common)


def _received(node: fx.Node, world: int) -> Any:
    """What the other ranks send of one gradient: their parts of the rows that this rank owns."""
    grad = node.args[0]
    assert isinstance(grad, fx.Node)
    return received_like(grad.meta["val"], node.meta["val"].shape[0], node.args[2], world)


def _is_impure(node: fx.Node) -> bool:
    return node.is_impure() or getattr(node.target, "namespace", "") == "zero"
