"""What an optimizer does to one parameter, as a graph: traced from its own `step`.

The optimizer is not asked what it is. A copy of it holds one fake parameter, and its `step` is run
under a tracer. Hyperparameters that are floats (a learning rate, betas) and numbers in the state (a
step count) are symbols: their values are the graph's inputs, and a branch taken on one is a guard.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from zcompile._torch import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    compiling,
    make_fx,
)

_BESIDE = "beside."  # inputs of a parameter before the one that is traced
_REMEMBERED = 64  # values that guards were asked about
Path = tuple[str | int, ...]  # ("lr",) or ("betas", 0)


class NotElementwise(Exception):
    """This update cannot become one kernel; says why."""


@dataclass(frozen=True)
class Like:
    """What a trace needs to know of a tensor. 0-dim tensors are scalars of an update."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Like:
        return Like(tuple(tensor.shape), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Case:
    """What a step sees of one parameter and of a gradient like it. state: each entry a Like, a
    number, or something that is passed on as it is; marks: plain attributes of the parameter."""

    param: Like
    state: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """An optimizer's update of one parameter.

    graph: placeholders are called after `inputs`; returns the values of `outputs`, in their order.
    inputs: "param", "grad", "state.<key>", "hyper.<key>" or "hyper.<key>.<index>".
    outputs: "param" and "state.<key>" for each entry of the state after the step.
    hyper: where the value of each "hyper" input lies in a param group.
    guards: expressions that were true of the values traced with; symbols: in them, by input.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    hyper: Mapping[str, Path]
    guards: tuple[Any, ...]
    symbols: Mapping[str, Any]
    _held: dict[tuple[float, ...], bool] = field(default_factory=dict)

    def results(self) -> dict[str, Any]:
        """The node, or the constant, of each output."""
        (output,) = self.graph.graph.find_nodes(op="output")
        return dict(zip(self.outputs, output.args[0], strict=True))

    def elementwise(self) -> set[str]:
        """Keys of the state that have the parameter's shape."""
        results = self.results()
        shape = results["param"].meta["val"].shape
        return {
            name.removeprefix("state.")
            for name, node in results.items()
            if isinstance(node, fx.Node)
            and isinstance(node.meta["val"], Tensor)
            and node.meta["val"].shape == shape
        } - {"param"}

    def scalar(self, key: str, value: float, on_device: bool) -> Any:
        """A number that the step adds to the state, as what the optimizer makes of it."""
        made = self.results()[f"state.{key}"]
        like = made.meta["val"] if isinstance(made, fx.Node) else made
        if isinstance(like, Tensor):
            device = like.device if on_device else torch.device("cpu")
            return torch.tensor(value, dtype=like.dtype, device=device)
        return int(value) if isinstance(like, (int, torch.SymInt)) else float(value)

    def meaning(self) -> tuple[Any, ...]:
        """What each output is computed by, whatever else is in the graph."""
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        known: dict[fx.Node, Any] = dict(zip(placeholders, self.inputs, strict=True))

        def of(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if value not in known:
                    said = (str(value.target), of(value.args), of(value.kwargs))
                    known[value] = hash(said)
                return known[value]
            if isinstance(value, (tuple, list)):
                return tuple(of(each) for each in value)
            if isinstance(value, dict):
                return tuple((k, of(v)) for k, v in value.items())
            return repr(value)

        for node in self.graph.graph.nodes:  # in order: no recursion is deeper than one operation
            if node.op == "get_attr":
                known[node] = repr(operator.attrgetter(node.target)(self.graph))
            elif node.op == "call_function":
                of(node)
        return tuple((name, of(value)) for name, value in self.results().items())

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether the same branches are taken for other values of hyperparameters and counts."""
        if not self.guards:
            return True
        asked = tuple(values[name] for name in self.symbols)
        if asked not in self._held:
            if len(self._held) == _REMEMBERED:
                self._held.clear()
            known = dict(zip(self.symbols.values(), asked, strict=True))
            self._held[asked] = all(bool(guard.subs(known)) for guard in self.guards)
        return self._held[asked]


def numbers(group: Mapping[str, Any]) -> dict[str, tuple[Path, float]]:
    """The floats among a param group's hyperparameters, by the name of their input."""
    found: dict[str, tuple[Path, float]] = {}
    for key, value in group.items():
        if isinstance(value, float):  # numpy's too
            found[f"hyper.{key}"] = ((key,), float(value))
        elif type(value) in (tuple, list) and key != "params":
            for index, item in enumerate(value):
                if isinstance(item, float):
                    found[f"hyper.{key}.{index}"] = ((key, index), float(item))
    return found


def trace(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    case: Case,
) -> Update:
    """Trace the step of `optimizer` for a parameter of one of its groups.

    Raises:
        NotElementwise: the step cannot be traced, or does more than update this parameter.
    """
    # Optimizers of torch have two forms: with counts as numbers, and, for capture, as tensors. The
    # second divides by the learning rate: a rate of 0 gives NaN where a gradient was 0. Where the
    # first branches on a count (RAdam), it cannot be traced.
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        raise NotElementwise("its state has keys that are no parameters")
    if not is_torchs_own(optimizer):
        return _aside(_check_alone, optimizer, group, case)
    if "capturable" not in group:
        return _aside(_trace, optimizer, group, case)
    try:
        return _aside(_trace, optimizer, {**group, "capturable": False}, case)
    except NotElementwise:
        return _aside(_trace, optimizer, {**group, "capturable": True}, case)


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is known to treat each parameter by itself, and to read its group only."""
    return own_step(type(optimizer)).__module__.startswith("torch.optim.")


def _check_alone(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], case: Case) -> Update:
    """Traced alone, and again behind another parameter: both have to be one and the same."""
    update = _trace(optimizer, group, case)
    if update.meaning() != _trace(optimizer, group, case, beside=True).meaning():
        raise NotElementwise("what it does to a parameter depends on those before it in its group")
    return update


def _aside(function: Callable[..., Update], *args: Any) -> Update:
    """Call it in a thread of its own. Whoever asks may run a compiled graph, below autograd and
    functionalization: what a dispatcher is told there holds for a thread, and would be traced."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.no_grad()(function), *args).result()


def _trace(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], case: Case, beside: bool = False
) -> Update:
    """beside: with another parameter before it in its group."""
    shapes = ShapeEnv()
    symbols: dict[str, Any] = {}

    def symbol(name: str, value: int | float) -> Any:
        source = ConstantSource(name)
        made = shapes.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        symbols[name] = made
        if isinstance(value, float):
            return shapes.create_symfloatnode(made, hint=value, source=source)
        return shapes.create_symintnode(made, hint=value, source=source)

    hyper = numbers(group)
    values: dict[str, Any] = {}
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    with fake:
        values["param"] = _empty(case.param)
        values["grad"] = _empty(case.param)
        for key, value in case.state.items():
            if isinstance(value, Like):
                values[f"state.{key}"] = _empty(value)
            elif type(value) in (int, float):
                values[f"state.{key}"] = symbol(f"state.{key}", value)
            elif not (value is None or type(value) in (bool, str)):
                raise NotElementwise(f"its state {key!r} is a {type(value).__name__}")
        for name, (_, value) in hyper.items():
            values[name] = symbol(name, value)
        for key, value in group.items():
            if isinstance(value, Tensor):
                values[f"hyper.{key}"] = _empty(Like.of(value))
    if beside:
        with fake:
            tensors = {
                k: v
                for k, v in values.items()
                if isinstance(v, Tensor) and not k.startswith("hyper.")
            }
            values |= {f"{_BESIDE}{key}": torch.empty_like(value) for key, value in tensors.items()}
    names, outputs = tuple(values), list[str]()

    def run(*args: Any) -> list[Any]:
        given = dict(zip(names, args))
        after = _run(optimizer, _with(group, hyper, given), given, case, beside)
        outputs[:] = after
        return list(after.values())

    try:
        with fake, compiling():
            graph = make_fx(torch.func.functionalize(run, remove="mutations_and_views"))(
                *values.values()
            )
    except NotElementwise:
        raise
    except Exception as error:
        raise NotElementwise(f"its step cannot be traced: {first_line(error)}") from error
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node.meta["input"] = name
    guards = tuple(guard.expr for guard in shapes.guards)
    asked = set[Any]().union(*(guard.free_symbols for guard in guards))
    return Update(
        graph,
        names,
        tuple(outputs),
        {name: path for name, (path, _) in hyper.items()},
        guards,
        {name: symbol for name, symbol in symbols.items() if symbol in asked},
    )


def _run(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    given: Mapping[str, Any],
    case: Case,
    beside: bool,
) -> dict[str, Any]:
    """Step a copy of the optimizer that holds one parameter, or that behind another -> outputs of
    the (last) one by name."""
    kept = {key: value for key, value in case.state.items() if f"state.{key}" not in given}

    def made(prefix: str) -> tuple[Tensor, dict[str, Any]]:
        of = lambda name: given.get(prefix + name, given.get(name))
        param = of("param").clone()
        if param.dtype != of("grad").dtype:
            param.grad_dtype = of("grad").dtype
        param.grad = of("grad").clone()
        for name, value in case.marks.items():
            setattr(param, name, value)
        state = {key: kept[key] if key in kept else of(f"state.{key}") for key in case.state}
        return param, {key: _copied(value) for key, value in state.items()}

    param, before = made("")
    others = [made(_BESIDE)] if beside else []
    twin = object.__new__(type(optimizer))  # copying would leave out what a subclass added
    twin.__dict__.update(vars(optimizer))
    for name in ("grad_scale", "found_inf"):  # a GradScaler's, which is not part of the update
        twin.__dict__.pop(name, None)
    given_group = {**group, "params": [*(other for other, _ in others), param]}
    before_group = {key: _shape_of(value) for key, value in given_group.items()}
    single = len(optimizer.param_groups) == 1
    twin.param_groups = [given_group] if single else _Groups([given_group])
    twin.state = defaultdict(dict)
    for each, state in (*others, (param, before)):
        if state:
            twin.state[each] = state
    # A subclass may call the step of its base, which runs them.
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, name, OrderedDict())
    attributes = {k: v for k, v in vars(twin).items() if k not in ("state", "param_groups")}
    tensor, sqrt = (mock.patch.object(torch, "tensor", _tensor),
                    mock.patch.object(math, "sqrt", _sqrt))  # fmt: skip
    with torch.no_grad(), tensor, sqrt:
        own_step(type(optimizer))(twin)
    for key, value in vars(twin).items():
        if key in ("state", "param_groups"):
            continue
        if key not in attributes or attributes[key] is not value:
            raise NotElementwise(f"its step sets the attribute {key!r} of the optimizer")
    (after_group,) = twin.param_groups
    after = {key: _shape_of(value) for key, value in after_group.items()}
    changed = [k for k in {**before_group, **after} if before_group.get(k) != after.get(k)]
    if changed:
        raise NotElementwise(f"its step changes its param group ({', '.join(changed)})")
    if any(key is not param and all(key is not o for o, _ in others) for key in twin.state):
        raise NotElementwise("its step keeps state beside the parameter's own")
    results = {"param": param}
    for key, value in twin.state.get(param, {}).items():
        if isinstance(value, Tensor) or type(value) in (int, float, torch.SymInt, torch.SymFloat):
            results[f"state.{key}"] = value
        elif key not in kept or kept[key] is not value:
            raise NotElementwise(f"its state {key!r} is a {type(value).__name__}")
    return results


