"""Tracing a model for a world that does not exist: one process, no process group, no memory.

A copy of the model's structure is made whose tensors are fake: shapes without values. Each
parameter is this rank's rows, read through the dialect, as zcompile.shard would leave it. The
forward and backward graphs are those that the backend would schedule on every rank of that world.

Tensors are fake ones *on the CPU*: an operation chooses its form by the device. On `meta` attention
becomes explicit matrices of scores, which no device would store; on the CPU it is one operation
that saves what a GPU's does. (Fake CUDA tensors are no way out: where torch has no CUDA, autograd
ends the process that makes one.)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from zcompile import comm, machine, planning
from zcompile._torch import (
    CustomPartitionerFn,
    FakeTensorMode,
    aot_autograd,
    compile_fx,
    disable_dynamo,
    unset_fake_temporarily,
    without_autograd_cache,
    without_garbage_collection,
)
from zcompile.errors import OptionError, ZeroError, ZeroWarning
from zcompile.options import Options
from zcompile.parameter import ParamSpec, unsharded
from zcompile.passes import Partition, verify
from zcompile.passes.partition import is_read
from zcompile.pipeline import run
from zcompile.schedule.plan import Plan
from zcompile.schedule.simulate import AtRest
from zcompile.sharding import cast_inputs, give_readers
from zcompile.specs import spec_of, with_threshold

RANK = 0  # its shards are the largest

Graphs = tuple[fx.GraphModule, fx.GraphModule | None]


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int,
    device: str = "h100",
    options: Mapping[str, Any] | Options | None = None,
    optimizer_bytes: int = 8,
) -> Plan:
    """The plan of a training step in a world that does not exist, from one process.

    Every pass that a run would go through runs, on tensors without values: nothing of the model's
    size is allocated, and the model is left as it was. The plan is what a run of `world_size` ranks
    of `device` would begin with, before it has measured anything.

    Args:
        model: on any device; `meta` for one that fits nowhere.
        example_inputs, example_kwargs: what the model is called with; only shapes matter.
        device: "cpu", "v100", "a100", "h100", "h200", "mi300x": published figures of the device and
            of the links in its usual machine.
        options: as of torch.compile. memory_budget: a share is of the device's memory.
        optimizer_bytes: state per element of a parameter; 8: two fp32 values, as Adam keeps.

    Raises:
        ZeroError: the model cannot be traced without values.
        BudgetError: no schedule fits options["memory_budget"].
        OptionError: an unknown device or option.
    """
    chosen = with_threshold(Options.parse(options), model.parameters(), world_size)
    costs = machine.published_costs(device, world_size)
    gpu = costs.device.name != "cpu"
    group = paper_group(world_size, native=gpu)
    known = machine.Machine(costs, costs.device.memory, costs.device.memory)
    setting = planning.Setting(
        options=chosen,
        world=world_size,
        native=gpu if chosen.primitive == "auto" else chosen.primitive == "native",
        costs=costs,
        at_rest=_at_rest(model, chosen, group, optimizer_bytes),
        budget=machine.budget(known, chosen.memory_budget),
        free=costs.device.memory,
        given=planning.load(chosen.plan),
    )
    made: list[Plan] = []
    name = type(model).__name__

    def cut(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        graphs, planned, _ = planning.cut_and_plan(setting, name, joint, inputs, kwargs)
        made.append(planned.plan)
        return graphs

    parts = trace(
        model, example_inputs, example_kwargs, world_size=world_size, options=chosen, gpu=gpu,
        partition=cut,
    )  # fmt: skip
    for forward, backward in parts:
        if backward is None:
            made.append(planning.plan(setting, [("inference", forward)], name).plan)
    if len(made) > 1:
        warnings.warn(
            f"the model is traced as {len(made)} graphs, each planned by itself; this is the plan "
            "of the one with most collectives. torch._dynamo.explain(model) says where it breaks",
            ZeroWarning,
            stacklevel=2,
        )
    return max(made, key=lambda plan: len(plan.collectives))


def _at_rest(model: nn.Module, options: Options, group: comm.Group, optimizer_bytes: int) -> AtRest:
    shards = state = 0
    for name, param in model.named_parameters():
        spec = spec_of(name, param, options, group.name)
        elements = machine.held_elements(spec, group.world)
        shards += elements * param.element_size()
        state += elements * optimizer_bytes if param.requires_grad else 0
    return AtRest(shards, state)


def trace(
    model: nn.Module,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int,
    options: Mapping[str, Any] | Options | None = None,
    gpu: bool = False,
    partition: Callable[..., Any] | None = None,
) -> list[Graphs]:
    """The forward and backward graphs of each part of the model that Dynamo traces as one.

    Backward is None where nothing needs a gradient. Outputs that need one are backward's inputs, as
    in a run: no loss is added. The graphs are unscheduled, as `Build.partition` leaves them; the
    group that they name stays registered, see `paper_group`.

    Args:
        model: on any device, `meta` included. It is left as it was, and none of it is copied.
        example_inputs, example_kwargs: what the model is called with; only shapes matter.
        gpu: attention with dropout is fused, as on a GPU; the CPU has no such kernel.
        partition: called as partition(joint, inputs, **kwargs), it cuts a joint graph in two;
            default: as the stage demands.

    Raises:
        ZeroError: the model cannot be copied, or cannot be traced without values.
    """
    chosen = with_threshold(Options.parse(options), model.parameters(), world_size)
    group = paper_group(world_size, native=gpu)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root = getattr(model, "_orig_mod", model)
    capture = Capture(chosen, gpu, partition)
    with without_garbage_collection(), mode, torch.enable_grad():
        on_paper = _copy(root, chosen, group)
        if isinstance(example_inputs, Tensor):
            raise OptionError(
                "example_inputs is a Tensor: give a tuple of what the model is called with, as in "
                "(x,)"
            )
        args, kwargs = tree_map(_fake, (tuple(example_inputs), dict(example_kwargs or {})))
        step = torch.compile(
            _own_code(lambda: on_paper(*args, **kwargs)),
            backend=capture,
            dynamic=False,
            isolate_recompiles=True,
        )
        try:
            step()
        except Exception as error:
            inner = getattr(error, "inner_exception", None)  # what a backend raised
            if isinstance(inner, ZeroError):
                raise inner from None
            raise ZeroError(
                f"the model cannot be traced without values: {type(error).__name__}: {error}. A "
                "branch on a tensor's value, .item() and print need one; shard and run it instead"
            ) from error
    if not capture.graphs:
        raise ZeroError("Dynamo traced no part of the model: its forward is disabled or skipped")
    return capture.graphs


def paper_group(world_size: int, native: bool = False) -> comm.Group:
    """The group that traced graphs name: a world of `world_size` ranks on paper, seen by rank 0."""
    if world_size < 1:
        raise ZeroError(f"world_size must be at least 1, got {world_size}")
    name = f"paper{world_size}"
    return comm.register(comm.Group(name, RANK, world_size, native=native))


class Capture:
    """A backend that stops once the graphs are cut, and computes nothing when it is called."""

    def __init__(
        self,
        options: Options,
        gpu: bool = False,
        partition: Callable[..., Any] | None = None,
    ) -> None:
        self.options, self.gpu, self.cut = options, gpu, partition or self._cut
        self.graphs: list[Graphs] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = self._run(gm, [Partition()])
        _view_shards(gm)
        if self.gpu:
            _fuse_attention(gm)
        # What is computed on constants while compiling is computed.
        with unset_fake_temporarily(), without_autograd_cache():
            if self.options.engine == "inductor":
                patches = {
                    **self.options.inductor,
                    "reorder_for_peak_memory": False,
                    "custom_partitioner_fn": _Partitioner(self),
                }
                return compile_fx(
                    gm, example_inputs, inner_compile=self._inner, config_patches=patches
                )
            return aot_autograd(
                fw_compiler=_nothing,
                bw_compiler=_nothing,
                inference_compiler=self._inference,
                partition_fn=self.partition,
                keep_inference_input_mutations=True,
            )(gm, example_inputs)

    def partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        forward, backward = self.cut(joint, inputs, **kwargs)
        self.graphs.append((forward, backward))
        return forward, backward

    def _cut(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return planning.cut(self.options, joint, frozenset(), inputs, kwargs)

    def _run(self, gm: fx.GraphModule, passes: Sequence[Any]) -> fx.GraphModule:
        check = verify if self.options.verify else None
        return run(gm, passes, done=("partition",), verify=check)

    def _inner(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return self._inference(gm, inputs) if kwargs.get("is_inference") else _nothing(gm, inputs)

    def _inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs.append((gm, None))
        return _nothing(gm, inputs)


class _Partitioner(CustomPartitionerFn):
    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return self.capture.partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Partitioner:
        return self  # Inductor copies its configuration; the graphs belong in the one that asked

    def uuid(self) -> None:
        return None  # nothing compiled is kept


def _nothing(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """A compiled graph that returns fake tensors of the right shapes."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in output.args[0]]

    def run_graph(args: list[Any]) -> list[Any]:
        args.clear()
        return [_fake(value) for value in values]

    # How AOTAutograd tells that a function takes its arguments in a list.
    run_graph._boxed_call = True  # type: ignore[attr-defined]
    return run_graph


