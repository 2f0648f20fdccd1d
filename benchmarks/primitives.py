"""What carries a collective on one host: the time of each way to gather and to reduce, by size.

    python benchmarks/primitives.py --world 2 --mb 1,9,36,64

Every rank holds 1/world of the rows and wants all of them (gather), or holds all of a gradient and
wants its rows of the sum (reduce). All but the last way of each are gloo's. Medians over --runs,
one thread per rank, in ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from zcompile.shared import Link, connect

Step = Callable[[], object]


def ways(megabytes: float, rank: int, world: int, link: Link | None) -> dict[str, Step]:
    """Each way as a callable on buffers that exist already. Sizes: whole values, fp32."""
    rows = int(megabytes * 2**20 / 4) // world
    whole = torch.randn(world, rows)
    shard, out = whole[rank].clone(), torch.empty(world, rows)
    copies, total = torch.empty(world, rows), torch.empty(rows)
    peers = [r for r in range(world) if r != rank]
    pg = dist.group.WORLD

    def exchange(send: Callable[[int], torch.Tensor], receive: torch.Tensor) -> None:
        works = [pg.recv([receive[r]], r, 1) for r in peers]
        works += [pg.send([send(r)], r, 1) for r in peers]
        for work in works:
            work.wait()

    def gather_messages() -> None:
        out[rank].copy_(shard)
        exchange(lambda r: out[rank], out)

    def gather_broadcasts() -> None:
        out[rank].copy_(shard)
        for work in [dist.broadcast(out[r], r, async_op=True) for r in range(world)]:
            work.wait()

    def gather_all_to_all() -> None:
        copies.copy_(shard.expand(world, -1))
        dist.all_to_all_single(out, copies)

    def reduce_messages() -> None:
        exchange(lambda r: whole[r], out)
        add_up()

    def gather_reads() -> None:
        assert link is not None
        transfer = link.start("gather", {r: [shard] for r in peers}, {r: [out[r]] for r in peers})
        out[rank].copy_(shard)
        transfer.wait()

    def add_up() -> None:
        torch.add(whole[rank], out[peers[0]], out=total)
        for peer in peers[1:]:
            total.add_(out[peer])

    def reduce_reads() -> None:
        assert link is not None
        link.start("reduce", {r: [whole[r]] for r in peers}, {r: [out[r]] for r in peers}).wait()
        add_up()

    def reduce_all_to_all() -> None:
        dist.all_to_all_single(out, whole)
        torch.sum(out, 0, out=total)

    steps: dict[str, Step] = {
        "gather: all_gather_into_tensor": lambda: dist.all_gather_into_tensor(out.view(-1), shard),
        "gather: all_to_all_single": gather_all_to_all,
        "gather: broadcasts": gather_broadcasts,
        "gather: messages": gather_messages,
        "gather: reads": gather_reads,
        "reduce: reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(total, whole.view(-1)),
        "reduce: all_to_all_single + sum": reduce_all_to_all,
        "reduce: messages + sum": reduce_messages,
        "reduce: reads + sum": reduce_reads,
    }
    return {name: step for name, step in steps.items() if link or "reads" not in name}


def _everyone(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def median_ms(step: Step, runs: int) -> float:
    for _ in range(2):
        step()
    seconds = []
    for _ in range(runs):
        dist.barrier()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e3


def serve(rank: int, world: int, store: str, sizes: list[float], runs: int) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    link, reason = connect(rank, _everyone, None)
    table = Table("way", *(f"{size:g} MB" for size in sizes), title=f"{world} ranks, ms")
    columns = [
        {name: median_ms(step, runs) for name, step in ways(size, rank, world, link).items()}
        for size in sizes
    ]
    for name in columns[0]:
        table.add_row(name, *(f"{column[name]:.2f}" for column in columns))
    if rank == 0:
        Console().print(table)
        if reason is not None:
            print(f"no reads: {reason}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--mb", default="1,9,36,64", help="sizes of the whole values")
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        sizes = [float(size) for size in args.mb.split(",")]
        mp.spawn(serve, (args.world, store, sizes, args.runs), args.world)


if __name__ == "__main__":
    main()
