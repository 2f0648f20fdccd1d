"""The "zero" backend of torch.compile.

    Dynamo graph -> partition -> AOTAutograd joint graph -> residency -> forward and backward
    -> (plan) -> place -> release -> lower -> Inductor, or an interpreter

The model is sharded when it is first called, before it is traced: see first_call.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any

from torch import fx, nn

from zcompile import comm, machine, planning, updates
from zcompile._torch import (
    COMPILER_CONTROL_FLOW,
    CustomPartitionerFn,
    _BoxedCodeGen,
    aot_autograd,
    code_being_compiled,
    compile_fx,
    compile_fx_inner,
    forget_compiled,
    shortened,
    without_autograd_cache,
)
from zcompile.control import Control, fingerprint
from zcompile.dump import Dump
from zcompile.errors import Disagreement, OptionError, ZeroError, ZeroWarning
from zcompile.first_call import FirstCall, watch
from zcompile.options import Options
from zcompile.owners import outermost_owners
from zcompile.parameter import ZeroParameter
from zcompile.passes import Lower, Partition, Place, Release, Update, verify
from zcompile.passes.partition import BranchError
from zcompile.pipeline import Pass, describe, run
from zcompile.replan import Replan
from zcompile.schedule.plan import Collective, Plan, lines
from zcompile.schedule.step import Step
from zcompile.sharding import is_sharded, warn_unowned
from zcompile.specs import warn_of_no_effect

OPTIONAL = ("release",)

Run = Callable[[list[Any]], Any]  # takes its arguments in a list that it empties
Rows = tuple[Collective, ...]
Spare = Callable[[], tuple[Run, Rows]]


def zero(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What torch.compile(model, backend="zero", options=...) calls with each traced graph.

    Raises:
        OptionError: an unknown option or a value out of range.
        ZeroError: the world or the model is not what zcompile can run.
    """
    chosen = Options.parse(options)
    if mode not in (None, "default"):
        raise OptionError(
            f"mode {mode!r} is Inductor's; give its settings as options={{'inductor': {{...}}}}"
        )
    for name in chosen.disable:
        if name not in OPTIONAL:
            raise OptionError(f"pass {name!r} cannot be disabled; optional ones: {OPTIONAL}")
    whole = [p for p in example_inputs if isinstance(p, nn.Parameter) and not is_sharded(p)]
    if whole:
        if outermost_owners(whole):
            return FirstCall(gm, chosen)
        warn_unowned(whole)
    return compile_graph(gm, example_inputs, chosen)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """Compile one Dynamo graph whose parameters are sharded. What cannot be compiled runs as it
    is, through the eager dialect ops, with one warning that says why."""
    group = _group(example_inputs)
    dump = Dump(options.dump, group) if options.dump and group is not None else None
    params = tuple(p for p in example_inputs if type(p) is ZeroParameter)
    warn_of_no_effect(options, params)
    build = Build(options, group, dump, params, code_being_compiled())
    try:
        gm = build.run(gm, [Partition()])
        with without_autograd_cache():
            if options.engine == "inductor":
                return build.inductor(gm, example_inputs)
            return build.interpreter(gm, example_inputs)
    except BranchError as error:
        reason: Exception = error
    except COMPILER_CONTROL_FLOW:
        raise
    except ZeroError as error:
        raise shortened(error) from error.__cause__
    except Exception as error:
        reason = error
    warnings.warn(
        "this part of the model could not be compiled and runs through the eager operations: "
        f"right, but slower. Reason: {type(reason).__name__}: {reason}",
        ZeroWarning,
        stacklevel=2,
    )
    return gm.forward


def _group(example_inputs: Sequence[Any]) -> comm.Group | None:
    names = {p.spec.group for p in example_inputs if type(p) is ZeroParameter}
    if len(names) > 1:
        raise ZeroError(f"one graph uses parameters of several meshes: {sorted(names)}")
    return comm.find(names.pop()) if names else None


