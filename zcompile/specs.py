"""What a parameter becomes under which options."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zcompile import comm
from zcompile.errors import ZeroWarning
from zcompile.options import Options
from zcompile.parameter import ParamSpec, ZeroParameter

SMALL = 16_384  # elements; see Options.persistence_threshold


def with_threshold(options: Options, params: Iterable[Tensor], world: int) -> Options:
    """With the `persistence_threshold` that a model of these parameters gets by default.

    What is replicated is held `world` times as often as what is sharded: of R in P elements it adds
    R (world - 1) / P to a rank's share. The smallest stay whole until that is one percent.
    """
    if options.persistence_threshold is not None:
        return options
    sizes = sorted(param.numel() for param in params)
    left, threshold = sum(sizes) / 100, 0
    for size, same in groupby(sizes):
        left -= size * len(list(same)) * (world - 1)
        if left < 0 or size >= SMALL:
            break
        threshold = size + 1
    return options.model_copy(update={"persistence_threshold": threshold})


def spec_of(name: str, param: Tensor, options: Options, group: str) -> ParamSpec:
    """What a parameter gathers to. Integer, bool and complex parameters keep their dtype."""
    real = param.dtype.is_floating_point
    dtype = options.param_dtype if real and options.param_dtype else param.dtype
    if not real:
        reduce_dtype = param.dtype
    else:
        reduce_dtype = options.reduce_dtype or torch.promote_types(dtype, torch.float32)
    large = param.numel() >= (options.persistence_threshold or 0)
    sharded = options.stage > 0 and param.dim() > 0 and large
    on_one_host = comm.find(group).link is not None
    copied = options.param_copy and sharded and dtype != param.dtype and on_one_host
    return ParamSpec(name, tuple(param.shape), dtype, reduce_dtype, group, sharded, copied)


def warn_of_no_effect(options: Options, params: Sequence[ZeroParameter]) -> None:
    """Say which of the options that were given came too late, if any: these parameters were sharded
    with others."""
    late: dict[str, str] = {}
    large = options.persistence_threshold or SMALL
    if options.stage > 0 and "stage" in options.model_fields_set:
        whole = [p for p in params if p.dim() and p.numel() >= large]
        if whole and not any(p.spec.sharded for p in params):
            late["stage"] = f"{whole[0].spec.name} {whole[0].spec.shape} is replicated"
    for param in params:
        spec, asked = param.spec, spec_of(param.spec.name, param, options, param.spec.group)
        for name, had, wanted in (
            ("param_dtype", spec.dtype, asked.dtype),
            ("reduce_dtype", spec.reduce_dtype, asked.reduce_dtype),
        ):
            if getattr(options, name) is not None and had != wanted:
                late.setdefault(name, f"{spec.name} has {had}")
        name = "stage" if options.stage == 0 else "persistence_threshold"
        if asked.sharded != spec.sharded and name in options.model_fields_set:
            how = "sharded" if spec.sharded else "replicated"
            late.setdefault(name, f"{spec.name} {spec.shape} is {how}")
    for name, why in late.items():
        warnings.warn(
            f"option {name!r} = {getattr(options, name)!r} has no effect: the model was sharded "
            f"before, with another ({why}). Give it to zcompile.shard, or to whatever compiles the "
            "model first",
            ZeroWarning,
            stacklevel=3,
        )
