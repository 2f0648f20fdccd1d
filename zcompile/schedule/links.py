"""Links: what carries a group's collectives, and how long that takes. See costs.Link.

    ring   base + steps * latency + sent / bandwidth      N - 1 steps; all-reduce 2 (N - 1)
    tree   base + 2 (n - 1 + log2(nodes)) latencies + sent N / (N - 1) / bandwidth    all-reduce

N ranks, n of them in a node. A ring enters each node once: of its steps, `nodes - 1` have the
latency between nodes and the rest that within one. It runs once per network port, so that its
bandwidth between nodes is that of all of a node's ports together. These are the terms that NCCL
chooses its own algorithms by (NCCL, src/graph/tuning.cc); ring and tree after Thakur, Rabenseifner
and Gropp (IJHPCA 19, 2005).

`MeasuredLink` is a table in their place, which calibrate.py fills on the real process group.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from zcompile.schedule.costs import Link
from zcompile.schedule.devices import GB, device
from zcompile.schedule.plan import KINDS

GATHER, REDUCE, ALL_REDUCE = KINDS

# What can carry a collective, by kind: the names that plans use. One rank carries nothing.
NATIVE: Mapping[str, str] = {
    GATHER: "all_gather_into_tensor",
    REDUCE: "reduce_scatter_tensor",
    ALL_REDUCE: "all_reduce",
}
P2P: Mapping[str, str] = {GATHER: "p2p", REDUCE: "p2p", ALL_REDUCE: "all_reduce"}
NOTHING = "none"

MICRO = 1e-6
GBIT = 1e9 / 8  # bytes


@dataclass(frozen=True)
class Wire:
    """bandwidth: bytes per second that one rank sends, in one direction, as published; efficiency:
    the share of it that collectives reach; latency: seconds a step."""

    name: str
    bandwidth: float
    efficiency: float
    latency: float
    source: str

    @property
    def speed(self) -> float:
        """Bytes per second that a collective reaches."""
        return self.bandwidth * self.efficiency


# Steps of rings within and between nodes, and what every collective costs before its first byte:
# NCCL's own figures for its LL128 protocol on NVLink and on a network (hwLat and baseLat in
# src/graph/tuning.cc).
_NCCL = "; latency: NCCL, src/graph/tuning.cc"
_NVLINK_STEP = 1.9 * MICRO
_NETWORK_STEP = 4.0 * MICRO
_NCCL_BASE = 10 * MICRO
# The same file takes 235 GB/s for the 300 GB/s that an A100's NVLinks have in one direction.
_NVLINK_EFFICIENCY = 0.78
# Headers and flow control of InfiniBand.
_NETWORK_EFFICIENCY = 0.9


def _nvlink(name: str, both_directions: float, source: str) -> Wire:
    return Wire(name, both_directions / 2, _NVLINK_EFFICIENCY, _NVLINK_STEP, source + _NCCL)


def _network(name: str, gbits: float, source: str) -> Wire:
    return Wire(name, gbits * GBIT, _NETWORK_EFFICIENCY, _NETWORK_STEP, source + _NCCL)


# Messages of one host to itself with one core per rank: the core copies each byte into and out of
# the kernel. Round figures of idle virtual machines; calibrate.py takes those of the host at hand.
_LOOPBACK = Wire(
    "gloo over loopback", 2 * GB, 1.0, 100 * MICRO, "round figures; benchmarks/links.py measures"
)

PCIE4 = Wire(
    "PCIe 4.0 x16",
    32 * GB,
    0.8,
    2.5 * MICRO,
    "PCI Express Base Specification 4.0: 16 GT/s, 16 lanes" + _NCCL,
)


@dataclass(frozen=True)
class Node:
    """The usual machine around a device: ranks in it, and what joins them and the machines."""

    ranks: int
    inside: Wire
    between: Wire


_IB400 = _network("InfiniBand NDR", 400, "NVIDIA DGX H100 user guide: one 400 Gb/s port per GPU")
_IB200 = _network("InfiniBand HDR", 200, "NVIDIA DGX A100 user guide: one 200 Gb/s port per GPU")
_A100_NODE = Node(8, _nvlink("NVLink 3", 600 * GB, "NVIDIA A100 data sheet: 600 GB/s"), _IB200)

NODES: Mapping[str, Node] = {
    "v100": Node(
        8,
        _nvlink("NVLink 2", 300 * GB, "NVIDIA V100 data sheet: 300 GB/s"),
        _network("InfiniBand EDR", 50, "NVIDIA DGX-1 data sheet: four 100 Gb/s ports, 8 GPUs"),
    ),
    "a100-40gb": _A100_NODE,
    "a100": _A100_NODE,
    "h100": Node(8, _nvlink("NVLink 4", 900 * GB, "NVIDIA H100 data sheet: 900 GB/s"), _IB400),
    "h200": Node(8, _nvlink("NVLink 4", 900 * GB, "NVIDIA H200 data sheet: 900 GB/s"), _IB400),
    "mi300x": Node(
        8,
        _nvlink("Infinity Fabric", 896 * GB, "AMD MI300X data sheet: 7 links of 128 GB/s"),
        _network("InfiniBand NDR", 400, "AMD Instinct MI300X platform: one port per GPU"),
    ),
}

# gloo runs on the cores that compute: it takes 0.75 of one while it communicates.
GLOO_SHARE = 0.75


@dataclass(frozen=True)
class RingLink:
    """The analytic link of `world` ranks. base: seconds of each collective; memory, launch: bytes
    per second and seconds per operation of the device, for the copies around a collective."""

    world: int
    ranks_per_node: int
    inside: Wire
    between: Wire
    memory: float
    launch: float
    base: float = 0.0
    share: float = 0.0
    primitives: Mapping[str, str] = field(default_factory=lambda: NATIVE)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)

    @property
    def speed(self) -> float:
        """Bytes per second that each rank sends while a ring is busy."""
        if self.nodes == 1:
            return self.inside.speed
        return min(self.inside.speed, self.between.speed * self.ranks_per_node)

    def primitive(self, kind: str, sent: int) -> str:
        return self.primitives[kind] if self.world > 1 else NOTHING

    def transfer(self, kind: str, sent: int) -> float:
        if self.world == 1 or not sent:
            return 0.0
        passes = 2 if kind == ALL_REDUCE else 1
        crossing = passes * (self.nodes - 1)
        within = passes * (self.world - 1) - crossing
        latency = self.base + within * self.inside.latency + crossing * self.between.latency
        ring = latency + sent / self.speed
        return min(ring, self._tree(sent)) if kind == ALL_REDUCE else ring

    def _tree(self, sent: int) -> float:
        """Up a tree of nodes and down again, a chain through each: short, but all bytes twice."""
        within = (min(self.world, self.ranks_per_node) - 1) * self.inside.latency
        between = math.ceil(math.log2(self.nodes)) * self.between.latency
        moved = sent * self.world / (self.world - 1)
        return self.base + 2 * (within + between) + moved / self.speed

    def issue(self, kind: str, whole: int) -> float:
        return self._touch(_touched(kind, self.primitives[kind], self.world)[0], whole)

    def finish(self, kind: str, whole: int) -> float:
        return self._touch(_touched(kind, self.primitives[kind], self.world)[1], whole)

    def _touch(self, times: float, whole: int) -> float:
        if self.world == 1 or not whole or not times:
            return 0.0
        return times * whole / self.memory + self.launch

    def to_json(self) -> str:
        return json.dumps({"link": "ring", **_plain(self)}, indent=1)


def _touched(kind: str, primitive: str, world: int) -> tuple[float, float]:
    """How often each byte of the whole value is read or written at its issue and its finish, by
    what passes/lower.py puts there."""
    if primitive == "p2p" and kind == GATHER:
        return 2 / world, 0.0  # this rank's rows into their place
    if primitive == "p2p":
        return 0.0, 1 + 1 / world  # the mean of all parts
    return {
        GATHER: (2 / world, 2.0),  # pack one shard; cut every parameter
        REDUCE: (2.0, 2 / world),  # pack every gradient; the mean of one shard
        ALL_REDUCE: (2.0, 2.0),
    }[kind]


class Sample(NamedTuple):
    """One line of a table. bytes: of the whole value. Seconds."""

    bytes: int
    issue: float
    transfer: float
    finish: float

    @property
    def total(self) -> float:
        return self.issue + self.transfer + self.finish


Tables = Mapping[str, Mapping[str, Sequence[Sample]]]  # kind -> primitive -> by bytes, ascending


@dataclass(frozen=True)
class MeasuredLink:
    """Measured times by kind, primitive and size. Between two sizes the times are on the line
    through both, above the largest on the last one's continuation; below the smallest they are the
    smallest's, since latency rules there.

    Raises:
        ValueError: a table is empty, not ascending, or holds a value that is no time.
    """

    world: int
    tables: Tables
    share: float = 0.0
    source: str = ""
    _known: dict[tuple[str, int], tuple[str, Sample]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share!r}, not between 0 and 1")
        for kind, primitives in self.tables.items():
            if kind not in KINDS:
                raise ValueError(f"unknown kind of collective {kind!r}")
            for primitive, samples in primitives.items():
                _check(samples, f"{kind} by {primitive}")

    def primitive(self, kind: str, sent: int) -> str:
        return self._cheapest(kind, self._whole(kind, sent))[0]

    def transfer(self, kind: str, sent: int) -> float:
        return self._cheapest(kind, self._whole(kind, sent))[1].transfer if sent else 0.0

    def issue(self, kind: str, whole: int) -> float:
        return self._cheapest(kind, whole)[1].issue if whole else 0.0

    def finish(self, kind: str, whole: int) -> float:
        return self._cheapest(kind, whole)[1].finish if whole else 0.0

    def only(self, primitives: Collection[str]) -> MeasuredLink:
        """The same without all other primitives, where lowering can use only some.

        Raises:
            ValueError: a kind would be left with none.
        """
        tables = {
            kind: {name: table for name, table in by.items() if name in primitives}
            for kind, by in self.tables.items()
        }
        for kind, left in tables.items():
            if not left:
                raise ValueError(
                    f"none of {sorted(primitives)} was measured for {kind}; "
                    f"known: {sorted(self.tables[kind])}"
                )
        return MeasuredLink(self.world, tables, self.share, self.source)

    def _whole(self, kind: str, sent: int) -> int:
        """Bytes of the whole value of which each rank sends `sent`: the inverse of (N - 1) / N,
        and for an all-reduce of twice that."""
        if self.world == 1:
            return 0
        whole = sent * self.world / (self.world - 1)
        return round(whole / 2 if kind == ALL_REDUCE else whole)

    def _cheapest(self, kind: str, whole: int) -> tuple[str, Sample]:
        if self.world == 1:
            return NOTHING, Sample(whole, 0.0, 0.0, 0.0)
        key = (kind, whole)  # a planner asks for the same sizes over and over
        if key not in self._known:
            by = {name: _at(table, whole) for name, table in self.tables[kind].items()}
            best = min(by, key=lambda name: (by[name].total, name))
            self._known[key] = (best, by[best])
        return self._known[key]

    def to_json(self) -> str:
        return json.dumps({"link": "measured", **_plain(self)}, indent=1)


def _at(samples: Sequence[Sample], whole: int) -> Sample:
    if whole <= samples[0].bytes or len(samples) == 1:
        return Sample(whole, *samples[0][1:])
    index = bisect_right(samples, whole, key=lambda sample: sample.bytes)
    index = min(max(index, 1), len(samples) - 1)
    low, high = samples[index - 1], samples[index]
    part = (whole - low.bytes) / (high.bytes - low.bytes)
    times = (a + part * (b - a) for a, b in zip(low[1:], high[1:]))
    # A last pair that falls would go below zero far behind it.
    return Sample(whole, *(max(each, 0.0) for each in times))


def _check(samples: Sequence[Sample], where: str) -> None:
    if not samples:
        raise ValueError(f"the table of {where} is empty")
    if any(b.bytes <= a.bytes for a, b in pairwise(samples)):
        raise ValueError(f"the sizes of {where} do not ascend")
    if not all(math.isfinite(t) and t >= 0 for sample in samples for t in sample[1:]):
        raise ValueError(f"the table of {where} holds a value that is no time")


def default_link(name: str, world: int) -> RingLink:
    """The published link of `world` devices in their usual machines: 8 H100s on NVLink and a
    400 Gb/s port each, and so on; for "cpu" gloo messages between the ranks of one host.

    Raises:
        OptionError: no such device.
    """
    on = device(name)
    if on.name == "cpu":
        return RingLink(
            world, world, _LOOPBACK, _LOOPBACK, on.bandwidth, on.launch, 0.0, GLOO_SHARE, P2P
        )
    node = NODES[on.name]
    return RingLink(
        world,
        node.ranks,
        node.inside,
        node.between,
        on.bandwidth * on.efficiency,
        on.launch,
        _NCCL_BASE,
    )


def link_from_json(text: str) -> Link:
    """What `to_json` of either link wrote.

    Raises:
        ValueError: the text is no link; says what is wrong with it.
    """
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("a link is a JSON object")
    form = raw.pop("link", None)
    try:
        if form == "ring":
            raw["inside"], raw["between"] = Wire(**raw["inside"]), Wire(**raw["between"])
            return RingLink(**raw)
        if form == "measured":
            raw["tables"] = {
                kind: {name: tuple(Sample(*line) for line in lines) for name, lines in by.items()}
                for kind, by in raw["tables"].items()
            }
            return MeasuredLink(**raw)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {form} link: {error!r}") from None
    raise ValueError(f"unknown form of link {form!r}; known: ring, measured")


def _plain(link: RingLink | MeasuredLink) -> dict[str, Any]:
    values = {k: v for k, v in vars(link).items() if not k.startswith("_")}
    return {k: asdict(v) if isinstance(v, Wire) else _dicts(v) for k, v in values.items()}


def _dicts(value: Any) -> Any:
    return {k: _dicts(v) for k, v in value.items()} if isinstance(value, Mapping) else value
