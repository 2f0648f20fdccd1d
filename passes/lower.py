"""lower: chooses what carries each collective, and leaves only operations that an engine runs.

| collective | p2p | native |
|---|---|---|
| gather | read or sent straight into the whole parameter | cat, all_gather_into_tensor, views |
| reduce | messages of rows, mean of them and a rank's own | pad, cat, reduce_scatter_tensor, mean |
| all-reduce | one flat all_reduce_ in place | one flat functional all_reduce |

With one rank collectives vanish: a gather is a cast or nothing, and so is a reduction. The
arithmetic (casts, packing, and means but those of messages) becomes plain operations that Inductor
fuses: a mean of messages is one operation, or what fuses of several would hold all of them at once.
This is the first graph that may differ between ranks, by the rows that they own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile import collectives
from zcompile.dialect import (
    ALL_REDUCE,
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    DRAIN,
    GATHER_START,
    MEAN,
    MEAN_IN_PLACE,
    ORDER,
    PUBLISH,
    REDUCE_FINISH,
    REDUCE_START,
    RELEASE,
    REPLICATE,
    UPDATE,
    WAIT,
)
from zcompile.layout import owned_rows
from zcompile.passes.graph import add, calls, fake_order, inline, is_view, item_users, items


@dataclass(frozen=True)
class Lower:
    """native: the backend's own collectives carry them; pg: the process group's name for those.
    copies: shards are also kept in the dtype that they are gathered in (copies.py); forward: this
    graph makes those anew."""

    world: int
    rank: int
    native: bool = False
    pg: str = ""
    copies: bool = False
    forward: bool = True
    name: ClassVar[str] = "lower"
    after: ClassVar[tuple[str, ...]] = ("place", "update", "release")

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = gm.graph
        for node in calls(graph, RELEASE):
            graph.erase_node(node)
        for node in calls(graph, REPLICATE):
            _replace(graph, node, [node], [self._cast(graph, node, node.args[0], node.args[1])])
        if self.world == 1:
            self._vanish(graph)
        elif self.native:
            self._to_native(graph)
        else:
            self._to_p2p(graph)
        graph.eliminate_dead_code()
        gm.recompile()
        return gm

    # One rank

    def _vanish(self, graph: fx.Graph) -> None:
        for start in calls(graph, GATHER_START):
            shards, dtype = start.args[0], start.args[2]
            wholes = item_users(start)
            news = [self._cast(graph, start, s, dtype) for s in shards]
            for wait in {u for w in wholes for u in w.users if u.target is WAIT}:
                graph.erase_node(wait)
            _replace(graph, start, wholes, news)
        for finish in calls(graph, REDUCE_FINISH, ALL_REDUCE_FINISH):
            grads, dtype = finish.args[0], finish.args[2]
            results = item_users(finish)
            alone = [grads.count(g) == 1 for g in grads]
            news = [
                self._own(graph, finish, g, dtype, one) for g, one in zip(grads, alone, strict=True)
            ]
            _replace(graph, finish, results, news)
        for start in calls(graph, REDUCE_START, ALL_REDUCE_START):
            for item in item_users(start):
                graph.erase_node(item)
            graph.erase_node(start)

    @staticmethod
    def _cast(graph: fx.Graph, before: fx.Node, source: Any, dtype: Any) -> fx.Node:
        if source.meta["val"].dtype == dtype:
            return source
        with graph.inserting_before(before):
            return inline(graph, lambda t: t.to(dtype), [source])[0]

    def _own(
        self, graph: fx.Graph, before: fx.Node, grad: fx.Node, dtype: Any, alone: bool
    ) -> fx.Node:
        """A gradient that nothing else holds, since an optimizer or a clip will write into it."""
        # Its users are the start and the finish of its reduction. An item of a tuple is a value of
        # its own.
        alone = alone and len(grad.users) <= 2 and grad.op != "placeholder"
        view = grad.target is not operator.getitem and any(
            is_view(grad, n) for n in grad.all_input_nodes
        )
        if grad.meta["val"].dtype == dtype and (view or not alone):
            with graph.inserting_before(before):
                copy = lambda t: t.clone(memory_format=torch.contiguous_format)
                return inline(graph, copy, [grad])[0]
        return self._cast(graph, before, grad, dtype)

    # Messages between ranks

    def _to_p2p(self, graph: fx.Graph) -> None:
        starts = calls(graph, GATHER_START, REDUCE_START, ALL_REDUCE_START)
        if not starts:
            return
        with graph.inserting_before(_first_body_node(graph)):
            order = add(graph, ORDER, (), fake_order(graph))
            self._publish(graph, order)
        for node in calls(
            graph, GATHER_START, WAIT, REDUCE_START, REDUCE_FINISH, ALL_REDUCE_START,
            ALL_REDUCE_FINISH, UPDATE,
        ):  # fmt: skip
            if node.target in (GATHER_START, WAIT, UPDATE):
                node.args = (*node.args, order)
            elif node.target is REDUCE_START:
                self._p2p_reduce_start(graph, node, order)
            elif node.target is REDUCE_FINISH:
                self._p2p_reduce_finish(graph, node, order)
            elif node.target is ALL_REDUCE_START:
                self._p2p_all_reduce_start(graph, node, order)
            else:
                self._all_reduce_finish(graph, node, order)

    def _publish(self, graph: fx.Graph, order: fx.Node) -> None:
        """Parameters do not change while a graph runs: whoever reads them need not wait."""
        alike: dict[tuple[Any, str], list[fx.Node]] = {}
        for start in calls(graph, GATHER_START):
            shards, _, dtype, group = start.args[:4]
            as_it_lies = lambda s, d=dtype: self.copies or s.meta["val"].dtype == d
            if all(s.op == "placeholder" and as_it_lies(s) for s in shards):
                alike.setdefault((dtype, group), []).append(start)
        for (dtype, group), starts in alike.items():
            shards = [shard for start in starts for shard in start.args[0]]
            counts, keys = [len(s.args[0]) for s in starts], [s.args[4] for s in starts]
            add(graph, PUBLISH, (shards, counts, keys, dtype, group, self.forward, order), None)
        for group in dict.fromkeys(group for _, group in alike):
            with graph.inserting_before(graph.output_node()):
                add(graph, DRAIN, (group, order), None)

    def _p2p_reduce_start(self, graph: fx.Graph, node: fx.Node, order: fx.Node) -> None:
        grads, reduce_dtype, group, key = node.args
        sent = []
        with graph.inserting_before(node):
            for grad in grads:
                have = grad.meta["val"].dtype
                sent.append(
                    self._cast(graph, node, grad, collectives.wire_dtype(have, reduce_dtype))
                )
        node.args = (sent, reduce_dtype, group, key, order)

    def _p2p_reduce_finish(self, graph: fx.Graph, node: fx.Node, order: fx.Node) -> None:
        _, received, dtype, reduce_dtype, group, key = node.args
        sent = received[0].args[0].args[0]
        results = item_users(node)
        wire = received[0].meta["val"].dtype
        with graph.inserting_before(node):
            add(graph, WAIT, (received, sent, group, key, order), None)
            if collectives.mean_in_place(self.world, wire, reduce_dtype, dtype):
                add(graph, MEAN_IN_PLACE, (received, sent, group), None)
                news = [inline(graph, lambda parts: parts[0], [r])[0] for r in received]
            else:
                means = node.meta["val"]
                mean = add(graph, MEAN, (sent, received, dtype, reduce_dtype, group), means)
                news = items(graph, mean, means)
        _replace(graph, node, results, news)

    def _p2p_all_reduce_start(self, graph: fx.Graph, node: fx.Node, order: fx.Node) -> None:
        grads, reduce_dtype, group, key = node.args
        with graph.inserting_before(node):
            (flat,) = inline(
                graph,
                lambda *g: collectives.flatten(g, reduce_dtype),
                list(grads),
            )
            add(graph, ALL_REDUCE, (flat, group, key, order), None)
        node.replace_all_uses_with(flat)
        graph.erase_node(node)

    def _all_reduce_finish(
        self, graph: fx.Graph, node: fx.Node, order: fx.Node | None = None
    ) -> None:
        grads, flat, dtype, group, key = node.args
        shapes = [tuple(g.meta["val"].shape) for g in grads]
        results = item_users(node)
        with graph.inserting_before(node):
            if order is None:
                (flat,) = inline(graph, torch.ops._c10d_functional.wait_tensor, [flat])
            else:
                add(graph, WAIT, ([flat], [], group, key, order), None)
            news = inline(
                graph,
                lambda f: collectives.all_reduced(f, shapes, dtype, self.world),
                [flat],
            )
        _replace(graph, node, results, news)

    # The backend's own collectives

    def _to_native(self, graph: fx.Graph) -> None:
        for start in calls(graph, GATHER_START):
            self._native_gather(graph, start)
        for start in calls(graph, REDUCE_START):
            self._native_reduce(graph, start)
        for start in calls(graph, ALL_REDUCE_START):
            grads, reduce_dtype = start.args[0], start.args[1]
            with graph.inserting_before(start):
                (flat,) = inline(
                    graph,
                    lambda *g, d=reduce_dtype: collectives.native_all_reduce(g, d, self.pg),
                    list(grads),
                )
            start.replace_all_uses_with(flat)
            graph.erase_node(start)
        for finish in calls(graph, ALL_REDUCE_FINISH):
            self._all_reduce_finish(graph, finish)

    def _native_gather(self, graph: fx.Graph, start: fx.Node) -> None:
        shards, _, dtype = start.args[:3]
        wholes = item_users(start)
        shapes = [tuple(w.meta["val"].shape) for w in wholes]
        (wait,) = {u for w in wholes for u in w.users if u.target is WAIT}
        with graph.inserting_before(start):
            (flat,) = inline(
                graph,
                lambda *s: collectives.native_gather(s, shapes, dtype, self.world, self.pg),
                list(shards),
            )
        with graph.inserting_before(wait):
            cut = lambda f: collectives.native_gathered(f, shapes, self.world)
            news = inline(graph, cut, [flat])
        graph.erase_node(wait)
        _replace(graph, start, wholes, news)

    def _native_reduce(self, graph: fx.Graph, start: fx.Node) -> None:
        grads, reduce_dtype = start.args[0], start.args[1]
        received = item_users(start)
        (finish,) = {u for r in received for u in r.users if u.target is REDUCE_FINISH}
        dtype, results = finish.args[2], item_users(finish)
        shapes = [tuple(g.meta["val"].shape) for g in grads]
        owned = []
        for shape in shapes:
            first, last = owned_rows(shape[0], self.world, self.rank)
            owned.append(last - first)
        with graph.inserting_before(start):
            (flat,) = inline(
                graph,
                lambda *g: collectives.native_reduce(g, reduce_dtype, self.world, self.pg),
                list(grads),
            )
        with graph.inserting_before(finish):
            cut = lambda f: collectives.native_reduced(f, shapes, owned, dtype, self.world)
            news = inline(graph, cut, [flat])
        _replace(graph, finish, results, news)
        for item in received:
            graph.erase_node(item)
        graph.erase_node(start)


def _replace(graph: fx.Graph, node: fx.Node, olds: list[fx.Node], news: list[fx.Node]) -> None:
    """Give the users of `olds` (the items of `node`, by index) the nodes `news` instead."""
    if olds == [node]:
        node.replace_all_uses_with(news[0])
    else:
        for old in olds:
            old.replace_all_uses_with(news[old.args[1]])
            graph.erase_node(old)
    graph.erase_node(node)


def _first_body_node(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op != "placeholder")
