"""Samples of all rounds -> one row per system, and the physical limits beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, median, quantiles

from benchmarks.launch import RANKS
from benchmarks.measure import TrainSample, WireSample
from benchmarks.models import SHAPES, count_parameters

LOSS_TOLERANCE = 1e-3  # relative, fp32; systems that agree differ by 1e-6 to 1e-5
FP32_BYTES, BF16_BYTES = 4, 2
FSDP2_ZERO3 = ("fsdp2", "fsdp2-compiled")

Pair = list[TrainSample]  # one run: the ranks' samples in rank order


@dataclass(frozen=True)
class SystemRuns:
    """Everything that was measured of one system."""

    system: str
    timed: list[Pair] = field(default_factory=list)  # one per round
    memory: Pair | None = None
    errors: dict[str, str] = field(default_factory=dict)  # by run: "time", "memory"


@dataclass(frozen=True)
class Row:
    """One system's line in the table; None where there is nothing to show."""

    system: str
    step_ms: float | None = None  # median
    low_ms: float | None = None  # lower quartile
    high_ms: float | None = None  # upper quartile
    tokens_per_second: float | None = None
    over_floor: float | None = None  # step time over the floor's, and so on: below 1 is faster
    over_fsdp2: float | None = None
    over_ddp_inductor: float | None = None
    loopback_mb: float | None = None  # on the wire, headers and other programs included
    written_mb: float | None = None  # by the rank itself; both per step and rank
    counted_mb: float | None = None  # by zcompile itself, per step and rank
    peak_mb: float | None = None  # highest of the ranks
    loss: float | None = None  # of the last step, mean over the ranks
    loss_differs: float | None = None  # relative to ddp's loss
    flagged: bool = False  # the loss differs by more than the tolerance
    note: str = ""


@dataclass(frozen=True)
class Limit:
    """What a stage cannot beat without overlapping communication with compute."""

    name: str
    sent_mb: float  # least bytes per step and rank
    wire_ms: float  # for these bytes through bare gloo
    serial_ms: float | None  # the floor and the wire, one after the other
    zero_over_serial: float | None  # the stage's measured time over that


@dataclass(frozen=True)
class Limits:
    """Speed of the wire and the bounds that follow from it."""

    wire_mb_per_second: float  # in each of both directions at once
    bounds: list[Limit]


def step_seconds(runs: SystemRuns) -> list[float]:
    """Every timed step of every round; a step takes as long as its slower rank."""
    return [
        max(times)
        for pair in runs.timed
        for times in zip(*(sample.step_seconds for sample in pair), strict=True)
    ]


def rows(runs: list[SystemRuns], size: str, dtype: str) -> list[Row]:
    """One row per system, with ratios to the reference systems that were run."""
    medians = {r.system: median(step_seconds(r)) for r in runs if r.timed}
    losses = {r.system: _last_loss(r) for r in runs if r.timed}
    fsdp2 = min((medians[name] for name in FSDP2_ZERO3 if name in medians), default=None)
    return [_row(r, size, dtype, medians, losses, fsdp2) for r in runs]


def _row(
    runs: SystemRuns,
    size: str,
    dtype: str,
    medians: dict[str, float],
    losses: dict[str, float],
    fsdp2: float | None,
) -> Row:
    """The row of one system."""
    note = "; ".join(f"{run}: {text}" for run, text in runs.errors.items())
    peak = max((s.peak_bytes or 0 for s in runs.memory), default=0) if runs.memory else None
    if not runs.timed:
        return Row(runs.system, peak_mb=_mb(peak), note=note)
    shape, seconds = SHAPES[size], step_seconds(runs)
    middle, loss = medians[runs.system], losses[runs.system]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [middle] * 3
    differs = abs(loss / losses["ddp"] - 1) if "ddp" in losses else None
    return Row(
        system=runs.system,
        step_ms=middle * 1e3,
        low_ms=low * 1e3,
        high_ms=high * 1e3,
        tokens_per_second=RANKS * shape.batch * shape.seq / middle,
        over_floor=_ratio(middle, medians.get("floor")),
        over_fsdp2=_ratio(middle, fsdp2),
        over_ddp_inductor=_ratio(middle, medians.get("ddp-inductor")),
        loopback_mb=_mb(min(_on_loopback(pair) for pair in runs.timed)),
        written_mb=_mb(_written(runs.timed[-1])),
        counted_mb=_mb(_counted(runs.timed[-1])),
        peak_mb=_mb(peak),
        loss=loss,
        loss_differs=differs,
        # The floor averages no gradients, so it must differ; bf16 systems round differently.
        flagged=dtype == "fp32" and runs.system != "floor" and (differs or 0) > LOSS_TOLERANCE,
        note=note,
    )


