"""Plans in training: budgets, plans made by hand, plans made again. Whatever the plan, the run is
the plain one, and what is sent is what the plan says."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from parity import check, options, sgd
from torch import nn

import zcompile
from zcompile import comm, machine
from zcompile.schedule.plan import Plan

WIDTH = 32


def model(depth=4):
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


def loss(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(4, WIDTH, generator=generator, requires_grad=True)).square().mean()


def planned(**more):
    """Options under which the planner plans, not the two rules."""
    return options(3, **more)


def run(rank, world, opts, steps=3):
    """-> bytes gathered in the last step."""
    before = zcompile.traffic()

    def measured(model, seed):
        nonlocal before
        if not isinstance(model, nn.Sequential):  # not the plain run
            before = zcompile.traffic()
        return loss(model, seed)

    check(rank, world, model, measured, opts, steps=steps)
    return (zcompile.traffic() - before).gather_bytes


def once(rank, world, opts):
    made = model()
    optimizer = sgd(made.parameters())  # its state counts against the budget
    loss(torch.compile(made, backend="zero", options=opts), 0).backward()
    optimizer.zero_grad()


def dumped(folder, name="plan"):
    """The plans of rank 0's training graphs, in order of compilation."""
    found = sorted(Path(folder).glob(f"rank0/*/{name}.json"))
    return [p for p in (Plan.from_json(f.read_text()) for f in found) if len(p.graphs) == 2]


# Budgets


def peaks(rank, world, folder):
    """The leanest peak, and that with everything kept, as plans say."""
    sizes = []
    for index, budget in enumerate((2, 10**9)):
        opts = planned(memory_budget=budget, dump=f"{folder}/{index}")
        try:
            once(rank, world, opts)
            sizes.append(dumped(f"{folder}/{index}")[0].timeline.peak_bytes if rank == 0 else 0)
        except zcompile.BudgetError as error:
            text = str(error)
            sizes.append(int(text.split("memory_budget=")[1].split()[0]))
    return sizes


@pytest.mark.parametrize("world", [2, 3])
def test_a_budget_is_spent_on_kept_parameters(ranks, tmp_path, world):
    lean, rich = ranks(peaks, str(tmp_path / "ends"), world=world)[0]
    assert lean < rich
    gathered = []
    for part in (0.0, 0.5, 1.0):
        budget = int(lean + part * (rich - lean))
        folder = str(tmp_path / str(part))
        sent = ranks(run, planned(memory_budget=budget, dump=folder), world=world)
        (plan, *_) = dumped(folder)
        assert plan.timeline.peak_bytes <= budget == plan.budget
        # Averages are rounded down, one a parameter and gather.
        assert 0 <= sum(sent) - world * plan.sent("all-gather") <= world * 24
        gathered.append(sum(sent))
    least = 4 * (WIDTH + 1) * WIDTH * 4 * (world - 1)
    # Memory between both ends may pay more for something else.
    assert gathered[0] >= gathered[1] >= gathered[2] == least < gathered[0]


def refused(rank, world):
    try:
        run(rank, world, planned(memory_budget=1000))
    except zcompile.BudgetError as error:
        return str(error)


def test_a_budget_that_nothing_fits_is_refused_on_every_rank(ranks):
    first, second = ranks(refused)
    assert first == second
    for part in ("the step does not fit", "1000 bytes", "largest contributors", "memory_budget="):
        assert part in first


@pytest.mark.parametrize("budget", [0, -5, 1.5, "8GB", True])
def test_a_budget_out_of_range_is_named(budget):
    with pytest.raises(zcompile.OptionError, match="memory_budget"):
        zcompile.Options.parse({"memory_budget": budget})


# Plans made by hand


def issue_later(text):
    """Issue every gather at its use, and merge the first two of forward."""
    raw = json.loads(text)
    rows = raw["collectives"]
    for row in rows:
        if row["kind"] == "all-gather":
            row["issue"] = row["wait"]
    first, second = [r for r in rows if r["kind"] == "all-gather"][:2]
    first["parameters"] += second["parameters"]
    rows.remove(second)
    return json.dumps(raw)


