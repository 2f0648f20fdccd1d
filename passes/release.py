"""release: marks the point below which no gathered parameter of a bucket is used.

    use(w)          ->      use(w)
    ...                     zero.release([w, ...], key)
                            ...

A use is any node that reads the parameter or a view of it, through whatever chain of views; which
operations make views is read off their schemas. A bucket that leaves the graph (kept for backward)
has no release. The mark holds no memory: buffers are freed with their last reference, which the
mark shows to the plan, the verifier and the reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.dialect import RELEASE, WAIT
from zcompile.passes.graph import add, aliases, calls


@dataclass(frozen=True)
class Release:
    name: ClassVar[str] = "release"
    after: ClassVar[tuple[str, ...]] = ("place",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = gm.graph
        for wait in calls(graph, WAIT):
            fulls, _, _, key = wait.args
            if not str(key).startswith("gather"):
                continue
            uses = {u for full in fulls for alias in aliases(full) for u in alias.users}
            if any(u.op == "output" for u in uses):
                continue
            with graph.inserting_after(max({*uses, wait})):
                add(graph, RELEASE, (fulls, key), None)
        gm.recompile()
        return gm
