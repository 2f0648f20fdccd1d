"""The whole training step as one call: forward, backward, reduction, clipping and update.

    step = zcompile.compile_step(model, loss_fn, optimizer, accumulate=4, clip=1.0)
    for x, y in batches:
        loss = step(x, y)

Forward and backward are planned together as ever. What is new is in the backward graph: a gradient
goes to the optimizer as soon as it is reduced and is freed there, so that gradients are never all
alive. Where an update needs to know all of them first (clipping, loss scaling) they are kept, and
the factor goes into the same pass over memory as the update.
"""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zcompile import comm, updates
from zcompile._torch import OptimizedModule, no_torch_function, step_pre_hooks
from zcompile.accumulation import check_settled, drop, is_open, no_sync
from zcompile.backend import zero
from zcompile.errors import OptionError, ZeroError, ZeroWarning
from zcompile.first_call import fuse_as, shard_whole
from zcompile.machine import held_elements
from zcompile.norm import squares
from zcompile.options import Options
from zcompile.parameter import ZeroParameter, gathered_alone, gradient
from zcompile.scaler import LossScaler
from zcompile.state import keep_laid_out
from zcompile.updates import Tensors

LossFunction = Callable[..., Tensor]


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: LossScaler | None = None,
    options: Mapping[str, Any] | None = None,
) -> Step:
    """Compile a training step. The model is sharded here, and the optimizer fused.

    loss_fn: `loss_fn(model(*inputs), target)` is the loss, for `step(*inputs, target)`; None: the
    model returns it, or something whose `loss` it is, for `step(*args, **kwargs)`. accumulate:
    micro-batches per step, along the first dimension of every tensor; the loss and the gradients
    are their mean. clip: the largest norm of all gradients together, as in
    torch.nn.utils.clip_grad_norm_. scaler: for fp16. options: as for torch.compile(model,
    backend="zero"); stochastic_rounding is how the optimizer rounds.

    Raises:
        OptionError: a value out of range or of another type, or an unknown option.
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"accumulate = {accumulate!r} must be a whole number, at least 1")
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise OptionError(
            f"scaler is a {type(scaler).__name__}: give a zcompile.LossScaler (a GradScaler works "
            "in a loop of your own)"
        )
    number = isinstance(clip, Real) and not isinstance(clip, bool)
    if clip is not None and not (number and clip > 0):
        raise OptionError(f"clip = {clip!r} must be a number above 0, or None")
    if not isinstance(optimizer, torch.optim.Optimizer) or not (
        loss_fn is None or callable(loss_fn)
    ):
        raise OptionError(
            f"compile_step(model, loss_fn, optimizer) got loss_fn = {_kind(loss_fn)} and optimizer "
            f"= {_kind(optimizer)}; it needs a function (or None) and a torch.optim.Optimizer"
        )
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    chosen = Options.parse(options)
    shard_whole([model], chosen)
    fuse_as(optimizer, chosen)
    keep_laid_out(optimizer)
    return Step(model, loss_fn, optimizer, accumulate, clip, scaler, dict(options or {}))


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class Step:
    """What compile_step returns. norm: of the last step's gradients, before clipping and without
    the loss scale, where clip or scaler asked for it; inf or NaN after a step that was left out."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizer: torch.optim.Optimizer,
        accumulate: int,
        clip: float | None,
        scaler: LossScaler | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.accumulate, self.clip, self.scaler = accumulate, clip, scaler
        self.stage = Options.parse(options).stage
        self.norm: float | None = None
        self.warned = False
        self.name = updates.register(self)
        self.loss = torch.compile(
            _loss_of(model, loss_fn), backend=zero, options={**options, "step": self.name}
        )
        self.params: dict[str, ZeroParameter] = {}
        self.moved: dict[str, int] | None = None  # see `updated`
        self.kept: dict[str, Tensor] = {}  # gradients that no update has taken yet, mean so far
        self.arrived: set[str] = set()  # in this backward pass
        self.forwards = self.before = 0  # graphs that ran in it; what was gathered without one
        self.last = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step on this rank's batch. Returns its loss, detached: the micro-batches' mean.

        Raises:
            ZeroError: a batch that cannot be cut, a gradient from elsewhere.
        """
        self.params = self._named()
        if self.moved is None:
            self.moved = self._moved()  # not while something is being traced
        self._check()
        losses = []
        try:
            for index, (some, named) in enumerate(self._micro_batches(args, kwargs)):
                self.last = index == self.accumulate - 1
                losses.append(self._forward_backward(some, named))
            self._finish()
        finally:
            self.kept.clear()
            if self.stage == 1 and self.accumulate > 1:
                drop(self.model.modules())
            with no_torch_function():
                for param in self.params.values():
                    param.grad = None
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    # What the backward graph calls: see updates.py

    def updated(self, params: Tensors) -> Mapping[str, int]:
        """Updates that backward does itself: none where each needs to know every gradient."""
        # Another model in the graph may have parameters of the same names.
        others = {
            p.spec.name
            for p in params
            if isinstance(p, ZeroParameter) and self.params.get(p.spec.name) is not p
        }
        return {n: b for n, b in (self.moved or {}).items() if n not in others}

    def held(self) -> int:
        if self.accumulate == 1:
            return 0
        total = 0
        for param in self.params.values():
            spec = param.spec
            if self.stage == 1:  # whole, until the last micro-batch
                total += math.prod(spec.shape) * spec.reduce_dtype.itemsize
            else:
                total += held_elements(spec, comm.find(spec.group).world) * param.dtype.itemsize
        return total

    def begin(self) -> None:
        self.forwards += 1

    def receive(self, names: Sequence[str], grads: Tensors, left: Tensors) -> None:
        # Where something besides this graph read parameters, autograd adds up what each makes.
        complete = self.before == gathered_alone()
        now = self.last and self.forwards == 1 and not self._waits
        ready = []
        with torch.no_grad(), no_torch_function():
            for name, grad, empty in zip(names, grads, left, strict=True):
                if not complete or name not in self.params or _is_watched(self.params[name]):
                    empty.resize_(grad.shape).copy_(grad)
                    continue
                self._keep(name, grad)
                self.arrived.add(name)
                if now:
                    param = self.params[name]
                    param.grad = gradient(self.kept[name], param)
                    ready.append(param)
            if ready:
                fused = self._fused()
                assert fused is not None
                for param in fused.update(self.optimizer, ready, 1.0 / self.accumulate):
                    assert isinstance(param, ZeroParameter)
                    del self.kept[param.spec.name]
                for param in ready:
                    param.grad = None

    # The parts of a step

    @property
    def _waits(self) -> bool:
        """Whether an update needs every gradient: for a norm, for a hook that looks at them."""
        asked = self.clip is not None or self.scaler is not None
        return asked or step_pre_hooks(self.optimizer) > 1  # one is our own

    def _moved(self) -> dict[str, int]:
        fused = self._fused()
        if self._waits or fused is None:
            return {}
        found: dict[str, int] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if type(param) is not ZeroParameter or _is_watched(param):
                    continue
                per_element = fused.bytes_moved(self.optimizer, group, param)
                if per_element is not None:
                    world = comm.find(param.spec.group).world
                    found[param.spec.name] = per_element * held_elements(param.spec, world)
        return found

    def _fused(self) -> Any:
        return getattr(self.optimizer.step, "fused", None)

    def _named(self) -> dict[str, ZeroParameter]:
        """The optimizer's parameters by the names that graphs use.

        Raises:
            ZeroError: one is no parameter of the model, or two have one name.
        """
        found: dict[str, ZeroParameter] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if type(param) is not ZeroParameter:
                    raise ZeroError(
                        f"the optimizer holds a parameter of shape {tuple(param.shape)} that is "
                        "not the model's: compile_step updates the parameters of one model"
                    )
                if found.setdefault(param.spec.name, param) is not param:
                    raise ZeroError(
                        f"two parameters of the optimizer are called {param.spec.name!r}: "
                        "zcompile.shard names them as in the module that it is given. Shard the "
                        "whole model at once, or leave it to compile_step"
                    )
        return found

    def _check(self) -> None:
        if not torch.is_grad_enabled():
            raise ZeroError("a compiled step trains: it cannot run under torch.no_grad()")
        if is_open():
            raise ZeroError("a compiled step accumulates by itself: call it outside of no_sync")
        check_settled(self.optimizer)
        for name, param in self.params.items():
            if param.grad is not None:
                raise ZeroError(
                    f"parameter {name!r} already holds a gradient. A compiled step makes and uses "
                    "its own: call optimizer.zero_grad(), or do not call backward() beside it"
                )

    def _micro_batches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Any, Any]]:
        if self.accumulate == 1:
            yield args, kwargs
            return
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        batches = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        for leaf in batches:
            if leaf.shape[0] % self.accumulate:
                raise ZeroError(
                    f"a batch of shape {tuple(leaf.shape)} cannot be cut into accumulate="
                    f"{self.accumulate} equal micro-batches along its first dimension"
                )
            if leaf.shape[0] != batches[0].shape[0]:
                raise ZeroError(
                    f"accumulate={self.accumulate} cuts every tensor along its first dimension, "
                    f"and these differ there: {tuple(batches[0].shape)}, {tuple(leaf.shape)}. What "
                    "is no batch belongs into the model, as a buffer"
                )
        for index in range(self.accumulate):
            yield torch.utils._pytree.tree_unflatten(
                [_piece(leaf, index, self.accumulate) for leaf in leaves], spec
            )

    def _forward_backward(self, args: Any, kwargs: Any) -> Tensor:
        # In stage 1 gradients stay whole, and are averaged once.
        whole = self.stage == 1 and not self.last
        with no_sync(self.model) if whole else contextlib.nullcontext():
            return self._micro_batch(args, kwargs)

    def _micro_batch(self, args: Any, kwargs: Any) -> Tensor:
        self.forwards, self.before = 0, gathered_alone()
        self.arrived.clear()
        loss = self.loss(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ZeroError(f"the loss must be a tensor of one number, not {_described(loss)}")
        scale = self.scaler.scale if self.scaler is not None else 1.0
        # Beyond what an fp16 loss can hold, the scale is infinite: an overflow like any other.
        loss.backward(torch.full_like(loss, scale, dtype=torch.float64).to(loss.dtype))
        with torch.no_grad(), no_torch_function():
            for name, param in self.params.items():
                grad, param.grad = param.grad, None
                if isinstance(grad, DTensor) and not _stands_for_nothing(grad, name, self.arrived):
                    self._keep(name, grad._local_tensor)
        return loss.detach()

    def _keep(self, name: str, grad: Tensor) -> None:
        before = self.kept.get(name)
        self.kept[name] = grad if before is None else before.add_(grad)

    def _finish(self) -> None:
        """Update what backward did not."""
        factor = 1.0 / self.accumulate
        if self.scaler is not None:
            factor /= self.scaler.scale
        if self.clip is not None or self.scaler is not None:
            self.norm = _norm(self.params, self.kept) * factor
            finite = self.norm < float("inf")
            if self.scaler is not None:
                if not finite:
                    self._say_what_overflowed()
                self.scaler.update(not finite)
                if not finite:
                    return
            if self.clip is not None:
                # torch.nn.utils.clip_grad_norm_'s formula; min() would lose a NaN.
                share = self.clip / (self.norm + 1e-6)
                factor *= 1.0 if share > 1.0 else share
        fused = self._fused()
        for name, grad in self.kept.items():
            self.params[name].grad = gradient(grad, self.params[name])
        if fused is None:
            for grad in self.kept.values():
                grad.mul_(factor)
            self.optimizer.step()
            return
        fused.factor = factor
        try:
            self.optimizer.step()
        finally:
            fused.factor = 1.0

    def _say_what_overflowed(self) -> None:
        """Once, on every rank: the parameters whose gradients are not finite on some rank. Every
        rank must call it."""
        assert self.scaler is not None
        if self.warned:
            return
        self.warned = True
        group = _group(self.params)
        mine = [name for name, grad in self.kept.items() if not bool(grad.isfinite().all())]
        everyone = comm.everyone(mine, group.pg) if group is not None and group.pg else [mine]
        names = sorted({name for some in everyone for name in some})
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        warnings.warn(
            f"gradients of {', '.join(names[:4])}{more} overflowed at a loss scale of "
            f"{self.scaler.scale:g}: the step is left out on every rank. Said once; "
            "scaler.skipped counts them",
            ZeroWarning,
            stacklevel=4,
        )


def _loss_of(model: nn.Module, loss_fn: LossFunction | None) -> Callable[..., Any]:
    if loss_fn is None:

        def returned(*args: Any, **kwargs: Any) -> Any:
            result = model(*args, **kwargs)
            return getattr(result, "loss", result)

        return _of_its_own(returned)

    def computed(*args: Any, **kwargs: Any) -> Any:
        *inputs, target = args
        return loss_fn(model(*inputs, **kwargs), target)

    return _of_its_own(computed)


def _of_its_own(function: Any) -> Callable[..., Any]:
    """The function with a code object of its own: by those Dynamo counts what it compiles."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, closure=function.__closure__)


