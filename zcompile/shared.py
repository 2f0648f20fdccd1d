"""Collectives between ranks of one host: each rank reads what it needs out of the other's memory.

Linux lets a process copy from another one of the same user (process_vm_readv): one copy, from the
place where the data lies to the place where it is used. There is no segment to size, to fill up or
to leave behind. Ranks tell each other by messages over Unix sockets:

    rank a                                        rank b
    start: "my part lies at this address"   ->    reads it, once it has started too
    wait: until b has read                  <-    "done"

A message is taken in at every start and wait, so a rank is ahead of another one for as long as it
would be with messages over gloo. A source may change after the wait, not before. Ranks may start
and await collectives in different orders: whoever waits serves all that is under way.

What does not change while a graph runs (a parameter's shard) is published at its beginning: others
read it when they need it and nobody waits, but for `drain` at the graph's end.

Where a container or a security policy keeps processes apart, `connect` says so on every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.constants import default_pg_timeout

READY, DONE = 1, 2
# kind, epoch, key, number of the transfer at its sender, address of its table, entries in it.
# The table lists the pieces of memory that the receiver of the message may read.
_MESSAGE = struct.Struct("=6Q")
_PROOF_BYTES = 16

# The system's limit on pieces in one call (IOV_MAX), and a size below its limit on bytes (2 GiB).
_MAX_SPANS = 1024
_MAX_BYTES = 2**30

# How often a waiting rank looks whether another one reported a failure.
_LOOK_MS = 200
# A neighbour answers on a Unix socket at once or not at all.
_CONNECT_SECONDS = 10.0

_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_RELATED_ONLY = "1"


class Span(ctypes.Structure):
    """A piece of memory; the system's struct iovec on 64 bits."""

    _fields_ = (("address", ctypes.c_uint64), ("size", ctypes.c_uint64))
    address: int
    size: int  # bytes


class Failures(Protocol):
    """What a link asks of the group's `Control`."""

    failure: str | None
    runs: int


def read(pid: int, sources: Sequence[Span], targets: Sequence[Span]) -> None:
    """Copy pieces of the memory of process `pid` into pieces of this process, of the same sizes.

    Raises:
        OSError: the process is gone, or may not be read.
    """
    for batch in _batches(sources, targets):
        count = len(batch)
        theirs, ours = (Span * count)(), (Span * count)()
        for index, (source, target, size) in enumerate(batch):
            theirs[index], ours[index] = Span(source, size), Span(target, size)
        got = _process_vm_readv()(pid, ours, count, theirs, count, 0)
        if got != sum(size for _, _, size in batch):
            error = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(error, f"reading the memory of process {pid}: {os.strerror(error)}")


def _batches(
    sources: Sequence[Span], targets: Sequence[Span]
) -> Iterator[list[tuple[int, int, int]]]:
    """(source, target, bytes), as many as one call may copy."""
    batch: list[tuple[int, int, int]] = []
    total = 0
    for source, target in zip(sources, targets, strict=True):
        for offset in range(0, target.size, _MAX_BYTES):
            size = min(_MAX_BYTES, target.size - offset)
            if batch and (len(batch) == _MAX_SPANS or total + size > _MAX_BYTES):
                yield batch
                batch, total = [], 0
            batch.append((source.address + offset, target.address + offset, size))
            total += size
    if batch:
        yield batch


@lru_cache(1)
def _process_vm_readv() -> Callable[..., int]:
    """ctypes lets go of the interpreter lock while it copies."""
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    size = ctypes.c_ulong
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size]
    function.restype = ctypes.c_ssize_t
    return function


