"""Whole states from shards and back, one tensor at a time.

Keys are those of the eager model and of a plain optimizer's state_dict(), so that a file written
here loads into an unsharded run, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zcompile import world
from zcompile.errors import ZeroError
from zcompile.parameter import ZeroParameter, state_dtensor


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank0_only: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The model's state with eager keys and whole tensors on `device`.

    Every rank must call it. One tensor is whole at a time on ranks that do not keep it.

    Args:
        optimizer: also return its state; the result is then {"model": ..., "optimizer": ...}.
        rank0_only: the other ranks take part and return no tensors: {}, or with an optimizer
            {"model": {}, "optimizer": {}}. Rank 0 is the job's, also on a mesh of fewer ranks.

    Raises:
        ZeroError: the optimizer holds none of the model's parameters.
    """
    if optimizer is not None:
        _check_owner(model, optimizer)
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    state = {}
    for key, value in _plain(model).state_dict().items():
        whole = _whole(value, keep, device, key)
        if keep:
            state[key] = whole
    if optimizer is None:
        return state
    return {"model": state, "optimizer": _full_optimizer(optimizer, keep, device)}


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Any:
    """The inverse of `full_state_dict`: each rank takes its part of whole tensors.

    Args:
        state: as `full_state_dict` returned it on a rank that keeps it; every rank needs it. With
            an optimizer its other entries, such as a scheduler's, are the caller's.

    Returns:
        What `model.load_state_dict` returns.

    Raises:
        RuntimeError: keys or shapes differ, in PyTorch's words.
        ZeroError: an optimizer was given that holds none of the model's parameters, or the state
            has none, or its groups differ; or the state is another rank's empty one.
    """
    if optimizer is None:
        if isinstance(state.get("model"), Mapping):
            both = "the optimizer as well, or " if "optimizer" in state else ""
            raise ZeroError(
                f"this state has the entries {_some_keys(state)}: give {both}state['model'] alone"
            )
        return _load_model(model, state, strict)
    _check_owner(model, optimizer)
    if not {"model", "optimizer"} <= set(state):
        raise ZeroError(
            "an optimizer was given, so the state needs the entries 'model' and 'optimizer' as "
            f"full_state_dict(model, optimizer) returns them; it has {_some_keys(state)}"
        )
    result = _load_model(model, state["model"], strict)
    _load_optimizer(optimizer, state["optimizer"])
    return result


def _load_model(model: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    plain = _plain(model)
    if not state and strict and any(True for _ in plain.parameters()):
        raise ZeroError(
            "the state is empty: with rank0_only=True, full_state_dict returns tensors on rank 0 "
            "alone, and every rank loads its part of them; let each read the file"
        )
    return plain.load_state_dict(dict(state), strict=strict)


def _some_keys(state: Mapping[str, Any]) -> str:
    names = sorted(map(repr, state))
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _plain(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _check_owner(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    ours = {id(p) for p in _plain(model).parameters()}
    if theirs and not any(id(p) in ours for p in theirs):
        raise ZeroError(
            f"the {type(optimizer).__name__} that was given holds {len(theirs)} parameters, and "
            f"none of them is one of this {type(_plain(model)).__name__}'s"
        )


def _whole(value: Any, keep: bool, device: torch.device | str, what: str) -> Any:
    """A whole tensor out of a shard. Collective: every rank must come here with the same one."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        world.agree(value.device_mesh, f"full_state_dict of {what} {tuple(value.shape)}")
        value = value.full_tensor()
    if not keep:
        return None
    return value.detach().to(device, copy=True)


def _full_optimizer(
    optimizer: torch.optim.Optimizer, keep: bool, device: torch.device | str
) -> dict[str, Any]:
    packed = optimizer.state_dict()
    state = {
        index: {
            key: _whole(value, keep, device, f"{key} of optimizer parameter {index}")
            for key, value in entry.items()
        }
        for index, entry in packed["state"].items()
    }
    return {"state": state, "param_groups": packed["param_groups"]} if keep else {}


def _load_optimizer(optimizer: torch.optim.Optimizer, full: Mapping[str, Any]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in full["param_groups"] for index in group["params"]]
    if len(params) != len(saved):
        raise ZeroError(
            f"the saved optimizer has {len(saved)} parameters, this one has {len(params)}"
        )
    state = {}
    for param, index in zip(params, saved, strict=True):
        if index in full["state"]:
            state[index] = dict(_laid_out(param, full["state"][index]))
    optimizer.load_state_dict({"state": state, "param_groups": full["param_groups"]})


def keep_laid_out(optimizer: torch.optim.Optimizer) -> None:
    """Each rank takes its part of what `optimizer.load_state_dict` loads, now and from now on: a
    plain run's state is whole."""
    lay_out(optimizer)
    optimizer.register_load_state_dict_post_hook(lay_out)


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    for param, entry in optimizer.state.items():
        if type(param) is ZeroParameter:
            entry.update(dict(_laid_out(param, entry)))


def _laid_out(param: Any, entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in entry.items():
        if type(param) is ZeroParameter and param.is_whole(key, value):
            local = value.to(param.device)
            yield key, state_dtensor(local, param.spec, param.device_mesh)
        else:
            yield key, value
