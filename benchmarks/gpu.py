"""One GPU: are the emitted kernels right there, and how fast are they and a compiled step?

    python -m benchmarks.gpu                            # a GPU, under eight minutes
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --elements 0.004

The second line runs every part of it without one: Triton's interpreter carries the same kernels.
Its times mean nothing and nothing is recorded. On a GPU, writes benchmarks/results/gpu.json.

- values: each optimizer's fused step against torch.optim in double precision, parameters and states
  within 1e-6 of their largest value, and a bf16 copy to the last bit;
- kernel: AdamW with a bf16 gradient and a bf16 copy, 28 bytes an element, against torch's fused
  AdamW between two casts, and against copying memory, which is the limit;
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
from benchmarks.models import GPT, SHAPES, Shape
from zcompile.codegen import build

RESULTS = Path(__file__).parent / "results" / "gpu.json"
BF16 = torch.bfloat16
SIZES = [(5,), (1,), (0,), (257, 33), (1024,)]
TOLERANCE = 1e-6  # of a tensor's largest value: fp32 rounding over STEPS steps
STEPS = 6
# A GPT that fills a GPU with work: GPT-2 124M on 8 sequences of 1024 tokens.
LARGE = Shape(layers=12, width=768, heads=12, vocab=50304, seq=1024, batch=8)

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AMSGrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, lr_decay=0.01),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
}


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
    params = [nn.Parameter(torch.randn(elements // 8, device=device)) for _ in range(8)]
    low = {p: torch.empty_like(p, dtype=BF16, requires_grad=False) for p in params}
    fused = zcompile.fuse(optim.AdamW(params, lr=1e-4), copies=low)
    for p in params:
        p.grad_dtype = BF16
        p.grad = torch.randn_like(p, dtype=BF16)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    plain = optim.AdamW(others, lr=1e-4, fused=device.type == "cuda")
    arriving = [p.grad for p in params]
    for p in others:
        p.grad = torch.zeros_like(p)
    wide, rounded = [p.grad for p in others], [torch.empty_like(c) for c in low.values()]

    def with_casts() -> None:
        with torch.no_grad():
            torch._foreach_copy_(wide, arriving)
            plain.step()
            torch._foreach_copy_(rounded, others)

    source = torch.empty(elements, device=device)
    target = torch.empty_like(source)
    moved = {"zcompile": 28 * elements, "torch": 28 * elements, "copy": 8 * elements}
    run = {"zcompile": fused.step, "torch": with_casts, "copy": lambda: target.copy_(source)}
    seconds = interleaved(run, device, rounds)
    found = {name: moved[name] / each for name, each in seconds.items()}
    found["of a copy's bandwidth"] = found["zcompile"] / found["copy"]
    return found


def steps(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second, bytes at the peak, and the last loss, of one process."""
    large = device.type == "cuda"
    shape = LARGE if large else SHAPES["tiny"]
    engine = "inductor" if large else "eager"
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq), device=device)
    found = {}
    for name in ("plain", "zero", "compile_step"):
        torch._dynamo.reset()
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
        run = {"step": functools.partial(step, tokens, tokens)}
        seconds = interleaved(run, device, rounds if large else 1)["step"]
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


def interleaved(
    run: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Median seconds of each, run in turn so that a drifting clock favours none."""
    times: dict[str, list[float]] = {name: [] for name in run}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for number in range(rounds + 2):
        for name, each in run.items():
            wait()
            begin = time.perf_counter()
            each()
            wait()
            if number >= 2:  # the first make state and kernels
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    main()
