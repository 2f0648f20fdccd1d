"""extract: reads a Step (schedule/step.py) off the graphs of one step, before any is scheduled.

Memory is followed by storage: views share one, an operation that returns several tensors makes
several. A storage lives from the operation that makes it to the last one that reads it or a view of
it; what forward saves lives on into backward. Under a compiler that fuses, a value that only fused
operations read is never stored.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.collectives import all_reduce_bytes, mean_in_place, wire_dtype
from zcompile.dialect import ALL_REDUCE_GRAD, REDUCE_GRAD, REPLICATE, UNSHARD
from zcompile.layout import chunk_rows, largest_shard
from zcompile.passes.fusing import COLLECTIVE, Fusing, is_reordered
from zcompile.passes.graph import hint, is_view, returned_as, size_of, trivial_source
from zcompile.passes.work import flops, workspace
from zcompile.schedule.step import Gather, Op, Owned, Reduction, Step

_REDUCTIONS = (REDUCE_GRAD, ALL_REDUCE_GRAD)
_aten = torch.ops.aten

# A loop that would read more values than this has some of them stored first.
MOST_READS = 8

_FOREVER = 2**62


@dataclass(eq=False)
class _Storage:
    """Bytes, and the slots (see Step) between which they are alive. held: by whoever calls."""

    bytes: int
    first: int
    last: int
    held: bool = False


def operations(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes of an unscheduled graph that a plan may name, in order: all but inputs, output,
    collectives, and the views through which a shard comes to its gather."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and not _is_schedule(n)]


def _is_schedule(node: fx.Node) -> bool:
    return node.target in COLLECTIVE or _is_shard_view(node)


def _is_shard_view(node: fx.Node) -> bool:
    if node.op != "call_function" or trivial_source(node).op != "placeholder":
        return False  # first, as it ends the recursion: only views of inputs go on to their users
    readers = [u for u in node.users if u.op != "output"]
    return bool(readers) and all(
        u.target in (UNSHARD, REPLICATE) or _is_shard_view(u) for u in readers
    )


def extract(
    graphs: Sequence[tuple[str, fx.GraphModule]],
    *,
    world: int,
    native: bool,
    fused: bool,
    cpu: bool = True,
    updates: Mapping[str, int] | None = None,
) -> Step:
    """The step that `graphs` make, in order of execution: (direction, graph) each.

    fused: whether the engine fuses (Inductor), or every operation stores what it computes.
    cpu: whether they run on a CPU, whatever their fake tensors say.
    updates: parameters that the step also updates, and the bytes which that reads and writes.
    """
    reader = _Reader(world, native, Fusing(cpu) if fused else None, cpu, updates or {})
    for direction, gm in graphs:
        reader.read(direction, gm)
    return reader.step()


@dataclass
class _Reader:
    world: int
    native: bool
    fusing: Fusing | None
    cpu: bool
    updates: Mapping[str, int] = field(default_factory=dict)
    directions: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    gathers: list[dict[str, Any]] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    owned: dict[str, Owned] = field(default_factory=dict)
    in_place: list[tuple[_Storage, list[_Storage]]] = field(default_factory=list)
    storages: list[_Storage] = field(default_factory=list)
    # By what a concatenation makes: its position, and what it reads.
    concatenated: dict[_Storage, tuple[int, list[_Storage]]] = field(default_factory=dict)
    # Positions of loops that read a concatenation, and what lives until the operation behind them.
    loops: list[tuple[int, list[_Storage]]] = field(default_factory=list)
    # By the name under which a later graph receives it: a storage or a gather (by index).
    passed_on: dict[str, _Storage | int] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)

    def read(self, direction: str, gm: fx.GraphModule) -> None:
        self.directions.append(direction)
        graph, begin = len(self.directions) - 1, len(self.ops)
        nodes = operations(gm)
        end = begin + len(nodes)
        position = {node: begin + i for i, node in enumerate(nodes)}
        home: dict[fx.Node, Any] = {}  # node -> its _Storage, its gather's index, or None
        stored = self.fusing.kept_in_memory(gm) if self.fusing else None
        results = gm.graph.find_nodes(op="output")[0].all_input_nodes
        local: set[fx.Node] = set()
        at = begin
        for node in gm.graph.nodes:
            if node in position:
                at = position[node] + 1
            if node.op == "placeholder":
                home[node] = self._input(node, begin, end, graph)
            elif node.target is UNSHARD and node.users:
                home[node] = self._gather(node, graph, begin, position)
            elif node.target is REPLICATE:
                self._replicated(node)
                home[node] = None
            elif node.target in _REDUCTIONS:
                home[node] = None
                self._reduction(node, graph, at, position, end, home)
            elif node in position and not local.isdisjoint(node.all_input_nodes):
                # What is made of this rank's own rows has sizes of its own on every rank.
                local.add(node)
                home[node] = None
                self.ops.append(Op(node.name, 0.0, 0.0, ""))
                self.text.append(f"{node.name} {node.target}")
            elif node in position:
                home[node] = self._made(node, position[node], home, stored)
                self.ops.append(self._op(node, home, stored))
                self.text.append(f"{node.name} {node.target} {_shape_text(node)}")
            if node.target is REDUCE_GRAD:
                local.add(node)
            self._touch(node, position, home)
        for node in results:
            where = home.get(node)
            if isinstance(where, _Storage):
                where.last = _FOREVER  # unless a later graph takes it over
            if where is not None:
                self.passed_on[node.name] = where
            if isinstance(where, int):
                self.gathers[where]["last"] = max(self.gathers[where]["last"], end)
        self.ends.append(end)

    def _input(self, node: fx.Node, begin: int, end: int, graph: int) -> Any:
        reads = [u for u in node.users if u.op != "output"]  # forward saves shards for backward
        shard = bool(reads) and all(
            u.target in (UNSHARD, REPLICATE) or _is_shard_view(u) for u in reads
        )
        if node.name in self.passed_on:
            home = self.passed_on[node.name]
            if shard and isinstance(home, _Storage):
                home.bytes = 0  # forward only handed it on, and could not tell
            elif isinstance(home, int):
                self.gathers[home]["last"] = begin
            elif not home.held:
                home.last = 2 * begin  # from here on its readers decide
            return home
        if shard:
            return None  # at rest
        # A batch, a buffer: whoever calls holds it. A gradient that backward is given is its own.
        held, slot = graph == 0, 2 * begin
        storage = _Storage(size_of(node), slot, _FOREVER if held else slot, held)
        self.storages.append(storage)
        return storage

    def _gather(
        self, node: fx.Node, graph: int, begin: int, position: Mapping[fx.Node, int]
    ) -> int:
        value, name = node.meta["val"], str(node.args[-1])
        shard = trivial_source(node.args[0])
        uses = [position[u] for u in node.users if u in position]
        leaves = all(u.op == "output" for u in node.users)
        first = min(uses, default=begin + len(position) if leaves else begin)
        size, local = size_of(node), node.args[0].meta["val"]
        self.gathers.append(
            {
                "parameter": name, "graph": graph, "first": first, "last": first,
                "ready": position.get(shard, begin - 1) + 1, "bytes": size,
                "sent": _sent(value, value.dtype, self.world, self.native),
                "dtype": _name(value.dtype), "cast": local.dtype != value.dtype,
            }
        )  # fmt: skip
        self._own(name, value, local, size, True)
        self.text.append(f"gather {name} {_shape_text(node)}")
        return len(self.gathers) - 1

    def _replicated(self, node: fx.Node) -> None:
        source = node.args[0].meta["val"]
        self._own(str(node.args[-1]), node.meta["val"], source, size_of(node), False)

    def _own(self, name: str, value: Any, local: Any, size: int, sharded: bool) -> None:
        local_bytes = _count(local) * local.dtype.itemsize
        if sharded and self.world > 1:
            # The same on every rank: the largest shard.
            local_bytes = _largest_shard(value, self.world) * local.dtype.itemsize
        shape = tuple(hint(n) for n in value.shape)
        owned = Owned(name, shape, _name(value.dtype), size, local_bytes, sharded)
        self.owned.setdefault(name, owned)

    def _reduction(
        self, node: fx.Node, graph: int, at: int, position: Mapping[fx.Node, int], end: int,
        home: Mapping[fx.Node, Any],
    ) -> None:  # fmt: skip
        grad, dtype, reduce_dtype, _, name = node.args
        assert isinstance(grad, fx.Node)
        value = grad.meta["val"]
        scatter = node.target is REDUCE_GRAD
        wire: Any = reduce_dtype
        if scatter and not self.native:
            wire = wire_dtype(value.dtype, reduce_dtype)
        whole = _count(value) * wire.itemsize
        held = _largest_shard(value, self.world) if scatter else _count(value)
        uses = [position[u] for u in node.users if u in position]
        at = position[grad] + 1 if grad in position else at
        alone = returned_as(node) is not None
        update_bytes = self.updates.get(str(name), 0) if alone else 0
        sent = (
            _sent(value, wire, self.world, self.native)
            if scatter
            else all_reduce_bytes(whole, self.world)
        )
        flat = self.world > 1 and not scatter and not self.native
        source = self.fusing.joined(grad) if self.fusing and flat else None
        if source is not None and isinstance(home.get(source), _Storage):
            home[source].bytes = 0  # it is a part of its bucket's buffer
        self.reductions.append(
            Reduction(
                parameter=str(name), graph=graph,
                kind="reduce-scatter" if scatter else "all-reduce",
                ready=at, needed=min(uses, default=end), bytes=whole, sent=sent, dtype=_name(wire),
                grad_bytes=size_of(grad),
                result_bytes=held * dtype.itemsize,
                mergeable=f"{node.target} {value.dtype} {dtype} {reduce_dtype}",
                in_place=scatter and not self.native
                and mean_in_place(self.world, wire, reduce_dtype, dtype),
                update_bytes=update_bytes,
                joined=position[source] if source is not None else None,
            )
        )  # fmt: skip
        updated = f", {update_bytes} bytes of update" if update_bytes else ""
        self.text.append(f"reduce {name} {_shape_text(grad)}{updated}")

    def _made(
        self, node: fx.Node, at: int, home: Mapping[fx.Node, Any], stored: set[fx.Node] | None
    ) -> Any:
        """Where the value of an operation lives: its own storage, or that which it is a view of."""
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            parts = home.get(source)
            return parts[node.args[1]] if isinstance(parts, dict) else parts
        for source in node.all_input_nodes:
            if source in home and is_view(node, source):
                return home[source]
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            parts = {}
            for index, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    parts[index] = self._store(_count(each) * each.dtype.itemsize, at)
            return parts
        if stored is None:
            return self._store(size_of(node), at)
        reads = frozenset().union(*(_leaves(home.get(n)) for n in node.all_input_nodes))
        moved = frozenset().union(*(_reordered(n, home.get(n)) for n in node.all_input_nodes))
        if node not in stored and len(reads) <= MOST_READS:
            return _Inlined(reads, moved)
        stored.add(node)
        made = self._store(size_of(node), at)
        sources = [r for r in reads if isinstance(r, _Storage)]
        if self.fusing and self.fusing.is_fused(node):
            self.in_place.append((made, [r for r in sources if r not in moved]))
        if node.target is _aten.cat.default:
            self.concatenated[made] = (at, sources)
        return made

    def _store(self, size: int, at: int) -> _Storage:
        """What the operation at a position makes."""
        self.storages.append(_Storage(size, 2 * at + 1, 2 * at + 1))
        return self.storages[-1]

    def _touch(
        self, node: fx.Node, position: Mapping[fx.Node, int], home: Mapping[fx.Node, Any]
    ) -> None:
        """`node` reads its inputs: they are alive until then."""
        if node not in position:
            return
        at = position[node]
        for source in node.all_input_nodes:
            for where in _leaves(home.get(source)):
                if isinstance(where, int):
                    self.gathers[where]["last"] = max(self.gathers[where]["last"], at)
                else:
                    where.last = max(where.last, 2 * at + 1)
                if where in self.concatenated and self.fusing and self.fusing.is_fused(node):
                    self._one_loop(where, at)

    def _one_loop(self, joined: _Storage, at: int) -> None:
        """What a concatenation reads and what the operation at `at` makes of it are alive together,
        if nothing is computed in between: Inductor makes one loop of both, and runs it as late as
        right before the next operation."""
        begin, sources = self.concatenated[joined]
        if not any(map(_computes, self.ops[begin + 1 : at])):
            self.loops.append((at, [joined, *sources]))

    def _op(self, node: fx.Node, home: Mapping[fx.Node, Any], stored: set[fx.Node] | None) -> Op:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        dtype = _name(first.dtype) if isinstance(first, torch.Tensor) else ""
        made = home[node]
        if node.target is operator.getitem or any(
            made is home.get(n) for n in node.all_input_nodes if n in home
        ):
            return Op(node.name, 0.0, 0.0, dtype)
        if stored is not None and node not in stored and not isinstance(made, dict):
            return Op(node.name, 0.0, 0.0, dtype)
        read: dict[Any, int] = {}
        for source in node.all_input_nodes:
            for where in _leaves(home.get(source)):
                whole = where.bytes if isinstance(where, _Storage) else self.gathers[where]["bytes"]
                read[where] = max(read.get(where, 0), min(whole, size_of(source) or whole))
        moved = sum(read.values()) + size_of(node)
        return Op(node.name, flops(node), float(moved), dtype, workspace(node) if self.cpu else 0)

    def _reuse(self) -> None:
        """A loop writes its result over an input of the same size that nothing reads any more."""
        taken: set[_Storage] = set()
        for made, reads in self.in_place:
            for read in sorted(reads, key=lambda r: r.first):
                same = read.bytes == made.bytes and read.last == made.first and not read.held
                if same and read not in taken:
                    taken.add(read)
                    read.last -= 1
                    break

    def step(self) -> Step:
        self._reuse()
        length = len(self.ops)
        for at, alive in self.loops:
            end = next(end for end in self.ends if at < end)
            following = next((p for p in range(at + 1, end) if _computes(self.ops[p])), end)
            for storage in alive:
                storage.last = max(storage.last, 2 * following)
        live = {"activations": _curve(self.storages, length)}
        print_ = hashlib.sha256("\n".join([str(self.world), *self.text]).encode()).hexdigest()
        return Step(
            world=self.world,
            native=self.native,
            directions=tuple(self.directions),
            ends=tuple(self.ends),
            ops=tuple(self.ops),
            gathers=tuple(Gather(**each) for each in self.gathers),
            reductions=tuple(self.reductions),
            parameters=tuple(self.owned.values()),
            live=live,
            fingerprint=print_[:32],
        )


class _Inlined:
    """A value that is never stored; whoever reads it reads `leaves`, some of them in another order
    than their own."""

    def __init__(self, leaves: frozenset[Any], moved: frozenset[Any]) -> None:
        self.leaves, self.moved = leaves, moved


def _leaves(where: Any) -> frozenset[Any]:
    if where is None:
        return frozenset()
    if isinstance(where, _Inlined):
        return where.leaves
    if isinstance(where, dict):
        return frozenset(where.values())
    return frozenset((where,))


def _reordered(node: fx.Node, where: Any) -> frozenset[Any]:
    """What somebody who reads `node`, which lives in `where`, reads in another order."""
    if is_reordered(node):
        return _leaves(where)
    return where.moved if isinstance(where, _Inlined) else frozenset()


def _curve(storages: Sequence[_Storage], length: int) -> tuple[int, ...]:
    """Bytes alive on each slot, see Step."""
    slots = 2 * length + 1
    change = [0] * (slots + 2)
    for s in storages:
        if s.bytes:
            change[s.first] += s.bytes
            change[min(s.last, slots) + 1] -= s.bytes
    return tuple(itertools.accumulate(change[:slots]))


def _computes(op: Op) -> bool:
    return bool(op.bytes or op.flops)


def _count(value: torch.Tensor) -> int:
    return math.prod(hint(n) for n in value.shape)


def _sent(value: torch.Tensor, dtype: Any, world: int, native: bool) -> int:
    """Bytes each rank sends of one parameter, an average where shards are uneven."""
    rows, *rest = (hint(n) for n in value.shape)
    rows = chunk_rows(rows, world) * world if native else rows
    return rows * math.prod(rest) * dtype.itemsize * (world - 1) // world


def _largest_shard(value: torch.Tensor, world: int) -> int:
    """Elements."""
    return largest_shard([hint(n) for n in value.shape], world)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_text(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{[hint(n) for n in value.shape]} {_name(value.dtype)}"
    return ""
