"""residency: which gathered parameters backward finds kept, and which it gathers again.

Runs on the joint graph, before it is cut into forward and backward. A tag on the unshard node
decides: MUST_RECOMPUTE gathers again in backward (stage 3), MUST_SAVE keeps (stages 1 and 2).
Whatever is computed from parameters alone (a transpose, a cast) is recomputed with them, or the
cut would keep a copy as large as the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zcompile._torch import OpOverload
from zcompile.dialect import REPLICATE, UNSHARD
from zcompile.passes.graph import calls

# Above any region that torch.utils.checkpoint numbers: the partitioner saves a recomputed node
# whose user is in a higher region.
REGION = 10**9


@dataclass(frozen=True)
class Residency:
    """Parameters that stay gathered from forward to backward: all, or these names (as in
    named_parameters())."""

    keep_all: bool = False
    keep: frozenset[str] = frozenset()
    name: ClassVar[str] = "residency"
    after: ClassVar[tuple[str, ...]] = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        again: set[fx.Node] = set()
        for node in calls(gm.graph, UNSHARD, REPLICATE):
            keep = node.target is UNSHARD and (self.keep_all or node.args[-1] in self.keep)
            if not keep:
                again.add(node)
            _tag(node, CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE)
        for node in gm.graph.nodes:
            if node not in again and _computed_from(node, again):
                again.add(node)
                _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        return gm


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = REGION


def _computed_from(node: fx.Node, sources: set[fx.Node]) -> bool:
    """Whether a node depends on nothing but `sources`, and gives the same when run again."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace == "zero" or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    if node.target._schema.is_mutable:
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(n in sources for n in inputs)
