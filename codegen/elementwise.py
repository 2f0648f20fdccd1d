"""From an optimizer's traced update to one kernel and the scalars that it reads.

What has the parameter's shape becomes the kernel's arithmetic. What is a number or a 0-dim tensor
(a step count, a learning rate, a bias correction) is computed outside of it, once per parameter and
in double precision, so that 1 - beta ** step loses nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zcompile._torch import OpOverload
from zcompile.codegen.kernel import (
    COPY,
    FACTOR,
    INFIX,
    OPS,
    RANDOM,
    Kernel,
    Line,
    Load,
    Operand,
    Store,
    is_name,
)
from zcompile.codegen.trace import NotElementwise, Update


@dataclass(frozen=True)
class Scalars:
    """Numbers as functions of hyperparameters and of the scalars in the state.

    inputs: those that are numbers; names: of the kernel's scalars, but FACTOR; state: keys whose
    new values are numbers.
    """

    inputs: Mapping[str, fx.Node]
    names: Mapping[str, fx.Node]
    state: Mapping[str, Any]

    def __call__(self, values: Mapping[str, Tensor | float]) -> tuple[Tensor, dict[str, Tensor]]:
        """values: of the inputs, numbers or (parameters,) in double precision.

        Returns the kernel's scalars (parameters, scalars) and the new state (parameters,).
        """
        wide = {n: torch.as_tensor(v, dtype=torch.float64) for n, v in values.items()}
        rows = max((v.numel() for v in wide.values()), default=1)
        known: dict[fx.Node, Any] = {node: wide[name] for name, node in self.inputs.items()}

        def of(value: Any) -> Tensor:
            made = _evaluate(value, known)
            return torch.as_tensor(made, dtype=torch.float64).expand(rows)

        table = [of(node) for node in self.names.values()]
        stacked = torch.stack(table, 1) if table else torch.zeros(rows, 0, dtype=torch.float64)
        return stacked, {key: of(value) for key, value in self.state.items()}

    def text(self, name: str) -> str:
        """A scalar's formula."""
        return _formula(self.names[name], outermost=True)

    def formula(self, key: str) -> str:
        """That of a new value of the state."""
        return _formula(self.state[key], outermost=True)


def split(
    update: Update,
    name: str,
    about: tuple[str, ...] = (),
    *,
    grad: torch.dtype | None = None,
    copy: torch.dtype | None = None,
    random: bool = False,
) -> tuple[Kernel, Scalars]:
    """The kernel of an update and its scalars. grad: in which the gradient arrives, if not in the
    dtype that the update was traced with. copy: in this dtype the kernel also stores the new
    parameter, into the buffer COPY. random: what is stored in bfloat16, but for the copy, is
    rounded at random.

    Raises:
        NotElementwise: an operation looks at more than one element, or has no emitter.
    """
    return _Splitter(update).split(name, about, grad, copy, random)


