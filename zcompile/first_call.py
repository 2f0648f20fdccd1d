"""When a compiled model is first called: its parameters become shards before anything is traced.

Dynamo says when something compiled is called, and again when it is about to compile a frame. The
frames below on the stack then hold the compiled object and its options; the modules that it will
run are sharded right there, so that the very first trace sees shards. (Sharding inside the backend
would be too late: Dynamo refuses a model that changed while it was traced.)

A compiled optimizer.step is found there too, and becomes a fused one.

What cannot be found that way, such as a model that only a nested function knows, is met in the
backend as a graph of whole parameters: `FirstCall` shards their owners and runs that graph as it
is; the next call compiles.
"""

from __future__ import annotations

import dis
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile import comm
from zcompile._torch import (
    OptimizeContext,
    OptimizedModule,
    before_each_call,
    before_each_compile,
    compiled_call,
    disable_dynamo,
    original_backend,
    redirect_compiled,
    shortened,
)
from zcompile.accumulation import check_settled
from zcompile.control import Control
from zcompile.errors import ZeroError, ZeroWarning
from zcompile.fused import fuse
from zcompile.options import Options
from zcompile.owners import live, outermost_owners
from zcompile.parameter import ZeroParameter, gathers_expected, unsharded
from zcompile.sharding import is_sharded, read_through_dialect, shard
from zcompile.state import keep_laid_out

Backend = Callable[..., Any]
Call = tuple[OptimizeContext, Any, Any, Any]  # and the function, its args, its kwargs
_TORCH = Path(torch.__file__).parent


def watch(backend: Backend) -> None:
    """From now on, shard what `backend` is about to compile."""
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def called() -> None:
        """The first call of each compiled function: nothing of it has run, not even hooks."""
        frame, call = _call_of(backend)
        if frame is None or call is None or call[1] in seen:
            return
        optimizer = _steps_for(call[1])
        if optimizer is not None:
            step = fuse_as(optimizer, _options_of(call[0])).step
            redirect_compiled(frame, step)
            seen.add(step)  # what this compiled object calls from now on
        else:
            modules, options = _called(frame, *call)
            shard_whole(modules, options)
            if options.optimizer is not None:
                fuse_as(options.optimizer, options)
            seen.add(call[1])

    def compiling(_: Any) -> None:
        """Modules that came to a compiled function since."""
        frame, call = _call_of(backend)
        if frame is not None and call is not None:
            try:
                shard_whole(*_called(frame, *call))
            except ZeroError as error:
                raise shortened(error) from error.__cause__

    before_each_call(backend, called)
    before_each_compile(compiling)
    _watch_optimizers(backend)


def _call_of(backend: Backend) -> tuple[FrameType | None, Call | None]:
    """The innermost call of something compiled with `backend`, and its frame."""
    for frame in _stack():
        call = compiled_call(frame)
        if call is not None and _is_of(call[0], backend):
            return frame, call
    return None, None


