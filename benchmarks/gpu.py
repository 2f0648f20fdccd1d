"""One GPU: are the emitted kernels right there, and how fast are they and a compiled step?

    python -m benchmarks.gpu                            # a GPU, under eight minutes
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --elements 0.004

The second line runs every part of it without one: Triton's interpreter carries the same kernels.
Its times mean nothing and nothing is recorded. On a GPU, writes benchmarks/results/gpu.json.

- values: each optimizer's fused step against torch.optim in double precision, parameters and states
  within 1e-6 of their largest value, and a bf16 copy to the last bit;
- kernel: AdamW with a bf16 gradient and a bf16 copy, 28 bytes an element, against torch's fused
  AdamW between two casts, and against copying memory, which is the limit;
- norm: the sum of squares of as many elements against torch's norms in float32, by the bytes of
  one reading; its value within 1e-12 of torch's in double precision;
- step: a GPT under zcompile.compile_step, torch.compile(backend="zero") and plain torch.compile:
  tokens a second and peak memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import zcompile
from benchmarks.elementwise import OPTIMIZERS
from benchmarks.models import GPT, SHAPES, Shape
from benchmarks.optimizer import BF16, BYTES, PIECES, interleaved, optimizer_of, stepping
from zcompile.codegen import build
from zcompile.norm import squares

RESULTS = Path(__file__).parent / "results" / "gpu.json"
SIZES = [(5,), (1,), (0,), (257, 33), (1024,)]
TOLERANCE = 1e-6  # of a tensor's largest value: fp32 rounding over STEPS steps
STEPS = 6
# A GPT that fills a GPU with work: GPT-2 124M on 8 sequences of 1024 tokens.
LARGE = Shape(layers=12, width=768, heads=12, vocab=50304, seq=1024, batch=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--elements", type=float, default=200, help="millions, of the kernel")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        # The Triton kernels, by the interpreter, in place of those in C++.
        build.on_cpu = functools.partial(build.by_triton, device=device)
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "interpreter",
        "values": {name: values(make, device) for name, make in OPTIMIZERS.items()},
        "kernel": kernel(int(args.elements * 1e6), device, args.rounds),
        "norm": norm(int(args.elements * 1e6), device, args.rounds),
        "step": steps(device, args.rounds),
    }
    print(json.dumps(record, indent=1))
    if device.type == "cuda":
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def values(make: Callable[[Any], optim.Optimizer], device: torch.device) -> float:
    """The largest error of a parameter or a state, relative to its tensor's largest value.

    Raises:
        AssertionError: it is above TOLERANCE, a copy is not its parameter, or no kernel ran.
    """
    torch.manual_seed(0)
    wide = [nn.Parameter(torch.randn(size, dtype=torch.float64, device=device)) for size in SIZES]
    ours = [nn.Parameter(p.detach().float()) for p in wide]
    for p, q in zip(wide, ours, strict=True):
        p.data.copy_(q)  # the same numbers
    low = {p: torch.empty_like(p, dtype=BF16, requires_grad=False) for p in ours}
    reference, fused = make(wide), zcompile.fuse(make(ours), copies=low)
    for _ in range(STEPS):
        for p, q in zip(wide, ours, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.double()
        reference.step()
        fused.step()
    assert fused.step.fused.programs and not fused.step.fused.warned
    worst = 0.0
    for p, q in zip(wide, ours, strict=True):
        assert torch.equal(low[q], q.to(BF16))
        pairs = [(p, q)]
        pairs += [
            (v, fused.state[q][k])
            for k, v in reference.state[p].items()
            if isinstance(v, torch.Tensor) and v.shape == p.shape
        ]
        for theirs, mine in pairs:
            if theirs.numel():
                scale = max(theirs.abs().max().item(), 1.0)
                worst = max(worst, (mine.double() - theirs).abs().max().item() / scale)
    assert worst <= TOLERANCE, worst
    return worst


def kernel(elements: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Bytes a second: of 28 an element for each AdamW, and of a copy (one read, one write)."""
    source = torch.empty(elements, device=device)
    target = torch.empty_like(source)
    run = {
        "zcompile": optimizer_of("bf16", elements, device.type).step,
        "torch": stepping("bf16", elements, device.type, fused=True),
        "copy": lambda: target.copy_(source),
    }
    moved = {"zcompile": BYTES * elements, "torch": BYTES * elements, "copy": 8 * elements}
    times = interleaved(run, rounds, waiting(device))
    found = {name: moved[name] / statistics.median(each) for name, each in times.items()}
    found["of a copy's bandwidth"] = found["zcompile"] / found["copy"]
    return found


def norm(elements: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Bytes a second, of 4 an element.

    Raises:
        AssertionError: the value is wrong.
    """
    grads = [torch.randn(elements // PIECES, device=device) for _ in range(PIECES)]
    exact = sum(g.double().square().sum().item() for g in grads)
    found = squares(grads, device).item()
    assert abs(found / exact - 1) <= 1e-12, (found, exact)
    run = {
        "zcompile": lambda: squares(grads, device),
        "torch": lambda: torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm(),
    }
    times = interleaved(run, rounds, waiting(device))
    return {name: 4 * elements / statistics.median(each) for name, each in times.items()}


def steps(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second, bytes at the peak, and the last loss, of one process."""
    large = device.type == "cuda"
    shape = LARGE if large else SHAPES["tiny"]
    engine = "inductor" if large else "eager"
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq), device=device)
    found = {}
    for name in ("plain", "zero", "compile_step"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = GPT(shape).to(device)
        optimizer = optim.AdamW(model.parameters(), lr=3e-4, fused=large)
        options = {"engine": engine, "param_dtype": "bf16"}
        if name == "compile_step":
            step = zcompile.compile_step(model, None, optimizer, options=options)
        elif name == "zero":
            step = loop(torch.compile(model, backend="zero", options=options), optimizer, False)
        else:
            plain = torch.compile(model, backend="inductor" if large else "eager")
            step = loop(plain, optimizer, True)
        for _ in range(3):
            loss = step(tokens, tokens)
        if large:
            torch.cuda.reset_peak_memory_stats()
        run = {name: functools.partial(step, tokens, tokens)}
        times = interleaved(run, rounds if large else 1, waiting(device))
        seconds = statistics.median(times[name])
        peak = torch.cuda.max_memory_allocated() if large else 0
        rate = tokens.numel() / seconds
        found[name] = {"tokens/s": rate, "peak bytes": peak, "loss": loss.item()}
        del model, optimizer, step
    return found


def loop(model: Any, optimizer: optim.Optimizer, autocast: bool) -> Callable[..., torch.Tensor]:
    def step(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(idx.device.type, BF16, enabled=autocast):
            loss: torch.Tensor = model(idx, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def waiting(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


if __name__ == "__main__":
    main()
