"""What operations and collectives cost, in seconds: everything the planner knows of a machine.

Neither a process group nor a device is needed: a plan for 1,024 H100s can be made on a laptop.

    compute    max(flops / peak, bytes / bandwidth) / efficiency + launch    the roofline model
    transfer   latency * steps + sent / bandwidth                            see links.py

Sources: the roofline is Williams, Waterman and Patterson (CACM 52, 2009); ring and tree terms are
those of Thakur, Rabenseifner and Gropp (IJHPCA 19, 2005).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zcompile.schedule.step import Op, Step


@dataclass(frozen=True)
class Device:
    """flops: by dtype name, per second, dense; bandwidth: bytes per second; memory: bytes;
    launch: seconds per operation; efficiency: the share of the peak that large operations reach.
    source: where the figures are published, or how they were measured. threads: of a
    CPU that share an operation, each with a workspace of its own; 0 of what is no CPU."""

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    launch: float
    efficiency: float
    source: str
    threads: int = 0

    def seconds(self, op: Op) -> float:
        """A dtype without a figure computes as float32 does; what moves and computes nothing (a
        view, an operation fused into another) is free."""
        if not op.flops and not op.bytes:
            return 0.0
        peak = self.flops.get(op.dtype) or self.flops["float32"]
        work = max(op.flops / peak, op.bytes / self.bandwidth)
        return work / self.efficiency + self.launch


class Link(Protocol):
    """How collectives of one group are carried. kind: all-gather, reduce-scatter or all-reduce;
    sent: bytes each rank sends; whole: bytes of the whole values, padding included."""

    @property
    def share(self) -> float:
        """Of the compute lane's time that a transfer takes while both are busy, 0 to 1."""
        ...

    def primitive(self, kind: str, sent: int) -> str:
        """The cheapest that can carry it."""
        ...

    def transfer(self, kind: str, sent: int) -> float:
        """Seconds on the link."""
        ...

    def issue(self, kind: str, whole: int) -> float:
        """Seconds of the compute lane to issue it: calls, copies into place, casts."""
        ...

    def finish(self, kind: str, whole: int) -> float:
        """Seconds of the compute lane behind its wait: cutting, means."""
        ...


@dataclass(frozen=True)
class ScaledLink:
    """A link that was seen to take `factor` times as long as `link` says."""

    link: Link
    factor: float

    @property
    def share(self) -> float:
        return self.link.share

    def primitive(self, kind: str, sent: int) -> str:
        return self.link.primitive(kind, sent)

    def transfer(self, kind: str, sent: int) -> float:
        return self.factor * self.link.transfer(kind, sent)

    def issue(self, kind: str, whole: int) -> float:
        return self.link.issue(kind, whole)

    def finish(self, kind: str, whole: int) -> float:
        return self.link.finish(kind, whole)


@dataclass(frozen=True)
class Costs:
    """measured: seconds of operations by "direction/name", in place of the model's.
    lines: one each on where the figures come from."""

    device: Device
    link: Link
    measured: Mapping[str, float] = field(default_factory=dict)
    lines: Sequence[str] = ()

    def compute(self, step: Step) -> list[float]:
        """Seconds of each operation."""
        seconds, begin = [], 0
        for direction, end in zip(step.directions, step.ends, strict=True):
            for op in step.ops[begin:end]:
                known = self.measured.get(f"{direction}/{op.name}")
                seconds.append(self.device.seconds(op) if known is None else known)
            begin = end
        return seconds
