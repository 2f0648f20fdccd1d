"""prefetch: gathers are issued `depth` buckets ahead of their use, reductions awaited as late.

    wait(bucket 0)                          start(bucket 0)
    use(bucket 0)                           ...
    start(bucket 1)             depth 1     wait(bucket 0)
    wait(bucket 1)                ->        start(bucket 1)
    use(bucket 1)                           use(bucket 0)
                                            wait(bucket 1)

A gather is issued right behind the wait of the bucket `depth` before it, so that at most
depth + 1 buckets are alive where each is used in turn. A reduction is finished right before the
one `depth` behind it is issued, so that at most depth + 1 buckets of gradients are alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.dialect import (
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    GATHER_START,
    REDUCE_FINISH,
    REDUCE_START,
    WAIT,
)
from zcompile.passes.graph import calls, first_user, item_users


@dataclass(frozen=True)
class Prefetch:
    """depth: buckets; 0 issues and awaits at the use."""

    depth: int = 1
    name: ClassVar[str] = "prefetch"
    after: ClassVar[tuple[str, ...]] = ("bucket",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.depth > 0:
            self._advance_gathers(gm.graph)
            self._delay_reductions(gm.graph, REDUCE_START, REDUCE_FINISH)
            self._delay_reductions(gm.graph, ALL_REDUCE_START, ALL_REDUCE_FINISH)
        gm.recompile()
        return gm

    def _advance_gathers(self, graph: fx.Graph) -> None:
        starts = calls(graph, GATHER_START)
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        for index, start in enumerate(starts):
            behind = [*start.all_input_nodes]
            if index == 0:
                behind += inputs[-1:]
            else:
                # In order of issue, and no earlier than the bucket `depth` before it is there.
                behind += _issue(starts[index - 1])
                behind.append(wait_of(starts[max(index - self.depth, 0)]))
            ready = max(behind, default=start)
            if ready < start:
                for node in reversed(_issue(start)):
                    ready.append(node)

    def _delay_reductions(self, graph: fx.Graph, issue: object, finish: object) -> None:
        starts, finishes = calls(graph, issue), calls(graph, finish)
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        for index, node in enumerate(finishes):
            later = index + self.depth
            target = starts[later] if later < len(starts) else output
            moved = [node, *item_users(node)]
            target = min([target, *(first_user(n) for n in moved[1:] if n.users)])
            if target > moved[-1]:
                for each in moved:
                    target.prepend(each)


def wait_of(start: fx.Node) -> fx.Node:
    """The node that awaits a gather."""
    return next(u for item in item_users(start) for u in item.users if u.target is WAIT)


def _issue(start: fx.Node) -> list[fx.Node]:
    return [start, *item_users(start)]
