"""Random steps, budgets and costs: every plan is valid, fits, cannot deadlock, and holds exactly
the memory that a count of live values gives. All is read off the plan's JSON, as ranks read it.
"""

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_steps import random_case

from zcompile.errors import BudgetError
from zcompile.schedule import planner
from zcompile.schedule.construct import Knobs, construct
from zcompile.schedule.describe import from_plan, to_plan
from zcompile.schedule.plan import Plan

QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SEEDS = st.integers(0, 10**9)


@st.composite
def planned(draw, parameters=(1, 9), ops=(1, 16)):
    """A case, its simulator, and its plan after a journey through JSON."""
    case = random_case(random.Random(draw(SEEDS)), parameters, ops)
    sim = case.simulator()
    rules = draw(st.sampled_from(["search", "search", "search", "fixed"]))
    if rules == "search":
        found = planner.plan(sim, case.budget, may_keep=case.may_keep)
    else:
        cap, depth = draw(st.sampled_from([1, 10**7, 10**9])), draw(st.integers(0, 3))
        found = planner.fixed(sim, frozenset(case.may_keep[:1]), cap, depth)
        case = case.within(None)
    plan = to_plan(sim, found, name="plan", budget=case.budget, free_residency=True)
    return case, sim, found, Plan.from_json(plan.to_json())


class Placed:
    """The rows of a plan with positions in place of names."""

    def __init__(self, case, plan):
        self.rows, self.kept = [], plan.kept()
        begins = dict(zip(case.step.directions, (0, *case.step.ends)))
        for row in plan.collectives:
            graph = next(g for g in plan.graphs if g.direction == row.graph)
            begin, end = begins[row.graph], begins[row.graph] + len(graph.nodes)

            def position(name, begin=begin, end=end, nodes=graph.nodes):
                return begin + nodes.index(name) if name else end

            self.rows.append((row, position(row.issue), position(row.wait)))


def gathers(case, name):
    return [g for g in case.step.gathers if g.parameter == name]


def reads(case, plan, name):
    """The (first, last) operations between which each gather of a parameter must be there."""
    found = gathers(case, name)
    if len(found) == 2 and name in plan.kept():
        return [(found[0].first, found[1].last)]
    return [(g.first, g.last) for g in found]


@given(planned())
@QUICK
def test_every_collective_stands_once_between_its_inputs_and_its_need(made):
    case, _, _, plan = made
    wanted = [(case.step.directions[r.graph], r.kind, r.parameter) for r in case.step.reductions]
    for name in {g.parameter for g in case.step.gathers}:
        made_of = gathers(case, name)[: len(reads(case, plan, name))]
        wanted += [(case.step.directions[g.graph], "all-gather", name) for g in made_of]
    there = [(row.graph, row.kind, name) for row in plan.collectives for name in row.parameters]
    assert sorted(there) == sorted(wanted)

    starts = dict(zip(case.step.directions, (0, *case.step.ends)))
    for row, issue, wait in Placed(case, plan).rows:
        assert starts[row.graph] <= issue <= wait
        for name in row.parameters:
            graph = case.step.directions.index(row.graph)
            if row.kind == "all-gather":
                (g,) = [g for g in gathers(case, name) if g.graph == graph]
                assert g.ready <= issue and wait <= g.first
            else:
                (r,) = [r for r in case.step.reductions if r.parameter == name]
                assert r.ready <= issue and wait <= r.needed


@given(planned())
@QUICK
def test_a_plan_fits_its_budget(made):
    case, sim, found, plan = made
    if case.budget is not None:
        assert plan.timeline.peak_bytes <= case.budget
    assert plan.timeline.peak_bytes == int(sim.memory(found.schedule).max())
    assert plan.timeline.seconds >= plan.timeline.bound_seconds * (1 - 1e-9)


@given(planned())
@QUICK
def test_a_plan_reads_back_as_the_schedule_it_was_made_from(made):
    _, sim, found, plan = made
    assert from_plan(sim, plan) == found.schedule
    assert sim.replay(from_plan(sim, plan)).peak == plan.timeline.peak_bytes


