"""bucket: merges collectives of one direction, dtype and group, in the order of use.

    w = zero.unshard(shard, ...)        ->   g = zero.gather_start([shard, ...], rows, ...)
    use(w)                                   w = g[0]
                                             zero.wait_([w, ...], ...)
                                             use(w)

    d = zero.reduce_grad(grad, ...)     ->   r = zero.reduce_start([grad, ...], ...)
                                             f = zero.reduce_finish([grad, ...], [r[0], ...], ...)
                                             d = f[0]

A bucket of gathers is issued and awaited where its first parameter is first used; a bucket of
reductions where its last gradient is there, or before one of its results is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from zcompile.collectives import wire_dtype
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
)
from zcompile.passes.graph import (
    add,
    calls,
    first_user,
    items,
    nbytes,
    trivial_source,
)


@dataclass(frozen=True)
class Bucket:
    """max_bytes: of gathered parameters, or whole gradients; one larger than this is alone."""

    max_bytes: int
    world: int
    name: ClassVar[str] = "bucket"
    after: ClassVar[tuple[str, ...]] = ("residency",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = gm.graph
        for index, bucket in enumerate(self._gathers(graph)):
            _merge_gathers(graph, bucket, f"gather.{index}")
        for index, bucket in enumerate(self._reductions(graph, REDUCE_GRAD)):
            self._merge_reductions(graph, bucket, f"reduce.{index}")
        for index, bucket in enumerate(self._reductions(graph, ALL_REDUCE_GRAD)):
            self._merge_all_reductions(graph, bucket, f"all_reduce.{index}")
        graph.eliminate_dead_code(is_impure_node=_is_impure)
        gm.recompile()
        return gm

    def _gathers(self, graph: fx.Graph) -> list[list[fx.Node]]:
        for node in calls(graph, UNSHARD):
            if not node.users:
                graph.erase_node(node)
        found = sorted(calls(graph, UNSHARD), key=first_user)

        def fits(bucket: Sequence[fx.Node], node: fx.Node) -> bool:
            # Every shard must exist where the bucket's first parameter is used.
            return trivial_source(node.args[0]) < first_user(bucket[0])

        return self._pack(found, lambda n: (n.args[2], n.args[4]), fits)

    def _reductions(self, graph: fx.Graph, target: Any) -> list[list[fx.Node]]:
        def fits(bucket: Sequence[fx.Node], node: fx.Node) -> bool:
            # No result may be used before the bucket's last gradient is there.
            return all(node < first_user(n) for n in bucket if n.users)

        def kind(node: fx.Node) -> Any:
            return (*node.args[1:4], node.args[0].meta["val"].dtype)

        return self._pack(calls(graph, target), kind, fits)

    def _pack(
        self,
        nodes: Iterable[fx.Node],
        kind: Callable[[fx.Node], Any],
        fits: Callable[[Sequence[fx.Node], fx.Node], bool],
    ) -> list[list[fx.Node]]:
        """Cut a sequence into buckets, one open per kind, in order of each bucket's first node."""
        buckets: list[list[fx.Node]] = []
        open_: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            bucket = open_.get(kind(node))
            size = sum(_bytes(n) for n in bucket or ()) + _bytes(node)
            if bucket is None or size > self.max_bytes or not fits(bucket, node):
                bucket = open_[kind(node)] = []
                buckets.append(bucket)
            bucket.append(node)
        return buckets

    def _merge_reductions(self, graph: fx.Graph, bucket: list[fx.Node], key: str) -> None:
        dtype, reduce_dtype, group = bucket[0].args[1:4]
        grads = [n.args[0] for n in bucket]
        buffers = [_received(n, self.world) for n in bucket]
        with graph.inserting_after(max(bucket)):
            start = add(graph, REDUCE_START, (grads, reduce_dtype, group, key), buffers)
        with _after(graph, start):
            received = items(graph, start, buffers)
            results = [n.meta["val"] for n in bucket]
            finish_args = (grads, received, dtype, reduce_dtype, group, key)
            finish = add(graph, REDUCE_FINISH, finish_args, results)
            _take_over(graph, bucket, items(graph, finish, results))
        start.meta["parameters"] = [n.args[-1] for n in bucket]
        _erase(graph, bucket)

    def _merge_all_reductions(self, graph: fx.Graph, bucket: list[fx.Node], key: str) -> None:
        dtype, reduce_dtype, group = bucket[0].args[1:4]
        grads = [n.args[0] for n in bucket]
        results = [n.meta["val"] for n in bucket]
        flat = results[0].new_empty(sum(r.numel() for r in results), dtype=reduce_dtype)
        with graph.inserting_after(max(bucket)):
            start = add(graph, ALL_REDUCE_START, (grads, reduce_dtype, group, key), flat)
        with _after(graph, start):
            finish = add(graph, ALL_REDUCE_FINISH, (grads, start, dtype, group, key), results)
            _take_over(graph, bucket, items(graph, finish, results))
        start.meta["parameters"] = [n.args[-1] for n in bucket]
        _erase(graph, bucket)


def _merge_gathers(graph: fx.Graph, bucket: list[fx.Node], key: str) -> None:
    shards = [trivial_source(n.args[0]) for n in bucket]
    rows = [n.args[1] for n in bucket]
    dtype, group = bucket[0].args[2], bucket[0].args[4]
    use = min(first_user(n) for n in bucket)
    fulls = [n.meta["val"] for n in bucket]
    with graph.inserting_before(use):
        start = add(graph, GATHER_START, (shards, rows, dtype, group, key), fulls)
        wholes = items(graph, start, fulls)
        add(graph, WAIT, (wholes, shards, group, key), None)
    start.meta["parameters"] = [n.args[-1] for n in bucket]
    _take_over(graph, bucket, wholes)
    _erase(graph, bucket)


def _received(node: fx.Node, world: int) -> Any:
    """What the other ranks send of one gradient: their parts of the rows that this rank owns."""
    grad, result = node.args[0], node.meta["val"]
    assert isinstance(grad, fx.Node)
    dtype = wire_dtype(grad.meta["val"].dtype, node.args[2])
    return result.new_empty((world - 1, *result.shape), dtype=dtype)


def _after(graph: fx.Graph, node: fx.Node) -> Any:
    """Insert in program order behind `node` (inserting_after would reverse it)."""
    return graph.inserting_before(node.next)


def _take_over(graph: fx.Graph, olds: list[fx.Node], news: list[fx.Node]) -> None:
    for old, new in zip(olds, news, strict=True):
        old.replace_all_uses_with(new)


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in nodes:
        graph.erase_node(node)


def _bytes(node: fx.Node) -> int:
    """Whole bytes of a node's parameter: the gathered one, or the gradient before reduction."""
    source = node if node.target is UNSHARD else node.args[0]
    assert isinstance(source, fx.Node)
    return nbytes(source.meta["val"])


def _is_impure(node: fx.Node) -> bool:
    return node.is_impure() or getattr(node.target, "namespace", "") == "zero"