def _view_shards(gm: fx.GraphModule) -> None:
    """Put a view between a shard and its read, as DTensor's to_local does in a real run: so that
    whatever follows gets the same name as there."""
    for node in gm.graph.nodes:
        if is_read(node) and node.args[0].op == "placeholder":
            shard = node.args[0]
            value = shard.meta["example_value"]
            with gm.graph.inserting_before(node):
                view = gm.graph.call_method("view", (shard, list(value.shape)))
            view.meta = dict(shard.meta)
            node.update_arg(0, view)
    gm.recompile()


def _fuse_attention(gm: fx.GraphModule) -> None:
    """Attention without its dropout, which a fused kernel draws inside and stores nothing of."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is F.scaled_dot_product_attention:
                    node.args = (
                        *node.args[:4],
                        *([0.0] if len(node.args) > 4 else []),
                        *node.args[5:],
                    )
                    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dropout_p"}
            module.recompile()


# The copy


def _copy(model: nn.Module, options: Options, group: comm.Group) -> nn.Module:
    """The model's structure with fake tensors: shards for parameters, whole ones for the rest."""
    memo: dict[int, Any] = {}
    specs: dict[int, ParamSpec] = {}
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ZeroError(
                f"parameter {name!r} has no shape yet: call the lazy module once before a dry run"
            )
        spec = spec_of(name, param, options, group.name)
        first, last = group.owned(param.shape[0]) if spec.sharded else (0, 0)
        shape = (last - first, *param.shape[1:]) if spec.sharded else param.shape
        local = nn.Parameter(torch.empty(shape, dtype=param.dtype), param.requires_grad)
        memo[id(param)], specs[id(local)] = local, spec
    for module in model.modules():
        held = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules")}
        for value in tree_leaves(held):
            if isinstance(value, Tensor):
                memo.setdefault(id(value), _fake(value))
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise ZeroError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and a dry "
            "run works on a copy: keep what cannot be copied out of the model"
        ) from error
    for module in copied.modules():
        own = {n: specs[id(p)] for n, p in module._parameters.items() if p is not None}
        if own:
            give_readers(module, {name: _reader(name, spec) for name, spec in own.items()})
    if options.param_dtype is not None and options.cast_inputs:
        cast_inputs(copied, options.param_dtype)
    return copied


def _reader(name: str, spec: ParamSpec) -> Callable[[nn.Module], Tensor]:
    def read(module: nn.Module) -> Tensor:
        if torch.compiler.is_compiling():
            return unsharded(module._parameters[name], spec)
        return eagerly(module._parameters[name], spec)

    eagerly = disable_dynamo(unsharded)  # what is not compiled is no graph
    return read


def _fake(value: Any) -> Any:
    """A fake CPU tensor of the same shape, strides, dtype; what is no tensor stays as it is."""
    if not isinstance(value, Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return fake.requires_grad_(value.requires_grad)


def _own_code(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function with a code object of its own: Dynamo keeps what it learns of shapes with it."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace()
    return function
