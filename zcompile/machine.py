"""What is known of the ranks that run a model: their costs, their memory, what was measured before.

Learnt while a model is sharded, which all ranks do together, so that every rank knows the same and
none has to communicate while it compiles.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zcompile import cache, comm
from zcompile.calibrate import Calibration, calibrate, hosts, of_rank_0
from zcompile.control import fingerprint
from zcompile.layout import largest_shard
from zcompile.options import Options
from zcompile.owners import live_optimizers, outermost_owners
from zcompile.parameter import ParamSpec, ZeroParameter
from zcompile.schedule.costs import Costs
from zcompile.schedule.devices import device as published
from zcompile.schedule.links import default_link
from zcompile.schedule.simulate import AtRest

log = logging.getLogger("zcompile")


@dataclass(frozen=True)
class Machine:
    """capacity: bytes of the device that a rank may use at most; free: those that were free when
    its model had been sharded, beside what the model holds. The least of the ranks.
    measured: seconds of operations by a step's fingerprint; key: under which they are kept on disk,
    None where they are not. other_shapes: the ranks were seen to compute with other shapes."""

    costs: Costs
    capacity: int
    free: int
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    key: Mapping[str, Any] | None = None
    other_shapes: bool = False


_machines: dict[str, Machine] = {}  # by name of the group
_calibrations: dict[tuple[str, str], Calibration] = {}


def learn(group: comm.Group, device: torch.device, options: Options, model: Sequence[str]) -> None:
    """Called by all ranks of a group together. model: a line on each parameter."""
    before = _machines.get(group.name)
    measured = dict(before.measured) if before is not None else {}
    key = None
    on_paper = group.pg is None and group.world > 1
    if options.calibrate and not on_paper:
        where = (group.name, str(device))
        if where not in _calibrations:
            _calibrations[where] = calibrate(group, device)
        costs = _calibrations[where].costs()
        carried = "native" if group.native else "messages" if group.link is None else "reads"
        key = {"model": fingerprint(model), "by": carried, **hosts(group, device)}
        measured.update(_kept(group, key))
    else:
        costs = published_costs("cpu" if device.type == "cpu" else _gpu(device), group.world)
    capacity, free = _least(group, [_capacity(device, group), _free(device, group)])
    ragged = before is not None and before.other_shapes
    _machines[group.name] = Machine(costs, capacity, free, measured, key, ragged)


def see_other_shapes(group: comm.Group) -> None:
    """From now on this group's graphs are scheduled by rules that no shape of a batch enters."""
    known = of(group)
    if not known.other_shapes:
        log.info("the ranks compute with other shapes: scheduled by rules from now on")
    _machines[group.name] = replace(known, other_shapes=True)


def remember(group: comm.Group, fingerprint: str, measured: Mapping[str, float]) -> None:
    """Keep what was measured of a step, in this process and on disk."""
    known = of(group)
    _machines[group.name] = replace(known, measured={**known.measured, fingerprint: measured})
    if known.key is not None and group.rank == 0:
        kept = cache.load("steps", known.key, _parse_measured) or {}
        cache.store("steps", known.key, {**kept, fingerprint: dict(measured)})


def _kept(group: comm.Group, key: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What rank 0 finds on disk, on every rank."""
    found = cache.load("steps", key, _parse_measured) if group.rank == 0 else None
    return of_rank_0(group, found) or {}


def _parse_measured(raw: Any) -> dict[str, dict[str, float]]:
    return {str(f): {str(k): float(v) for k, v in ops.items()} for f, ops in raw.items()}


def of(group: comm.Group) -> Machine:
    """What was learnt; of a group on paper, what is published."""
    if group.name not in _machines:
        costs = published_costs("cpu", group.world)
        return Machine(costs, costs.device.memory, costs.device.memory)
    return _machines[group.name]


def published_costs(name: str, world: int) -> Costs:
    """Of `world` devices of a kind, in their usual machines.

    Raises:
        OptionError: no such device.
    """
    on, link = published(name), default_link(name, world)
    return Costs(on, link, lines=(f"device {on.name}: {on.source}", f"link: published, {world}"))


def budget(machine: Machine, stated: int | float | None) -> int | None:
    """Bytes of options["memory_budget"]."""
    if isinstance(stated, float):
        return int(stated * machine.capacity)
    return stated


def at_rest(group: comm.Group, params: Sequence[ZeroParameter]) -> AtRest:
    """What a rank holds of the models that own `params`: shards, and the state of their optimizers,
    or, before the first step, what that will be."""
    owned = {id(p): p for p in params}
    for root in outermost_owners(params):
        owned.update((id(p), p) for p in root.parameters() if type(p) is ZeroParameter)
    sizes = {key: held_elements(p.spec, group.world) * p.dtype.itemsize for key, p in owned.items()}
    kept = sum(sizes.values()) + sum(_copy_bytes(p.spec, group.world) for p in owned.values())
    state = 0
    for optimizer in live_optimizers():
        for param_group in optimizer.param_groups:
            for param in param_group["params"]:
                if id(param) in sizes and param.requires_grad:
                    copies = _copies(optimizer, param, param_group)
                    state += int(copies * sizes[id(param)])
    return AtRest(parameters=kept, optimizer=state)


def held_elements(spec: ParamSpec, world: int) -> int:
    """Elements of a parameter that a rank counts as its own: the same on every rank."""
    return largest_shard(spec.shape, world) if spec.sharded else math.prod(spec.shape)


def _copy_bytes(spec: ParamSpec, world: int) -> int:
    """Bytes of the copy that a rank keeps of a parameter in the dtype that it is gathered in."""
    return held_elements(spec, world) * spec.dtype.itemsize if spec.copied else 0


def _copies(optimizer: Any, param: Any, group: Mapping[str, Any]) -> float:
    """How many values of a parameter's size an optimizer keeps of it."""
    state = optimizer.state.get(param)
    if state:
        shape = tuple(param.shape)
        return sum(tuple(getattr(v, "shape", ())) == shape for v in state.values())
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    if "momentum" in group or "alpha" in group:
        return bool(group.get("momentum")) + ("alpha" in group) + bool(group.get("centered"))
    return 1.0 if "lr_decay" in group or "rho" in group else 0.0


def _gpu(device: torch.device) -> str:
    """The published figures that are nearest to a GPU's own name."""
    name = torch.cuda.get_device_name(device).lower()
    known = ("h200", "h100", "a100", "v100", "mi300x")
    return next((k for k in known if k in name), "h100")


def _local_ranks(group: comm.Group) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", group.world))


def _capacity(device: torch.device, group: comm.Group) -> int:
    if device.type != "cpu":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _local_ranks(group)


def _free(device: torch.device, group: comm.Group) -> int:
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: line.split()[1] for line in lines}
        return int(found["MemAvailable"]) * 1024 // _local_ranks(group)
    except (OSError, KeyError, ValueError):  # not Linux
        return _capacity(device, group) // 2


def _least(group: comm.Group, values: list[int]) -> list[int]:
    if group.pg is None:
        return values
    pair = torch.tensor(values)
    on = group.control.group if group.control is not None else group.pg
    if dist.get_backend(on) == "nccl":
        pair = pair.cuda()
    dist.all_reduce(pair, dist.ReduceOp.MIN, group=on)
    return [int(v) for v in pair.tolist()]
