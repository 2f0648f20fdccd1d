"""Measures the ranks' own links and devices, once per set of hosts, for about a second.

Each primitive that lowering can use carries two parameters of a few sizes, and three times are
taken: of its issue, of its flight and of its finish. Every rank ends up with the same figures: the
slowest rank's. They are kept on disk (cache.py), where rank 0 alone looks, so that ranks with
and without the file, or with files that differ, do the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from zcompile import buffers, cache, collectives, comm
from zcompile.control import fingerprint
from zcompile.errors import ZeroError
from zcompile.schedule.costs import Costs, Device, Link
from zcompile.schedule.devices import device as published
from zcompile.schedule.links import (
    ALL_REDUCE,
    GATHER,
    NATIVE,
    P2P,
    REDUCE,
    MeasuredLink,
    Sample,
    default_link,
    link_from_json,
)

MIB = 2**20

# Bytes of the whole value. Latency rules below, bandwidth above; between them is interpolated.
SIZES = (64 * 2**10, MIB, 4 * MIB, 12 * MIB, 48 * MIB)
# Runs of one size, behind one that is not timed: as many as fit into this time, and these at most.
SIZE_SECONDS = 0.12
MOST_RUNS = 9
# A larger size is left out where it would end later than this, seconds behind the start: the link
# is slow, and its slope is known by then. What small buckets hold is always measured.
LIMIT_SECONDS = 1.5
ALWAYS = 4 * MIB
# Buckets hold several parameters, and packing and cutting them is part of the price.
PARAMETERS = 2
COLUMNS = 64

SHARE_BYTES = 8 * MIB
SHARE_RUNS = 5
# Compute has to outlast the transfer that it shares a core with.
SHARE_COVER = 2.0

MATRIX = 512  # side of the products that the arithmetic's rate is taken from
STREAM_BYTES = 32 * MIB
DEVICE_RUNS = 3
LAUNCHES = 200

_KEY = "zcompile-calibrate"


@dataclass(frozen=True)
class Calibration:
    """What a machine costs. link: of the group, with every primitive that was measured; device: of
    one rank; native: whether the group's collectives are the backend's own."""

    device: Device
    link: Link
    native: bool = False

    def costs(self) -> Costs:
        """For the planner: with the primitives that this group's collectives are lowered to."""
        link, lines = self.link, [f"device {self.device.name}: {self.device.source}"]
        if isinstance(link, MeasuredLink):
            link = link.only((NATIVE if self.native else P2P).values())
            lines.append(f"link: {link.source}")
        else:
            lines.append("link: published")
        return Costs(self.device, link, lines=tuple(lines))


def calibrate(group: comm.Group, device: torch.device) -> Calibration:
    """The costs of this group's ranks, from disk or measured now. All ranks call it together, and
    all get the same.

    device: what a rank computes on. With one rank only the device is measured; a group on paper
    gets published figures.

    Raises:
        ZeroError: a rank came to something else instead, or failed, while others were here.
    """
    if group.pg is None and group.world > 1:
        name = "cpu" if device.type == "cpu" else "h100"
        return Calibration(published(name), default_link(name, group.world), group.native)
    if group.control is not None:
        line = "measure the links between the ranks"
        group.control.agree(fingerprint([line]), lambda: [line])
    with _heard(group):
        key = hosts(group, device)
        kept = cache.load("links", key, _parse) if group.rank == 0 else None
        kept = of_rank_0(group, kept)
        if kept is None:
            kept = _measure(group, device, key["hosts"].count(socket.gethostname()))
            if group.rank == 0:
                cache.store("links", key, _plain(kept))
        threads = max(key["threads"]) if device.type == "cpu" else 0
        on = replace(kept.device, threads=threads)
        return replace(kept, device=on, native=group.native)


def hosts(group: comm.Group, device: torch.device) -> dict[str, Any]:
    """Everything that the figures depend on."""
    kind = device.type if device.type == "cpu" else torch.cuda.get_device_name(device)
    here = [socket.gethostname(), torch.get_num_threads(), kind, torch.__version__]
    every = _everyone(group, here)
    hosts, threads, kinds, versions = (sorted(column) for column in zip(*every))
    return {
        "hosts": hosts,
        "world": group.world,
        "backend": "none" if group.pg is None else dist.get_backend(group.pg),
        "reads": group.link is not None,  # of each other's memory, in place of messages
        "torch": sorted(set(versions)),
        "threads": sorted(set(threads)),
        "device": sorted(set(kinds)),
    }


