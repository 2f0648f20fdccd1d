"""Starts one run: a fresh pair of processes and a fresh group, ended by a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RANKS = 2
WIRE = "wire"  # name of the run that exchanges blocks and trains nothing
GRACE_SECONDS = 10.0  # what a rank gets to fail by itself once its peer has failed
POLL_SECONDS = 0.2
ROOT = Path(__file__).resolve().parents[1]

# glibc then gives every large block back at once, so resident memory is memory in use;
# it costs time, which is why memory has runs of its own.
MEMORY_ENV = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class RunSpec:
    """What one pair of processes is to run."""

    system: str  # a key of systems.SYSTEMS, or WIRE
    size: str
    dtype: str  # "fp32" or "bf16"
    warmup: int  # untimed steps
    steps: int  # timed steps
    memory: bool = False  # measure peak memory; the times are then not comparable


class RunError(Exception):
    """A run that gave no result; the message is one line."""


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its sample or its error."""
    return folder / f"rank{rank}.json"


def run(spec: RunSpec, timeout: float, logs: Path | None) -> list[dict[str, Any]]:
    """The ranks' samples, as dicts in rank order.

    `timeout` is in seconds. With `logs`, each rank's output is kept in that folder.
    Raises RunError if a rank fails or the time is up; no process outlives the call.
    """
    with TemporaryDirectory(prefix="step_time-") as name:
        folder = Path(name)
        log_paths = [_log_path(spec, rank, logs or folder) for rank in range(RANKS)]
        processes = [_start(spec, rank, folder, path) for rank, path in enumerate(log_paths)]
        try:
            finished = _wait(processes, time.monotonic() + timeout)
            codes = [process.poll() for process in processes]  # None: stopped by us, below
        finally:
            for process in processes:
                _kill(process)
        if not finished:
            raise RunError(f"timed out after {timeout:.0f} s; {_last_line(log_paths[0])}")
        if any(code != 0 for code in codes):
            raise RunError(_first_error(codes, folder, log_paths))
        return [
            json.loads(result_path(folder, rank).read_text())["sample"] for rank in range(RANKS)
        ]


def _start(spec: RunSpec, rank: int, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start one rank, in a session of its own so that its children can be ended with it."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the device whose counters are read
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no worker pool beside the timed ranks
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **(MEMORY_ENV if spec.memory else {}),
    }
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(asdict(spec)), str(folder)]
    with log.open("w") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended, or one has failed; False if the deadline came first."""
    failing = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return True
        if not failing and any(code not in (None, 0) for code in codes):
            failing, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    return failing


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a rank and the children it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_error(codes: list[int | None], folder: Path, logs: list[Path]) -> str:
    """The error that came first: a rank that fails second often only lost its peer."""
    errors = []
    for rank, code in enumerate(codes):
        path = result_path(folder, rank)
        result = json.loads(path.read_text()) if path.exists() else {}
        if "error" in result:
            errors.append((result["time"], f"rank {rank}: {result['error']}"))
        elif code not in (None, 0):  # crashed; whatever the peer reports follows from it
            return f"rank {rank}: exit status {code}; {_last_line(logs[rank])}"
    return min(errors)[1]


def _log_path(spec: RunSpec, rank: int, folder: Path) -> Path:
    """File for a rank's output; a later round overwrites an earlier one's."""
    kind = "memory" if spec.memory else "time"
    return folder / f"{spec.size}-{spec.dtype}-{spec.system}-{kind}-rank{rank}.log"


def _last_line(log: Path) -> str:
    """Last line that a rank printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output")
