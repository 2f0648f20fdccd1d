"""What is planned: the operations of one step in their order, and what they need of other ranks.

A Step is read off graphs once (extract.py), for the leanest residency: every parameter is gathered
for forward and again for backward. It says nothing of time: costs.py prices it.

Positions are indices into `ops`; a collective "at i" stands right before ops[i]; len(ops) is the
end. Forward's operations come first, backward's follow; `ends[g]` is the index behind graph g.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One operation. flops: of matrix products and convolutions; bytes: read and written memory
    (0 for a view, or where it is fused into another). dtype: of its result, as in "bfloat16".
    workspace: bytes that each thread takes while it runs."""

    name: str
    flops: float
    bytes: float
    dtype: str
    workspace: int = 0


@dataclass(frozen=True)
class Gather:
    """A parameter that one graph reads whole. first, last: its first and last reading operation;
    last == ends[graph] where it leaves the graph. ready: where its shard exists. bytes: whole, in
    the gathered dtype; sent: by each rank; cast: the shard at rest has another dtype."""

    parameter: str
    graph: int
    first: int
    last: int
    ready: int
    bytes: int
    sent: int
    dtype: str
    cast: bool = False


@dataclass(frozen=True)
class Reduction:
    """A gradient that is averaged over the ranks. kind: reduce-scatter or all-reduce. ready: the
    first position at which the whole gradient exists; needed: where its mean is first read, or
    the graph's end. bytes: on the wire; grad_bytes: the whole gradient as it was computed;
    result_bytes: this rank's part of the mean, which lives on; in_place: where it was received.
    update_bytes: read and written by the optimizer's update that consumes the mean right behind its
    wait; 0: none does. joined: the operation that computes it straight into the flat buffer of its
    bucket, which is there from the first such one on; None: it has memory of its own.
    mergeable: gradients of one class may travel in one bucket."""

    parameter: str
    graph: int
    kind: str
    ready: int
    needed: int
    bytes: int
    sent: int
    dtype: str
    grad_bytes: int
    result_bytes: int
    mergeable: str = ""
    in_place: bool = False
    update_bytes: int = 0
    joined: int | None = None


@dataclass(frozen=True)
class Owned:
    """A parameter at rest: whole shape, bytes whole as gathered, and what this rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    shard_bytes: int
    sharded: bool


@dataclass(frozen=True)
class Step:
    """live[category]: bytes alive on each slot, without what collectives add (gathered parameters,
    whole gradients behind their making, buffers, reduced gradients). Slot 2p lies in front of
    ops[p], slot 2p + 1 is ops[p] while it runs; 2 * len(ops) + 1 slots.
    native: the backend's own collectives carry them, in flat padded buffers."""

    world: int
    native: bool
    directions: tuple[str, ...]
    ends: tuple[int, ...]
    ops: tuple[Op, ...]
    gathers: tuple[Gather, ...]
    reductions: tuple[Reduction, ...]
    parameters: tuple[Owned, ...]
    live: Mapping[str, tuple[int, ...]]
    fingerprint: str = ""

    def graph_of(self, position: int) -> int:
        return next(
            g for g, end in enumerate(self.ends) if position < end or g == len(self.ends) - 1
        )

    def start(self, graph: int) -> int:
        return self.ends[graph - 1] if graph else 0

    def anchor(self, graph: int, position: int) -> str:
        """The name by which a plan refers to a position."""
        return self.ops[position].name if position < self.ends[graph] else ""
