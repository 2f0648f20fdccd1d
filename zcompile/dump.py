"""Writes what a compilation did: every pass's graph as runnable Python, and the plan.

    DIR/rank0/000/01.partition.before.py    a module's first graph, as Dynamo gave it
    DIR/rank0/000/01.partition.after.py
    ...
    DIR/rank0/000/forward.plan.txt          the schedule as a table
    DIR/rank0/000/forward.plan.json         the same, see schedule/plan.py
    DIR/rank0/000/pipeline.txt              the passes that ran, with their options

`python DIR/.../03.bucket.after.py` runs that graph on zeros, in one process, with collectives
that move nothing.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import fx

from zcompile.comm import Group
from zcompile.schedule.plan import Plan

_HEADER = '''"""{label}  {note}

Runs by itself: python {file}
"""
import torch
from torch import device, inf, nan
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import zcompile.dialect
from zcompile import comm

comm.register(comm.Group({group!r}, rank={rank}, world={world}))

{code}

def inputs():
    """Zeros of the traced shapes; symbolic sizes as they were when the graph was made."""
    return [
{inputs}
    ]


if __name__ == "__main__":
    for value in torch.utils._pytree.tree_leaves({name}()(*inputs())):
        print(tuple(value.shape) if isinstance(value, torch.Tensor) else value)
'''


class Dump:
    """A Recorder that writes under one folder per compiled graph."""

    def __init__(self, folder: str, group: Group) -> None:
        root = Path(folder) / f"rank{group.rank}"
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            self.folder = root / f"{number:03d}"
            try:
                self.folder.mkdir()
            except FileExistsError:
                continue
            break
        self.group, self.numbers, self.prefix = group, itertools.count(1), ""

    def graph(self, gm: fx.GraphModule, label: str, note: str) -> None:
        number = f"{next(self.numbers):02d}"
        prefix = f"{self.prefix}." if self.prefix else ""
        name = f"{number}.{prefix}{label}.py"
        code = gm.print_readable(print_output=False).strip()
        text = _HEADER.format(
            label=f"{prefix}{label}",
            note=note,
            file=name,
            group=self.group.name,
            rank=self.group.rank,
            world=self.group.world,
            code=code,
            name=_class_name(code),
            inputs="\n".join(f"        {_literal(n)}," for n in _placeholders(gm)),
        )
        (self.folder / name).write_text(text)

    def plan(self, plan: Plan) -> None:
        (self.folder / f"{plan.direction}.plan.txt").write_text(plan.to_text())
        (self.folder / f"{plan.direction}.plan.json").write_text(plan.to_json())

    def text(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _class_name(code: str) -> str:
    return code.split("class ", 1)[1].split("(", 1)[0]


def _literal(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        shape = [int(getattr(s, "node", s).hint if hasattr(s, "node") else s) for s in value.shape]
        # A sharded parameter is traced as a DTensor of the whole shape; read alone, it is whole.
        return f"torch.zeros({shape}, dtype={value.dtype})"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return repr(value.node.hint)
    return repr(value) if isinstance(value, (int, float, bool, str)) else "None"
