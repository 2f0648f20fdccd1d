"""sink: computes large values late, so that fewer are alive at once.

    dw = x.t() @ g                      dx = g @ w              (w is not needed any more)
    zero.reduce_grad(dw)        ->      dw = x.t() @ g
    dx = g @ w                          zero.reduce_grad(dw)

    big = a @ b                         ...
    ...                         ->      big = a @ b             (where a and b are smaller than big)
    use(big)                            use(big)

    mean = zero.reduce_grad(dw)         mean = zero.reduce_grad(dw)
    grad = mean.view(4, 8)      ->      ...
    ...                                 grad = mean.view(4, 8)
    return grad                         return grad

The first: a parameter's gradient behind the products that pass the gradient on, as one of them is
the last to read the parameter itself. The second: whatever is larger than the inputs that have to
be kept for it, right in front of its first use; the first of a tied weight's two gradients, say.
The third: what only names a mean that is returned, which would be awaited for it. A product that is
added to something comes to its sum, where Inductor computes both as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zcompile._torch import OpOverload
from zcompile.dialect import ALL_REDUCE_GRAD, REDUCE_GRAD, REPLICATE, UNSHARD
from zcompile.passes.graph import aliases, calls, is_view, returned_as, size_of
from zcompile.passes.work import flops

SMALLEST_BYTES = 2**20


@dataclass(frozen=True)
class Sink:
    name: ClassVar[str] = "sink"
    after: ClassVar[tuple[str, ...]] = ("residency",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in reversed(list(gm.graph.nodes)):
            if _becomes_addmm(node):
                next(iter(node.users)).prepend(node)
            elif _moves(node):
                _to_first_use(node)
        _behind_products(gm.graph)
        _views_of_means(gm.graph)
        gm.recompile()
        return gm


def _moves(node: fx.Node) -> bool:
    """Whether a node is large, gives the same wherever it stands, and has memory of its own."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target.namespace == "zero" or target._schema.is_mutable or node.is_impure():
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or size_of(node) < SMALLEST_BYTES:
        return False
    single = isinstance(node.meta.get("val"), torch.Tensor)
    return single and not any(is_view(node, n) for n in node.all_input_nodes)


def _becomes_addmm(node: fx.Node) -> bool:
    """Whether Inductor makes one operation of a product and the sum that alone reads it. It stands
    where the sum does, and what the product reads is kept until then: a plan has to know."""
    if node.target is not torch.ops.aten.mm.default or len(node.users) != 1:
        return False
    (user,) = node.users
    return user.target is torch.ops.aten.add.Tensor and len(user.all_input_nodes) == 2


def _to_first_use(node: fx.Node) -> None:
    first = min(_readers(node), default=None)
    if first is None or first.op == "output":
        return
    kept = 0
    for root in {_root(n) for n in node.all_input_nodes}:
        if root.target in (UNSHARD, REPLICATE):
            return  # a parameter would stay gathered for it
        if all(use < first for use in _readers(root) if use is not node):
            kept += size_of(root)
    if kept < size_of(node):
        views = [n for n in aliases(node) if n is not node]
        first = min([first, *(v for v in views)])
        first.prepend(node)


def _behind_products(graph: fx.Graph) -> None:
    reductions = calls(graph, REDUCE_GRAD, ALL_REDUCE_GRAD)
    made = {_root(n.args[0]): n for n in reductions if isinstance(n.args[0], fx.Node)}
    for product, reduction in made.items():
        if not _moves(product) or not flops(product):
            continue
        chain = sorted(n for n in aliases(product) if n <= reduction)
        if any(u is not reduction and u not in chain for n in chain for u in n.users):
            continue
        roots = [_root(n) for n in product.all_input_nodes]
        passing = [
            use
            for root in roots
            for use in _readers(root)
            if use > product and use not in made and flops(use)
        ]
        if not passing:
            continue
        place = max(passing)
        for node in (*chain, reduction):
            if node < place:
                place.append(node)
                place = node


def _views_of_means(graph: fx.Graph) -> None:
    (output,) = graph.find_nodes(op="output")
    for mean in calls(graph, REDUCE_GRAD, ALL_REDUCE_GRAD):
        if returned_as(mean) is not None:
            while (user := next(iter(mean.users))) is not output:
                output.prepend(user)
                mean = user


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """What reads a value or a view of it; views themselves read nothing."""
    same = aliases(node)
    return [u for n in same for u in n.users if u not in same]


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function":
        source = next((n for n in node.all_input_nodes if is_view(node, n)), None)
        if source is None:
            break
        node = source
    return node