class _Groups(list[dict[str, Any]]):
    """One group of several, whose place among them a step must not ask for."""

    def __getitem__(self, index: Any) -> Any:
        raise NotElementwise("its step reads another param group than a parameter's own")


def _shape_of(value: Any) -> Any:
    """Of a value in a group: which objects it holds, and in which order."""
    if isinstance(value, (list, tuple)):
        return (type(value), *(_shape_of(each) for each in value))
    if isinstance(value, dict):
        return (dict, *((key, _shape_of(each)) for key, each in value.items()))
    return id(value)


_original_tensor = torch.tensor


def _tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """torch.tensor, but a number becomes an operation: the tracer computes with constants, and
    wrongly, where one meets a symbol."""
    if type(data) in (int, float) and not args and kwargs.keys() <= {"dtype", "device"}:
        return torch.full((), data, **kwargs)
    return _original_tensor(data, *args, **kwargs)


_original_sqrt = math.sqrt


def _sqrt(x: Any) -> Any:
    """math.sqrt, but of a symbol: it would become the number that it stands for now."""
    return torch.sym_sqrt(x) if isinstance(x, (torch.SymInt, torch.SymFloat)) else _original_sqrt(x)


def own_step(kind: type[Any]) -> Callable[..., Any]:
    """The class's step without the wrapper that runs hooks, which run outside of a kernel."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _with(
    group: Mapping[str, Any], hyper: Mapping[str, tuple[Path, float]], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The group with symbols for its floats, to be stepped one tensor at a time."""
    made = {
        key: list(value) if type(value) in (tuple, list) else value for key, value in group.items()
    }
    for name, (path, _) in hyper.items():
        if len(path) == 1:
            made[str(path[0])] = given[name]
        else:
            made[str(path[0])][int(path[1])] = given[name]
    for key, value in group.items():
        if type(value) is tuple:
            made[key] = tuple(made[key])
        elif isinstance(value, Tensor):
            made[key] = given[f"hyper.{key}"]
    for key in ("foreach", "fused"):
        if key in made:
            made[key] = False
    return made


def _empty(like: Like) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def first_line(error: BaseException) -> str:
    """What an error is and the beginning of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
