"""Moving rows between ranks: the groups, the point-to-point exchange, and the byte counters.

A shard is sent straight from where it lies to where it is used: no flat buffer, no padding, and
uneven shards cost nothing. On gloo this takes a third of the time of the backend's own all-gather
and reduce-scatter (benchmarks/primitives.py). Ranks of one host need no messages for it: they read
each other's memory (shared.py).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zcompile import buffers, copies
from zcompile.collectives import all_reduce_bytes
from zcompile.control import Control
from zcompile.errors import ZeroError
from zcompile.layout import owned_rows
from zcompile.shared import Link, Transfer


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent since the process began, by what they were for."""

    gather_bytes: int = 0
    reduce_bytes: int = 0
    all_reduce_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.gather_bytes - earlier.gather_bytes,
            self.reduce_bytes - earlier.reduce_bytes,
            self.all_reduce_bytes - earlier.all_reduce_bytes,
        )


@dataclass(frozen=True, eq=False)
class Group:
    """The data-parallel ranks, under the name that stands for them in graphs.

    A group without a process group exists on paper: its collectives move nothing. Graph tests
    and dry runs use it for worlds that do not exist. native: the backend's own collectives carry
    ours, and `pg_name` is how they know the process group. link: the ranks are on one host and
    read each other's memory; `pg` then carries what is left.
    """

    name: str
    rank: int
    world: int
    pg: dist.ProcessGroup | None = None
    native: bool = False
    control: Control | None = None
    pg_name: str = ""
    link: Link | None = None

    def owned(self, rows: int, rank: int | None = None) -> tuple[int, int]:
        return owned_rows(rows, self.world, self.rank if rank is None else rank)

    def peers(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]


class _Work(Protocol):
    def wait(self) -> Any: ...


_groups: dict[str, Group] = {}
_in_flight: dict[tuple[str, str], list[_Work | None]] = {}
_sent = {"gather": 0, "reduce": 0, "all_reduce": 0}


def register(group: Group) -> Group:
    _groups[group.name] = group
    return group


def find(name: str) -> Group:
    """The group of a name that stands in a graph.

    Raises:
        ZeroError: when the graph was made in another process or the group is gone.
    """
    if name not in _groups:
        raise ZeroError(f"no group {name!r} in this process; known: {sorted(_groups) or 'none'}")
    return _groups[name]


def traffic() -> Traffic:
    """Bytes that this rank has sent since the process began."""
    return Traffic(_sent["gather"], _sent["reduce"], _sent["all_reduce"])


def count(kind: str, nbytes: int) -> None:
    """Add to the bytes that this rank has sent. kind: gather, reduce or all_reduce."""
    _sent[kind] += nbytes


def gather_start(
    shards: Sequence[torch.Tensor], rows: Sequence[int], dtype: torch.dtype, group: Group, key: str
) -> list[torch.Tensor]:
    """Issue an all-gather by rows. The results are whole after `wait(group, key)`.

    shards[i]: (owned rows of rows[i], *rest) -> result[i]: (rows[i], *rest) in `dtype`
    """
    fulls = [buffers.empty((n, *s.shape[1:]), s, dtype) for s, n in zip(shards, rows, strict=True)]
    if group.link is not None:
        _in_flight[group.name, key] = [_read_gather(shards, fulls, group, group.link, key)]
        return fulls
    works: list[_Work | None] = []
    for index, (full, shard) in enumerate(zip(fulls, shards, strict=True)):
        first, last = group.owned(full.shape[0])
        tag = _tag(key, index)
        if group.pg is None and group.world > 1:
            full.zero_()
        works += [_receive(full, group, peer, tag) for peer in group.peers()]
        mine = full[first:last]
        mine.copy_(shard)
        works += [_send(mine, group, peer, tag, "gather") for peer in group.peers()]
    _in_flight[group.name, key] = works
    return fulls


def publish(
    shards: Sequence[Sequence[torch.Tensor]],
    keys: Sequence[str],
    dtype: torch.dtype,
    group: Group,
    forward: bool,
) -> None:
    """Let ranks of one host read what gathers under `keys` will want of this one. The shards stay
    as they are until `drain`. forward: copies in `dtype` are made anew."""
    if group.link is not None:
        copy = copies.fresh if forward else copies.last
        for members, key in zip(shards, keys, strict=True):
            parts = [copy(shard, dtype) for shard in members]
            if all(part.is_contiguous() for part in parts):  # otherwise a gather sends a copy
                group.link.publish(key, [part for part in parts if part.numel()])


def drain(group: Group) -> None:
    """Return when the others have read all that was published.

    Raises:
        ZeroError: see wait.
    """
    if group.link is not None:
        with _explained(group):
            group.link.drain()


