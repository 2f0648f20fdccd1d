"""Runs passes in order, verifies between them, and records what each did.

The runner knows no pass by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

from torch import fx

from zcompile.errors import ZeroError

log = logging.getLogger("zcompile")

Check = Callable[[fx.GraphModule, str], None]


class Pass(Protocol):
    """A pass changes the graph it was given and nothing else. `after`: passes it builds on."""

    name: ClassVar[str]
    after: ClassVar[tuple[str, ...]]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule: ...


class Recorder(Protocol):
    """Is shown every graph: before the first pass and behind each one."""

    def graph(self, gm: fx.GraphModule, label: str, note: str) -> None: ...


def run(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    *,
    graph: str = "",
    done: Iterable[str] = (),
    verify: Check | None = None,
    recorder: Recorder | None = None,
) -> fx.GraphModule:
    """Apply `passes` in order. graph: what it is called; done: passes that ran on earlier forms.

    Raises:
        ZeroError: a pass stands before one that it builds on; nothing has run then.
        GraphError: a pass left a graph that breaks a rule.
    """
    check_order(passes, done)
    prefix = f"{graph}." if graph else ""
    for each in passes:
        before, start = len(gm.graph.nodes), time.perf_counter()
        if recorder is not None:
            recorder.graph(gm, f"{prefix}{each.name}.before", "")
        gm = each(gm)
        seconds, now = time.perf_counter() - start, len(gm.graph.nodes)
        note = f"{each!r}: nodes {before} -> {now} ({now - before:+d}), {seconds * 1e3:.1f} ms"
        log.info("%s", note)
        if recorder is not None:
            recorder.graph(gm, f"{prefix}{each.name}.after", note)
        if verify is not None:
            verify(gm, each.name)
    return gm


def check_order(passes: Sequence[Pass], done: Iterable[str] = ()) -> None:
    names = [each.name for each in passes]
    ran = set(done)
    for each in passes:
        for needed in each.after:
            if needed in names and needed not in ran:
                raise ZeroError(
                    f"pass {each.name!r} builds on {needed!r}, which comes later in: "
                    f"{' -> '.join(names)}"
                )
        ran.add(each.name)


def describe(passes: Sequence[Pass]) -> str:
    """The pipeline, one pass a line, as it will run."""
    return "\n".join(f"{index}. {each!r}" for index, each in enumerate(passes, 1)) + "\n"