class _Splitter:
    def __init__(self, update: Update) -> None:
        self.update = update
        nodes = update.graph.graph.find_nodes(op="placeholder")
        self.inputs = dict(zip(update.inputs, nodes, strict=True))
        self.like = self.inputs["param"].meta["val"]
        self.env: dict[fx.Node, Operand] = {}  # values of the parameter's shape
        self.truths: set[str] = set()
        self.lines: dict[tuple[str, tuple[Operand, ...]], str] = {}
        self.scalars: dict[fx.Node, str] = {}
        # A user's state and hyperparameters may share names, such as `momentum`.
        self.taken = {COPY, FACTOR, *RANDOM}
        for key, node in (*self.inputs.items(), *update.results().items()):
            if key.startswith("hyper."):
                continue
            buffer = _buffer(key)
            self.taken.add(buffer)
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            whole = isinstance(value, Tensor) and value.dim() > 0
            if key.startswith("state.") and whole and not is_name(buffer):
                raise NotElementwise(f"its state {buffer!r} cannot be the name of a buffer")

    def split(
        self,
        name: str,
        about: tuple[str, ...],
        grad: torch.dtype | None,
        copy: torch.dtype | None,
        random: bool,
    ) -> tuple[Kernel, Scalars]:
        loads: list[Load] = []
        for key, node in self.inputs.items():
            value = node.meta["val"]
            if isinstance(value, Tensor) and (key in ("param", "grad") or value.dim()):
                arrives = grad if key == "grad" and grad is not None else value.dtype
                loads.append(Load(_buffer(key), arrives))
                self.env[node] = _buffer(key)
                if key == "grad":
                    self.env[node] = self.line("mul", "grad", FACTOR)
        for node in self.update.graph.graph.nodes:
            if node.op == "call_function" and self._elementwise(node):
                self.env[node] = self._translate(node)
        stores, state = [], {}
        dtypes = {load.buffer: load.dtype for load in loads}
        for key, value in self.update.results().items():
            if isinstance(value, fx.Node) and self._elementwise(value):
                buffer = _buffer(key)
                dtype = dtypes.get(buffer, value.meta["val"].dtype)
                if self.env[value] != buffer:
                    rounds = random and dtype == torch.bfloat16
                    stores.append(Store(buffer, self._named(value), dtype, rounds))
            else:
                state[key.removeprefix("state.")] = value
        if copy is not None:
            new = next((s.value for s in stores if s.buffer == "param"), "param")
            stores.append(Store(COPY, new, copy))
        body, used = _needed(self.lines, [store.value for store in stores])
        kept = {s: n for n, s in self.scalars.items() if s in used}
        loads = [load for load in loads if load.buffer in used]
        touched = [load.dtype for load in loads] + [store.dtype for store in stores]
        wide = torch.float64 if torch.float64 in touched else torch.float32
        if copy is not None and wide == torch.float64:
            raise NotElementwise("a copy is of a float32 parameter, and rounded once")
        read = {operand for line in body for operand in line.args}
        if any(s.buffer == "param" and s.dtype.itemsize < 4 and s.value in read for s in stores):
            # As it would be to make up for what rounding it loses.
            raise NotElementwise("it reads back a parameter that it has rounded")
        inputs = {name: node for name, node in self.inputs.items() if node not in self.env}
        scalars = Scalars(inputs, kept, state)
        formulas = tuple(f"{scalar} = {scalars.text(scalar)}" for scalar in kept)
        taken = (*kept, FACTOR) if FACTOR in used else tuple(kept)
        taken += RANDOM if any(store.random for store in stores) else ()
        kernel = Kernel(name, tuple(loads), taken, body, tuple(stores), wide, about + formulas)
        return kernel, scalars

    def _elementwise(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if node.target is torch.ops.aten.copy_.default:
            return False  # the epilogue that writes the inputs: outputs say the same
        if not isinstance(value, Tensor):
            if isinstance(value, (list, tuple)):
                raise NotElementwise(f"{node.target} gives several tensors")
            return False
        if value.shape == self.like.shape:
            return True
        if value.dim() == 0:
            if any(a in self.env for a in node.all_input_nodes):
                raise NotElementwise(f"{node.target} makes one number out of many")
            return False
        raise NotElementwise(f"{node.target} gives a value of shape {tuple(value.shape)}")

    def _translate(self, node: fx.Node) -> Operand:
        if not isinstance(node.target, OpOverload):
            raise NotElementwise(f"{node.target} is not an operation of torch")
        kind = node.target.overloadpacket.__name__.removesuffix("_")
        rule = _RULES.get(kind)
        if rule is None:
            raise NotElementwise(f"{node.target} has no emitter")
        kwargs = {k: v for k, v in node.kwargs.items() if k not in _SAYS_WHERE}
        target = node.meta["val"].dtype
        if kind in _CASTS and not (target.is_floating_point or target == torch.bool):
            raise NotElementwise(f"{node.target} gives {target}")
        try:
            made = rule(_Emit(self), *node.args, **kwargs)
        except TypeError as error:
            raise NotElementwise(f"{node.target} with {dict(node.kwargs)}: {error}") from error
        return self.line("ne", made, 0.0) if target == torch.bool and not self.true(made) else made

    def operand(self, value: Any) -> Operand:
        """A line's operand: a value, a constant, or a scalar that is now known to be used."""
        if isinstance(value, fx.Node):
            if value in self.env:
                return self.env[value]
            if value not in self.scalars:
                computed = sum("input" not in node.meta for node in self.scalars)
                name = value.meta.get("input", f"hyper.s{computed + 1}")
                name = name.split(".", 1)[1].replace(".", "_")
                while name in self.taken or not is_name(name):
                    name = f"hyper_{name}"
                self.taken.add(name)
                self.scalars[value] = name
            return self.scalars[value]
        if isinstance(value, (bool, int, float)):
            return float(value)
        return value

    def line(self, op: str, *args: Any) -> str:
        key = op, tuple(self.operand(a) for a in args)
        if key not in self.lines:
            name = f"{op}_{sum(o == op for o, _ in self.lines) + 1}"
            self.lines[key] = name.replace("not_", "n_")  # which C++ knows as an operator
            if OPS[op] == "?":
                self.truths.add(self.lines[key])
        return self.lines[key]

    def true(self, operand: Any) -> bool:
        return operand in self.truths

    def _named(self, node: fx.Node) -> str:
        """A store's value: a constant becomes a line."""
        value = _Emit(self).number(node)
        return value if isinstance(value, str) else self.line("add", value, 0.0)


class _Emit:
    """What a rule writes with: emit.mul(x, y) is a line."""

    def __init__(self, splitter: _Splitter) -> None:
        self.splitter = splitter

    def __getattr__(self, op: str) -> Callable[..., str]:
        return lambda *args: self.splitter.line(op, *map(self.number, args))

    def number(self, value: Any) -> Operand:
        """A truth value as 1 or 0."""
        operand = self.splitter.operand(value)
        if self.splitter.true(operand):
            return self.splitter.line("where", operand, 1.0, 0.0)
        return operand

    def truth(self, value: Any) -> Operand:
        operand = self.splitter.operand(value)
        return operand if self.splitter.true(operand) else self.splitter.line("ne", operand, 0.0)

    def logic(self, op: str, *args: Any) -> str:
        return self.splitter.line(op, *map(self.truth, args))

    def uniform(self, value: Any) -> bool:
        """Whether it is a scalar of the kernel's, the same for all elements."""
        return isinstance(value, fx.Node) and value not in self.splitter.env

    def scaled(self, value: Any, by: Any) -> Any:
        return value if by == 1 else self.mul(value, by)


def _lerp(e: _Emit, start: Any, end: Any, weight: Any) -> str:
    """From the nearer end, as torch does: a weight of 1 gives `end` to the last bit."""
    way = e.sub(end, start)
    low = lambda: e.add(start, e.mul(weight, way))
    high = lambda: e.sub(end, e.mul(way, e.sub(1.0, weight)))
    if isinstance(weight, (int, float)):
        return low() if abs(weight) < 0.5 else high()
    return _where(e, e.lt(e.abs(weight), 0.5), low(), high())


def _clamp(e: _Emit, x: Any, min: Any = None, max: Any = None) -> Operand:
    low = e.number(x) if min is None else e.maximum(x, min)
    return low if max is None else e.minimum(low, max)


def _div(e: _Emit, x: Any, y: Any, rounding_mode: str | None = None) -> str:
    if rounding_mode not in (None, "floor"):
        raise NotElementwise(f"division rounded by {rounding_mode!r}")
    if rounding_mode is None and e.uniform(y):
        return e.mul(x, e.reciprocal(y))  # one division a segment, not one an element
    return e.div(x, y) if rounding_mode is None else e.floor(e.div(x, y))


def _pow(e: _Emit, x: Any, exponent: Any) -> str:
    if exponent == 2:
        return e.mul(x, x)
    return e.sqrt(x) if exponent == 0.5 else e.pow(x, exponent)


def _where(e: _Emit, truth: Any, x: Any, y: Any) -> str:
    return e.splitter.line("where", e.truth(truth), e.number(x), e.number(y))


def _index_put(e: _Emit, x: Any, indices: Any, value: Any, accumulate: bool = False) -> str:
    """x[mask] = number"""
    mask = indices[0]
    if len(indices) > 1 or accumulate or mask.meta["val"].dtype != torch.bool:
        raise NotElementwise("it writes to elements by index")
    if value in e.splitter.env:
        raise NotElementwise("it writes many values under a mask")
    return _where(e, mask, value, x)


_SAYS_WHERE = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}
_CASTS = {"_to_copy", "convert_element_type", "to"}
_unary = lambda op: lambda e, x: getattr(e, op)(x)
_binary = lambda op: lambda e, x, y: getattr(e, op)(x, y)
_same: Callable[..., Operand] = lambda e, x, *_: e.splitter.operand(x)
_second: Callable[..., Operand] = lambda e, _, value, *rest: e.splitter.operand(value)
_constant = lambda value: lambda e, *_: value
_logic = lambda op: lambda e, *args: e.logic(op, *args)

