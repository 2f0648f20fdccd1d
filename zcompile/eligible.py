"""What of an optimizer, a param group and a parameter decides which kernel steps it, if one can.

Facts come as tuples that can be compared and kept as keys; values do not enter, but those that a
step may branch on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zcompile.codegen.trace import NotElementwise, is_torchs_own
from zcompile.errors import OptionError, ZeroError
from zcompile.parameter import ZeroParameter

# What every optimizer has, and what schedulers and scalers hang on it.
_KNOWN = frozenset(
    "defaults state param_groups step _zero_grad_profile_name _opt_called _step_count grad_scale "
    "found_inf _warned_capturable_if_run_uncaptured _need_device_dtype_check_for_fused "
    "_step_supports_amp_scaling".split()
)
_PLAIN = (nn.Parameter, Tensor, DTensor, ZeroParameter)
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def attributes_of(optimizer: torch.optim.Optimizer) -> tuple[tuple[Any, ...], str]:
    """Plain values that the optimizer itself carries, on which its step may depend; and, where it
    carries others, which may change unseen or know single parameters, that no kernel is for it."""
    found = []
    for key, value in vars(optimizer).items():
        if key in _KNOWN or key.startswith("_optimizer_"):
            continue
        if not _plain(value):
            return (), f"it carries {key!r}, a {type(value).__name__}"
        found.append((key, value))
    if not is_torchs_own(optimizer):
        known = {key: value for key, value in optimizer.defaults.items() if _plain(value)}
        found.append(("defaults", tuple(known.items())))
    return tuple(found), ""


def marks_of(param: Tensor) -> dict[str, Any]:
    """Plain attributes that somebody gave a parameter, such as `p.no_decay = True`."""
    return {k: v for k, v in vars(param).items() if _plain(v) and not k.startswith("_is_param")}


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype))


def signature_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """All of a group that is no float: another value is another update."""
    found: list[Any] = []
    for key, value in group.items():
        if key in ("params", "initial_lr", "param_names"):
            continue
        if type(value) in (tuple, list):
            value = tuple("float" if isinstance(i, float) else repr(i) for i in value)
        elif isinstance(value, float):
            value = "float"
        elif isinstance(value, Tensor):
            value = (tuple(value.shape), value.dtype, value.device)
        elif not _plain(value):
            raise NotElementwise(f"its param group holds {key!r}, a {type(value).__name__}")
        found.append((key, value))
    return tuple(found)


def kind_of(value: Any) -> Any:
    """All of a tensor, but its values, that decides what steps it and whether a kernel can."""
    if isinstance(value, Tensor):
        placed = value.placements if isinstance(value, DTensor) else None
        local = local_part(value)
        lies = _lies(local) if local.layout is torch.strided else ()
        return (type(value), type(local), value.shape, value.dtype, local.layout, placed, lies)
    return type(value) if type(value) in (int, float) else repr(value)


def _lies(local: Tensor) -> tuple[Any, ...]:
    """How a tensor's values lie in memory."""
    return (local.shape, local.stride(), local.device, local.is_neg(), _is_there(local))


def _is_there(local: Tensor) -> bool:
    """Whether a tensor's memory was not freed under it."""
    last = (local.storage_offset() + local.numel()) * local.element_size()
    return local.untyped_storage().nbytes() >= last


def check(param: Tensor, grad: Tensor, state: Mapping[str, Any]) -> None:
    """Raises NotElementwise where memory cannot be handed to a kernel as it lies, ZeroError where
    there is none any more."""
    for tensor in (param, grad, *(v for v in state.values() if isinstance(v, Tensor))):
        for each in (tensor, local_part(tensor)):
            if type(each) not in _PLAIN:
                raise NotElementwise(f"a tensor is a {type(each).__name__}")
        if tensor.layout != torch.strided:
            raise NotElementwise(f"a tensor is {tensor.layout}")
        if local_part(tensor).is_neg():
            raise NotElementwise("a tensor is a view that negates")
        if not _is_there(local_part(tensor)):
            raise ZeroError(
                f"the memory of a {tuple(tensor.shape)} parameter, or of its gradient or state, "
                "was freed: it cannot be stepped"
            )
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            raise NotElementwise("a gradient is not reduced")
        if tensor.dtype not in _DTYPES:
            raise NotElementwise(f"a tensor is {tensor.dtype}")
    local = local_part(param)
    placed, as_ = (getattr(t, "placements", None) for t in (param, grad))
    if placed != as_ or local_part(grad).shape != local.shape:
        raise NotElementwise(f"a gradient is {as_}, its parameter {placed}")
    for value in state.values():
        if isinstance(value, Tensor) and value.dim() and value.shape == param.shape:
            mine = local_part(value)
            if mine.shape != local.shape or mine.stride() != local.stride():
                raise NotElementwise("its state lies otherwise in memory than its parameter")
    if not torch.ops.aten.is_non_overlapping_and_dense(local):
        raise NotElementwise("a parameter's memory has gaps")


def check_copy(param: Tensor, copy: Tensor) -> None:
    """Raises OptionError where a kernel could not store a copy of a parameter in this tensor."""
    ours, theirs = ((tuple(t.shape), t.stride(), t.device) for t in (param, copy))
    right = type(param) in (nn.Parameter, Tensor) and param.dtype == torch.float32
    narrow = copy.dtype in (torch.bfloat16, torch.float16)
    writable = not copy.is_neg() and _is_there(copy)
    if not (right and narrow and writable) or ours != theirs:
        raise OptionError(
            f"a copy must be in bfloat16 or float16 and lie like its float32 parameter: "
            f"{copy.dtype} {theirs[:2]} on {copy.device} for {type(param).__name__} of "
            f"{param.dtype} {ours[:2]} on {param.device}. (Sharded parameters need none.)"
        )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
