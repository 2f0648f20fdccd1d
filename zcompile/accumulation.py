"""no_sync: gradients of several backward passes stay whole on each rank and are averaged once.

Under no_sync, and behind it until that has happened, a module reads its parameters in another form:
what is gathered is detached, and its gradient goes to a leaf of the parameter's whole shape, where
autograd adds it up. A form is a class of the module, so a compiler that guards on classes has a
graph for each and comes back to either without compiling anew. At the end of the first backward
pass that runs outside of no_sync, the leaves' gradients are averaged and become the parameters'.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zcompile import dialect
from zcompile._torch import OptimizedModule, at_the_end_of_backward, backward_pass
from zcompile.errors import ZeroError
from zcompile.parameter import ParamSpec, ZeroParameter, gradient, unsharded
from zcompile.sharding import give_form, read_shard

BUCKET = 32 * 2**20  # bytes of gradients that are averaged together

_holding: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose leaves may have gradients
_numbers = itertools.count()  # of modules, in the order in which they were first held
_open = 0  # no_sync contexts that have been entered and not left
_settles = -1  # the backward pass at whose end gradients are averaged


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients of forward passes in here stay on this rank, whole, in the dtype that they are
    reduced in. The next forward and backward pass outside averages their sum with its own, in one
    reduction.

        with zcompile.no_sync(model):
            compiled(x1).backward()
        compiled(x2).backward()

    What is not compiled is averaged in every pass. optimizer.zero_grad() does not discard what is
    held.

    Raises:
        ZeroError: the model is not sharded (yet).
    """
    global _open
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    modules = [m for m in model.modules() if hasattr(type(m), "_zero_specs")]
    if not modules:
        raise ZeroError(
            "no_sync: the model is not sharded yet. Call zcompile.shard(model, ...) with its "
            "options first, or run one step"
        )
    for module in modules:
        _hold(module)
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def is_open() -> bool:
    """Whether this is inside of a no_sync."""
    return _open > 0


def check_settled(optimizer: torch.optim.Optimizer) -> None:
    """Raises ZeroError where a gradient is still held: a step would miss it."""
    if not _holding:
        return
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in _holding:
        for name in _owed(module):
            if id(module._parameters[name]) in ours:
                raise ZeroError(
                    f"the gradient of {type(module)._zero_specs[name].name!r} that was held under "
                    "no_sync was never averaged: run the last backward pass before "
                    "optimizer.step() outside of no_sync"
                )


@torch.no_grad()
def settle() -> None:
    """Average what is held, on every rank together, and read parameters as ever.

    Raises:
        ZeroError: ranks hold gradients of other parameters.
    """
    # All ranks take modules in one order: two models may have the same names.
    modules = sorted(_holding, key=lambda module: module._zero_order)
    held: dict[int, tuple[Any, Tensor]] = {}  # several modules may share a parameter
    for module in modules:
        for name in _owed(module):
            param, grad = module._parameters[name], module._zero_held[name].grad
            before = held.get(id(param))
            held[id(param)] = (param, grad if before is None else before[1] + grad)
    drop(modules)
    by_kind: dict[Any, list[tuple[Any, Tensor]]] = {}
    for param, grad in held.values():
        kind = (param.spec.group, param.spec.sharded, grad.dtype)
        by_kind.setdefault(kind, []).append((param, grad))
    for (group, sharded, _), members in by_kind.items():
        for bucket in _buckets(members):
            specs, grads = [p.spec for p, _ in bucket], [grad for _, grad in bucket]
            for (param, _), mean in zip(bucket, dialect.average(group, sharded, specs, grads)):
                mean = gradient(mean.to(param.dtype), param)
                param.grad = mean if param.grad is None else param.grad + mean


def drop(modules: Iterable[nn.Module]) -> None:
    """Read parameters as ever, and forget what is held."""
    for module in modules:
        for leaf in vars(module).get("_zero_held", {}).values():
            leaf.grad = None
        _holding.discard(module)
        give_form(module, "", read_shard)


def _hold(module: nn.Module) -> None:
    vars(module).setdefault("_zero_order", next(_numbers))
    leaves = vars(module).setdefault("_zero_held", {})
    for name, spec in type(module)._zero_specs.items():
        param = module._parameters[name]
        if param is not None and param.requires_grad and name not in leaves:
            leaves[name] = _leaf(module, param, spec)
    _holding.add(module)
    give_form(module, "held", _read_held)


def _owed(module: Any) -> list[str]:
    return [name for name, leaf in module._zero_held.items() if leaf.grad is not None]


def _leaf(module: nn.Module, param: Any, spec: ParamSpec) -> Tensor:
    """Of the parameter's whole shape and no memory: what gathers its whole gradient."""
    zero = param._local_tensor.detach().new_zeros((), dtype=spec.reduce_dtype)
    leaf: Tensor = zero.expand(spec.shape).requires_grad_()
    owner = weakref.ref(module)

    def arrived(_: Tensor) -> None:
        global _settles
        # A forward pass may have read this leaf before others were averaged.
        if (holder := owner()) is not None:
            _holding.add(holder)
        if not _open and _settles != backward_pass():
            _settles = backward_pass()
            at_the_end_of_backward(settle)

    leaf.register_post_accumulate_grad_hook(arrived)
    return leaf


def _buckets(members: Sequence[tuple[Any, Tensor]]) -> Iterator[list[tuple[Any, Tensor]]]:
    bucket: list[tuple[Any, Tensor]] = []
    for member in members:
        if bucket and sum(grad.nbytes for _, grad in [*bucket, member]) > BUCKET:
            yield bucket
            bucket = []
        bucket.append(member)
    if bucket:
        yield bucket


class _Hold(torch.autograd.Function):
    """A gathered parameter whose gradient goes to a leaf of the same shape."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, leaf: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad.to(ctx.dtype)


def _read_held(module: Any, name: str, param: ZeroParameter, spec: ParamSpec) -> Any:
    leaf = module._zero_held.get(name)
    if leaf is None or not param.requires_grad:
        return read_shard(module, name, param, spec)
    return _Hold.apply(unsharded(param.to_local().detach(), spec), leaf)