# An ATen operation, by its name, as lines of a kernel.
_RULES: dict[str, Callable[..., Operand]] = {
    **{op: _unary(op) for op in "neg sqrt rsqrt exp log abs sign floor ceil".split()},
    **{op: _unary(op) for op in "reciprocal tanh sigmoid isnan isinf".split()},
    **{op: _binary(op) for op in "mul maximum minimum eq ne lt le gt ge".split()},
    **{f"logical_{op}": _logic(op) for op in ("and", "or", "not")},
    **{f"bitwise_{op}": _logic(op) for op in ("and", "or", "not")},
    **dict.fromkeys(
        "clone detach alias lift_fresh_copy _to_copy convert_element_type view expand "
        "detach_copy alias_copy view_copy expand_copy".split(),
        _same,
    ),
    **{op: _constant(0.0) for op in ("zeros_like", "zeros", "new_zeros", "zero")},
    **{op: _constant(1.0) for op in ("ones_like", "ones", "new_ones")},
    "sgn": _unary("sign"),
    "true_divide": _div,
    "div": _div,
    "add": lambda e, x, y, alpha=1: e.add(x, e.scaled(y, alpha)),
    "sub": lambda e, x, y, alpha=1: e.sub(x, e.scaled(y, alpha)),
    "rsub": lambda e, x, y, alpha=1: e.sub(y, e.scaled(x, alpha)),
    "square": lambda e, x: e.mul(x, x),
    "pow": _pow,
    "lerp": _lerp,
    "addcmul": lambda e, x, a, b, value=1: e.add(x, e.mul(e.scaled(a, value), b)),
    "addcdiv": lambda e, x, a, b, value=1: e.add(x, e.div(e.scaled(a, value), b)),
    "clamp": _clamp,
    "clamp_min": lambda e, x, min: e.maximum(x, min),
    "clamp_max": lambda e, x, max: e.minimum(x, max),
    "where": _where,
    "index_put": _index_put,
    **dict.fromkeys("copy fill full_like full".split(), _second),
    "new_full": lambda e, x, size, value: e.splitter.operand(value),
    "masked_fill": lambda e, x, mask, value: _where(e, mask, value, x),
}