@lru_cache(4096)
def _number(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def _spans(tensors: Sequence[torch.Tensor]) -> Any:
    """A ctypes array."""
    spans = (Span * len(tensors))()
    for index, tensor in enumerate(tensors):
        spans[index] = Span(tensor.data_ptr(), tensor.nbytes)
    return spans


@dataclass(eq=False)
class Transfer:
    """One collective of this rank that is under way; holds its tensors until it is complete."""

    link: Link
    epoch: int
    number: int
    incoming: dict[int, Sequence[Span]]  # what is still to be read, by rank
    unread: set[int]  # the ranks that have not read ours yet
    held: list[Any] = field(default_factory=list)

    def wait(self) -> bool:
        """Return when all is read, here and by the others.

        Raises:
            RuntimeError: another rank failed or its process ended.
        """
        self.link.finish(self)
        return True


class Link:
    """The connections of one rank to all others of a group. Made by `connect`."""

    def __init__(self, peers: Mapping[int, tuple[int, socket.socket]], control: Failures | None):
        """peers: rank -> (process id, connected socket)"""
        self.control = control
        self.pids = {rank: pid for rank, (pid, _) in peers.items()}
        self.sockets = {rank: end for rank, (_, end) in peers.items()}
        self.closed: set[int] = set()
        self._outbox: dict[int, deque[bytes]] = {rank: deque() for rank in peers}
        self._rank_of = {end.fileno(): rank for rank, end in self.sockets.items()}
        self._poll = select.poll()
        for end in self.sockets.values():
            end.setblocking(False)
            self._poll.register(end, select.POLLIN)
        self.published: set[str] = set()
        self._epoch = 0
        self._numbers = 0
        self._mine: dict[int, Transfer] = {}  # by number, until every rank has read it
        # By (rank, key): what was started here and not announced there, and the other way round.
        self._expecting: defaultdict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
        self._announced: defaultdict[tuple[int, int], deque[tuple[int, int, int, int]]]
        self._announced = defaultdict(deque)
        _links.add(self)

    def start(
        self,
        key: str,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        incoming: Mapping[int, Sequence[torch.Tensor]],
        held: Iterable[torch.Tensor] = (),
    ) -> Transfer:
        """Issue an exchange of contiguous tensors, none of them empty.

        outgoing[rank]: what that rank reads; incoming[rank]: where this one puts what it reads, in
        the same number and sizes as that rank's outgoing. Neither may change before the wait.
        """
        self._begin_epoch()
        self._numbers += 1
        transfer = Transfer(self, self._epoch, self._numbers, {}, set(), [*held])
        name = _number(key)
        for rank, parts in outgoing.items():
            if not parts:
                continue
            table = _spans(parts)
            transfer.held += [table, parts]
            transfer.unread.add(rank)
            where = ctypes.addressof(table), len(parts)
            self._send(rank, _MESSAGE.pack(READY, self._epoch, name, transfer.number, *where))
        if transfer.unread:
            self._mine[transfer.number] = transfer
        for rank, parts in incoming.items():
            if parts:
                transfer.held.append(parts)
                transfer.incoming[rank] = _spans(parts)
                self._expecting[rank, name].append(transfer)
                self._match(rank, name)
        self._serve(0)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Serve everybody until `transfer` is complete."""
        self._serve_until(lambda: transfer.incoming.keys() | transfer.unread)
        transfer.held.clear()

    def publish(self, key: str, parts: Sequence[torch.Tensor]) -> None:
        """Let every other rank read `parts` under `key`, whenever it starts. They may not change
        before `drain`. A start under that key sends nothing."""
        self.start(key, dict.fromkeys(self.sockets, parts), {})
        self.published.add(key)

    def drain(self) -> None:
        """Return when the others have read all that was published."""
        self._serve_until(lambda: {r for t in self._mine.values() for r in t.unread})
        self.published.clear()

    def _serve_until(self, waited_for: Callable[[], Set[int]]) -> None:
        """Serve everybody until this rank waits for no other.

        Raises:
            RuntimeError: another rank failed, its process ended or the time is up.
        """
        deadline = time.monotonic() + default_pg_timeout.total_seconds()
        while ranks := waited_for():
            lost = self.closed & ranks
            if lost:
                raise RuntimeError(f"connection closed by rank {min(lost)} of the same host")
            if self.control is not None and self.control.failure is not None:
                raise RuntimeError("another rank failed")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer from rank {min(ranks)} within {default_pg_timeout}")
            self._serve(_LOOK_MS)

    def close(self) -> None:
        _close(self.sockets)

    def _begin_epoch(self) -> None:
        """Forget what an exception left behind in an earlier run of a graph.

        Ranks agree before each run, so none of them reads from an earlier one any more.
        """
        epoch = self.control.runs if self.control is not None else 0
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self.published.clear()
        self._mine = {n: t for n, t in self._mine.items() if t.epoch == epoch}
        for key in [k for k, waiting in self._expecting.items() if waiting]:
            self._expecting[key].clear()
        for key, found in self._announced.items():
            if found:
                self._announced[key] = deque(each for each in found if each[0] >= epoch)

    def _match(self, rank: int, name: int) -> None:
        """Read what is both announced there and expected here, in order."""
        expecting, announced = self._expecting[rank, name], self._announced[rank, name]
        while expecting and announced and announced[0][0] == expecting[0].epoch:
            if rank in self.closed:  # and its memory with it: `finish` says so
                return
            _, number, address, count = announced[0]
            targets = expecting[0].incoming[rank]
            table: Any = (Span * count)()
            try:
                where, here = Span(address, ctypes.sizeof(table)), ctypes.addressof(table)
                read(self.pids[rank], [where], [Span(here, ctypes.sizeof(table))])
                _check(table, targets, rank)
                read(self.pids[rank], table, targets)
            except OSError:
                self.closed.add(rank)
                return
            announced.popleft()
            del expecting.popleft().incoming[rank]
            self._send(rank, _MESSAGE.pack(DONE, self._epoch, name, number, 0, 0))

    def _serve(self, patience_ms: int) -> None:
        """Take in what has arrived; wait for something to arrive for at most so long."""
        for descriptor, event in self._poll.poll(patience_ms):
            rank = self._rank_of[descriptor]
            if event & select.POLLOUT:
                self._flush(rank)
            if event & ~select.POLLOUT:
                self._receive(rank)

    def _receive(self, rank: int) -> None:
        while True:
            try:
                message = self.sockets[rank].recv(_MESSAGE.size)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # reported once, before what is still to be received
            if not message:
                self._poll.unregister(self.sockets[rank])
                self._outbox[rank].clear()
                self.closed.add(rank)
                return
            kind, epoch, name, number, address, count = _MESSAGE.unpack(message)
            if kind == DONE:
                self._read_by(rank, number)
            elif epoch >= self._epoch:
                self._announced[rank, name].append((epoch, number, address, count))
                self._match(rank, name)

    def _read_by(self, rank: int, number: int) -> None:
        transfer = self._mine.get(number)
        if transfer is not None:
            transfer.unread.discard(rank)
            if not transfer.unread:
                del self._mine[number]

    def _send(self, rank: int, message: bytes) -> None:
        """Never waits: a rank that computes does not empty its socket."""
        self._outbox[rank].append(message)
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        outbox = self._outbox[rank]
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while outbox:
                self.sockets[rank].send(outbox[0])
                outbox.popleft()
        if rank not in self.closed:
            self._poll.modify(self.sockets[rank], select.POLLIN | (select.POLLOUT if outbox else 0))


def _check(theirs: Sequence[Span], ours: Sequence[Span], rank: int) -> None:
    sent, expected = [each.size for each in theirs], [each.size for each in ours]
    if sent != expected:
        raise RuntimeError(f"rank {rank} sends {sent} bytes where {expected} are expected")


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_all() -> None:
    for link in list(_links):
        link.close()


# A forked child (a data loader's) would hold a killed rank's connections open.
os.register_at_fork(after_in_child=_close_all)


Exchange = Callable[[Any], Sequence[Any]]


def connect(
    rank: int, everyone: Exchange, control: Failures | None
) -> tuple[Link | None, str | None]:
    """Connect the ranks of a group, if all of them can read each other's memory.

    Args:
        everyone: hands a value to all ranks and returns all ranks' values, in rank order.

    Returns:
        (link, None), or on every rank (None, why not).
    """
    proof = secrets.token_bytes(_PROOF_BYTES)
    buffer = ctypes.create_string_buffer(proof, len(proof))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sockets: dict[int, socket.socket] = {}
    with contextlib.closing(listener), contextlib.ExitStack() as undo:
        # Not in the file system: the name is gone with the process.
        name, reason = f"\0zcompile-{os.getpid()}-{secrets.token_hex(8)}".encode(), None
        try:
            listener.bind(name)
            listener.listen(socket.SOMAXCONN)
            _let_siblings_read()
        except OSError as error:
            reason = f"rank {rank}: {error}"
        cards = everyone((os.getpid(), name, proof, ctypes.addressof(buffer), reason))
        undo.callback(_close, sockets)
        reason = reason or _greet(rank, cards, sockets)
        reasons = [each for each in everyone(reason) if each is not None]
        if not reasons:
            reason = _accept(listener, cards, sockets)
            reasons = [each for each in everyone(reason) if each is not None]
        if reasons:
            return None, reasons[0]
        undo.pop_all()
    peers = {peer: (cards[peer][0], end) for peer, end in sockets.items()}
    return Link(peers, control), None


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for end in sockets.values():
        end.close()


def _greet(
    rank: int, cards: Sequence[tuple[Any, ...]], sockets: dict[int, socket.socket]
) -> str | None:
    """Read every other rank's proof out of its memory, and connect to the lower ranks."""
    for peer, (pid, name, proof, address, reason) in enumerate(cards):
        if peer == rank:
            continue
        if reason is not None:
            return str(reason)
        try:
            if peer < rank:
                sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[peer].settimeout(_CONNECT_SECONDS)
                sockets[peer].connect(name)
                sockets[peer].send(cards[rank][2] + rank.to_bytes(8, "little"))
            found = ctypes.create_string_buffer(len(proof))
            size = len(proof)
            read(pid, [Span(address, size)], [Span(ctypes.addressof(found), size)])
        except OSError as error:
            return f"rank {rank} cannot reach rank {peer}: {error}"
        if found.raw != proof:
            return f"rank {rank} reads another process than rank {peer}"
    return None


def _accept(
    listener: socket.socket, cards: Sequence[tuple[Any, ...]], sockets: dict[int, socket.socket]
) -> str | None:
    """Take the connections of the higher ranks. Each shows the proof that gloo brought."""
    listener.settimeout(_CONNECT_SECONDS)
    try:
        while len(sockets) < len(cards) - 1:
            end, _ = listener.accept()
            end.settimeout(_CONNECT_SECONDS)
            hello = end.recv(_PROOF_BYTES + 8)
            peer = int.from_bytes(hello[_PROOF_BYTES:], "little")
            if peer < len(cards) and hello[:_PROOF_BYTES] == cards[peer][2]:
                sockets[peer] = end
            else:
                end.close()
    except OSError as error:
        return f"a connection between ranks of one host failed: {error}"
    return None


def _let_siblings_read() -> None:
    """Where only a parent may read a process (Yama), let the launcher's other children do so."""
    if _YAMA.exists() and _YAMA.read_text().strip() == _RELATED_ONLY:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
