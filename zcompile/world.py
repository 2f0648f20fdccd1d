"""The ranks: process group, mesh, and the group that stands for them in graphs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile import comm, shared
from zcompile.control import Control, fingerprint
from zcompile.errors import ZeroError
from zcompile.options import Options


@dataclass(frozen=True)
class World:
    """A one-dimensional data-parallel mesh and the communication group over it."""

    mesh: DeviceMesh
    group: comm.Group


_worlds: dict[tuple[object, ...], World] = {}


def join(options: Options, device: torch.device) -> World:
    """The world of `options.mesh`, or of all ranks; makes the process group if there is none.

    Raises:
        ZeroError: the mesh is not one-dimensional, has another size than the job, leaves this
            rank out, or its backend cannot carry the chosen primitive.
    """
    if not dist.is_initialized():
        _initialise(device)
    mesh = options.mesh or _all_ranks(device)
    _check(mesh)
    backend = dist.get_backend(mesh.get_group())
    native = options.primitive == "native" or (options.primitive == "auto" and backend != "gloo")
    if options.primitive == "p2p" and backend not in ("gloo", "fake"):
        raise ZeroError(
            f"primitive 'p2p' needs the gloo backend, this mesh uses {backend}; use 'auto'"
        )
    members = tuple(mesh.mesh.flatten().tolist())
    near = options.primitive == "auto" and backend == "gloo" and mesh.device_type == "cpu"
    key = (dist.group.WORLD, mesh.device_type, members, native, near, options.check)
    if key not in _worlds:
        name = f"zero{len(_worlds)}"
        _worlds[key] = World(mesh, _group(name, members, native, near, backend, options))
    return _worlds[key]


def _initialise(device: torch.device) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _all_ranks(device: torch.device) -> DeviceMesh:
    kind = "cuda" if device.type == "cuda" else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("zero",))


def _check(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ZeroError(
            f"the mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; zcompile shards over one. "
            "Pass the data-parallel one: mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ZeroError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    if mesh.size() > dist.get_world_size():
        raise ZeroError(
            f"the mesh has {mesh.size()} ranks, the job has {dist.get_world_size()}; "
            "make the mesh after init_process_group, from the same world size"
        )


def _group(
    name: str, members: tuple[int, ...], native: bool, near: bool, backend: str, options: Options
) -> comm.Group:
    """near: ranks of one host read each other's memory, where they may."""
    rank = members.index(dist.get_rank())
    if len(members) == 1 or backend == "fake":
        pg_name = dist.group.WORLD.group_name if native else ""
        return comm.register(comm.Group(name, rank, len(members), native=native, pg_name=pg_name))
    # A group of our own: the user's messages on theirs can never be taken for ours.
    # On a part of the job only members take part: disjoint meshes make theirs at the same time.
    part = len(members) < dist.get_world_size()
    pg = dist.new_group(list(members), use_local_synchronization=part)
    control = Control(name, members, rank, options.check_timeout) if options.check else None
    if control is not None:
        control.guard(pg)
    link = None
    # Without a Control nothing would tell a run from an earlier one that an exception ended.
    if near and control is not None and sys.platform == "linux":
        link = shared.connect(rank, lambda value: comm.everyone(value, pg), control)[0]
    return comm.register(
        comm.Group(name, rank, len(members), pg, native, control, pg.group_name, link)
    )


def agree(mesh: DeviceMesh, line: str) -> None:
    """Check that every rank of a mesh is about to do what `line` says, on each group over it.

    Raises:
        ZeroError: on every rank, naming what the others are about to do.
    """
    for world in _worlds.values():
        if world.mesh is mesh and world.group.control is not None:
            world.group.control.agree(fingerprint([line]), lambda: [line])
            return
