"""How long planning takes, by the number of collectives.

    python benchmarks/planning_time.py

Transformers of varied layers at world 64 on H100s, from 125 to 4,000 collectives, under a tight, a
medium and no budget: CPU seconds of the search and of reading the plan's rows off its schedule. The
growth is compared to n log n. Writes benchmarks/results/planning_time.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from zcompile.schedule import planner
from zcompile.schedule.costs import Costs
from zcompile.schedule.describe import to_plan
from zcompile.schedule.devices import device
from zcompile.schedule.links import default_link
from zcompile.schedule.simulate import AtRest, Simulator
from zcompile.schedule.step import Gather, Op, Owned, Reduction, Step

RESULTS = Path(__file__).parent / "results" / "planning_time.json"
SIZES = (125, 250, 500, 1000, 2000, 4000)
BUDGETS = (1.02, 1.3, None)  # of the leanest schedule's peak
LIMIT_SECONDS, LIMIT_SIZE = 5.0, 1000
SEARCHED = 250  # above so many collectives none is moved by itself, so only there n decides
NOISE = 0.1  # of that power, between runs
WORLD = 64
PER_LAYER = 4  # weights: attention in and out, MLP up and down
VIEWS = 3  # operations that cost nothing, beside each that does


def transformer(collectives: int) -> Step:
    """A gather in forward, one in backward and a reduction of each weight; layers differ in width,
    as pruned or mixed models' do."""
    rng = random.Random(collectives)
    weights = round(collectives / 3)
    widths = [rng.choice((2048, 3072, 4096)) for _ in range(-(-weights // PER_LAYER))]
    ratios = (3, 1, 4, 4)
    sizes = [ratios[i % PER_LAYER] * widths[i // PER_LAYER] ** 2 for i in range(weights)]
    stride = VIEWS + 1
    forward, end = weights * stride, 2 * weights * stride
    tokens = 4096
    ops = []
    for index in range(end):
        weight = index // stride if index < forward else (end - 1 - index) // stride
        flops = 2.0 * tokens * sizes[weight] * (1 if index < forward else 2)
        busy = index % stride == 0
        ops.append(Op(f"op_{index}", flops if busy else 0.0, 0.0, "bfloat16"))
    gathers, reductions, change = [], [], [0] * (2 * end + 2)
    for i, size in enumerate(sizes):
        whole, name = 2 * size, f"layers.{i // PER_LAYER}.{i % PER_LAYER}"
        sent = whole * (WORLD - 1) // WORLD
        at, back = i * stride, end - (i + 1) * stride
        gathers.append(Gather(name, 0, at, at + 1, 0, whole, sent, "bfloat16", True))
        gathers.append(Gather(name, 1, back, back + 1, forward, whole, sent, "bfloat16", True))
        reductions.append(
            Reduction(
                name, 1, "reduce-scatter", back + 2, end, 2 * whole, 2 * sent, "float32", whole,
                2 * whole // WORLD, "bfloat16 float32",
            )
        )  # fmt: skip
        saved = 2 * tokens * widths[i // PER_LAYER]
        change[2 * at + 1] += saved
        change[2 * back + 2] -= saved
    live, total = [], 0
    for step in change[:-1]:
        total += step
        live.append(total)
    owned = [
        Owned(g.parameter, (g.bytes // 2,), "bfloat16", g.bytes, 2 * g.bytes // WORLD, True)
        for g in gathers
        if g.graph == 0
    ]
    return Step(
        world=WORLD,
        native=True,
        directions=("forward", "backward"),
        ends=(forward, end),
        ops=tuple(ops),
        gathers=tuple(sorted(gathers, key=lambda g: g.first)),
        reductions=tuple(sorted(reductions, key=lambda r: r.ready)),
        parameters=tuple(owned),
        live={"activations": tuple(live)},
    )


def measure(size: int, spent: float | None) -> dict[str, float | None]:
    """CPU seconds of one plan. spent: the budget, as a multiple of the leanest peak."""
    step = transformer(size)
    rest = sum(p.shard_bytes for p in step.parameters)
    sim = Simulator(step, Costs(device("h100"), default_link("h100", WORLD)), AtRest(rest))
    names = [p.name for p in step.parameters]
    least = int(sim.memory(planner.lean(sim)).max())
    begin = time.process_time()
    found = planner.plan(sim, None if spent is None else int(least * spent), may_keep=names)
    planned = time.process_time()
    to_plan(sim, found, name="plan")
    rows = time.process_time()
    return {
        "collectives": len(step.gathers) + len(step.reductions),
        "budget": spent,
        "search": planned - begin,
        "rows": rows - planned,
        "total": rows - begin,
        "to_bound": found.replay.seconds / sim.bound(found.schedule) - 1,
    }


def exponent(rows: list[dict[str, float | None]]) -> float:
    """The slope of log(seconds / (n log n)) over log n, by least squares: growth no faster than
    n log n has none above 0."""
    points = []
    for row in rows:
        n, total = float(row["collectives"] or 0), float(row["total"] or 0)
        points.append((math.log(n), math.log(total / (n * math.log(n)))))
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--json", type=Path, default=RESULTS)
    given = arguments.parse_args()
    console = Console()
    table = Table(title="planning time, CPU seconds")
    for name in ("collectives", "budget", "search", "rows", "us / (n log2 n)", "over the bound"):
        table.add_column(name, justify="right")
    rows = []
    for size in SIZES:
        for spent in BUDGETS:
            row = measure(size, spent)
            rows.append(row)
            n = float(row["collectives"] or 0)
            constant = float(row["total"] or 0) * 1e6 / (n * math.log2(n))
            table.add_row(
                f"{n:.0f}", "none" if spent is None else f"{spent:.2f}", f"{row['search']:.2f}",
                f"{row['rows']:.2f}", f"{constant:.1f}", f"{row['to_bound']:.2%}",
            )  # fmt: skip
    console.print(table)
    slowest = max(float(r["total"] or 0) for r in rows if (r["collectives"] or 0) <= LIMIT_SIZE)
    growth = exponent([r for r in rows if (r["collectives"] or 0) > SEARCHED])
    console.print(
        f"slowest up to {LIMIT_SIZE} collectives: {slowest:.2f} s (limit {LIMIT_SECONDS:.0f})\n"
        f"above {SEARCHED}, seconds / (n log n) grow with n to the power of {growth:+.2f}"
    )
    given.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {"slowest_to_1000": slowest, "growth_over_n_log_n": growth}
    given.json.write_text(json.dumps({"figures": figures, "rows": rows}, indent=1) + "\n")
    sys.exit(slowest > LIMIT_SECONDS or growth > NOISE)


if __name__ == "__main__":
    main()