def _plain(found: Calibration) -> dict[str, Any]:
    assert isinstance(found.link, MeasuredLink)
    return {"device": asdict(found.device), "link": json.loads(found.link.to_json())}


def _parse(raw: Any) -> Calibration:
    rank = Device(**raw["device"])
    figures = (*rank.flops.values(), rank.bandwidth, rank.memory, rank.efficiency)
    if "float32" not in rank.flops or not all(math.isfinite(f) and f > 0 for f in figures):
        raise ValueError("the device's figures are not positive")
    return Calibration(rank, link_from_json(json.dumps(raw["link"])))


def _measure(group: comm.Group, device: torch.device, neighbours: int) -> Calibration:
    """neighbours: ranks on this rank's host."""
    before = comm.traffic()
    rank = _slowest_device(_everyone(group, _device(device, neighbours)))
    tables: dict[str, dict[str, tuple[Sample, ...]]] = {}
    share = 0.0
    if group.world > 1:
        tables = _tables(group, device)
        # A GPU's copies and NCCL's few blocks leave the arithmetic its time.
        share = _share(group, device) if device.type == "cpu" else 0.0
        # The counters say what training sent.
        spent = comm.traffic() - before
        comm.count("gather", -spent.gather_bytes)
        comm.count("reduce", -spent.reduce_bytes)
        comm.count("all_reduce", -spent.all_reduce_bytes)
        buffers.forget()  # no step asks for these sizes
    backend = "one rank" if group.pg is None else dist.get_backend(group.pg)
    source = f"measured on {group.world} ranks of {backend}, torch {torch.__version__}"
    return Calibration(rank, MeasuredLink(group.world, tables, share, source))


# Links


@dataclass(frozen=True)
class _Way:
    """One primitive on buffers of one size, cut where the compute lane does something else."""

    kind: str
    primitive: str
    issue: Callable[[], Any]
    wait: Callable[[Any], None]
    finish: Callable[[Any], Any]