def _buffer(key: str) -> str:
    return key.removeprefix("state.")


def _needed(
    lines: Mapping[tuple[str, tuple[Operand, ...]], str], wanted: list[str]
) -> tuple[tuple[Line, ...], set[str]]:
    """The lines that lead to `wanted`, in order, and every name that they read."""
    used, kept = set(wanted), list[Line]()
    for (op, args), name in reversed(list(lines.items())):
        if name in used:
            kept.append(Line(name, op, args))
            used.update(a for a in args if isinstance(a, str))
    return tuple(reversed(kept)), used


# Scalars


def _evaluate(value: Any, known: dict[fx.Node, Any]) -> Any:
    """The value of a scalar node, for all parameters at once."""
    if not isinstance(value, fx.Node):
        return value
    if value not in known:
        if value.op == "get_attr":
            constant = operator.attrgetter(value.target)(value.graph.owning_module)
            known[value] = constant.double()
            return known[value]
        args = [_evaluate(a, known) for a in value.args]
        kwargs = {k: _evaluate(a, known) for k, a in value.kwargs.items() if k not in _SAYS_WHERE}
        known[value] = _call(value, args, kwargs)
    return known[value]


def _call(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    target = node.target
    if isinstance(target, OpOverload):
        kind = target.overloadpacket.__name__
        if kind in ("full", "scalar_tensor"):
            return args[-1]
        if kind in _CASTS or _RULES.get(kind) is _same or kind == "_local_scalar_dense":
            dtype = node.meta["val"].dtype if isinstance(node.meta["val"], Tensor) else None
            if dtype is not None and not dtype.is_floating_point:
                return torch.as_tensor(args[0]).to(dtype)
            return args[0]
        if any(isinstance(a, Tensor) for a in args):
            # Overloads for numbers refuse the vectors that stand for them here.
            plain = getattr(torch, kind.removesuffix("_"), None)
            if plain is not None:
                args = [torch.as_tensor(a, dtype=torch.float64) if type(a) is float else a
                        for a in args]  # fmt: skip
                return plain(*args, **kwargs)
        return target(*args, **kwargs)
    if target in _ON_NUMBERS and any(isinstance(a, Tensor) for a in args):
        return _ON_NUMBERS[target](*args, **kwargs)
    return target(*args, **kwargs)


# Functions of Python numbers, on vectors of them.
_ON_NUMBERS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: lambda x: x,
    torch.sym_int: torch.trunc,
    torch.sym_max: lambda x, y: torch.maximum(*map(torch.as_tensor, (x, y))),
    torch.sym_min: lambda x, y: torch.minimum(*map(torch.as_tensor, (x, y))),
    torch.sym_not: torch.logical_not,
    torch.sym_sqrt: torch.sqrt,
    math.sqrt: torch.sqrt,
    math.floor: torch.floor,
    math.ceil: torch.ceil,
}

