"""How far the planner's schedules are from the best ones, on small steps where those are known.

    python benchmarks/planner_quality.py --cases 2000

Random steps of up to a dozen collectives, on links of any speed, under any budget: see
tests/random_steps.py. The optimum is found by exact search: tests/optimum.py. A gap is how much
longer the planner's step takes, simulated. Writes benchmarks/results/planner_quality.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from optimum import TooLarge, optimum
from random_steps import random_case
from rich.console import Console
from rich.table import Table

from zcompile.schedule import planner

RESULTS = Path(__file__).parent / "results" / "planner_quality.json"
BINS = (0.0, 1e-6, 0.001, 0.003, 0.01, 0.03, float("inf"))
MOST = 300_000  # partial schedules that one exact search may look at


def measure(seed: int) -> dict[str, object]:
    """One case: seconds planned and least, and what both searches took."""
    case = random_case(random.Random(seed), parameters=(1, 4), ops=(1, 12))
    sim = case.simulator()
    begin = time.process_time()
    found = planner.plan(sim, case.budget, may_keep=case.may_keep)
    planned = time.process_time()
    try:
        best = optimum(case, bound=found.replay.seconds, most=MOST)
    except TooLarge:
        gap = None
    else:
        gap = 0.0 if best.schedule is None else found.replay.seconds / best.seconds - 1
    return {
        "seed": seed,
        "collectives": case.collectives(),
        "operations": len(case.step.ops),
        "share": case.costs.link.share,
        "limited": case.budget is not None,
        "gap": gap,
        "planner_seconds": planned - begin,
        "exact_seconds": time.process_time() - planned,
    }


def show(rows: list[dict[str, object]], to: Console) -> dict[str, float]:
    """Print the distribution of gaps; returns its figures."""
    gaps = sorted(float(str(row["gap"])) for row in rows if row["gap"] is not None)
    count = len(gaps)
    figures = {
        "cases": count,
        "given_up": len(rows) - count,
        "optimal": sum(gap <= BINS[1] for gap in gaps) / count,
        "median": gaps[count // 2],
        "p95": gaps[int(count * 0.95)],
        "p99": gaps[int(count * 0.99)],
        "max": gaps[-1],
        "over_3_percent": sum(gap > 0.03 for gap in gaps),
    }
    table = Table(title="steps by their gap to the optimum")
    for name in ("gap up to", "steps", ""):
        table.add_column(name, justify="left" if not name else "right")
    for low, high in pairwise(BINS):
        inside = sum(low <= gap < high for gap in gaps)
        label = "none" if high == BINS[1] else f"{high:.1%}"
        table.add_row(label, str(inside), "#" * round(60 * inside / count))
    to.print(table)
    to.print(", ".join(f"{k} {v:.4%}" if isinstance(v, float) else f"{k} {v}"
                       for k, v in figures.items()))  # fmt: skip
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--cases", type=int, default=1000)
    arguments.add_argument("--first", type=int, default=200_000, help="seed of the first case")
    arguments.add_argument("--json", type=Path, default=RESULTS)
    given = arguments.parse_args()
    rows = [measure(seed) for seed in range(given.first, given.first + given.cases)]
    figures = show(rows, Console())
    given.json.parent.mkdir(parents=True, exist_ok=True)
    worst = sorted((r for r in rows if r["gap"]), key=lambda r: -float(str(r["gap"])))[:20]
    given.json.write_text(json.dumps({"figures": figures, "worst": worst}, indent=1) + "\n")
    sys.exit(figures["over_3_percent"] > 0)


if __name__ == "__main__":
    main()
