"""The fused AdamW step beside what it replaces, and beside a kernel that only moves its bytes.

    python benchmarks/optimizer.py --elements 50 --threads 1,2

Two ways to train, both of 28 bytes an element. fp32: four loads, three stores. bf16: the gradient
is read in bf16 and the parameter is also stored in bf16, as mixed precision needs them; the others
cast before and after their step. `ceiling` is a kernel of the same loads and stores without
arithmetic, emitted and built alike; nothing of this traffic can be faster. Every system steps in
turn within a round, and medians over the rounds are shown. DeepSpeed's CPU Adam is measured where
deepspeed is installed. Writes benchmarks/results/optimizer.json.
"""

from __future__ import annotations

import argparse
import contextlib
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
from torch import Tensor, nn, optim

import zcompile
from zcompile.codegen import build
from zcompile.codegen.kernel import COPY, Kernel, Line

RESULTS = Path(__file__).parent / "results"
PIECES = 16  # parameters
BYTES = 28  # an element
BF16, F32 = torch.bfloat16, torch.float32
KINDS = ("fp32", "bf16")

Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=50, help="millions")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    rows = [
        measure(kind, int(args.elements * 1e6), int(threads), args.rounds)
        for kind in KINDS
        for threads in args.threads.split(",")
    ]
    record = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "rows": rows}
    (RESULTS / "optimizer.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        show(row)


def measure(kind: str, elements: int, threads: int, rounds: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    systems = {
        "ceiling": ceiling(kind, elements),
        "zcompile.fuse": fused(kind, elements),
        "torch fused": stepping(kind, elements, fused=True),
        "torch foreach": stepping(kind, elements, foreach=True),
        "torch.compile": compiled(kind, elements),
    }
    with contextlib.suppress(ImportError):
        systems["DeepSpeed CPU Adam"] = deepspeed_adam(kind, elements)
    times = interleaved(systems, rounds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    about = {"kind": kind, "elements": elements, "threads": threads}
    return {**about, "seconds": medians, "all": times}


def interleaved(
    systems: dict[str, Step], rounds: int, wait: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each, run in turn so that a drifting clock favours none. wait: for the device."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for step in systems.values():
        step(), step()  # which make state and kernels
    for _ in range(rounds):
        for name, step in systems.items():
            wait()
            begin = time.perf_counter()
            step()
            wait()
            times[name].append(time.perf_counter() - begin)
    return times


# The systems


def parameters(elements: int, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(elements // PIECES, device=device)) for _ in range(PIECES)]


def optimizer_of(kind: str, elements: int, device: str = "cpu") -> optim.Optimizer:
    """zcompile's: it reads bf16 gradients and writes bf16 copies by itself."""
    params = parameters(elements, device)
    dtype = BF16 if kind == "bf16" else F32
    for p in params:
        p.grad_dtype = dtype
        p.grad = torch.randn_like(p, dtype=dtype)
    low = {p: torch.empty_like(p, dtype=BF16, requires_grad=False) for p in params}
    copies = low if kind == "bf16" else None
    return zcompile.fuse(optim.AdamW(params, lr=1e-4), copies=copies)


def fused(kind: str, elements: int) -> Step:
    return optimizer_of(kind, elements).step


def stepping(kind: str, elements: int, device: str = "cpu", **how: bool) -> Step:
    params = parameters(elements, device)
    return with_casts(kind, params, optim.AdamW(params, lr=1e-4, **how).step)


def with_casts(kind: str, params: list[nn.Parameter], step: Step) -> Step:
    """In mixed precision: gradients widened before a step, parameters rounded behind it."""
    for p in params:
        p.grad = torch.randn_like(p)
    if kind == "fp32":
        return step
    arriving = [torch.randn_like(p, dtype=BF16) for p in params]
    rounded = [torch.empty_like(p, dtype=BF16, requires_grad=False) for p in params]
    grads = [p.grad for p in params]

    def whole() -> None:
        with torch.no_grad():
            torch._foreach_copy_(grads, arriving)
            step()
            torch._foreach_copy_(rounded, params)

    return whole


def compiled(kind: str, elements: int) -> Step:
    params = parameters(elements)
    # A number as the rate would be compiled anew at each change.
    step = with_casts(kind, params, optim.AdamW(params, lr=torch.tensor(1e-4)).step)
    return torch.compile(step)


def deepspeed_adam(kind: str, elements: int) -> Step:
    """Raises ImportError where deepspeed is not installed, or cannot build its kernel here."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params = parameters(elements)
    try:
        optimizer = DeepSpeedCPUAdam(params, lr=1e-4)
    except Exception as error:
        print(f"DeepSpeed's CPU Adam is left out: {error}", file=sys.stderr)
        raise ImportError(str(error)) from error
    return with_casts(kind, params, optimizer.step)


def ceiling(kind: str, elements: int) -> Step:
    """The loads and stores of a fused step."""
    bare = without_arithmetic(kernel_of(kind))
    assert bare.bytes_per_element() == BYTES
    run = build.on_cpu(bare)
    # Buffers as an optimizer's own lie in memory.
    optimizer = optimizer_of(kind, elements)
    optimizer.step()
    rows = [buffers_of(optimizer, p) for p in optimizer.param_groups[0]["params"]]
    addresses = torch.tensor([[row[name].data_ptr() for row in rows] for name in bare.buffers()])
    counts = torch.tensor([row["param"].numel() for row in rows])
    nothing = torch.zeros(PIECES, 0, dtype=torch.float64)

    def step() -> object:
        run(addresses, counts, nothing)
        return rows  # whose memory the addresses are

    return step


def kernel_of(kind: str) -> Kernel:
    optimizer = optimizer_of(kind, 1000 * PIECES)
    for _ in range(2):  # the first has no state to read
        optimizer.step()
    kernel: Kernel = list(optimizer.step.fused.programs.values())[-1].kernel
    return kernel


def without_arithmetic(kernel: Kernel) -> Kernel:
    """The same loads and stores; every load is stored somewhere, or it would be left out."""
    body = (Line("moved", "add", ("param", "grad")),)
    values = {"param": "moved", "exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg", COPY: "moved"}
    stores = tuple(replace(store, value=values[store.buffer]) for store in kernel.stores)
    return replace(kernel, name="bare", scalars=(), about=(), body=body, stores=stores)


def buffers_of(optimizer: optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    found = {"param": p, "grad": p.grad, **optimizer.state[p]}
    copy = optimizer.step.fused.copies.get(p)
    return found if copy is None else {**found, COPY: copy}


# The table


def show(row: dict[str, object]) -> None:
    title = f"AdamW, {row['kind']}, {row['elements'] / 1e6:.0f}M elements, {row['threads']} threads"
    table = Table(title=title)
    for head in ("", "ms", f"GB/s of {BYTES} bytes", "of the ceiling"):
        table.add_column(head, justify="left" if not head else "right")
    seconds = row["seconds"]
    for name, each in seconds.items():
        rate = row["elements"] * BYTES / each / 1e9
        share = seconds["ceiling"] / each
        table.add_row(name, f"{each * 1e3:.1f}", f"{rate:.1f}", f"{share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
