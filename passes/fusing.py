"""Inductor's rules, as far as they decide what is stored, and what is computed inside of another
operation's loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zcompile._torch import OpOverload
from zcompile.dialect import ALL_REDUCE_GRAD, REDUCE_GRAD, REPLICATE, UNSHARD
from zcompile.passes.graph import is_view

_aten = torch.ops.aten

# What is not scheduled yet.
COLLECTIVE = (UNSHARD, REPLICATE, REDUCE_GRAD, ALL_REDUCE_GRAD)

# Operations, besides those tagged pointwise, that Inductor computes inside of another's loop.
_FUSED = {
    f"aten::{name}"
    for name in (
        "sum mean amax amin var_mean var prod any all argmax argmin embedding gather "
        "index full full_like zeros ones empty arange scalar_tensor constant_pad_nd cat "
        "repeat index_select slice_scatter select_scatter _to_copy clone _softmax "
        "_log_softmax native_layer_norm native_dropout _softmax_backward_data "
        "_log_softmax_backward_data nll_loss_forward nll_loss_backward "
        "native_layer_norm_backward scatter rand randn bernoulli"
    ).split()
} | {
    f"prims::{name}"
    for name in (
        "convert_element_type iota broadcast_in_dim inductor_random inductor_seeds "
        "inductor_lookup_seed"
    ).split()
}


@dataclass(frozen=True)
class Fusing:
    """cpu: whether it compiles for a CPU."""

    cpu: bool

    def kept_in_memory(self, gm: fx.GraphModule) -> set[fx.Node]:
        """The operations whose results are kept in memory: what anything but a fused operation
        makes or reads, directly or through views."""
        kept: set[fx.Node] = set()
        wanted: set[fx.Node] = set()  # read by something that needs memory
        for node in reversed(list(gm.graph.nodes)):
            loop = self.is_fused(node)
            joins = node.target is _aten.cat.default  # what it reads may be computed in place
            view = source_of_view(node) is not None
            if node.op == "call_function" and not view and (not loop or node in wanted):
                kept.add(node)
            needs = node.op == "output" or node.target in COLLECTIVE or not (loop or view or joins)
            for source in node.all_input_nodes:
                if needs or (view and node in wanted):
                    wanted.add(source)
        return kept

    def is_fused(self, node: fx.Node) -> bool:
        target = node.target
        if not isinstance(target, OpOverload):
            return False
        if target is _aten.cat.default:
            # On a CPU what is concatenated is always written into memory. Elsewhere what lies in
            # memory is copied there, unless loops are all that reads it.
            loops = all(_is_loop(n) for n in node.all_input_nodes)
            return not self.cpu and (loops or _read_by_loops(node))
        return torch.Tag.pointwise in target.tags or target._schema.name in _FUSED

    def joined(self, grad: fx.Node) -> fx.Node | None:
        """The operation that computes a gradient straight into the buffer in which it travels."""
        source = source_of_view(grad)
        if source is not None:
            return self.joined(source)
        return grad if self.is_fused(grad) else None


def is_reordered(node: fx.Node) -> bool:
    """Whether it is a view that reads memory in another order."""
    source = source_of_view(node)
    return source is not None and (node.target in _REORDERING or is_reordered(source))


_REORDERING = {_aten.permute.default, _aten.transpose.int, _aten.t.default}


def source_of_view(node: fx.Node) -> fx.Node | None:
    """What `node` is a view of."""
    if node.op != "call_function":
        return None
    return next((n for n in node.all_input_nodes if is_view(node, n)), None)


def _read_by_loops(node: fx.Node) -> bool:
    for user in node.users:
        same = user.op == "call_function" and is_view(user, node)
        if not (_read_by_loops(user) if same else _is_loop(user)):
            return False
    return True


def _is_loop(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