def limits(wire: list[list[WireSample]], size: str, dtype: str, table: list[Row]) -> Limits | None:
    """Bounds for ZeRO-2 and ZeRO-3; None if the exchange was not measured.

    Bytes are those of ZeRO (arXiv 1910.02054, section 7) with N ranks: each of the gathers
    and the reduce-scatter sends (N - 1) / N of the model. In bf16 the gathers send bf16; the
    gradients are given in both widths, as fp32 is what FSDP2 sends and bf16 the least.
    """
    if not wire:
        return None
    rate = _wire_rate(wire)
    times = {row.system: row.step_ms for row in table}
    share = count_parameters(size) * (RANKS - 1) / RANKS
    param = FP32_BYTES if dtype == "fp32" else BF16_BYTES
    bounds = []
    for stage, gathers in ((2, 1), (3, 2)):
        for grad in dict.fromkeys((param, FP32_BYTES)):
            name = f"stage {stage}"
            if param != FP32_BYTES:
                name += ", gradients in " + ("fp32" if grad == FP32_BYTES else "bf16")
            sent = share * (gathers * param + grad)
            bounds.append(_limit(name, sent, rate, times.get("floor"), times.get(f"zero-{stage}")))
    return Limits(rate / 1e6, bounds)


def _limit(
    name: str, sent: float, rate: float, floor_ms: float | None, zero_ms: float | None
) -> Limit:
    """One bound; `sent` in bytes, `rate` in bytes per second."""
    wire_ms = sent / rate * 1e3
    serial_ms = None if floor_ms is None else floor_ms + wire_ms
    return Limit(name, sent / 1e6, wire_ms, serial_ms, _ratio(zero_ms, serial_ms))


def _wire_rate(wire: list[list[WireSample]]) -> float:
    """Bytes per second in one direction: the median over all blocks of all rounds."""
    seconds = [
        max(times)
        for pair in wire
        for times in zip(*(sample.block_seconds for sample in pair), strict=True)
    ]
    return float(wire[0][0].block_bytes / median(seconds))


def _last_loss(runs: SystemRuns) -> float:
    """Mean over the ranks; every round gives the same, but for the order of sums."""
    return mean(sample.losses[-1] for sample in runs.timed[-1])


def cpu_share(runs: list[SystemRuns]) -> float | None:
    """Processor time over wall time of the floor, which never waits: 1 on an idle machine."""
    samples = [s for r in runs if r.system == "floor" for pair in r.timed for s in pair]
    if not samples:
        return None
    return sum(s.cpu_seconds for s in samples) / sum(sum(s.step_seconds) for s in samples)


def _on_loopback(pair: Pair) -> float:
    """Bytes on the loopback device per step and rank.

    Both ranks read one counter, the machine's. The caller takes the least of the rounds:
    other programs' traffic can only add.
    """
    return pair[0].loopback_bytes / len(pair[0].step_seconds) / RANKS


def _written(pair: Pair) -> float:
    """Bytes that the ranks wrote per step, mean over the ranks."""
    return mean(sample.written_bytes / len(sample.step_seconds) for sample in pair)


def _counted(pair: Pair) -> float | None:
    """Bytes per step that zcompile counted, mean over the ranks."""
    if any(sample.traffic is None for sample in pair):
        return None
    return mean(sum((s.traffic or {}).values()) / len(s.step_seconds) for s in pair)


def _mb(size: float | None) -> float | None:
    """Bytes to megabytes (10^6)."""
    return None if size is None else size / 1e6


def _ratio(value: float | None, reference: float | None) -> float | None:
    """value / reference, where both are known."""
    return None if value is None or reference is None else value / reference
