"""From the graphs of one step to its plan: what backend and dry run share.

A Setting is everything that a plan depends on besides the graphs. It is the same on every rank, and
so is the plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zcompile._torch import min_cut_rematerialization_partition, saved_tensors_first
from zcompile.errors import OptionError, ZeroWarning
from zcompile.options import MIB, Options
from zcompile.passes import Residency, Sink, verify
from zcompile.passes.extract import extract
from zcompile.pipeline import Recorder, run
from zcompile.schedule import planner
from zcompile.schedule.costs import Costs, ScaledLink
from zcompile.schedule.describe import from_plan, to_plan
from zcompile.schedule.plan import Plan
from zcompile.schedule.planner import Found
from zcompile.schedule.simulate import AtRest, Schedule, Simulator
from zcompile.schedule.step import Step

Graphs = Sequence[tuple[str, fx.GraphModule]]  # (direction, graph), in order of execution

# A budget that was stated is there to be spent. Without one a plan may hold SLACK more than the
# leanest peak, and up to ALLOWANCE more where that saves more than THRIFT of its time.
SLACK = 0.02
ALLOWANCE = 0.1
THRIFT = 0.01
# Each search, of which a step has up to four, may take what so many steps lose to communication: a
# toy's step is not worth a second of planning.
PAYS_WITHIN = 100

STEP = ("forward", "backward")
FACTORS = (0.1, 100.0)  # a link that differs from its figures by more is not worth believing
LINK = "link"  # among measured times: how many times as long transfers took as the link's figures


@dataclass(frozen=True)
class Setting:
    """budget: bytes that a rank may hold, as the user stated it; free: what the device has, which
    limits a plan where no budget was stated. measured: seconds of operations by fingerprint of a
    step, then by "direction/name"; given: a plan to follow; updates: as in passes/extract.py."""

    options: Options
    world: int
    native: bool
    costs: Costs
    at_rest: AtRest = field(default_factory=AtRest)
    budget: int | None = None
    free: int | None = None
    given: Plan | None = None
    other_shapes: bool = False
    updates: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def by_rule(self) -> bool:
        """Whether two rules stand in place of the planner: on demand, or as the ranks see other
        shapes, of which the rules know nothing."""
        if self.other_shapes:
            return True
        return self.options.bucket_bytes is not None or self.options.prefetch is not None

    @property
    def free_residency(self) -> bool:
        """Whether the planner decides which parameters stay gathered, and not the stage."""
        return (
            self.options.stage == 3
            and not self.by_rule
            and (self.budget is not None or self.given is not None)
        )

    def step(self, graphs: Graphs) -> Step:
        fused = self.options.engine == "inductor"
        return extract(
            graphs, world=self.world, native=self.native, fused=fused,
            cpu=self.costs.device.threads > 0, updates=self.updates,
        )  # fmt: skip

    def simulator(self, step: Step) -> Simulator:
        measured = self.measured.get(step.fingerprint, {})
        costs = self.costs
        if measured:
            lines = (*costs.lines, "operations: measured in a step, mean of the ranks")
            link = ScaledLink(costs.link, measured.get(LINK, 1.0))
            costs = replace(costs, measured=measured, link=link, lines=lines)
        return Simulator(step, costs, self.at_rest)


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made with."""

    plan: Plan
    setting: Setting
    symbolic: bool
    sim: Simulator
    found: Found


def cut_and_plan(
    setting: Setting,
    name: str,
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    recorder: Recorder | None = None,
) -> tuple[tuple[fx.GraphModule, fx.GraphModule], Planned, Step | None]:
    """A joint graph as forward and backward, the plan of both, and, where the planner chose what
    to keep, the leanest form that it chose on. kwargs: for the partitioner."""
    keep, lean = frozenset[str](), None
    if setting.free_residency:
        graphs = cut(setting.options, copied(joint), keep, inputs, kwargs, recorder)
        lean = setting.step(list(zip(STEP, graphs)))
        keep = residency(setting, lean)
    graphs = cut(setting.options, joint, keep, inputs, kwargs, recorder)
    mark = lean.fingerprint if lean is not None else ""
    return graphs, plan(setting, list(zip(STEP, graphs)), name, mark), lean