def buffers(case, row):
    """(until the wait, parameters that are made at the wait and not at the issue, a lone
    parameter's padded buffer) of a collective, by what the primitives need (passes/lower.py)."""
    world, native = case.step.world, case.step.native
    if world == 1:
        return 0, False, None
    part = -(-row.bytes // world)
    if native:
        of = case.step.gathers if row.kind == "all-gather" else case.step.reductions
        graph = case.step.directions.index(row.graph)
        sent = sum(
            m.sent
            for name in row.parameters
            for m in of
            if m.parameter == name and m.graph == graph
        )
        part = max(part, sent // (world - 1))
    flat = max(row.bytes, sent // (world - 1) * world) if native else row.bytes
    if row.kind == "all-gather":
        if not native:
            return 0, False, None  # every rank's rows arrive in their place
        if len(row.parameters) == 1:
            return part, False, flat
        return part + flat, True, None
    if row.kind == "all-reduce":
        return row.bytes, False, None
    if native:
        return part + flat, False, None
    casts = sum(
        r.bytes
        for r in case.step.reductions
        if r.parameter in row.parameters and r.kind == row.kind and r.bytes != r.grad_bytes
    )
    return row.bytes * (world - 1) // world + casts, False, None


def count_live(case, plan):
    """Bytes on each slot: for each slot, every value that is alive in it."""
    step, rest = case.step, case.at_rest.total()
    values = []  # (bytes, first slot, last slot)
    for row, issue, wait in Placed(case, plan).rows:
        flying, late, padded = buffers(case, row)
        values.append((flying, 2 * issue, 2 * wait))
        graph = step.directions.index(row.graph)
        for name in row.parameters:
            if row.kind == "all-gather":
                (g,) = [g for g in gathers(case, name) if g.graph == graph]
                (last,) = [last for first, last in reads(case, plan, name) if first == g.first]
                if step.world > 1 or g.cast:
                    size = g.bytes if padded is None else padded
                    values.append((size, 2 * (wait if late else issue), 2 * last + 1))
            else:
                (r,) = [r for r in step.reductions if r.parameter == name]
                values.append((r.grad_bytes, 2 * r.ready, 2 * wait))
                values.append((r.result_bytes, 2 * wait, 2 * len(step.ops)))
    for slot in range(2 * len(step.ops) + 1):
        live = sum(size for size, first, last in values if first <= slot <= last)
        yield rest + sum(curve[slot] for curve in step.live.values()) + live


@given(planned(parameters=(1, 12), ops=(1, 20)))
@QUICK
def test_memory_is_what_a_count_of_live_values_gives(made):
    case, sim, found, plan = made
    counted = list(count_live(case, plan))
    assert sim.memory(found.schedule).tolist() == counted
    assert plan.timeline.peak_bytes == max(counted)
    assert max(plan.timeline.memory.total()) == max(counted)


def program(plan):
    """What one rank does, in order: ("issue" or "wait", row)."""
    acts = []
    for graph in plan.graphs:
        rows = plan.of(graph.direction)
        for name in (*graph.nodes, ""):
            acts += [("issue", row) for row in rows if row.issue == name]
            acts += [("wait", row) for row in rows if row.wait == name]
    return acts


@given(planned(), SEEDS)
@QUICK
def test_ranks_that_run_at_any_speed_never_deadlock(made, seed):
    """A transfer is over once every rank has issued it, and only one collective, the oldest that a
    rank has issued, is in progress on a rank: the least that any backend does."""
    _, _, _, plan = made
    rng, acts = random.Random(seed), program(plan)
    issued = [row for kind, row in acts if kind == "issue"]
    waited = [row for kind, row in acts if kind == "wait"]
    assert len(issued) == len(waited) == len(plan.collectives)
    for row in plan.collectives:
        assert acts.index(("issue", row)) < acts.index(("wait", row))
    world = 3
    at, queues, over = [0] * world, [[] for _ in range(world)], set()
    while any(place < len(acts) for place in at):
        heads = [queue[0] if queue else None for queue in queues]
        movable = []
        for rank, place in enumerate(at):
            if place < len(acts):
                kind, row = acts[place]
                if kind == "issue" or (row.graph, row.key) in over:
                    movable.append(rank)
        if heads[0] is not None and heads.count(heads[0]) == world:
            movable.append(None)
        assert movable, "every rank waits and nothing is on the way"
        rank = rng.choice(movable)
        if rank is None:
            over.add(heads[0])
            for queue in queues:
                queue.pop(0)
            continue
        kind, row = acts[at[rank]]
        if kind == "issue":
            queues[rank].append((row.graph, row.key))
        at[rank] += 1
    assert len(over) == len(plan.collectives)


@given(SEEDS, st.floats(0.0, 1.0))
@QUICK
def test_a_budget_is_met_or_refused(seed, share):
    case = random_case(random.Random(seed), (1, 6), (1, 10))
    sim = case.simulator()
    peak = int(sim.memory(planner.lean(sim, may_keep=case.may_keep)).max())
    limit = int(peak * (0.5 + share))
    try:
        found = planner.plan(sim, limit, may_keep=case.may_keep)
    except BudgetError:
        assert limit < peak
    else:
        assert found.replay.peak <= limit


def test_a_constructed_schedule_holds_what_its_curve_says():
    """The curve is kept up to date move by move, and decides what fits."""
    in_place = delayed = 0
    for seed in range(300):
        rng = random.Random(seed)
        case = random_case(rng, (1, 9), (1, 16))
        rows = tuple(
            replace(r, in_place=r.kind == "reduce-scatter" and not case.step.native and index % 2)
            for index, r in enumerate(case.step.reductions)
        )
        case = replace(case, step=replace(case.step, reductions=rows))
        sim = case.simulator()
        total = sum(g.bytes for g in case.step.gathers) + 1
        knobs = Knobs(rng.choice([0, total // 3, total]), rng.choice([0, total]), 1.5)
        kept = frozenset(case.may_keep[: rng.randint(0, 2)]) & frozenset(sim.pairs)
        roof = rng.choice([2**62, int(sim.replay(planner.lean(sim, kept)).peak * 1.2)])
        made = construct(sim, kept, knobs, roof, 500)
        if made is None:
            continue
        schedule, curve = made
        true = sim.memory(schedule)
        # An update's result counts as there while its gradient travels: never too little.
        assert (curve >= true).all(), seed
        if not any(r.update_bytes for r in case.step.reductions):
            assert (curve == true).all(), seed
        in_place += any(rows[m].in_place for b in schedule.buckets
                        if b.kind == "reduce-scatter" for m in b.members)  # fmt: skip
        delayed += any(b.wait > b.issue for b in schedule.buckets if b.kind != "all-gather")
    assert in_place > 20 and delayed > 20
