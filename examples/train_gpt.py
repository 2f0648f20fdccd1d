"""Train a byte-level GPT with ZeRO as the compiler backend.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py --preset tiny                      # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py --backend inductor   # DDP, to compare

The loop is that of one device. What makes it ZeRO is one argument, ``backend="zero"``.
"""

import argparse
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from gpt import GPT, PRESETS
from report import Outcome, Sent, StepLog, StepStats, Traffic, measure_resting, print_report
from rich.console import Console
from text import DEFAULT_TEXT, Text, fixed_batches, load_text, random_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

DUMP = os.environ.get("ZCOMPILE_DUMP", "runs/dump")
MAX_GRAD_NORM = 1.0
HELD_OUT_BATCHES = 4
COMPILE_STEPS = 2  # the first steps compile and warm up: that is not training time
SPEED_STEPS = 10  # steps whose median gives tokens/s


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with ZeRO as the compiler backend.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="size of the model")
    add("--data", type=Path, default=DEFAULT_TEXT, help="any file, read as bytes")
    add("--backend", choices=["zero", "inductor", "eager"], default="zero")
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    add("--engine", choices=["inductor", "eager"], default="inductor", help="zero's code generator")
    add("--dump", type=Path, default=Path(DUMP), help="folder for zero's schedule")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="compute dtype")
    add("--steps", type=int, default=60)
    add(
        "--seconds",
        type=float,
        help="stop early after training this long, compilation not counted",
    )
    add("--batch", type=int, default=8, help="windows per rank and step")
    add("--seq", type=int, help="bytes in a window; the preset's by default")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--eval-every", type=int, default=10, help="steps between held-out losses")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    longest = PRESETS[args.preset].seq
    args.seq = args.seq or longest
    if args.seq > longest:
        parser.error(f"--seq {args.seq} is longer than the {longest} of preset {args.preset}")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


def compile_model(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """``backend="zero"`` needs nothing else; the others need DDP to use more than one rank."""
    if args.backend == "zero":
        options = {"stage": args.stage, "engine": args.engine, "dump": str(args.dump)}
        if args.dtype == "bf16":
            options["param_dtype"] = "bfloat16"
        return torch.compile(model, backend="zero", options=options)
    if WORLD > 1:
        dist.init_process_group()
        model = DistributedDataParallel(model)
    return torch.compile(model, backend=args.backend)


def precision(args: argparse.Namespace, device: torch.device) -> AbstractContextManager:
    """Autocast for the plain backends; zero casts the shards before it gathers them."""
    if args.dtype == "bf16" and args.backend != "zero":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def warmup_cosine(steps: int) -> Callable[[int], float]:
    """Factor of the peak rate: up over the first tenth, then a half cosine down to a tenth."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


class StepClock:
    """Seconds per step. Compiling shows in neither number: one skips it, one is a median."""

    def __init__(self) -> None:
        self.steps = 0
        self.trained = 0.0  # seconds since compiling ended
        self.recent: deque[float] = deque(maxlen=SPEED_STEPS)

    def add(self, seconds: float) -> None:
        self.steps += 1
        self.recent.append(seconds)
        if self.steps > COMPILE_STEPS:
            self.trained += seconds

    @property
    def typical(self) -> float:
        return median(self.recent)


def rank0_says(answer: bool, device: torch.device) -> bool:
    """Clocks differ between ranks, and a rank that stops alone leaves the others waiting."""
    if not dist.is_initialized():
        return answer
    flag = torch.tensor([answer], dtype=torch.int32, device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def traffic(backend: str) -> Traffic | None:
    """Bytes this rank has sent so far; only zero counts them."""
    if backend != "zero":
        return None
    import zcompile  # for the report only: training needs no import

    return zcompile.traffic()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    text: Text,
    device: torch.device,
    args: argparse.Namespace,
    log: StepLog,
) -> Outcome:
    """The loop. Its last gradients stay where they are, to be measured."""
    schedule = LambdaLR(optimizer, warmup_cosine(args.steps))
    autocast = precision(args, device)
    generator = torch.Generator().manual_seed(args.seed + RANK)  # other batches on every rank
    held_out = fixed_batches(text.held_out, HELD_OUT_BATCHES, args.batch, args.seq)

    @torch.no_grad()
    def evaluate() -> float:
        """The same windows on every rank: under stage 3 none could run the model alone."""
        model.eval()
        with autocast:
            losses = [model(x.to(device), y.to(device)) for x, y in held_out]
        model.train()
        return torch.stack(losses).mean().item()

    clock = StepClock()
    first_loss = held_out_loss = evaluate()
    for step in range(1, args.steps + 1):
        started, sent_before = time.perf_counter(), traffic(args.backend)
        x, y = random_batch(text.train, args.batch, args.seq, generator)
        lr = schedule.get_last_lr()[0]

        optimizer.zero_grad()
        with autocast:
            loss = model(x.to(device), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()

        train_loss = loss.item()  # waits for the device, so the clock sees the whole step
        clock.add(time.perf_counter() - started)
        sent_after = traffic(args.backend)
        last = step == args.steps
        if args.seconds is not None:
            last |= rank0_says(clock.trained >= args.seconds, device)
        if last or step % args.eval_every == 0:
            held_out_loss = evaluate()
        tokens_per_second = WORLD * args.batch * args.seq / clock.typical
        log.show(StepStats(step, train_loss, held_out_loss, tokens_per_second, lr), last)
        if last:
            break
    return Outcome(first_loss, held_out_loss, Sent.between(sent_before, sent_after))


def main() -> None:
    args = parse_args()
    console = Console(quiet=RANK != 0, highlight=False)
    device = pick_device()
    text = load_text(args.data, args.seq)

    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(PRESETS[args.preset]).to(device)
    size = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    model = compile_model(model, args)

    zero = args.backend == "zero"
    console.print(
        f"{args.preset}, {size / 1e6:.1f}M parameters, {args.dtype}, "
        f"{WORLD} x {args.batch} x {args.seq} bytes a step, {args.backend}"
        + (f" stage {args.stage}" if zero else "")
    )
    with StepLog(console, args.steps) as log:
        outcome = train(model, optimizer, text, device, args, log)
    # On every rank, so that none is alone in whatever reading a DTensor may start.
    resting = measure_resting(model, optimizer)
    print_report(
        console,
        outcome,
        resting,
        parameter_bytes=size * (2 if zero and args.dtype == "bf16" else 4),
        stage=args.stage if zero else 0,
        world=WORLD,
        dump=args.dump if zero else None,
    )

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
