"""A comparison as tables on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.launch import RANKS
from benchmarks.measure import WireSample
from benchmarks.models import SHAPES, count_parameters
from benchmarks.summary import Limits, Row, SystemRuns, cpu_share, limits, rows

WIDTH = 150  # columns, where the output is no terminal
BUSY_SHARE = 0.9  # below this share of its cores for the floor, other programs were running


@dataclass(frozen=True)
class Comparison:
    """All systems at one size and dtype."""

    size: str
    dtype: str
    runs: list[SystemRuns]
    wire: list[list[WireSample]]

    def rows(self) -> list[Row]:
        """The table's rows."""
        return rows(self.runs, self.size, self.dtype)

    def limits(self) -> Limits | None:
        """The physical limits."""
        return limits(self.wire, self.size, self.dtype, self.rows())


def console() -> Console:
    """A console that is wide enough for the table when written to a file."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def show(comparison: Comparison, to: Console) -> None:
    """Print the systems, the limits, and what failed."""
    table = comparison.rows()
    to.print(_systems_table(comparison, table))
    for row in table:
        if row.note:
            to.print(f"[red]{row.system}[/red] {escape(row.note)}")
        if row.flagged:
            to.print(f"[red]{row.system}[/red] loss differs from ddp by {row.loss_differs:.1e}")
    share = cpu_share(comparison.runs)
    if share is not None and share < BUSY_SHARE:
        to.print(f"[red]busy machine[/red] floor had {share:.0%} of its cores: trust no ratio")
    found = comparison.limits()
    if found is not None:
        to.print(_limits_table(found))


def _systems_table(comparison: Comparison, table: list[Row]) -> Table:
    """One line per system."""
    shape = SHAPES[comparison.size]
    result = Table(
        title=f"{comparison.size} ({count_parameters(comparison.size) / 1e6:.1f}M parameters), "
        f"{comparison.dtype}, {RANKS} ranks x {shape.batch} x {shape.seq} tokens",
        caption="x: step time over the named system's, below 1 is faster. "
        "MB: 10^6 bytes per step and rank. ! loss differs from ddp.",
    )
    result.add_column("system", no_wrap=True)
    names = (
        "ms/step",
        "quartiles",
        "tokens/s",
        "x floor",
        "x FSDP2 Z3",
        "x DDP+Ind.",
        "MB on lo",
        "MB written",
        "MB counted",
        "peak MB",
        "loss",
    )
    for name in names:
        result.add_column(name, justify="right")
    for row in table:
        result.add_row(*_cells(row))
    return result


def _cells(row: Row) -> list[str]:
    """A row's text."""
    if row.step_ms is None:
        return [row.system, "failed", *["-"] * 8, _number(row.peak_mb, 0), "-"]
    return [
        row.system,
        _number(row.step_ms, 1),
        f"{_number(row.low_ms, 1)} - {_number(row.high_ms, 1)}",
        _number(row.tokens_per_second, 0),
        _number(row.over_floor, 2),
        _number(row.over_fsdp2, 2),
        _number(row.over_ddp_inductor, 2),
        _number(row.loopback_mb, 2),
        _number(row.written_mb, 2),
        _number(row.counted_mb, 2),
        _number(row.peak_mb, 0),
        _number(row.loss, 5) + (" !" if row.flagged else ""),
    ]


def _limits_table(found: Limits) -> Table:
    """Bounds from the floor and the bare exchange."""
    result = Table(
        title=f"limits: bare gloo moves {found.wire_mb_per_second:.0f} MB/s each way",
        caption="serial: the floor's step, then the wire. zero/serial: measured over that.",
    )
    for name in ("least traffic", "MB", "wire ms", "serial ms", "zero/serial"):
        result.add_column(name, justify="left" if name == "least traffic" else "right")
    for bound in found.bounds:
        result.add_row(
            bound.name,
            _number(bound.sent_mb, 2),
            _number(bound.wire_ms, 1),
            _number(bound.serial_ms, 1),
            _number(bound.zero_over_serial, 2),
        )
    return result


def _number(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def save(comparison: Comparison, settings: dict[str, object], path: Path) -> None:
    """Write rows, limits and every sample, with what is needed to run it again."""
    found = comparison.limits()
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/step_time.py", *sys.argv[1:]]),
        "settings": settings,
        "versions": _versions(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count()},
        "size": comparison.size,
        "dtype": comparison.dtype,
        "ranks": RANKS,
        "parameters": count_parameters(comparison.size),
        "shape": dataclasses.asdict(SHAPES[comparison.size]),
        "floor_cpu_share": cpu_share(comparison.runs),
        "rows": [dataclasses.asdict(row) for row in comparison.rows()],
        "limits": None if found is None else dataclasses.asdict(found),
        "samples": [dataclasses.asdict(runs) for runs in comparison.runs],
        "wire_samples": [[dataclasses.asdict(s) for s in pair] for pair in comparison.wire],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _versions() -> dict[str, str | None]:
    """Versions of what the times depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "zcompile"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
