"""partition: one unshard per parameter and grad mode, however often the model reads it.

Grammar of what Dynamo records for one read of a parameter:

    param: placeholder
    local = param.to_local(grad_placements=...)
    whole = zero.unshard(local, rows, dtype, reduce_dtype, group, name)      | zero.replicate(...)

A parameter that is read twice, a module that is called twice and tied weights give several such
chains from one placeholder. They become one, so that the value is gathered once and autograd sums
the gradients before they are reduced. Reads under no_grad stay apart from reads that need
gradients. A graph that writes into a gathered parameter is refused: the write would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile._torch import HigherOrderOperator, set_grad_enabled
from zcompile.dialect import REPLICATE, UNSHARD
from zcompile.errors import GraphError

# Higher-order operations whose body runs exactly once, in order: checkpointing and wrappers.
RUNS_ONCE = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")

_READS = {UNSHARD, REPLICATE, torch.ops.zero.unshard, torch.ops.zero.replicate}


@dataclass(frozen=True)
class Partition:
    name: ClassVar[str] = "partition"
    after: ClassVar[tuple[str, ...]] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Raises GraphError for a write into a gathered parameter, or a read in a branch."""
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                self._merge(module)
        self._refuse_branches(gm)
        gm.recompile()
        return gm

    def _merge(self, gm: fx.GraphModule) -> None:
        kept: dict[tuple[Any, ...], fx.Node] = {}
        grad_mode = True
        for node in list(gm.graph.nodes):
            if node.target is set_grad_enabled:
                grad_mode = node.args[0]
            if not is_read(node):
                continue
            self._refuse_writes(node)
            key = (_source(node), grad_mode)
            if key not in kept:
                kept[key] = node
                continue
            node.replace_all_uses_with(kept[key])
            gm.graph.erase_node(node)
        for node in reversed(list(gm.graph.nodes)):
            if node.op == "call_method" and node.target == "to_local" and not node.users:
                gm.graph.erase_node(node)

    def _refuse_writes(self, node: fx.Node) -> None:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value._version > 0:
            raise GraphError(
                f"the compiled code writes into parameter {node.args[-1]!r} in place; the write "
                "would go to the gathered copy and be lost. Write outside of the compiled code"
            )

    def _refuse_branches(self, gm: fx.GraphModule) -> None:
        for module in gm.modules():
            if not isinstance(module, fx.GraphModule):
                continue
            for node in module.graph.nodes:
                if not isinstance(node.target, HigherOrderOperator):
                    continue
                if node.target.name() not in RUNS_ONCE and any(map(_reads, _bodies(module, node))):
                    raise BranchError(
                        f"{node.target.name()} reads a sharded parameter inside its body, which "
                        "ranks may run a different number of times. Read it before the branch"
                    )


class BranchError(GraphError):
    """Such a graph can still run operation by operation, where each collective is checked."""


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operation runs."""
    found = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            body = getattr(gm, str(argument.target), None)
            if isinstance(body, fx.GraphModule):
                found.append(body)
    return found


def _reads(body: fx.GraphModule) -> bool:
    inner = (m for m in body.modules() if isinstance(m, fx.GraphModule))
    return any(is_read(node) for module in inner for node in module.graph.nodes)


def is_read(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _READS


def _source(node: fx.Node) -> fx.Node:
    local = node.args[0]
    assert isinstance(local, fx.Node)
    if local.op == "call_method" and local.target == "to_local":
        source = local.args[0]
        assert isinstance(source, fx.Node)
        return source
    return local
