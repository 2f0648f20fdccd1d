"""Does a step do what its plan says? Simulated against measured time and memory, and the frontier.

    python benchmarks/prediction.py --size small --points 5
    python benchmarks/prediction.py --size gpt2 --points 4 --peers fsdp2,fsdp2-zero2,ddp

Two gloo ranks of one thread each. Stages 1, 2 and 3 and budgets between the leanest peak and that
of stage 2 are trained in turn. Of each: the median time of forward and backward (the slower
rank's), and the peak of live bytes within them, from every allocation and release that torch's
allocator reports (not resident memory). Beside it stands what the simulator says of the same plan
when the times of single operations and of the link are those measured under stage 3: a prediction
for all the others. Peers are measured alike; they have no plan. With --rounds all of it is done
again and medians are shown: a machine that slows down meanwhile favours none.

Writes benchmarks/results/prediction-<size>.json and .html (a plot: time over memory).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks import measure, models
from benchmarks.systems import SYSTEMS, make_adamw

RANKS = 2
RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """Seconds and bytes. Peaks are of live tensors in forward and backward, the larger rank's."""

    name: str
    measured_seconds: float
    measured_peak: int
    predicted_seconds: float | None = None
    predicted_peak: int | None = None
    budget: int | None = None
    kept: int | None = None
    sent: int | None = None
    sent_planned: int | None = None
    lean_peak: int | None = None
    # Of each round: measured and predicted seconds.
    every: list[tuple[float, float]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", choices=("tiny", "small", "gpt2"))
    parser.add_argument("--engine", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--points", type=int, default=4, help="budgets between both ends")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=1, help="times everything is started anew")
    parser.add_argument("--peers", default="fsdp2,fsdp2-zero2,ddp")
    parser.add_argument("--plot-only", action="store_true", help="draw the recorded figures again")
    args = parser.parse_args()
    where = RESULTS / f"prediction-{args.size}.json"
    if args.plot_only:
        rows = [Row(**row) for row in json.loads(where.read_text())["rows"]]
    else:
        rows = measured(args)
        record = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        record |= {"engine": args.engine, "rows": [asdict(row) for row in rows]}
        where.write_text(json.dumps(record, indent=1) + "\n")
    show(rows)
    plot(rows, args.size, where.with_suffix(".html"))


def measured(args: argparse.Namespace) -> list[Row]:
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = [_round(args) for _ in range(args.rounds)]
    return [_median(list(same)) for same in zip(*rounds, strict=True)]


def _round(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ZCOMPILE_CACHE"] = folder
        run = lambda name, options: _spawn(folder, name, options, args)
        rows = [run("stage 3", {"stage": 3, "replan_gain": 9.0})]
        rows.append(run("stage 2", {"stage": 2, "replan_after": 0}))
        low, high = rows[0].lean_peak or 0, rows[1].predicted_peak or 0
        for point in range(1, args.points + 1):
            budget = int(low + (high - low) * point / (args.points + 1))
            options = {"stage": 3, "memory_budget": budget, "replan_after": 0}
            rows.append(run(f"budget {budget / 1e6:.0f} MB", options))
        rows.append(run("stage 1", {"stage": 1, "replan_after": 0}))
        rows += [run(name, None) for name in args.peers.split(",") if name]
    return rows


def _median(rows: list[Row]) -> Row:
    """One row of the same system in several rounds: medians of times, and the peaks of the round in
    which the measured one was most above its plan's."""
    predicted = [row.predicted_seconds for row in rows if row.predicted_seconds is not None]
    return replace(
        max(rows, key=lambda row: row.measured_peak / (row.predicted_peak or 1)),
        measured_seconds=statistics.median(row.measured_seconds for row in rows),
        predicted_seconds=statistics.median(predicted) if predicted else None,
        every=[(row.measured_seconds, row.predicted_seconds or 0.0) for row in rows],
    )


def _spawn(folder: str, name: str, options: Any, args: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as store:
        context = mp.get_context("spawn")
        pipe = context.SimpleQueue()
        spec = (folder, name, options, args.size, args.engine, args.steps, f"{store}/store", pipe)
        mp.spawn(_rank, spec, RANKS)
        row: Row = pipe.get()
    Console(stderr=True).print(f"[dim]{name}: {row.measured_seconds * 1e3:.1f} ms")
    return row


def _rank(
    rank: int, folder: str, name: str, options: Any, size: str, engine: str, steps: int, store: str,
    pipe: Any,
) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    run = _ours if options is not None else _peer
    row = run(rank, folder, name, options, size, engine, steps)
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (row.measured_seconds, row.measured_peak, row.sent))
    row.measured_peak = max(peak for _, peak, _ in everyone)
    if rank == 0:
        pipe.put(row)
    dist.barrier()
    dist.destroy_process_group()


def _ours(
    rank: int, folder: str, name: str, options: Any, size: str, engine: str, steps: int
) -> Row:
    import zcompile
    from zcompile import buffers, machine, planning

    made: list[Any] = []
    original = planning.plan
    planning.plan = lambda *args, **kwargs: made.append(original(*args, **kwargs)) or made[-1]
    model = models.build(size)
    optimizer = make_adamw(model.parameters())
    compiled = torch.compile(model, backend="zero", options={**options, "engine": engine})
    batch = models.batch(size, rank)
    step = lambda: compiled(*batch).backward()
    seconds = _time(step, optimizer, steps)
    before = zcompile.traffic()
    step()
    sent = zcompile.traffic() - before
    planned = made[0]  # what was compiled: no later plan promises a gain of 9
    buffers.SMALLEST_BYTES = 2**62  # blocks that are used again are not the allocator's
    peak = planned.sim.at_rest.total() + _peak(step, optimizer)
    # What stage 3 was measured to take, operation by operation.
    reference = Path(folder) / "reference.json"
    known = machine.of(_group(model)).measured
    if not reference.exists() and rank == 0:
        reference.write_text(json.dumps(dict(next(iter(known.values())))))
    dist.barrier()
    measured = json.loads(reference.read_text())
    found, sim = planned.found, planned.sim
    setting = planning.Setting(
        zcompile.Options.parse({**options, "engine": engine}), RANKS, sim.step.native,
        machine.of(_group(model)).costs, sim.at_rest, measured={sim.step.fingerprint: measured},
    )  # fmt: skip
    replay = setting.simulator(sim.step).replay(found.schedule)
    return Row(
        name=name,
        measured_seconds=seconds,
        measured_peak=peak,
        predicted_seconds=replay.seconds,
        predicted_peak=replay.peak,
        budget=options.get("memory_budget"),
        kept=len(planned.plan.kept()),
        sent=sent.gather_bytes + sent.reduce_bytes + sent.all_reduce_bytes,
        sent_planned=planned.plan.sent(),
        lean_peak=sim.replay(planning.planner.lean(sim)).peak,
    )


def _group(model: Any) -> Any:
    from zcompile import comm

    return comm.find(next(model.parameters()).spec.group)


def _peer(
    rank: int, folder: str, name: str, options: Any, size: str, engine: str, steps: int
) -> Row:
    model = models.build(size)
    optimizers: list[Any] = []

    def make(parameters: Any) -> Any:
        optimizers.append(make_adamw(parameters))
        return optimizers[-1]

    losses: list[Any] = []
    original = torch.Tensor.backward
    whole = SYSTEMS[name](model, make, "fp32")
    optimizer = optimizers[0]
    batch = models.batch(size, rank)
    # The systems' step is forward, backward and update: time and memory end with backward.
    span: list[float] = []

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        original(loss, *args, **kwargs)
        span.append(time.perf_counter())
        losses.append(loss)

    # Every system calls it in its step, and none says when it is over.
    torch.Tensor.backward = backward  # type: ignore[method-assign]
    times = []
    for index in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        whole(*batch)
        if index >= 3:
            times.append(span[-1] - begin)
    seconds = _slowest(times)
    held = sum(_local(p).nbytes for p in model.parameters())
    for state in optimizer.state.values():
        held += sum(_local(v).nbytes for v in state.values() if isinstance(v, torch.Tensor))
    optimizer.zero_grad(set_to_none=True)
    peak = held + _peak(lambda: whole(*batch), optimizer)
    return Row(name, seconds, peak)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _time(step: Callable[[], object], optimizer: Any, steps: int) -> float:
    times = []
    for index in range(steps):
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        begin = time.perf_counter()
        step()
        if index >= 5:  # compiled, measured, perhaps compiled again
            times.append(time.perf_counter() - begin)
        optimizer.step()
    return _slowest(times)


def _slowest(times: list[float]) -> float:
    """Median over the steps, each as long as its slower rank."""
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, times)
    return statistics.median(max(step) for step in zip(*everyone, strict=True))


def _peak(step: Callable[[], object], optimizer: Any) -> int:
    """Bytes over what was there before."""
    optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    return measure.peak_of(seen)


def show(rows: list[Row]) -> None:
    table = Table(title="simulated against measured: forward and backward")
    for head in ("", "ms", "simulated", "off", "peak MB", "simulated", "off", "budget MB", "kept"):
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        time_off = _off(row.predicted_seconds, row.measured_seconds)
        peak_off = _off(row.predicted_peak, row.measured_peak)
        table.add_row(
            row.name, f"{row.measured_seconds * 1e3:.1f}", _number(row.predicted_seconds, 1e3),
            time_off, f"{row.measured_peak / 1e6:.1f}", _number(row.predicted_peak, 1e-6), peak_off,
            _number(row.budget, 1e-6), "" if row.kept is None else str(row.kept),
        )  # fmt: skip
    Console().print(table)
    planned = [row for row in rows if row.predicted_seconds is not None]
    offs = [abs((r.predicted_seconds or 0) / r.measured_seconds - 1) for r in planned]
    Console().print(f"median error of time: {statistics.median(offs):.1%}")
    over = [r.name for r in planned if r.budget and r.measured_peak > r.budget]
    Console().print(f"over their budget: {', '.join(over) or 'none'}")
    wrong = [r.name for r in planned if abs((r.sent or 0) - (r.sent_planned or 0)) > 4096]
    Console().print(f"bytes sent that differ from the plan's: {', '.join(wrong) or 'none'}")
    if all(len(row.every) > 1 for row in planned):
        alike, pairs = ranked(planned)
        text = "pairs that every round measured, and simulated, in one order"
        Console().print(f"{text}: {pairs}, the same one: {alike}")


def ranked(rows: list[Row]) -> tuple[int, int]:
    """(those simulated in the order in which they were measured, pairs of plans of which every
    round found the same one faster). By rounds, so that a machine which drifts tells no two plans
    apart; plans that are one and the same are no pair."""
    alike = pairs = 0
    for one, other in itertools.combinations(rows, 2):
        both = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(one.every, other.every, strict=True)]
        told = [all(d[i] < 0 for d in both) or all(d[i] > 0 for d in both) for i in (0, 1)]
        if all(told):
            pairs += 1
            alike += (both[0][0] < 0) == (both[0][1] < 0)
    return alike, pairs


def _off(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else f"{predicted / measured - 1:+.1%}"


def _number(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.1f}"


def plot(rows: list[Row], size: str, where: Path) -> None:
    from plotly import graph_objects as go

    ours = sorted((r for r in rows if r.predicted_peak), key=lambda r: r.measured_peak)
    peers = [r for r in rows if not r.predicted_peak]
    figure = go.Figure()

    def points(name: str, of: list[Row], peak: str, seconds: str, **style: Any) -> None:
        figure.add_scatter(
            x=[getattr(r, peak) / 1e6 for r in of],
            y=[getattr(r, seconds) * 1e3 for r in of],
            text=[r.name for r in of],
            name=name,
            textposition="top center",
            **style,
        )

    lines = {"mode": "lines+markers+text"}
    points("zcompile, measured", ours, "measured_peak", "measured_seconds", **lines)
    points("zcompile, simulated", ours, "predicted_peak", "predicted_seconds", mode="markers",
           marker={"symbol": "x"})  # fmt: skip
    points("peers", peers, "measured_peak", "measured_seconds", mode="markers+text")
    figure.update_layout(
        title=f"{size}: forward and backward on 2 gloo ranks, time over peak of live bytes",
        xaxis_title="peak of live bytes, MB",
        yaxis_title="ms",
        template="plotly_white",
    )
    figure.write_html(where, include_plotlyjs="cdn")


if __name__ == "__main__":
    main()
