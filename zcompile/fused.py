"""An optimizer whose step is one pass over memory: its own update, traced and emitted as a kernel.

`fuse(optimizer)` leaves the optimizer what it is: its param groups, its state (tensors and DTensors
under the same keys), hooks, schedulers and state_dict work as before. Only `step` computes in
another way. What cannot become a kernel is stepped by the optimizer itself, and a warning says why.
"""

from __future__ import annotations

import inspect
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zcompile import dump as dumps
from zcompile._torch import disable_dynamo, no_torch_function
from zcompile.codegen import build
from zcompile.codegen.elementwise import split
from zcompile.codegen.kernel import Kernel
from zcompile.codegen.trace import (
    Case,
    Like,
    NotElementwise,
    Update,
    numbers,
    own_step,
    trace,
)
from zcompile.eligible import (
    attributes_of,
    check,
    check_copy,
    kind_of,
    local_part,
    marks_of,
    signature_of,
)
from zcompile.errors import OptionError, ZeroWarning
from zcompile.launch import Program, Segment, by_program, launch, try_scalars
from zcompile.rounding import Rounding

# Kernels of one kind of parameter that differ in the branches taken on numbers. A step that takes
# another for every count would never stop compiling.
MOST_CASES = 8

_SCALING = ("grad_scale", "found_inf")  # set by a GradScaler while it calls step


def fuse(
    optimizer: torch.optim.Optimizer,
    *,
    copies: Mapping[Tensor, Tensor] | None = None,
    stochastic_rounding: bool = False,
    dump: str | None = None,
) -> torch.optim.Optimizer:
    """Make `optimizer.step` a fused kernel, in place. Returns the optimizer. Twice is once. A copy
    or a pickle of it is not fused: torch's optimizers carry groups and state over, and no more.

    copies: for master weights. Of some of its float32 parameters, a tensor of the same shape in
    bfloat16 or float16, into which each step also rounds the new value (to nearest even). It is
    written now, too. Such a parameter's gradient may be in that dtype, by `param.grad_dtype`.
    stochastic_rounding: round what is kept in bfloat16, parameters and state, to either neighbour,
    to each as often as the value is near it: for training without fp32 masters, where steps of
    less than half a unit in the last place would be lost.
    dump: folder for the source of each kernel; default: $ZCOMPILE_DUMP.

    The update that the optimizer's class defines is traced, whatever the class: it has to treat
    every element alike. lr and other floats of a param group may change at any time.

    Raises:
        OptionError: a copy that does not go with its parameter.
    """
    if not hasattr(optimizer.step, "fused"):
        given = vars(optimizer).get("step")
        known = ("_wrapped_by_lr_sched", "_torchdynamo_orig_callable")
        if given is not None and not any(hasattr(given, name) for name in known):
            asked = [
                n
                for n, v in (("copies", copies), ("stochastic_rounding", stochastic_rounding))
                if v
            ]
            if asked:
                raise OptionError(
                    f"{type(optimizer).__name__}.step was replaced on this object, so no kernel "
                    f"steps it, and {asked[0]} would have no effect: put its own step back first"
                )
            warnings.warn(
                f"{type(optimizer).__name__}.step was replaced on this object and stays as it is",
                ZeroWarning,
                stacklevel=2,
            )
            return optimizer
        fused = _Fused(own_step(type(optimizer)))

        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._opt_called = True  # what a scheduler asks after
            fused.check_copies(self)
            if fused.is_more_than_an_update(self, args, kwargs):
                if fused.rounding is not None:
                    fused.warn_once(
                        f"{type(self).__name__} steps itself when it is given a closure"
                    )
                result = fused.own(self, *args, **kwargs)
                fused.copy_all()
                return result
            return fused.step(self, *args, **kwargs)

        hooked: Any = disable_dynamo(torch.optim.Optimizer.profile_hook_step(step))
        hooked.fused, hooked._wrapped_by_lr_sched = fused, True
        optimizer.step = types.MethodType(hooked, optimizer)
    if stochastic_rounding:
        optimizer.step.fused.round_at_random()
    optimizer.step.fused.write_into(dump or os.environ.get("ZCOMPILE_DUMP"))
    if len({id(copy) for copy in (copies or {}).values()}) < len(copies or {}):
        raise OptionError("fuse(copies=...) was given one tensor as the copy of two parameters")
    for param, copy in (copies or {}).items():
        check_copy(param, copy)
        optimizer.step.fused.copies[param] = copy
    optimizer.step.fused.check_copies(optimizer)
    optimizer.step.fused.copy_all()
    return optimizer