def _steps_for(function: Any, depth: int = 3) -> torch.optim.Optimizer | None:
    """The optimizer whose bound step a function is, or wraps as schedulers do."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.optim.Optimizer) and function.__name__ == "step":
        return owner
    code = getattr(function, "__code__", None)
    # A user's function that is called `step` and closes over an optimizer does more than step it.
    if depth and code is not None and Path(code.co_filename).is_relative_to(_TORCH):
        for cell in getattr(function, "__closure__", None) or ():
            value = cell.cell_contents
            value = value() if type(value) is weakref.ref else value
            if isinstance(value, torch.optim.Optimizer):
                return value
            found = _steps_for(value, depth - 1)
            if found is not None:
                return found
    return None


def _is_of(context: OptimizeContext, backend: Backend) -> bool:
    compiler = original_backend(context)
    return getattr(compiler, "compiler_fn", compiler) is backend


def _watch_optimizers(backend: Backend) -> None:
    """Before each step of an optimizer, count it: all ranks must make it. Before the first, lay out
    a state that was loaded whole, and look for parameters that nothing synchronises."""
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @disable_dynamo  # a count in a graph would be compiled anew at each step
    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        check_settled(optimizer)
        if optimizer not in met:
            met.add(optimizer)
            keep_laid_out(optimizer)
        for control in _controls_of(optimizer):
            control.steps += 1
        alone = max(int(os.environ.get("WORLD_SIZE", "1")), _ranks()) == 1
        if optimizer not in seen and (alone or _is_synchronised(optimizer, backend)):
            seen.add(optimizer)

    register_optimizer_step_pre_hook(check)


def _controls_of(optimizer: torch.optim.Optimizer) -> list[Control]:
    """Of the groups over which its parameters are sharded."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    names = {p.spec.group for p in params if is_sharded(p)}
    controls = (comm.find(name).control for name in names)
    return [control for control in controls if control is not None]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_synchronised(optimizer: torch.optim.Optimizer, backend: Backend) -> bool:
    """Whether no more need be asked of this optimizer. Raises where ranks would drift apart."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    whole = {id(p) for p in params if not isinstance(p, DTensor) and p.grad is not None}
    if not whole:
        return True
    for module in live(OptimizedModule):
        if not _is_of(module.dynamo_ctx, backend):
            continue
        for name, param in module._orig_mod.named_parameters():
            if id(param) in whole:
                if not _gradients_differ([p for p in params if id(p) in whole]):
                    return False  # steps on the same data, before the first compiled call
                raise ZeroError(
                    f"parameter {name!r} of a model compiled with backend='zero' is about to be "
                    "updated and was never sharded: its gradient is this rank's alone. Nothing of "
                    "the model was compiled (a recompile limit, a stance or a disabled forward). "
                    "Call zcompile.shard(model, ...) before training"
                )
    if any(is_sharded(p) for p in params):
        shapes = [tuple(p.shape) for p in params if id(p) in whole]
        warnings.warn(
            f"the optimizer also holds {len(whole)} parameters of no sharded model, of shapes "
            f"{shapes[:4]}: their gradients are not averaged over the ranks. Shard their module "
            "too: zcompile.shard(module, ...)",
            ZeroWarning,
            stacklevel=4,
        )
    return True


def _gradients_differ(params: list[Any]) -> bool:
    if not dist.is_initialized():
        return True
    # As text, in which a NaN equals a NaN.
    sums = [repr(float(p.grad.double().sum())) for p in params]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return any(theirs != sums for theirs in everyone)


def fuse_as(optimizer: torch.optim.Optimizer, options: Options) -> torch.optim.Optimizer:
    """Fuse a step as options say."""
    rounding = options.stochastic_rounding
    return fuse(optimizer, stochastic_rounding=rounding, dump=options.dump)


def shard_whole(modules: list[nn.Module], options: Options) -> None:
    """Shard the outermost modules around `modules` wherever their parameters are still whole.

    A compiled part of a model shards all of it: gradients of the other parts must be averaged too.
    """
    for module in modules:
        whole = [p for p in module.parameters() if not is_sharded(p)]
        for root in outermost_owners(whole):
            shard(root, options)
        for inner in module.modules():
            read_through_dialect(inner)  # one that was given a sharded parameter since


class FirstCall:
    """Shards the model that a graph's whole parameters belong to, then runs the graph as it is."""

    def __init__(self, gm: fx.GraphModule, options: Options) -> None:
        self.gm, self.options = gm, options

    def __call__(self, *args: Any) -> Any:
        whole = [a for a in args if isinstance(a, nn.Parameter) and not is_sharded(a)]
        places: dict[int, tuple[nn.Module, str]] = {}
        for root in outermost_owners(whole):
            for module in root.modules():
                for name, param in module._parameters.items():
                    places.setdefault(id(param), (module, name))
            shard(root, self.options)

        def sharded_argument(value: Any) -> Any:
            if isinstance(value, nn.Parameter) and id(value) in places:
                module, name = places[id(value)]
                param = module._parameters[name]
                assert isinstance(param, ZeroParameter)
                placements = param.spec.placements
                return unsharded(param.to_local(grad_placements=placements), param.spec)
            return value

        with gathers_expected():
            return self.gm(*map(sharded_argument, args))


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _called(
    frame: FrameType, context: OptimizeContext, function: Any, args: Any, kwargs: Any
) -> tuple[list[nn.Module], Options]:
    """The modules and options of a call of something compiled, whose `frame` it is."""
    values = [function, *_known_to(function)]
    values += torch.utils._pytree.tree_leaves((args, kwargs))
    if frame.f_back is not None:
        values.append(frame.f_back.f_locals.get("self"))
    modules: dict[int, nn.Module] = {}
    for value in values:
        value = getattr(value, "__self__", value)
        if isinstance(value, OptimizedModule):
            value = value._orig_mod
        if isinstance(value, nn.Module):
            modules[id(value)] = value
    return list(modules.values()), _options_of(context)


def _options_of(context: OptimizeContext) -> Options:
    return Options.parse(getattr(original_backend(context), "kwargs", {}).get("options"))


def _known_to(function: Any) -> Iterator[Any]:
    """What a plain function can reach by name: its closure and the globals that it mentions."""
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is None or isinstance(getattr(function, "__self__", None), nn.Module):
        return
    for cell in plain.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield plain.__globals__.get(step.argval)