def cut(
    options: Options,
    joint: fx.GraphModule,
    keep: frozenset[str],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    recorder: Recorder | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph, with these parameters kept between them."""
    tags = Residency(keep_all=options.stage < 3, keep=keep)
    check = verify if options.verify else None
    watch: Any = {"verify": check, "recorder": recorder}
    joint = run(joint, [tags], graph="joint", done=("partition",), **watch)
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    saved_tensors_first(forward, backward, kwargs["num_fwd_outputs"])
    done = ("partition", "residency")
    backward = run(backward, [Sink()], graph="backward", done=done, **watch)
    return forward, backward


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in other nodes, whose tags are its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for new, old in zip(graph.nodes, gm.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def residency(setting: Setting, step: Step) -> frozenset[str]:
    """The parameters to keep from forward to backward. step: the leanest form, which keeps none."""
    given = setting.given
    if given is not None and given.fingerprint == step.fingerprint:
        return given.kept()
    return _search(setting, setting.simulator(step), may_keep=_sharded(step)).schedule.kept


def again(setting: Setting, step: Step, lean: Step | None) -> float:
    """Seconds of the best plan under (newly measured) times."""
    if lean is not None:
        return _search(setting, setting.simulator(lean), may_keep=_sharded(lean)).replay.seconds
    return _search(setting, setting.simulator(step)).replay.seconds


def fit(setting: Setting, step: Step, schedule: Schedule, seconds: float) -> float:
    """By which factor transfers must be longer than the link's figures for the schedule to take
    the time that it was measured to take. (Ranks that compute on one host slow each other's
    transfers, and whoever is behind makes the others wait.)"""
    low, high = FACTORS
    measured = setting.measured[step.fingerprint]
    for _ in range(24):
        middle = math.sqrt(low * high)
        trial = replace(setting, measured={step.fingerprint: {**measured, LINK: middle}})
        if trial.simulator(step).time(schedule).seconds < seconds:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _symbolic(gm: fx.GraphModule) -> bool:
    """Whether a graph is for sizes that are not known yet."""
    values = (n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder"))
    return any(isinstance(v, torch.SymInt) for v in values)


def _sharded(step: Step) -> list[str]:
    return [owned.name for owned in step.parameters if owned.sharded]


def plan(setting: Setting, graphs: Graphs, name: str, fingerprint: str = "") -> Planned:
    """The plan of graphs whose residency is decided.

    fingerprint: of the step that the residency was decided on; "" for the graphs' own.

    Raises:
        BudgetError: the leanest schedule needs more than a budget that the user stated.
        PlanError: the plan that the user gave is for these graphs, and does not fit them.
    """
    step = setting.step(graphs)
    step = replace(step, fingerprint=fingerprint or step.fingerprint)
    sim = setting.simulator(step)
    notes: list[str] = []
    given = setting.given
    if given is not None and given.fingerprint == step.fingerprint:
        schedule = from_plan(sim, given)
        found = Found(schedule, sim.replay(schedule), planner.Knobs())
        notes.append("follows the plan that was given")
        if setting.budget is not None and found.replay.peak > setting.budget:
            notes.append(f"its peak is over the budget of {setting.budget} bytes")
    else:
        if given is not None:
            _warn(
                f"the plan that was given is for another graph ({given.fingerprint}) than the one "
                f"compiled now ({step.fingerprint}, {'+'.join(step.directions)}): that one is "
                "planned anew"
            )
        found = _search(setting, sim)
    made = to_plan(
        sim,
        found,
        name=name,
        budget=setting.budget,
        free_residency=setting.free_residency,
        notes=notes,
    )
    return Planned(made, setting, any(map(_symbolic, (gm for _, gm in graphs))), sim, found)


def _search(setting: Setting, sim: Simulator, may_keep: Sequence[str] = ()) -> Found:
    options = setting.options
    if setting.by_rule:
        # Messages gain nothing from merging and wait less the earlier they are issued; one launch
        # of a backend's collective is worth a larger bucket.
        size, depth = (32 * MIB, 1) if setting.native else (4 * MIB, 4)
        depth = depth if options.prefetch is None else options.prefetch
        return planner.fixed(sim, frozenset(), options.bucket_bytes or size, depth)
    if setting.budget is not None:
        return planner.plan(sim, setting.budget, may_keep=may_keep, steps=PAYS_WITHIN)
    lean = sim.replay(planner.lean(sim)).peak
    most = int(lean * (1 + ALLOWANCE))
    if setting.free is not None and setting.free < most:
        most = max(setting.free, lean)
        if setting.free < lean:
            _warn(
                f"the step needs {lean / 1e6:.0f} MB at its peak, and {setting.free / 1e6:.0f} MB "
                "were free when the model was sharded; memory_budget=... refuses what does not fit"
            )
    thrifty = planner.plan(
        sim, min(int(lean * (1 + SLACK)), most), thrift=THRIFT, steps=PAYS_WITHIN
    )
    ample = planner.plan(sim, most, thrift=THRIFT, steps=PAYS_WITHIN)
    return ample if ample.replay.seconds < thrifty.replay.seconds * (1 - THRIFT) else thrifty


def _warn(text: str) -> None:
    warnings.warn(text, ZeroWarning, stacklevel=3)


def load(file: str | None) -> Plan | None:
    """The plan in a file.

    Raises:
        OptionError: there is no such file, or it holds no plan; says why.
    """
    if file is None:
        return None
    try:
        return Plan.from_json(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise OptionError(
            f"option 'plan' = {file!r}: {error}. Give the plan.json that a dump wrote, or the JSON "
            "of zcompile.plan(...)"
        ) from None