@dataclass
class Build:
    """The compilation of one Dynamo graph into a forward and a backward one. plan: the step's, once
    its graphs are there."""

    options: Options
    group: comm.Group | None
    dump: Dump | None
    params: tuple[ZeroParameter, ...] = ()
    code: CodeType | None = None
    plan: Plan | None = None
    replan: Replan | None = None

    def passes(self, rows: Rows, direction: str) -> list[Pass]:
        """What runs on a forward or backward graph. This is the whole schedule's pipeline."""
        assert self.group is not None
        world, rank, native = self.group.world, self.group.rank, self.group.native
        pipeline: list[Pass] = [
            Place(rows, world),
            *self.update(direction),
            Release(),
            Lower(
                world,
                rank,
                native,
                self.group.pg_name if native else "",
                copies=any(p.spec.copied for p in self.params),
                forward=direction != "backward",
            ),
        ]
        return [each for each in pipeline if each.name not in self.options.disable]

    def update(self, direction: str) -> list[Pass]:
        if self.options.step is None or self.group is None or direction != "backward":
            return []
        return [Update(self.options.step, frozenset(self.updated()), self.group.world)]

    def updated(self) -> Mapping[str, int]:
        """Parameters that are updated during backward, and the bytes which that moves."""
        if self.options.step is None or self.group is None:
            return {}
        found = updates.find(self.options.step).updated(self.params)
        if self.group.world > 1:
            return found
        # Of one rank's parameters, those that forward keeps are the ones at rest, under a name of
        # their own: who reads them cannot be told.
        kept = self.plan.kept() if self.plan is not None else frozenset()
        whole = self.options.stage < 3
        return {n: b for n, b in found.items() if not whole and n not in kept}

    def run(self, gm: fx.GraphModule, passes: Sequence[Pass], graph: str = "") -> fx.GraphModule:
        check = verify if self.options.verify else None
        done = ("partition", "residency", "sink")
        return run(gm, passes, graph=graph, done=done, verify=check, recorder=self.dump)

    def setting(self) -> planning.Setting:
        """What the plan depends on besides the graphs."""
        assert self.group is not None
        known = machine.of(self.group)
        rest = machine.at_rest(self.group, self.params)
        if self.options.step is not None:
            rest = replace(rest, gradients=updates.find(self.options.step).held())
        return planning.Setting(
            options=self.options,
            world=self.group.world,
            native=self.group.native,
            costs=known.costs,
            at_rest=rest,
            budget=machine.budget(known, self.options.memory_budget),
            free=known.free + rest.parameters,
            other_shapes=known.other_shapes,
            given=planning.load(self.options.plan),
            measured=known.measured,
            updates=self.updated(),
        )

    def partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Cut a joint graph into forward and backward, as its residency demands, and plan both."""
        if self.group is None:
            return planning.cut(self.options, joint, frozenset(), inputs, kwargs, self.dump)
        graphs, planned, lean = planning.cut_and_plan(
            self.setting(), self.title(), joint, inputs, kwargs, self.dump
        )
        self.plan = planned.plan
        self.replan = self.watch(planned, lean)
        return graphs

    def watch(self, planned: planning.Planned, lean: Step | None) -> Replan | None:
        """What plans this step again, unless its times are known or its plan is given."""
        setting = planned.setting
        known = planned.sim.step.fingerprint in setting.measured
        by_hand = setting.given is not None or setting.by_rule
        on_host = all(p.device.type == "cpu" for p in self.params)
        if self.group is None or self.group.control is None or known or by_hand or not on_host:
            return None
        if self.options.replan_after == 0 or self.code is None or planned.symbolic:
            return None
        forget = partial(forget_compiled, self.code)
        after, gain = self.options.replan_after, self.options.replan_gain
        return Replan(self.group, planned, lean, after, gain, self.dump, forget)

    def title(self) -> str:
        return self.dump.folder.name if self.dump else "graph"

    def schedule(self, gm: fx.GraphModule, direction: str) -> tuple[fx.GraphModule, Rows]:
        """Passes of a forward, backward or inference graph, and its rows of the plan."""
        if self.group is None:
            return gm, ()
        if direction == "inference":
            self.plan = planning.plan(self.setting(), [(direction, gm)], self.title()).plan
        assert self.plan is not None
        rows = self.plan.of(direction)
        passes = self.passes(rows, direction)
        if self.dump is not None:
            self.dump.plan(self.plan)
            self.dump.append("pipeline.txt", f"{direction}:\n{describe(passes)}")
        return self.run(gm, passes, direction), rows

    def spare(self, gm: fx.GraphModule, direction: str) -> Spare | None:
        """Makes the same graph scheduled by the two rules, interpreted, with its rows."""
        if self.group is None or self.group.control is None:
            return None
        group, unscheduled = self.group, planning.copied(gm)

        def make() -> tuple[Run, Rows]:
            machine.see_other_shapes(group)
            if self.code is not None:
                forget_compiled(self.code)
            planned = planning.plan(self.setting(), [(direction, unscheduled)], self.title())
            rows = planned.plan.collectives
            return _boxed(self.run(unscheduled, self.passes(rows, direction), direction)), rows

        return make

    def guarded(self, run_graph: Run, direction: str, rows: Rows, spare: Spare | None) -> Guarded:
        begin = None
        if self.options.step is not None and direction == "forward":
            begin = updates.find(self.options.step).begin
        return Guarded(run_graph, direction, rows, self.group, self.replan, spare, begin)

    def inductor(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            direction = _direction(kwargs)
            spare = self.spare(gm, direction)
            gm, rows = self.schedule(gm, direction)
            ran = compile_fx_inner(gm, inputs, **kwargs)
            return self.guarded(ran, direction, rows, spare)

        patches = {
            # A buffer kept for a later one of its size is alive in between: no plan would know.
            "allow_buffer_reuse": False,
            **self.options.inductor,
            # Our order is the plan; these passes would undo it.
            "reorder_for_peak_memory": False,
            "reorder_for_locality": False,
            "custom_partitioner_fn": Partitioner(self),
        }
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)

    def interpreter(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(direction: str) -> Callable[..., Any]:
            def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
                spare = self.spare(gm, direction)
                gm, rows = self.schedule(gm, direction)
                return self.guarded(_boxed(gm), direction, rows, spare)

            return compile_

        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


def _boxed(gm: fx.GraphModule) -> Run:
    """An interpreter of a graph that frees its inputs as it goes."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    run_graph: Run = gm.forward
    return run_graph