@dataclass
class _Fused:
    own: Callable[..., Any]
    updates: dict[Any, list[tuple[Update, Program]]] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)
    programs: dict[Any, Program] = field(default_factory=dict)
    warned: bool = False
    moved: dict[Any, list[tuple[Update, int]]] = field(default_factory=dict)
    factor: float = 1.0  # of every gradient in the next step
    copies: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    folder: str | None = None  # for the kernels' source
    rounding: Rounding | None = None

    def __post_init__(self) -> None:
        closure = inspect.signature(self.own).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty

    def round_at_random(self) -> None:
        if self.rounding is None:
            self.rounding = Rounding()
            self.updates.clear()

    def write_into(self, folder: str | None) -> None:
        self.folder = folder or self.folder
        for kernel, _, device in self.programs:
            self._write(kernel, device)

    def _write(self, kernel: Kernel, device: torch.device) -> None:
        if self.folder:
            text, name = build.source(kernel, device)
            dumps.kernel(self.folder, name, text)

    def warn_once(self, text: str) -> None:
        if not self.warned:
            self.warned = True
            nearest = ". It rounds to nearest" if self.rounding is not None else ""
            warnings.warn(text + nearest, ZeroWarning, stacklevel=7)

    def check_copies(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises OptionError where a copy is of a parameter that is not the optimizer's."""
        if self.copies:
            params = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for param in self.copies:
                if id(param) not in params:
                    raise OptionError(
                        f"fuse(copies=...) has a copy of a {tuple(param.shape)} parameter that the "
                        "optimizer does not hold (any more): drop that parameter for good, or put "
                        "it back. A model that is sharded has other parameters, and needs no copies"
                    )

    def copy_all(self) -> None:
        with torch.no_grad():
            for param, copy in self.copies.items():
                copy.copy_(param)

    def is_more_than_an_update(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> bool:
        """Whether this call must be the optimizer's own: it needs a closure, or may do more with
        one than evaluate it first, as torch's own do."""
        if self.needs_closure:
            return True
        given = len(args) + len(kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if given > 1 or (given == 1 and not args and "closure" not in kwargs):
            return True
        return closure is not None and not type(optimizer).__module__.startswith("torch.optim")

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if _unscale(optimizer):
                self._step(optimizer)
        return loss

    def update(
        self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], factor: float
    ) -> list[Tensor]:
        """Step these parameters only, by `factor` times their gradients. Returns those stepped; the
        others are the optimizer's own, in its next step."""
        with torch.no_grad(), no_torch_function():
            return self._launch_all(optimizer, factor, frozenset(map(id, params)))[0]

    def bytes_moved(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor
    ) -> int | None:
        """Bytes per element that a step reads and writes once the state is there. None: no kernel
        steps this parameter."""
        local, marks = local_part(param), marks_of(param)
        attributes, why_not = attributes_of(optimizer)
        if group.get("differentiable") or why_not:
            return None
        values = {name: value for name, (_, value) in numbers(group).items()}
        try:
            own = (attributes, signature_of(group), tuple(marks.items()))
            known = self.moved.setdefault((own, local.dtype, param.dim() == 0), [])
            for update, moved in known:
                if update.holds(values):
                    return moved
            update = _traced(optimizer, group, param, {}, marks)
            kernel, _ = split(update, "update")
        except NotElementwise:
            return None
        moved = 2 * sum(store.dtype.itemsize for store in kernel.stores) + local.element_size()
        known.append((update, moved))
        return moved

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        with no_torch_function():  # which a sharded parameter's every attribute would go through
            done, reasons = self._launch_all(optimizer, self.factor)
        if reasons:
            self._run_own(optimizer, done, reasons)

    def _launch_all(
        self, optimizer: torch.optim.Optimizer, factor: float, only: frozenset[int] | None = None
    ) -> tuple[list[Tensor], dict[str, int]]:
        """Step all parameters, or those in `only` (by id), that kernels can step. Returns them, and
        how many others there are by the reason why not."""
        reasons: dict[str, int] = {}
        done: list[Tensor] = []
        attributes, why_not = attributes_of(optimizer)
        number = 0
        for group in optimizer.param_groups:
            segments, reason = [], why_not
            numbered = enumerate(group["params"], number)
            number += len(group["params"])
            hyper = {name: value for name, (_, value) in numbers(group).items()}
            try:
                shared = (attributes, signature_of(group))
            except NotElementwise as error:
                shared, reason = ((), ()), str(error)
            for index, param in numbered:
                if param.grad is None or (only is not None and id(param) not in only):
                    continue
                try:
                    if reason:
                        raise NotElementwise(reason)
                    segments.append(self._segment(optimizer, group, hyper, shared, param, index))
                    done.append(param)
                except NotElementwise as error:
                    reasons[str(error)] = reasons.get(str(error), 0) + 1
            for program, members in by_program(segments):
                launch(program, members, hyper, group, optimizer.state, factor, self.rounding)
        return done, reasons

    def _run_own(
        self, optimizer: torch.optim.Optimizer, done: Sequence[Tensor], reasons: Mapping[str, int]
    ) -> None:
        count = sum(reasons.values())
        self.warn_once(
            f"{type(optimizer).__name__} steps {count} of {count + len(done)} parameters itself, "
            f"not fused: {'; '.join(reasons)}"
        )
        grads = [param.grad for param in done]
        for param in done:
            param.grad = None
        if self.factor != 1.0:
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                if param.grad is not None:
                    local_part(param.grad).mul_(self.factor)
        scaling = {k: vars(optimizer).pop(k) for k in _SCALING if k in vars(optimizer)}
        try:
            self.own(optimizer)
            self.copy_all()
        finally:
            vars(optimizer).update(scaling)
            for param, grad in zip(done, grads, strict=True):
                param.grad = grad

    def _segment(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        hyper: Mapping[str, float],
        shared: Any,
        param: Tensor,
        number: int,
    ) -> Segment:
        """What steps a parameter. hyper: the group's floats; shared: what else of the optimizer and
        the group an update depends on; number: of the parameter among the optimizer's.

        Raises:
            NotElementwise: no kernel can.
            ZeroError, OptionError: its memory is gone, or its copy no longer fits.
        """
        grad = param.grad
        assert grad is not None
        state = optimizer.state.get(param, {})
        marks, beside = marks_of(param), self.copies.get(param)
        kinds = kind_of(param), kind_of(grad), kind_of(beside), tuple(map(kind_of, state.values()))
        signature = (shared, kinds, tuple(state), tuple(marks.items()))
        counts = {f"state.{k}": v for k, v in state.items() if type(v) in (int, float)}
        values = {**hyper, **counts}
        if signature in self.refused:
            raise NotElementwise(self.refused[signature])
        known = self.updates.setdefault(signature, [])
        for update, program in known:
            if update.holds(values):
                return Segment(param, update, program, beside, number)
        try:
            if len(known) == MOST_CASES:
                asked = ", ".join(known[-1][0].symbols)
                raise NotElementwise(f"it is another step for every value of {asked}")
            if group.get("differentiable"):
                raise NotElementwise("it is differentiable")
            check(param, grad, state)
            if beside is not None:
                check_copy(param, beside)
            update = _traced(optimizer, group, param, state, marks)
            copy = beside.dtype if beside is not None else None
            program = self._program(optimizer, update, grad.dtype, copy)
            try_scalars(program.scalars, hyper, group, state)
        except NotElementwise as error:
            self.refused[signature] = str(error)
            raise
        known.append((update, program))
        return Segment(param, update, program, beside, number)

    def _program(
        self,
        optimizer: torch.optim.Optimizer,
        update: Update,
        grad: torch.dtype,
        copy: torch.dtype | None,
    ) -> Program:
        """Parameters of all shapes share one wherever their arithmetic is the same."""
        kind = type(optimizer)
        name = f"{kind.__name__.lower()}_step"
        about = (f"{kind.__module__}.{kind.__qualname__}, one step of every element",)
        kernel, scalars = split(
            update, name, about, grad=grad, copy=copy, random=self.rounding is not None
        )
        device = update.graph.graph.find_nodes(op="placeholder")[0].meta["val"].device
        key = (kernel, tuple((k, scalars.formula(k)) for k in scalars.state), device)
        if key not in self.programs:
            try:
                run = build.on(kernel, device)
            except build.CannotBuild as error:
                raise NotElementwise(f"its kernel cannot be built: {error}") from error
            self.programs[key] = Program(kernel, scalars, run)
            self._write(kernel, device)
        return self.programs[key]


def _unscale(optimizer: torch.optim.Optimizer) -> bool:
    """What torch.amp.GradScaler leaves to fused optimizers: gradients are divided by its scale, as
    torch's leave them. False: one is not finite, and the step is left out."""
    scale, found = (getattr(optimizer, name, None) for name in _SCALING)
    if found is not None and local_part(found).item():
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local_part(param.grad).div_(local_part(scale))
    return True


def _traced(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    param: Tensor,
    state: Mapping[str, Any],
    marks: Mapping[str, Any],
) -> Update:
    """The update of one parameter, by the shape of the whole of it, and by a gradient of its dtype:
    a kernel widens both as it loads them, so that one in another dtype is the same arithmetic."""
    like = Like.of(param)
    likes = {k: Like.of(v) if isinstance(v, Tensor) else v for k, v in state.items()}
    if param.dim() == 0:
        # Which of its state is a value of the parameter's, which a count? One with a dimension
        # tells them apart.
        like = replace(like, shape=(1,))
        fresh = Case(like, marks=marks)
        wide = trace(optimizer, group, fresh).elementwise()
        likes = {k: replace(v, shape=(1,)) if k in wide else v for k, v in likes.items()}
    return trace(optimizer, group, Case(like, likes, marks))
