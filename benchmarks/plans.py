"""How long a dry run of a model takes that no machine here could hold, and how much memory.

    python -m benchmarks.plans turing-nlg
    python -m benchmarks.plans one-trillion --engine eager

The models are on `meta`, the world is on paper, and everything happens in this one process.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.gpt import GPT, GPTConfig
from zcompile.dry_run import trace


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
    chosen = parser.parse_args()
    model, inputs = build(chosen.model)
    world = DRY[chosen.model].world
    options = {"engine": chosen.engine, "stage": chosen.stage, "param_dtype": "bf16"}
    wall, cpu = time.perf_counter(), time.process_time()
    ((forward, backward),) = trace(model, inputs, world_size=world, options=options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert backward is not None
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB -> GiB
    print(f"{chosen.model}: {billions:.1f}B parameters, {world} ranks, stage {chosen.stage}")
    print(f"forward {len(forward.graph.nodes)} nodes, backward {len(backward.graph.nodes)}")
    print(f"traced in {wall:.1f} s ({cpu:.1f} s of one core), peak {peak:.2f} GiB of memory")


if __name__ == "__main__":
    main()
