"""How long a dry run of a model takes that no machine here could hold, and how much memory.

    python -m benchmarks.plans turing-nlg
    python -m benchmarks.plans one-trillion --engine eager -o plan.json

The models are on `meta`, the world is on paper, and everything happens in this one process.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.gpt import GPT, GPTConfig
from zcompile import plan


@dataclass(frozen=True)
class Dry:
    """A model, the ranks it is planned for, and one rank's batch in sequences."""

    config: GPTConfig
    world: int
    batch: int = 1


DRY: dict[str, Dry] = {
    # Rajbhandari et al., "ZeRO" (SC 2020), section 10: 17.4B parameters
    "turing-nlg": Dry(GPTConfig(layers=78, dim=4256, heads=28, seq=1024, vocab=50304), 256),
    # Narayanan et al., "Efficient large-scale language model training" (SC 2021), table 1: 1008B
    "one-trillion": Dry(GPTConfig(layers=128, dim=25600, heads=160, seq=2048, vocab=51200), 1024),
}


def build(name: str) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The model and one rank's (tokens, targets), each (batch, seq) int64, all on meta."""
    dry = DRY[name]
    with torch.device("meta"):
        tokens = torch.zeros(dry.batch, dry.config.seq, dtype=torch.int64)
        return GPT(dry.config), (tokens, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=DRY)
    parser.add_argument("--engine", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--device", default="h100")
    parser.add_argument("-o", "--output", help="write the plan's JSON here, for zcompile show")
    chosen = parser.parse_args()
    model, inputs = build(chosen.model)
    world = DRY[chosen.model].world
    options = {
        "engine": chosen.engine,
        "stage": chosen.stage,
        "param_dtype": "bf16",
    }
    wall, cpu = time.perf_counter(), time.process_time()
    made = plan(model, inputs, world_size=world, device=chosen.device, options=options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    psi = sum(p.numel() for p in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB -> GiB
    timeline = made.timeline
    assert timeline is not None
    print(f"{chosen.model}: {psi / 1e9:.1f}B parameters, {world} ranks, stage {chosen.stage}")
    nodes = ", ".join(f"{g.direction} {len(g.nodes)} operations" for g in made.graphs)
    print(f"{nodes}; {len(made.collectives)} collectives")
    print(f"planned in {wall:.1f} s ({cpu:.1f} s of one core), peak {peak:.2f} GiB of memory")
    # fp32 shards, their gradients and Adam's two moments: 16 bytes per parameter in all.
    rest = 4 * sum(p.shard_bytes for p in made.parameters)
    print(f"at rest {rest / 1e9:.3f} GB per rank, {rest / (16 * psi / world):.4f} of 16 psi / N")
    share = psi * (world - 1) / world
    gathers = (2 if chosen.stage == 3 else 1) * 2 * share
    print(
        f"sent {made.sent('all-gather') / 1e9:.3f} GB in gathers, "
        f"{made.sent('all-gather') / gathers:.4f} of the formula; "
        f"{made.sent('reduce-scatter') / 1e9:.3f} GB in reductions"
    )
    print(
        f"step {timeline.seconds * 1e3:.1f} ms, bound {timeline.bound_seconds * 1e3:.1f} ms, "
        f"peak {timeline.peak_bytes / 1e9:.2f} GB"
    )
    if chosen.output:
        Path(chosen.output).write_text(made.to_json())


if __name__ == "__main__":
    main()
