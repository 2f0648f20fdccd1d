"""Ranks agree before they communicate, and hear of each other's failures.

Two mechanisms, both beside the data path:

- `Control.agree` compares a 62-bit fingerprint over a CPU group of its own, whose timeout is long:
  a rank that is still compiling makes the others wait there, not in a collective with a watchdog.
  Where fingerprints differ, every rank gets the same error with the first difference.
- a daemon thread watches the rendezvous store for a failure that another rank published, and cuts
  this rank's connections, so that a blocked wait returns at once and can say whose fault it was.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcompile._torch import _get_default_store
from zcompile.errors import Disagreement, ZeroError

POLL_SECONDS = 0.5
# How long a rank that lost a connection waits for the failing rank to say why.
EXPLAIN_SECONDS = 3.0
_CUT_TAG = 2**30

_controls: weakref.WeakSet[Control] = weakref.WeakSet()


def fingerprint(lines: Sequence[str]) -> int:
    """A non-negative 62-bit hash of a plan's lines (so that it and its negative fit an int64)."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


class Control:
    """One per mesh and process. `members` are global ranks; `rank` counts within them."""

    def __init__(self, name: str, members: Sequence[int], rank: int, timeout: float) -> None:
        self.name, self.rank, self.world = name, rank, len(members)
        self.group = dist.new_group(
            list(members),
            backend="gloo",
            timeout=timedelta(seconds=timeout),
            use_local_synchronization=len(members) < dist.get_world_size(),
        )
        # Disjoint meshes have groups of the same name; their failures are their own.
        prefix = f"zcompile/{name}/{members[0]}"
        self.store = dist.PrefixStore(prefix, _get_default_store().clone())
        self.failure: str | None = None
        self.runs = 0
        self.steps = 0  # of optimizers that hold this group's shards
        self.running = False
        self._data: list[dist.ProcessGroup] = []
        self._ended = threading.Event()
        self._watcher = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._ended),
            name=f"zcompile-{name}",
            daemon=True,
        )
        _controls.add(self)
        _install_hooks()
        self._watcher.start()

    def guard(self, group: dist.ProcessGroup) -> None:
        """Cut `group` too when another rank fails."""
        self._data.append(group)

    def agree(self, mark: int, describe: Callable[[], Sequence[str]], ready: bool = False) -> bool:
        """Return when every rank came here with the same mark and as many optimizer steps; whether
        all of them are `ready`.

        Raises:
            Disagreement: on every rank, naming the first line in which two ranks differ.
            ZeroError: a rank failed or left meanwhile: says which one and why. Or an optimizer did
                not step on all ranks.
        """
        if self.failure is not None:
            raise ZeroError(self.failure)
        most = torch.tensor([mark, -mark, not ready, self.steps, -self.steps])
        try:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
            high, low, unready, most_steps, fewest = most[0], -most[1], most[2], most[3], -most[4]
            if high == low and most_steps == fewest:
                return not unready
            # Ranks at different places may be a step apart for that alone.
            if high != low:
                everyone: list[Any] = [None] * self.world
                dist.all_gather_object(everyone, list(describe()), group=self.group)
        except RuntimeError as error:
            raise self.explain(error) from error
        if high != low:
            raise Disagreement(first_difference(everyone), everyone)
        made, self.steps = self.steps, int(most_steps)  # told once: a checkpoint mends it
        raise ZeroError(
            f"an optimizer stepped on some ranks only: rank {self.rank} made {made} steps; over "
            f"all ranks it is {int(fewest)} to {int(most_steps)}. Each rank updates its own part "
            "of every parameter, so all must step or none. Decide it by what all ranks know, such "
            "as the norm that clip_grad_norm_ returns, and not by this rank's loss. The parameters "
            "are of two different steps now: load a checkpoint"
        )

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Around a graph's collectives. An exception that all ranks meet alike, and catch, leaves
        them where they were; one that only this rank meets ends the others' wait."""
        self.runs += 1
        self.running = True
        try:
            yield
        except BaseException as error:
            report = {"rank": self.rank, "text": self._text(error), "run": self.runs}
            with contextlib.suppress(Exception):
                self.store.set("stumbled", json.dumps(report))
            raise
        finally:
            self.running = False

    def _text(self, error: BaseException) -> str:
        return f"rank {self.rank} failed: {type(error).__name__}: {error}"

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. The first failure is the one that is kept."""
        report = json.dumps({"rank": self.rank, "text": self._text(error)})
        with contextlib.suppress(Exception):
            self.store.compare_set("failed", "", report)

    def leave(self) -> None:
        """Tell the other ranks that this process ends in order."""
        with contextlib.suppress(Exception):
            self.store.set(f"left/{self.rank}", "1")
        # A thread inside the store while the interpreter ends would abort the process.
        self._ended.set()
        self._watcher.join(timeout=5)

    def explain(self, error: BaseException) -> ZeroError:
        """What happened, for a rank whose connection broke. Takes at most a few seconds."""
        deadline = time.monotonic() + EXPLAIN_SECONDS
        with contextlib.suppress(Exception):
            self.store.set(f"alive/{self.rank}", "1")
        while time.monotonic() < deadline:
            text = self.failure or self._published()
            if text is not None:
                return ZeroError(text)
            time.sleep(0.1)
        left, silent = self._missing()
        if left:
            return ZeroError(
                f"rank {left[0]} ended its process while rank {self.rank} was still waiting for "
                "it: the ranks did not run the same number of steps, or it ended early and its log "
                f"says why. Give every rank the same number of batches. ({error})"
            )
        if silent:
            return ZeroError(
                f"rank {silent[0]} no longer answers: its process was killed or lost its "
                f"connection. Look at that rank's log. ({error})"
            )
        return ZeroError(f"a collective failed on rank {self.rank}: {error}")

    def _published(self) -> str | None:
        """Another rank's failure: one that ended it, or one in the graph that this rank is in."""
        for key in ("failed", "stumbled"):
            try:
                if not self.store.check([key]):
                    continue
                report = json.loads(self.store.get(key))
            except Exception:
                return None
            here = self.running and report.get("run") == self.runs
            if report["rank"] != self.rank and (key == "failed" or here):
                return f"{report['text']} (rank {self.rank} stopped because of it)"
        return None

    def _missing(self) -> tuple[list[int], list[int]]:
        left, silent = [], []
        for rank in range(self.world):
            with contextlib.suppress(Exception):
                if self.store.check([f"left/{rank}"]):
                    left.append(rank)
                elif rank != self.rank and not self.store.check([f"alive/{rank}"]):
                    silent.append(rank)
        return left, silent

    def _cut(self) -> None:
        for group in [self.group, *self._data]:
            if dist.get_backend(group) != "gloo":
                with contextlib.suppress(Exception):
                    group.abort()
                continue
            for peer in range(self.world):
                if peer != self.rank:
                    # gloo has no abort for messages under way. A receive that times out closes
                    # its pair, and with it whatever waits there.
                    with contextlib.suppress(Exception):
                        group.recv([torch.zeros(1)], peer, _CUT_TAG).wait(timedelta(milliseconds=1))