def _ways(group: comm.Group, device: torch.device, whole: int) -> tuple[int, list[_Way]]:
    """Bytes of the whole value (about `whole`), and every primitive that lowering can use."""
    chunk = max(1, whole // (4 * COLUMNS * PARAMETERS * group.world))
    rows, dtype = chunk * group.world, torch.float32
    shapes, owned = [(rows, COLUMNS)] * PARAMETERS, [chunk] * PARAMETERS
    grads = [torch.ones(shape, device=device) for shape in shapes]
    shards = [grad[:chunk].clone() for grad in grads]

    def wait_messages(_: Any) -> None:
        comm.wait(group, _KEY)

    def wait_native(flat: torch.Tensor) -> None:
        torch.ops._c10d_functional.wait_tensor(flat)

    def all_reduce() -> torch.Tensor:
        flat = collectives.flatten(grads, dtype)
        comm.all_reduce_start(flat, group, _KEY)
        return flat

    def means(_: Any) -> list[torch.Tensor]:
        # What Inductor makes of the mean reads every part once and writes one; eager operations
        # would pass over memory several times. A sum over the own gradient moves the same bytes.
        return [grad.view(group.world, -1).sum(0) for grad in grads]

    ways = [
        _Way(
            GATHER,
            NATIVE[GATHER],
            lambda: collectives.native_gather(shards, shapes, dtype, group.world, group.pg_name),
            wait_native,
            lambda flat: collectives.native_gathered(flat, shapes, group.world),
        ),
        _Way(
            REDUCE,
            NATIVE[REDUCE],
            lambda: collectives.native_reduce(grads, dtype, group.world, group.pg_name),
            wait_native,
            lambda flat: collectives.native_reduced(flat, shapes, owned, dtype, group.world),
        ),
        _Way(
            ALL_REDUCE,
            NATIVE[ALL_REDUCE],
            all_reduce,
            wait_messages,
            lambda flat: collectives.all_reduced(flat, shapes, dtype, group.world),
        ),
    ]
    if dist.get_backend(group.pg) == "gloo":
        ways += [
            _Way(
                GATHER,
                "p2p",
                lambda: comm.gather_start(shards, [rows] * PARAMETERS, dtype, group, _KEY),
                wait_messages,
                lambda fulls: None,
            ),
            _Way(
                REDUCE, "p2p", lambda: comm.reduce_start(grads, group, _KEY), wait_messages, means
            ),
        ]
    return rows * COLUMNS * PARAMETERS * dtype.itemsize, ways


def _tables(group: comm.Group, device: torch.device) -> dict[str, dict[str, tuple[Sample, ...]]]:
    found: dict[str, dict[str, list[Sample]]] = {}
    # The first collective of a group connects it, which may take seconds and counts for nothing.
    for way in _ways(group, device, SIZES[0])[1]:
        _time(group, device, way)
    begin, last = time.perf_counter(), 0.0
    for size in SIZES:
        # Four times the bytes take four times as long at most: of the smallest, latency is most.
        ends = time.perf_counter() - begin + 4 * last
        if not of_rank_0(group, size <= ALWAYS or ends < LIMIT_SECONDS):
            break
        whole, ways = _ways(group, device, size)
        if found and whole <= next(iter(found[GATHER].values()))[-1].bytes:
            continue  # so many ranks that the small sizes come out alike
        start = time.perf_counter()
        for way in ways:
            _time(group, device, way)
        once = time.perf_counter() - start
        runs = of_rank_0(group, max(1, min(MOST_RUNS, int(SIZE_SECONDS / once))))
        for way in ways:
            times = [_time(group, device, way) for _ in range(runs)]
            sample = Sample(whole, *(statistics.median(column) for column in zip(*times)))
            found.setdefault(way.kind, {}).setdefault(way.primitive, []).append(sample)
        last = time.perf_counter() - start
    return _slowest_tables(_everyone(group, found))


def _time(group: comm.Group, device: torch.device, way: _Way) -> list[float]:
    """Seconds of issue, flight and finish, once."""
    _together(group, device)
    clock = _Clock(device)
    clock.mark()
    flying = way.issue()
    clock.mark()
    way.wait(flying)
    clock.mark()
    way.finish(flying)
    clock.mark()
    return clock.seconds()


class _Clock:
    """Marks on the compute lane: of the host where it computes, else of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cpu":
            self.marks.append(time.perf_counter())
            return
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Between each two marks."""
        pairs = list(zip(self.marks, self.marks[1:]))
        if self.device.type == "cpu":
            return [b - a for a, b in pairs]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def _slowest_tables(
    every: Sequence[Mapping[str, Mapping[str, Sequence[Sample]]]],
) -> dict[str, dict[str, tuple[Sample, ...]]]:
    """Over all ranks the longest of each time. What disturbs a run only makes it longer, so a
    smaller size takes no longer than any larger one."""
    slowest: dict[str, dict[str, tuple[Sample, ...]]] = {}
    for kind, primitives in every[0].items():
        slowest[kind] = {}
        for primitive in primitives:
            most = (math.inf, math.inf, math.inf)
            table: list[Sample] = []
            for lines in reversed(list(zip(*(ranks[kind][primitive] for ranks in every)))):
                longest = (max(column) for column in zip(*(line[1:] for line in lines)))
                issue, transfer, finish = most = tuple(map(min, longest, most))
                table.insert(0, Sample(lines[0][0], issue, transfer, finish))
            slowest[kind][primitive] = tuple(table)
    return slowest


def _share(group: comm.Group, device: torch.device) -> float:
    """The share of a core that a transfer takes from arithmetic: with the transfer in flight it
    ends that much of the transfer's time later."""
    ways = _ways(group, device, SHARE_BYTES)[1]
    way = next(w for w in reversed(ways) if w.kind == GATHER)
    side = torch.ones(MATRIX // 2, MATRIX // 2, device=device)
    out = torch.empty_like(side)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(side, side, out=out)

    compute(3)
    begin = time.perf_counter()
    compute(10)
    one = (time.perf_counter() - begin) / 10
    shares = []
    for _ in range(SHARE_RUNS):
        flight = _time(group, device, way)[1]
        flight, one = (max(column) for column in zip(*_everyone(group, (flight, one))))
        times = math.ceil(SHARE_COVER * flight / one)
        _together(group, device)
        begin = time.perf_counter()
        compute(times)
        alone = time.perf_counter() - begin
        _together(group, device)
        flying = way.issue()
        begin = time.perf_counter()
        compute(times)
        way.wait(flying)
        shares.append((time.perf_counter() - begin - alone) / flight)
    every = _everyone(group, statistics.median(shares))
    return min(max(0.0, *every), 1.0)


# The device


def _device(device: torch.device, neighbours: int) -> Device:
    """This rank's arithmetic, memory and calls, while the other ranks measure theirs."""
    rates = {
        str(dtype).removeprefix("torch."): _rate(device, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    threads = torch.get_num_threads()
    note = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if device.type == "cpu" and threads > 1:
        torch.set_num_threads(1)
        try:
            alone = ", ".join(
                f"{name} {_rate(device, getattr(torch, name)) / 1e9:.0f}" for name in rates
            )
        finally:
            torch.set_num_threads(threads)
        note += f" (on one, GFLOP/s: {alone})"
    source = torch.ones(STREAM_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = _seconds(device, lambda: target.copy_(source))
    tiny = torch.ones(1, device=device)

    def calls() -> None:
        for _ in range(LAUNCHES):
            tiny.add_(1.0)

    return Device(
        name="cpu" if device.type == "cpu" else note,
        flops=rates,
        bandwidth=2 * STREAM_BYTES / copy,
        memory=_memory(device, neighbours),
        launch=_seconds(device, calls) / LAUNCHES,
        efficiency=1.0,  # these are not peaks but what was reached
        source=f"measured, {note}",
    )


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of matrix products."""
    side = MATRIX if device.type == "cpu" else 8 * MATRIX
    a = torch.ones(side, side, device=device, dtype=dtype)
    out = torch.empty_like(a)
    return 2 * side**3 / _seconds(device, lambda: torch.mm(a, a, out=out))


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median of a few runs behind one that is not timed."""
    run()
    times = []
    for _ in range(DEVICE_RUNS):
        clock = _Clock(device)
        clock.mark()
        run()
        clock.mark()
        times += clock.seconds()
    return statistics.median(times)


def _memory(device: torch.device, neighbours: int) -> int:
    """Bytes of the device; on the CPU this rank's part of the host's."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // neighbours
    return int(torch.cuda.get_device_properties(device).total_memory)


def _slowest_device(every: Sequence[Device]) -> Device:
    first = every[0]
    return Device(
        name=first.name,
        flops={name: min(each.flops[name] for each in every) for name in first.flops},
        bandwidth=min(each.bandwidth for each in every),
        memory=min(each.memory for each in every),
        launch=max(each.launch for each in every),
        efficiency=first.efficiency,
        source=first.source,
    )


# Agreement


def _talk(group: comm.Group) -> dist.ProcessGroup:
    """The group for objects: on the CPU, where there is one."""
    talk = group.pg if group.control is None else group.control.group
    assert talk is not None
    return talk


def _everyone(group: comm.Group, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    if group.world == 1:
        return [value]
    return comm.everyone(value, _talk(group))


def of_rank_0(group: comm.Group, value: Any) -> Any:
    """Rank 0's value on every rank."""
    if group.world == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=_talk(group), group_src=0)
    return values[0]


def _together(group: comm.Group, device: torch.device) -> None:
    """Start a run at the same time on all ranks, with nothing before it under way."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    dist.barrier(group=_talk(group))


@contextlib.contextmanager
def _heard(group: comm.Group) -> Iterator[None]:
    """A failure here ends the other ranks' wait, and theirs ends ours with their reason."""
    if group.control is None:
        yield
        return
    with group.control.run():
        try:
            yield
        except ZeroError:
            raise
        except RuntimeError as error:
            raise group.control.explain(error) from error
