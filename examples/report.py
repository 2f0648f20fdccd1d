"""What the training script shows: a line per step while it runs, tables of bytes at the end."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor

MB = 1e6  # bytes
LINE_EVERY = 10  # steps between two lines in a log file, where a live bar is no use


@dataclass(frozen=True)
class StepStats:
    """One optimizer step as rank 0 saw it. Losses in nats per token."""

    step: int
    train_loss: float
    held_out_loss: float
    tokens_per_second: float  # all ranks together
    lr: float

    def __str__(self) -> str:
        return (
            f"train {self.train_loss:.4f}  held-out {self.held_out_loss:.4f}  "
            f"{self.tokens_per_second:>7,.0f} tokens/s  lr {self.lr:.2e}"
        )


class StepLog:
    """A live bar on a terminal, a line every LINE_EVERY steps elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("compiling", total=steps)

    def __enter__(self) -> "StepLog":
        self.bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.stop()

    def show(self, stats: StepStats, last: bool) -> None:
        self.bar.update(self.task, completed=stats.step, description=str(stats))
        due = stats.step == 1 or stats.step % LINE_EVERY == 0 or last
        if due and not self.console.is_terminal:
            count = f"{stats.step:>{len(str(self.steps))}}/{self.steps}"
            self.console.print(f"step {count}  {stats}", soft_wrap=True)


@dataclass(frozen=True)
class Resting:
    """Bytes of one kind of tensor between two steps: on this rank, and on each rank without
    partitioning."""

    held: int
    replicated: int


@dataclass(frozen=True)
class RestingState:
    parameters: Resting
    gradients: Resting
    optimizer: Resting


def resting(tensors: Iterable[Tensor]) -> Resting:
    """Sum bytes over ``tensors``. A DTensor has the shape of the whole; its local is the shard."""
    held = replicated = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held += local.numel() * local.dtype.itemsize
        # Sizes come from attributes: an operation on a partitioned parameter may gather it.
        replicated += math.prod(tensor.shape) * tensor.dtype.itemsize
    return Resting(held, replicated)


@torch.no_grad()
def measure_resting(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> RestingState:
    """Call it while the last step's gradients are still there."""
    parameters = list(model.parameters())
    states = optimizer.state.values()
    return RestingState(
        parameters=resting(parameters),
        gradients=resting(p.grad for p in parameters if p.grad is not None),
        optimizer=resting(t for state in states for t in state.values() if torch.is_tensor(t)),
    )


class Traffic(Protocol):
    """The fields of ``zcompile.traffic()`` used here: bytes this rank sent since it started."""

    gather_bytes: int
    reduce_bytes: int
    all_reduce_bytes: int


@dataclass(frozen=True)
class Sent:
    """Bytes one rank sent in one step, by collective."""

    gather: int
    reduce_scatter: int
    all_reduce: int

    @classmethod
    def between(cls, before: Traffic | None, after: Traffic | None) -> "Sent | None":
        """None where nothing counts."""
        if before is None or after is None:
            return None
        return cls(
            gather=after.gather_bytes - before.gather_bytes,
            reduce_scatter=after.reduce_bytes - before.reduce_bytes,
            all_reduce=after.all_reduce_bytes - before.all_reduce_bytes,
        )

    @property
    def total(self) -> int:
        return self.gather + self.reduce_scatter + self.all_reduce


@dataclass(frozen=True)
class Outcome:
    """What a run came to: held-out losses in nats per byte, bytes sent in its last step."""

    first_loss: float
    last_loss: float
    sent: Sent | None


def resting_table(state: RestingState, world: int) -> Table:
    table = bytes_table(f"At rest on rank 0 of {world}, MB", "held", "replicated")
    rows = {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer state": state.optimizer,
    }
    for name, row in rows.items():
        table.add_row(name, *compared(row.held, row.replicated))
    table.add_section()
    held = sum(row.held for row in rows.values())
    replicated = sum(row.replicated for row in rows.values())
    table.add_row("total", *compared(held, replicated))
    return table


def traffic_table(sent: Sent | None, parameter_bytes: int, stage: int, world: int) -> Table:
    """Against ZeRO's volume (Rajbhandari et al. 2020, section 7).

    Stages 0 to 2 move the Ψ = ``parameter_bytes`` twice (reduce gradients, gather parameters),
    stage 3 gathers once more for backward. Gradients summed in a wider dtype than parameters
    are gathered in send more than this.
    """
    passes = 3 if stage == 3 else 2
    expected = passes * parameter_bytes * (world - 1) / world
    table = bytes_table("Sent by rank 0 in the last step, MB", "sent", f"{passes}Ψ(N-1)/N")
    if sent is None:
        table.add_row("total", "not counted", f"{expected / MB:,.2f}", "")
        return table
    table.add_row("all-gather", f"{sent.gather / MB:,.2f}")
    table.add_row("reduce-scatter", f"{sent.reduce_scatter / MB:,.2f}")
    table.add_row("all-reduce", f"{sent.all_reduce / MB:,.2f}")
    table.add_section()
    table.add_row("total", *compared(sent.total, expected))
    return table


def bytes_table(title: str, measured: str, reference: str) -> Table:
    """Fixed widths, so that the columns of two tables stand under each other."""
    style = {"title_justify": "left", "title_style": "bold"}
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, **style)
    table.add_column("", width=16)
    table.add_column(measured, justify="right", width=12)
    table.add_column(reference, justify="right", width=12)
    table.add_column("ratio", justify="right", width=6)
    return table


def compared(measured: float, reference: float) -> tuple[str, str, str]:
    ratio = f"{measured / reference:.3f}" if reference else "-"
    return f"{measured / MB:,.2f}", f"{reference / MB:,.2f}", ratio


def held_out_verdict(first: float, last: float) -> str:
    change = f"{first:.4f} -> {last:.4f}"
    if last < first:
        return f"Held-out loss fell: {change} nats per byte."
    return f"[bold red]Held-out loss did not fall: {change} nats per byte.[/]"


def dump_line(directory: Path | None) -> str:
    """``directory`` is None for a backend that has no schedule."""
    if directory is None:
        return "Schedule dump: none, this backend has no schedule."
    if not directory.exists():
        return f"Schedule dump: [bold red]{directory} was not written.[/]"
    return f"Schedule dump: {directory}"


def print_report(
    console: Console,
    outcome: Outcome,
    resting: RestingState,
    *,
    parameter_bytes: int,
    stage: int,
    world: int,
    dump: Path | None,
) -> None:
    for table in (
        resting_table(resting, world),
        traffic_table(outcome.sent, parameter_bytes, stage, world),
    ):
        console.print("", table, sep="\n")
    console.print()
    console.print(held_out_verdict(outcome.first_loss, outcome.last_loss))
    console.print(dump_line(dump), soft_wrap=True)
