"""Runs a user's script on several ranks as torchrun would: processes that may die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    code: int
    output: str
    seconds: float


def script(path: Path, world: int, *args: str, timeout: float = 240) -> list[Finished]:
    """Start `world` ranks with torchrun's environment; kill what is alive after `timeout`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.monotonic()
    children = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        child = subprocess.Popen(
            [sys.executable, str(path), *args],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children.append(child)
    finished = []
    for child in children:
        try:
            left = max(1.0, timeout - (time.monotonic() - begin))
            output, _ = child.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            output += f"\nKILLED after {timeout} s: it hung"
        finished.append(Finished(child.returncode, output, time.monotonic() - begin))
    return finished