def file_of(ranks, folder, **more):
    """Of the plan that is made for `model`."""
    ranks(once, planned(dump=str(folder), **more), timeout=300)
    (file,) = folder.glob("rank0/*/plan.json")
    return file


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory):
    return file_of(ranks, tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_an_edited_plan_is_followed(ranks, tmp_path, engine):
    made = file_of(ranks, tmp_path / "a", engine=engine)
    edited = tmp_path / "edited.json"
    edited.write_text(issue_later(made.read_text()))
    opts = planned(plan=str(edited), dump=str(tmp_path / "b"), engine=engine)
    ranks(run, opts, timeout=300)
    wanted, followed = Plan.from_json(edited.read_text()), dumped(tmp_path / "b")[0]
    for graph in ("forward", "backward"):
        rows = [(r.kind, r.parameters, r.issue, r.wait) for r in followed.of(graph)]
        assert sorted(rows) == sorted(
            (r.kind, r.parameters, r.issue, r.wait) for r in wanted.of(graph)
        )
    before = Plan.from_json(made.read_text())
    assert len(followed.collectives) == len(before.collectives) - 1


def follow(rank, world, file):
    try:
        run(rank, world, planned(plan=file))
    except zcompile.ZeroError as error:
        return str(error)


@pytest.mark.parametrize(
    "edit, text",
    [
        (lambda row: row.update(issue="nowhere"), "'nowhere' is not an operation"),
        (lambda row: row.update(wait=""), "needs"),
        (lambda row: row.update(parameters=["0.0.typo"]), "has no all-gather of '0.0.typo'"),
        (lambda row: row.update(colour="red"), "unknown field 'colour'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(ranks, tmp_path, made, edit, text):
    raw = json.loads(made.read_text())
    edit(raw["collectives"][0])
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(raw))
    answers = ranks(follow, str(file))
    assert answers[0] == answers[1] and text in answers[0]


def other_graph(rank, world, file):
    with pytest.warns(zcompile.ZeroWarning, match="for another graph"):
        compiled = torch.compile(model(3), backend="zero", options=planned(plan=file))
        loss(compiled, 0).backward()


def test_a_plan_of_another_graph_is_not_followed_and_says_so(ranks, made):
    ranks(other_graph, str(made))


# Plans made again


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def replanned(rank, world, opts, steps):
    """-> what was said of planning again, and how many graphs were compiled."""
    machine._machines.clear()  # what another test measured in this process
    machine._calibrations.clear()
    said, log = Said(), logging.getLogger("zcompile")
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        check(rank, world, model, loss, opts, steps=steps)
    finally:
        log.removeHandler(said)
        log.setLevel(logging.NOTSET)
    return [line for line in said.lines if "planned again" in line]


@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_step_is_planned_again_from_measured_times(ranks, tmp_path, world, engine):
    folder = str(tmp_path)
    # Whatever the gain: the new plan is compiled, and training goes on as if nothing had happened.
    opts = planned(replan_gain=-1.0, replan_after=2, dump=folder, engine=engine)
    answers = ranks(replanned, opts, 6, world=world, timeout=300)
    assert all(len(said) == 1 and "compiled at the next call" in said[0] for said in answers)
    assert len(set(map(str, answers))) == 1, "the ranks came to different plans"
    first, second = dumped(folder)
    assert any("measured" in line for line in second.costs)
    assert not any("measured in a step" in line for line in first.costs)
    (measured,) = dumped(folder, "measured")
    assert measured.timeline.source == "measured" and measured.timeline.seconds > 0
    again = dataclasses.replace(measured, timeline=None, notes=())
    assert again == dataclasses.replace(first, timeline=None, notes=())


def test_a_gain_too_small_is_skipped_and_says_so(ranks, tmp_path):
    opts = planned(replan_gain=0.99, replan_after=1, dump=str(tmp_path))
    for said in ranks(replanned, opts, 4):
        assert len(said) == 1 and "the plan stays" in said[0]
    assert len(dumped(tmp_path)) == 1


def remembers(rank, world, cache, steps):
    import os

    os.environ["ZCOMPILE_CACHE"] = cache
    try:
        opts = planned(replan_gain=0.99, replan_after=1, calibrate=True, dump=f"{cache}/dump")
        return replanned(rank, world, opts, steps)
    finally:
        del os.environ["ZCOMPILE_CACHE"]


def test_measured_times_are_kept_for_the_next_run(ranks, tmp_path):
    first = ranks(remembers, str(tmp_path), 3)
    assert all(len(said) == 1 for said in first)
    assert list(tmp_path.glob("steps/*.json")) and list(tmp_path.glob("links/*.json"))
    again = ranks(remembers, str(tmp_path), 3)
    assert all(not said for said in again), "measured again"
    assert any("measured in a step" in line for line in dumped(f"{tmp_path}/dump")[-1].costs)


# Ranks that see other shapes


def ragged_loss(model, seed):
    """4 rows on even ranks, 512 on odd ones: their plans differ in what is merged."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 + 508 * (seed % 2), WIDTH, generator=generator, requires_grad=True)
    return model(x).square().mean()


def ragged(rank, world, opts):
    """-> whether the ranks were seen to plan differently."""
    machine._machines.clear()
    try:
        made = check(rank, world, model, ragged_loss, opts, steps=4)
        return machine.of(comm.find(next(made.parameters()).spec.group)).other_shapes
    finally:
        machine._machines.clear()  # other tests in this process are planned


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_ranks_may_see_other_shapes(ranks, tmp_path, engine):
    opts = planned(engine=engine, replan_after=1, replan_gain=-1.0, dump=str(tmp_path))
    assert ranks(ragged, opts, timeout=300) == [True, True], "the plans were the same"
    rows = []
    for rank in range(2):
        last = sorted((tmp_path / f"rank{rank}").glob("*/plan.json"))[-1]
        plan = Plan.from_json(last.read_text())
        rows.append([(r.graph, r.kind, r.parameters) for r in plan.collectives])
    assert rows[0] == rows[1]
