"""Step time, memory and traffic of zcompile and of what it replaces, side by side.

    python benchmarks/step_time.py --sizes gpt2 --dtype fp32,bf16

benchmarks/README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

# Run as a script, Python looks for modules beside the script, not above its folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import launch, report
from benchmarks.launch import WIRE, RunError, RunSpec
from benchmarks.measure import TrainSample, WireSample
from benchmarks.models import SHAPES
from benchmarks.summary import SystemRuns, step_seconds
from benchmarks.systems import SYSTEMS

DTYPES = ("fp32", "bf16")
MEMORY_STEPS = 3  # timed steps of a memory run: the peak repeats with every step
DEFAULT_JSON = "benchmarks/results/step_time-{size}-{dtype}.json"


def main() -> None:
    """Compare the systems at every size and dtype asked for."""
    args = parse_args()
    console = report.console()
    for size in args.sizes:
        for dtype in args.dtype:
            path = Path(args.json.format(size=size, dtype=dtype))
            comparison = compare(size, dtype, args, path)
            report.show(comparison, console)
            print(f"wrote {path}", file=sys.stderr)


def compare(size: str, dtype: str, args: argparse.Namespace, path: Path) -> report.Comparison:
    """Run all systems in rounds, then once for memory; the JSON is saved after each round."""
    comparison = report.Comparison(size, dtype, [SystemRuns(name) for name in args.systems], [])
    settings = {
        name: getattr(args, name) for name in ("rounds", "warmup", "steps", "memory", "timeout")
    }
    for number in range(args.rounds):
        # Every second round runs backwards, so that a machine which slowly gets slower, or
        # faster, favours no system.
        order = comparison.runs if number % 2 == 0 else list(reversed(comparison.runs))
        done = {runs.system: _timed(runs, size, dtype, args, number) for runs in order}
        comparison = replace(
            comparison,
            runs=[done[name] for name in args.systems],
            wire=comparison.wire + _wire(size, dtype, args),
        )
        report.save(comparison, settings, path)
    if args.memory:
        measured = [_memory(runs, size, dtype, args) for runs in comparison.runs]
        comparison = replace(comparison, runs=measured)
        report.save(comparison, settings, path)
    return comparison


def _timed(
    runs: SystemRuns, size: str, dtype: str, args: argparse.Namespace, number: int
) -> SystemRuns:
    """One more round of a system; one that has failed is not tried again."""
    if runs.errors:
        return runs
    spec = RunSpec(runs.system, size, dtype, args.warmup, args.steps)
    try:
        pair = [TrainSample(**sample) for sample in launch.run(spec, args.timeout, args.logs)]
    except RunError as error:
        _progress(f"round {number + 1} {runs.system}: {error}")
        return replace(runs, errors={"time": str(error)})
    times = step_seconds(SystemRuns(runs.system, [pair]))
    _progress(f"round {number + 1} {runs.system}: {sorted(times)[len(times) // 2] * 1e3:.1f} ms")
    return replace(runs, timed=[*runs.timed, pair])


def _memory(runs: SystemRuns, size: str, dtype: str, args: argparse.Namespace) -> SystemRuns:
    """Peak memory of a system, from a short run of its own."""
    if runs.errors:
        return runs
    spec = RunSpec(runs.system, size, dtype, args.warmup, MEMORY_STEPS, memory=True)
    try:
        pair = [TrainSample(**sample) for sample in launch.run(spec, args.timeout, args.logs)]
    except RunError as error:
        _progress(f"memory {runs.system}: {error}")
        return replace(runs, errors={"memory": str(error)})
    _progress(f"memory {runs.system}: {max(s.peak_bytes or 0 for s in pair) / 1e6:.0f} MB")
    return replace(runs, memory=pair)


def _wire(size: str, dtype: str, args: argparse.Namespace) -> list[list[WireSample]]:
    """One bare exchange, or none if it failed: the limits are then left out."""
    spec = RunSpec(WIRE, size, dtype, warmup=0, steps=0)
    try:
        return [[WireSample(**sample) for sample in launch.run(spec, args.timeout, args.logs)]]
    except RunError as error:
        _progress(f"bare exchange: {error}")
        return []


def _progress(text: str) -> None:
    """Say what was just measured; the tables alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=_names(SHAPES), default=["tiny"], help=f"of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--dtype", type=_names(DTYPES), default=["fp32"], help="fp32, bf16 or fp32,bf16"
    )
    parser.add_argument(
        "--systems", type=_names(SYSTEMS), default=list(SYSTEMS), help=f"of {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--rounds", type=int, default=2, help="times each system is started")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps of each start")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each start")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one more start of each system, for peak memory",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one start")
    parser.add_argument("--json", default=DEFAULT_JSON, help="may contain {size} and {dtype}")
    parser.add_argument("--logs", type=Path, help="keep every rank's output in this folder")
    args = parser.parse_args()
    if min(args.rounds, args.warmup, args.steps) < 1:
        parser.error("--rounds, --warmup and --steps must be at least 1")
    targets = {args.json.format(size=s, dtype=d) for s in args.sizes for d in args.dtype}
    if len(targets) < len(args.sizes) * len(args.dtype):
        parser.error("several sizes or dtypes need {size} and {dtype} in --json")
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    return args


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of known names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(unknown)}; choose from {', '.join(known)}"
            )
        return list(dict.fromkeys(names))

    return parse


if __name__ == "__main__":
    main()
