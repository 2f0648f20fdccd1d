"""update: hands a reduced gradient to the optimizer where it is complete, in place of returning it.

    f = zero.reduce_finish(...)     ->   f = zero.reduce_finish(...)
    d = f[0]                             d = f[0]
    ...                                  e = empty (0, *rest)
    return d                             zero.update_([d], [shard], [e], [name], step)
                                         ...
                                         return e

An update writes the shard, so it comes behind everything that reads it. On this rank those are
operations of the graph. On the others they are the gathers of the parameter: all ranks run one
order, so whoever issued a reduction has passed every wait in front of it, and a reduction that is
complete here was issued everywhere. A gradient for which no such place is found is returned as
before.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zcompile.dialect import (
    ALL_REDUCE_FINISH,
    GATHER_START,
    REDUCE_FINISH,
    REPLICATE,
    UPDATE,
    WAIT,
)
from zcompile.passes.graph import (
    add,
    aliases,
    calls,
    inline,
    item_users,
    returned_as,
    trivial_source,
)


@dataclass(frozen=True)
class Update:
    """step: see zcompile/updates.py; parameters: those that it updates, by name."""

    step: str
    parameters: frozenset[str]
    world: int
    name: ClassVar[str] = "update"
    after: ClassVar[tuple[str, ...]] = ("place",)

    def __repr__(self) -> str:
        return f"Update({self.step}, {len(self.parameters)} parameters)"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = gm.graph
        finishes = calls(graph, REDUCE_FINISH, ALL_REDUCE_FINISH)
        found = [each for finish in finishes for each in self._gradients(finish)]
        reads = _Reads(graph, self.world)
        places: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
        for name, grad in found:
            behind = max((grad, *reads.local.get(name, ())))
            wait = reads.waits.get(name)
            for finish in finishes:
                if finish < grad.args[0] or (wait is not None and _start(finish) < wait):
                    continue
                last = max((finish, *finish.users, behind))
                places.setdefault(last, []).append((name, grad))
                break
        for place, members in places.items():
            self._insert(graph, place, members, reads)
        gm.recompile()
        return gm

    def _gradients(self, finish: fx.Node) -> Iterator[tuple[str, fx.Node]]:
        """Those of one reduction that nothing but the caller reads."""
        names = _start(finish).meta["parameters"]
        for item in item_users(finish):
            if names[item.args[1]] in self.parameters and returned_as(item) is not None:
                yield names[item.args[1]], item

    def _insert(
        self, graph: fx.Graph, place: fx.Node, members: list[tuple[str, fx.Node]], reads: _Reads
    ) -> None:
        names, grads = [name for name, _ in members], [grad for _, grad in members]
        shards = [reads.shards[name] for name in names if name in reads.shards]
        leaves = [returned_as(grad) for grad in grads]
        with graph.inserting_before(place.next):
            left = inline(graph, lambda *g: [_empty(t) for t in g], grads)
            add(graph, UPDATE, (grads, shards, left, names, self.step), None)
        for grad, leaf, empty in zip(grads, leaves, left, strict=True):
            assert leaf is not None
            graph.output_node().replace_input_with(leaf, empty)
            while leaf is not grad:
                view, leaf = leaf, leaf.args[0]
                assert isinstance(leaf, fx.Node)
                graph.erase_node(view)


def _empty(grad: torch.Tensor) -> torch.Tensor:
    """What stands for a gradient that was handed over: autograd takes no None for a DTensor's."""
    return grad.new_empty((0, *grad.shape[1:]))


class _Reads:
    """What reads shards. local: nodes of this graph that read a shard itself; waits: the last wait
    for a parameter that is gathered; shards: the graph's inputs. All by parameter."""

    def __init__(self, graph: fx.Graph, world: int) -> None:
        self.local: dict[str, list[fx.Node]] = {}
        self.waits: dict[str, fx.Node] = {}
        self.shards: dict[str, fx.Node] = {}
        for node in calls(graph, REPLICATE):
            self._read(str(node.args[-1]), node.args[0], [node])
        for start in calls(graph, GATHER_START):
            for name, shard, item in zip(
                start.meta["parameters"], start.args[0], item_users(start), strict=True
            ):
                # With one rank the shard is the parameter.
                self._read(name, shard, [item] if world == 1 else [])
                if world > 1:
                    (wait,) = {u for u in item.users if u.target is WAIT}
                    self.waits[name] = max(wait, self.waits.get(name, wait))

    def _read(self, name: str, shard: fx.Node, same: Iterable[fx.Node]) -> None:
        """same: values that may share the shard's memory."""
        source = trivial_source(shard)
        if source.op == "placeholder":
            self.shards[name] = source
        uses = self.local.setdefault(name, [])
        uses.append(shard)
        for value in same:
            uses += [u for a in aliases(value) for u in (a, *a.users) if u.op != "output"]


def _start(finish: fx.Node) -> fx.Node:
    """What issued a reduction."""
    if finish.target is ALL_REDUCE_FINISH:
        return finish.args[1]
    received = finish.args[1][0]
    assert received.target is operator.getitem
    return received.args[0]
