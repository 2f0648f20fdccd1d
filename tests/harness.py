"""One way to run a function on several gloo ranks, for every distributed test.

Ranks live in worker processes that are reused from test to test (an import of torch costs
seconds) and thrown away after any failure, and after CALLS calls: the memory of what compilers
leave behind adds up. A call has a timeout that kills them, and an error shows every rank's
traceback.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

_spawn = get_context("spawn")
CALLS = 80


class RanksFailed(AssertionError):
    """At least one rank raised or did not answer in time."""


class Ranks:
    """`ranks(function, *args, world=2)` calls function(rank, world, *args) on every rank and
    returns the results in rank order. The function must be importable."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def __call__(
        self, function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 360
    ) -> list[Any]:
        if world in self.pools and self.pools[world].calls == CALLS:
            self.pools.pop(world).kill()
        if world not in self.pools:
            self.pools[world] = Pool(world)
        try:
            return self.pools[world].call(function, args, timeout)
        except BaseException:
            self.pools.pop(world).kill()
            raise

    def close(self) -> None:
        for pool in self.pools.values():
            pool.kill()
        self.pools.clear()


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self.calls = 0
        store = tempfile.mktemp(prefix="zcompile-store-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(
                target=_serve, args=(rank, world, store, theirs, list(sys.path)), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        self.calls += 1
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world and time.monotonic() < deadline:
            for rank, pipe in enumerate(self.pipes):
                if rank not in answers and pipe.poll(0.01):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = (False, "the process died")
            failed = any(not ok for ok, _ in answers.values())
            if failed:
                # Whoever waits for the failed rank may be told why; no need to wait long.
                deadline = min(deadline, time.monotonic() + 15)
        if len(answers) == self.world and all(ok for ok, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world)]
        report = []
        for rank in range(self.world):
            ok, text = answers.get(rank, (False, f"no answer after {timeout} s"))
            report.append(f"--- rank {rank}: {'returned' if ok else text}")
        raise RanksFailed("\n".join(report))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(rank: int, world: int, store: str, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        # Searches among live objects pass over what earlier calls have left.
        gc.collect()
        gc.freeze()
        torch.manual_seed(0)
        try:
            answer = (True, function(rank, world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)
