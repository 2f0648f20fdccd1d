"""The fused AdamW step beside what it replaces, and beside a kernel that only moves its bytes.

    python benchmarks/optimizer.py --elements 50 --threads 1,2

fp32 parameters, gradients and state: 28 bytes an element (four loads, three stores). `ceiling` is a
kernel of the same loads and stores without arithmetic, emitted and built alike; nothing of this
traffic can be faster. Every system steps in turn within a round, and medians over the rounds are
shown. Writes benchmarks/results/optimizer.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import nn, optim

import zcompile
from zcompile.codegen import build
from zcompile.codegen.kernel import Kernel, Line, Store

RESULTS = Path(__file__).parent / "results"
PIECES = 16  # parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=50, help="millions")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = [
        measure(int(args.elements * 1e6), int(threads), args.rounds)
        for threads in args.threads.split(",")
    ]
    record = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "rows": rows}
    (RESULTS / "optimizer.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        show(row)


def measure(elements: int, threads: int, rounds: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    systems = {
        "ceiling": ceiling(elements),
        "zcompile.fuse": stepping(elements, zcompile.fuse),
        "torch fused": stepping(elements, lambda o: o, fused=True),
        "torch foreach": stepping(elements, lambda o: o, foreach=True),
        "torch.compile": stepping(elements, compiled),
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    for step in systems.values():
        step(), step()
    for _ in range(rounds):
        for name, step in systems.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {"elements": elements, "threads": threads, "seconds": medians, "all": times}


def parameters(elements: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(elements // PIECES)) for _ in range(PIECES)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def stepping(
    elements: int, wrap: Callable[[optim.Optimizer], optim.Optimizer], **more: bool
) -> Callable[[], object]:
    optimizer = wrap(optim.AdamW(parameters(elements), lr=1e-4, **more))
    return lambda: optimizer.step()


def compiled(optimizer: optim.Optimizer) -> optim.Optimizer:
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-4)  # a number compiles anew at each change
    optimizer.step = torch.compile(optimizer.step)
    return optimizer


def ceiling(elements: int) -> Callable[[], object]:
    """Four loads and three stores an element; the additions only keep the loads alive."""
    own = optim.AdamW(parameters(1000 * PIECES), lr=1e-4)
    zcompile.fuse(own)
    for _ in range(2):
        own.step()
    kernel: Kernel = list(own.step.fused.programs.values())[-1].kernel
    assert kernel.bytes_per_element() == 28
    bare = replace(
        kernel,
        name="bare",
        scalars=(),
        about=(),
        body=(Line("moved", "add", ("grad", "exp_avg")),),
        stores=(
            Store("param", "moved", torch.float32),
            Store("exp_avg", "exp_avg_sq", torch.float32),
            Store("exp_avg_sq", "param", torch.float32),
        ),
    )
    run = build.on_cpu(bare)
    # Buffers as an optimizer's own lie in memory.
    optimizer = optim.AdamW(parameters(elements))
    optimizer.step()
    states = optimizer.state.items()
    rows = [[p, p.grad, s["exp_avg"], s["exp_avg_sq"]] for p, s in states]
    addresses = torch.tensor([[t.data_ptr() for t in row] for row in rows]).T.contiguous()
    counts = torch.tensor([p.numel() for p, _ in states])
    nothing = torch.zeros(PIECES, 0, dtype=torch.float64)

    def step() -> object:
        run(addresses, counts, nothing)
        return optimizer  # whose memory the addresses are

    return step


def show(row: dict[str, object]) -> None:
    table = Table(title=f"AdamW, {row['elements'] / 1e6:.0f}M elements, {row['threads']} threads")
    for head in ("", "ms", "GB/s of 28 bytes", "of the ceiling"):
        table.add_column(head, justify="left" if not head else "right")
    seconds = row["seconds"]
    for name, each in seconds.items():
        rate = row["elements"] * 28 / each / 1e9
        share = seconds["ceiling"] / each
        table.add_row(name, f"{each * 1e3:.1f}", f"{rate:.1f}", f"{share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
