"""Writes what a compilation did: every pass's graph as runnable Python, and the plan.

    DIR/rank0/000/01.partition.before.py    a module's first graph, as Dynamo gave it
    DIR/rank0/000/01.partition.after.py
    ...
    DIR/rank0/000/plan.txt                  the schedule as a table
    DIR/rank0/000/plan.json                 the same, see docs/plan-schema.md
    DIR/rank0/000/pipeline.txt              the passes that ran, with their options
    DIR/rank0/kernels/adamw_step_....cpp    what steps the optimizer

`python DIR/.../08.forward.place.after.py` runs that graph on zeros, in one process, with
collectives that move nothing.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile import comm, updates
from zcompile._torch import FakeStore, register_process_group
from zcompile.dialect import UPDATE
from zcompile.parameter import ParamSpec, ZeroParameter, shard_of
from zcompile.passes.graph import calls
from zcompile.schedule.plan import Plan
from zcompile.show.text import text

_HEADER = '''"""{label}  {note}

Runs by itself: python {file}
"""
import torch
from torch import device, inf, nan
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from zcompile.dump import on_paper, parameter

mesh = on_paper({group!r}, rank={rank}, world={world}, pg={pg!r}{step})

{code}

def inputs():
    """Zeros of the traced shapes; symbolic sizes as they were when the graph was made."""
    return [
{inputs}
    ]


if __name__ == "__main__":
    for value in torch.utils._pytree.tree_leaves(GraphModule()(*inputs())):
        print(tuple(value.shape) if isinstance(value, torch.Tensor) else value)
'''


def on_paper(group: str, rank: int, world: int, pg: str, step: str = "") -> DeviceMesh:
    """A world in which a dumped graph runs alone: collectives have shapes and move nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    if pg and pg != dist.group.WORLD.group_name:
        register_process_group(pg, dist.group.WORLD)
    comm.register(comm.Group(group, rank, world))
    updates.ignore(step)
    return DeviceMesh("cpu", list(range(world)))


def parameter(
    mesh: DeviceMesh, group: str, shape: list[int], dtype: torch.dtype, sharded: bool
) -> ZeroParameter:
    """Zeros in place of a model's parameter of `shape`."""
    spec = ParamSpec("parameter", tuple(shape), dtype, dtype, group, sharded)
    local = shard_of(torch.zeros(shape, dtype=dtype), spec, mesh)
    return ZeroParameter.make(local, spec, mesh, requires_grad=False)


class Dump:
    """A Recorder that writes under one folder per compiled graph."""

    def __init__(self, folder: str, group: comm.Group) -> None:
        root = Path(folder) / f"rank{group.rank}"
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            self.folder = root / f"{number:03d}"
            try:
                self.folder.mkdir()
            except FileExistsError:
                continue
            break
        self.group, self.numbers = group, itertools.count(1)

    def graph(self, gm: fx.GraphModule, label: str, note: str) -> None:
        number = f"{next(self.numbers):02d}"
        name = f"{number}.{label}.py"
        plain = _plain(gm)
        code = plain.print_readable(print_output=False).strip()
        code = re.sub(r"^class \S+\(", "class GraphModule(", code)
        text = _HEADER.format(
            label=label,
            note=note,
            file=name,
            group=self.group.name,
            rank=self.group.rank,
            world=self.group.world,
            code=code,
            pg=_process_group(plain),
            step=_step(plain),
            inputs="\n".join(f"        {_literal(n, self.group.name)}," for n in _inputs(plain)),
        )
        (self.folder / name).write_text(text)

    def plan(self, plan: Plan, name: str = "plan") -> None:
        (self.folder / f"{name}.json").write_text(plan.to_json())
        (self.folder / f"{name}.txt").write_text(text(plan))

    def append(self, name: str, lines: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(lines)


def kernel(folder: str, name: str, source: str) -> None:
    """Write a kernel's source beside this rank's graphs."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    where = Path(folder) / f"rank{rank}" / "kernels" / name
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(source)


def _plain(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with one argument per placeholder, whatever calling convention it had."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _process_group(gm: fx.GraphModule) -> str:
    """The name under which a lowered graph knows the backend's process group, if it uses one."""
    calls = (n for n in gm.graph.nodes if "_c10d_functional" in str(n.target))
    return next((n.args[-1] for n in calls if isinstance(n.args[-1], str)), "")


def _step(gm: fx.GraphModule) -> str:
    """More of what `on_paper` must know: which step takes gradients, if one does."""
    names = {n.args[4] for n in calls(gm.graph, UPDATE)}
    return f", step={names.pop()!r}" if names else ""


def _literal(node: fx.Node, group: str) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, DTensor):
        shape, sharded = [_hint(s) for s in value.shape], not value.placements[0].is_replicate()
        return f"parameter(mesh, {group!r}, {shape}, {value.dtype}, {sharded})"
    if isinstance(value, torch.Tensor):
        shape, stride = ([_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return f"torch.empty_strided({shape}, {stride}, dtype={value.dtype}).zero_()"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return repr(value.node.hint)
    return repr(value) if isinstance(value, (int, float, bool, str)) else "None"


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
