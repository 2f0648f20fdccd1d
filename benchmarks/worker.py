"""One rank of one run, in its own process: `python -m benchmarks.worker SPEC FOLDER`.

SPEC is a RunSpec as JSON. The sample, or the error, is written to FOLDER/rank<r>.json.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import measure, models
from benchmarks.launch import WIRE, RunSpec, result_path
from benchmarks.systems import SYSTEMS, make_adamw

# torch loads these on first use. Loading them before the base is read keeps some hundred
# megabytes of imports out of the compiled systems' peak memory.
LAZY_IMPORTS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch.distributed.tensor",
)


def main() -> None:
    """Run, write the result, and leave with status 1 on an error."""
    spec, folder = RunSpec(**json.loads(sys.argv[1])), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    path = result_path(folder, rank)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        sample = measure.exchange() if spec.system == WIRE else _train(spec, rank)
        path.write_text(json.dumps({"sample": asdict(sample)}))
    except Exception as error:
        traceback.print_exc()
        path.write_text(json.dumps({"error": _one_line(error), "time": time.time()}))
        sys.stderr.flush()
        os._exit(1)  # destroying a process group whose peer still waits may hang
    dist.barrier()
    dist.destroy_process_group()


def _train(spec: RunSpec, rank: int) -> measure.TrainSample:
    """Measure a training system."""
    for name in LAZY_IMPORTS:
        importlib.import_module(name)
    return measure.train(
        partial(_build_step, spec),
        models.batch(spec.size, rank),
        spec.warmup,
        spec.steps,
        spec.memory,
        _traffic_reader(spec.system),
    )


def _build_step(spec: RunSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Model and system; called after the base memory was read."""
    return SYSTEMS[spec.system](models.build(spec.size), make_adamw, spec.dtype)


def _traffic_reader(system: str) -> Callable[[], object] | None:
    """The byte counters of zcompile itself, for the systems that have them."""
    if not system.startswith("zero-"):
        return None
    read: Callable[[], object] = importlib.import_module("zcompile").traffic
    return read


def _one_line(error: BaseException) -> str:
    """The innermost error and the first line of what it says; wrappers only repeat it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


if __name__ == "__main__":
    main()