def reduce_start(grads: Sequence[torch.Tensor], group: Group, key: str) -> list[torch.Tensor]:
    """Issue the exchange of a reduce-scatter: every rank sends each other rank's rows to it.

    grads[i]: (rows, *rest) -> result[i]: (world - 1, owned rows, *rest), the other ranks' parts in
    rank order, whole after `wait(group, key)`. The caller adds its own rows.
    """
    if group.link is not None:
        received, transfer = _read_reduce(grads, group, group.link, key)
        _in_flight[group.name, key] = [transfer]
        return received
    received = []
    works: list[_Work | None] = []
    for index, grad in enumerate(grads):
        grad = grad.contiguous()  # a copy lives until it is sent: each send holds its tensor
        first, last = group.owned(grad.shape[0])
        shape = (group.world - 1, last - first, *grad.shape[1:])
        buffer = buffers.empty(shape, grad, grad.dtype)
        tag = _tag(key, index)
        if group.pg is None:
            buffer.zero_()
        for slot, peer in enumerate(group.peers()):
            if group.pg is not None and buffer[slot].numel():
                works.append(group.pg.recv([buffer[slot]], peer, tag))
        for peer in group.peers():
            low, high = group.owned(grad.shape[0], peer)
            works.append(_send(grad[low:high], group, peer, tag, "reduce"))
        received.append(buffer)
    _in_flight[group.name, key] = works
    return received


def all_reduce_start(flat: torch.Tensor, group: Group, key: str) -> None:
    """Issue an all-reduce (sum) of `flat` in place; complete after `wait(group, key)`."""
    works: list[_Work | None] = []
    if group.pg is not None and flat.numel():
        view = torch.view_as_real(flat) if flat.is_complex() else flat
        works.append(dist.all_reduce(view, group=group.pg, async_op=True))
        count("all_reduce", all_reduce_bytes(flat.nbytes, group.world))
    _in_flight[group.name, key] = works


def everyone(value: Any, pg: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in rank order, on every rank. value: can be pickled."""
    values: list[Any] = [None] * pg.size()
    dist.all_gather_object(values, value, group=pg)
    return values


def broadcast(tensor: torch.Tensor, group: Group) -> None:
    """Rank 0's values on every rank, in place. tensor: contiguous.

    They travel as bytes: a backend's broadcast does not know every dtype.
    """
    if group.pg is not None and tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=group.pg, group_src=0)


def wait(group: Group, key: str) -> None:
    """Complete what was issued under `key`.

    Raises:
        ZeroError: when another rank failed, left or was killed; says which and why.
    """
    for work in _in_flight.pop((group.name, key)):
        if work is None:
            continue
        with _explained(group):
            work.wait()


@contextlib.contextmanager
def _explained(group: Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        for stale in [k for k in _in_flight if k[0] == group.name]:
            del _in_flight[stale]
        if group.control is None:
            raise
        raise group.control.explain(error) from error


def _read_gather(
    shards: Sequence[torch.Tensor],
    fulls: Sequence[torch.Tensor],
    group: Group,
    link: Link,
    key: str,
) -> Transfer:
    """Every rank reads the others' rows. They read ours where they lie, unless they want another
    dtype."""
    peers = group.peers()
    sources, own = [], []
    incoming: dict[int, list[torch.Tensor]] = {peer: [] for peer in peers}
    published = key in link.published
    for full, shard in zip(fulls, shards, strict=True):
        if published:
            shard = copies.last(shard, full.dtype)
        first, last = group.owned(full.shape[0])
        mine = full[first:last]
        same = shard.dtype == full.dtype and shard.is_contiguous()
        if same:
            own.append((mine, shard))
        else:
            mine.copy_(shard)
        if mine.numel():
            sources.append(shard if same else mine)
            count("gather", mine.nbytes * len(peers))
        for peer in peers:
            low, high = group.owned(full.shape[0], peer)
            if low < high and full.numel():
                incoming[peer].append(full[low:high])
    outgoing = {} if published else dict.fromkeys(peers, sources)
    transfer = link.start(key, outgoing, incoming, fulls)
    for mine, shard in own:  # meanwhile the others read
        mine.copy_(shard)
    return transfer


def _read_reduce(
    grads: Sequence[torch.Tensor], group: Group, link: Link, key: str
) -> tuple[list[torch.Tensor], Transfer]:
    """Every rank reads its rows of the others' gradients."""
    peers = group.peers()
    received = []
    outgoing: dict[int, list[torch.Tensor]] = {peer: [] for peer in peers}
    incoming: dict[int, list[torch.Tensor]] = {peer: [] for peer in peers}
    for grad in grads:
        grad = grad.contiguous()
        first, last = group.owned(grad.shape[0])
        buffer = buffers.empty((len(peers), last - first, *grad.shape[1:]), grad, grad.dtype)
        received.append(buffer)
        for slot, peer in enumerate(peers):
            if buffer[slot].numel():
                incoming[peer].append(buffer[slot])
            low, high = group.owned(grad.shape[0], peer)
            if grad[low:high].numel():
                outgoing[peer].append(grad[low:high])
                count("reduce", grad[low:high].nbytes)
    return received, link.start(key, outgoing, incoming)


def _tag(key: str, index: int) -> int:
    """The same on every rank, whatever order messages are issued in. Messages between two ranks
    under one tag arrive in the order in which they were sent."""
    return zlib.crc32(f"{key} {index}".encode()) >> 3


def _receive(full: torch.Tensor, group: Group, peer: int, tag: int) -> dist.Work | None:
    low, high = group.owned(full.shape[0], peer)
    part = full[low:high]
    return group.pg.recv([part], peer, tag) if group.pg and part.numel() else None


def _send(part: torch.Tensor, group: Group, peer: int, tag: int, kind: str) -> dist.Work | None:
    if not part.numel():
        return None
    count(kind, part.nbytes)
    return group.pg.send([part], peer, tag) if group.pg else None
