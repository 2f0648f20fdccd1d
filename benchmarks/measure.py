"""What one rank measures: step times, resident memory, bytes sent."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WIRE_BLOCK = 16 * 2**20  # bytes in one message of the bare exchange; large enough to stream
WIRE_WARMUP = 2  # blocks; the first ones pay for page faults and connections
WIRE_BLOCKS = 12  # timed blocks

Traffic = dict[str, int]  # bytes by kind, zcompile's own count


@dataclass(frozen=True)
class TrainSample:
    """One rank's measurements of one system in one run."""

    step_seconds: list[float]  # timed steps only
    losses: list[float]  # timed steps only
    setup_seconds: float  # building the model and the warm-up steps, compilation included
    cpu_seconds: float  # processor time in the timed steps, all threads
    loopback_bytes: int  # sent on `lo` by the whole machine during the timed steps
    written_bytes: int  # passed to write calls by this process during the timed steps
    traffic: Traffic | None  # sent by this rank during the timed steps; zcompile only
    peak_bytes: int | None  # highest resident memory in the timed steps, over the imports


@dataclass(frozen=True)
class WireSample:
    """One rank's measurements of a bare exchange in both directions at once."""

    block_bytes: int  # sent, and received, in each of the times below
    block_seconds: list[float]


def status_bytes(field: str) -> int:
    """A memory field of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no field {field}")


def reset_peak() -> None:
    """Set VmHWM back to the present VmRSS."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def bytes_sent() -> tuple[int, int]:
    """(sent on `lo` by all programs, written by this process) so far, in bytes.

    All ranks must call it. The first barrier lets every rank's earlier traffic end, the
    second keeps a fast rank from sending before a slow one has read.
    """
    dist.barrier()
    sent = _loopback_counter(), _written_counter()
    dist.barrier()
    return sent


def _written_counter() -> int:
    """Bytes this process has passed to write calls; gloo's sockets are nearly all of it."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise ValueError("/proc/self/io has no field wchar")


def _loopback_counter() -> int:
    """`lo`'s transmitted bytes since boot: the ninth column of /proc/net/dev."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise ValueError("/proc/net/dev has no device lo")


def peak_of(seen: Any) -> int:
    """The most bytes at a time over what was there before, as the allocator reports each block.

    seen: a torch.profiler.profile(profile_memory=True) that is over.
    """
    changes: list[tuple[int, int]] = []
    queue = list(seen.profiler.kineto_results.experimental_event_tree())
    while queue:
        event = queue.pop()
        queue += event.children
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    changes.sort(key=lambda change: change[0])
    return max(itertools.accumulate((size for _, size in changes), initial=0))


def train(
    build_step: Callable[[], Callable[[Tensor, Tensor], Tensor]],
    batch: tuple[Tensor, Tensor],
    warmup: int,
    steps: int,
    memory: bool,
    read_traffic: Callable[[], object] | None,
) -> TrainSample:
    """Build a system and time `steps` steps of it after `warmup` untimed ones."""
    gc.collect()
    base = status_bytes("VmRSS")
    start = perf_counter()
    step = build_step()
    for _ in range(warmup):
        step(*batch)
    setup_seconds = perf_counter() - start
    if memory:
        reset_peak()
    traffic = _traffic(read_traffic)
    loopback, written = bytes_sent()
    cpu = process_time()
    step_seconds, losses = _timed(step, batch, steps)
    cpu_seconds = process_time() - cpu
    loopback_after, written_after = bytes_sent()
    return TrainSample(
        step_seconds=step_seconds,
        losses=losses,
        setup_seconds=setup_seconds,
        cpu_seconds=cpu_seconds,
        loopback_bytes=loopback_after - loopback,
        written_bytes=written_after - written,
        traffic=_difference(_traffic(read_traffic), traffic),
        peak_bytes=status_bytes("VmHWM") - base if memory else None,
    )


def _timed(
    step: Callable[[Tensor, Tensor], Tensor], batch: tuple[Tensor, Tensor], steps: int
) -> tuple[list[float], list[float]]:
    """Seconds and loss of each of `steps` steps."""
    seconds, losses = [], []
    for _ in range(steps):
        start = perf_counter()
        loss = step(*batch)
        seconds.append(perf_counter() - start)
        losses.append(loss.item())
    return seconds, losses


def _traffic(read: Callable[[], object] | None) -> Traffic | None:
    """What zcompile.traffic() counts, as a dict."""
    if read is None:
        return None
    # A zcompile.Traffic, which is not imported beside other systems.
    counters = dataclasses.asdict(read())  # type: ignore[call-overload]
    return {name: int(value) for name, value in counters.items()}


def _difference(after: Traffic | None, before: Traffic | None) -> Traffic | None:
    """Bytes counted between two readings."""
    if after is None or before is None:
        return None
    return {name: after[name] - before[name] for name in after}


def exchange() -> WireSample:
    """Two ranks send each other one block after another, both directions at the same time."""
    peer = 1 - dist.get_rank()
    outgoing = torch.ones(WIRE_BLOCK, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    seconds = []
    for _ in range(WIRE_WARMUP + WIRE_BLOCKS):
        start = perf_counter()
        works = [dist.isend(outgoing, peer), dist.irecv(incoming, peer)]
        for work in works:
            assert work is not None
            work.wait()
        seconds.append(perf_counter() - start)
    return WireSample(WIRE_BLOCK, seconds[WIRE_WARMUP:])
