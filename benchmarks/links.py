"""What the links between local ranks cost: the table that plans are made from.

    python benchmarks/links.py --world 2

Every rank is a process of its own on this host, with one thread, joined by gloo. The time of each
primitive by size, in ms: issue + flight + finish, and which of them is the cheapest. Measured anew,
in a cache of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from zcompile.calibrate import Calibration, calibrate
from zcompile.options import Options
from zcompile.schedule.links import MeasuredLink
from zcompile.world import join

RANKS = range(2, 5)


def show(found: Calibration, seconds: float, to: Console) -> None:
    """Print one row per primitive and size."""
    link = found.link
    assert isinstance(link, MeasuredLink)
    table = Table(title=f"{link.source}, share {link.share:.2f}, took {seconds:.2f} s")
    for name in ("collective", "primitive"):
        table.add_column(name, no_wrap=True)
    for name in ("MiB whole", "issue ms", "flight ms", "finish ms", "sum ms", "GB/s", ""):
        table.add_column(name, justify="right")
    for kind, primitives in link.tables.items():
        passes = 2 if kind == "all-reduce" else 1
        for primitive, samples in primitives.items():
            for sample in samples:
                sent = passes * sample.bytes * (link.world - 1) // link.world
                cheapest = link.primitive(kind, sent) == primitive and len(primitives) > 1
                table.add_row(
                    kind,
                    primitive,
                    f"{sample.bytes / 2**20:.3g}",
                    *(f"{t * 1e3:.3f}" for t in (*sample[1:], sample.total)),
                    f"{sent / sample.total / 1e9:.2f}",
                    "cheapest" if cheapest else "",
                )
        table.add_section()
    to.print(table)
    on = found.device
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in on.flops.items())
    to.print(
        f"{on.source}: {rates}, memory {on.bandwidth / 1e9:.1f} GB/s, "
        f"{on.launch * 1e6:.1f} µs a call"
    )


def serve(rank: int, world: int, folder: str) -> None:
    """One rank; rank 0 prints."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ["ZCOMPILE_CACHE"] = folder
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    device = torch.device("cpu")
    group = join(Options(), device).group
    begin = time.perf_counter()
    found = calibrate(group, device)
    seconds = time.perf_counter() - begin
    if rank == 0:
        show(found, seconds, Console() if sys.stdout.isatty() else Console(width=120))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, choices=RANKS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (args.world, folder), args.world)


if __name__ == "__main__":
    main()