def _is_watched(param: ZeroParameter) -> bool:
    """Whether somebody looks at its gradient: hooks besides our own."""
    before = getattr(param, "_backward_hooks", None) or {}
    return len(before) > 1 or bool(getattr(param, "_post_accumulate_grad_hooks", None))


def _stands_for_nothing(grad: DTensor, name: str, arrived: set[str]) -> bool:
    """Whether it is what passes/update.py returns in place of a gradient that was handed over."""
    return name in arrived and not grad._local_tensor.numel()


def _piece(leaf: Any, index: int, count: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    rows = leaf.shape[0] // count
    return leaf[index * rows : (index + 1) * rows]


def _described(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))


def _group(params: Mapping[str, ZeroParameter]) -> comm.Group | None:
    return next((comm.find(p.spec.group) for p in params.values()), None)


def _norm(params: Mapping[str, ZeroParameter], grads: Mapping[str, Tensor]) -> float:
    """The norm of all gradients together, the same on every rank; not finite where one of them is
    not. Each rank's squares, then those of all, both in a fixed order."""
    group = _group(params)
    first = group is None or group.rank == 0
    # A replicated gradient is the same on all ranks: it is counted on the first.
    mine = [
        grads[name]
        for name, param in params.items()
        if name in grads and (param.spec.sharded or first)
    ]
    device = next((grad.device for grad in grads.values()), torch.device("cpu"))
    total = squares(mine, device)
    if group is not None and group.pg is not None:
        every = [torch.empty_like(total) for _ in range(group.world)]
        dist.all_gather(every, total, group=group.pg)
        total = torch.stack(every).sum()
    return float(total.sqrt())  # here the host waits for the device