class Partitioner(CustomPartitionerFn):
    """Inductor's extension point for cutting the joint graph."""

    def __init__(self, build: Build) -> None:
        self.build = build

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return self.build.partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        # Inductor copies its configuration; a process group cannot be copied.
        return self

    def uuid(self) -> str:
        return f"zcompile stage {self.build.options.stage}"  # the rest is in the lowered graph


class Guarded:
    """A compiled graph that runs when every rank is about to run the same plan."""

    def __init__(
        self,
        run_graph: Callable[[list[Any]], Any],
        direction: str,
        rows: Sequence[Collective],
        group: comm.Group | None,
        replan: Replan | None = None,
        by_rule: Spare | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.begin = begin
        self.by_rule = by_rule
        self.run_graph, self.direction, self.rows = run_graph, direction, rows
        self.replan = replan if direction in planning.STEP else None
        # On the instance: AOTAutograd wraps callables with functools.wraps, which copies that.
        self._boxed_call = True
        collectives = rows if group is not None and group.world > 1 else ()
        self.control = group.control if group is not None and collectives else None
        self.mark = fingerprint(self.lines())
        # Messages count themselves as they are sent; what the backend carries is counted here.
        counted = collectives if group is not None and group.native else ()
        self.counted = tuple((_COUNTED[row.kind], row.sent) for row in counted)

    def lines(self) -> list[str]:
        return lines(self.direction, self.rows)

    def __call__(self, args: list[Any]) -> Any:
        if self.begin is not None:
            self.begin()
        if self.control is None:
            return self.run_graph(args)
        measured = self._agree(self.control)
        for kind, sent in self.counted:
            comm.count(kind, sent)
        with self.control.run():
            if self.replan is None:
                return self.run_graph(args)
            return self.replan.run(self.direction, self.run_graph, args, measured)

    def _agree(self, control: Control) -> bool:
        """Whether this run is measured. Ranks that see other shapes may have merged the same
        collectives in other ways; then all of them go on by the two rules, which see none."""
        ready = self.replan is not None and self.replan.ready(self.direction)
        try:
            return control.agree(self.mark, self.lines, ready)
        except Disagreement as error:
            same = len({lines[-1] for lines in error.everyone}) == 1
            directions = {lines[0] for lines in error.everyone}
            if self.by_rule is None or not same or len(directions) > 1:
                raise
        self.run_graph, self.rows = self.by_rule()
        self.mark, self.replan, self.by_rule = fingerprint(self.lines()), None, None
        control.agree(self.mark, self.lines)
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run_graph, name)


_COUNTED = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "all_reduce"}


def _direction(kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


watch(zero)

__all__ = ["zero"]