def first_difference(everyone: Sequence[Sequence[str]]) -> str:
    """The error text for ranks whose plans differ: the first line that is not the same on all."""
    base = everyone[0]
    other, theirs = next(
        (r, lines) for r, lines in enumerate(everyone) if list(lines) != list(base)
    )
    for index in range(max(len(base), len(theirs))):
        mine = base[index] if index < len(base) else "nothing more"
        yours = theirs[index] if index < len(theirs) else "nothing more"
        if mine != yours:
            break
    return (
        "the ranks would run different collectives, so none was started. First difference, at "
        f"step {index}:\n  rank 0: {mine}\n  rank {other}: {yours}\n" + _advice(mine, yours)
    )


def _advice(*lines: str) -> str:
    kinds = {line.split(" ", 1)[0] for line in lines}
    if len(kinds) > 1 and (gathers := kinds & {"full_state_dict", "full_tensor"}):
        return (
            f"{gathers.pop()} gathers from all ranks: call it on every one, and not under "
            "`if rank == 0:` (full_state_dict(..., rank0_only=True) keeps the result on one)."
        )
    if "inference" in kinds and len(kinds) > 1:
        return (
            "A rank evaluates the model while others do not: each rank must call it as often as "
            "the others, also for an evaluation, where the result is wanted on one."
        )
    return (
        "Every rank must take the same path through the model: look for a branch, a loop or a "
        "module that depends on this rank's data."
    )


def _watch(ref: weakref.ref[Control], ended: threading.Event) -> None:
    before: str | None = None
    while not ended.wait(POLL_SECONDS):
        control = ref()
        if control is None or not dist.is_initialized():
            return
        text = control._published()
        # Twice in a row: a rank that is about to meet the same exception gets the time to.
        before, text = text, text if text == before else None
        if text is not None:
            control.failure = text
            control._cut()
            return
        del control


_installed = False


def _install_hooks() -> None:
    """Publish uncaught exceptions and orderly exits of this process."""
    global _installed
    if _installed:
        return
    _installed = True
    previous = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        for control in list(_controls):
            control.fail(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_leave_all)


def _leave_all() -> None:
    for control in list(_controls):
        control.leave()