_INFIX = {**INFIX, "div": "/", "truediv": "/", "pow": "**"}


def _formula(value: Any, outermost: bool = False) -> str:
    """A scalar as arithmetic on its inputs, for people."""
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.op == "placeholder":
        name: str = value.meta.get("input", value.name)
        return name.removeprefix("hyper.")
    if value.op == "get_attr":
        return repr(operator.attrgetter(value.target)(value.graph.owning_module).item())
    name = getattr(value.target, "__name__", str(value.target)).split(".")[0].removeprefix("sym_")
    args = list(value.args)
    if name == "rsub":
        name, args = "sub", args[::-1]
    dtype = getattr(value.meta.get("val"), "dtype", None)
    if name == "_to_copy" and dtype is not None and not dtype.is_floating_point:
        return f"{str(dtype).removeprefix('torch.')}({_formula(args[0], True)})"
    if name in ("_to_copy", "clone", "detach", "float", "alias", "lift_fresh_copy"):
        return _formula(args[0], outermost)
    if name in ("full", "scalar_tensor"):
        return _formula(args[-1])
    if name in _INFIX and len(args) == 2 and not value.kwargs:
        text = f"{_formula(args[0])} {_INFIX[name]} {_formula(args[1])}"
        return text if outermost else f"({text})"
    if name == "neg":
        return f"-{_formula(args[0])}"
    said = [_formula(arg, True) for arg in args]
    said += [f"{k}={_formula(v, True)}" for k, v in value.kwargs.items() if k not in _SAYS_WHERE]
    return f"{name}({', '.join(said)})"
