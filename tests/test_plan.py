"""A plan: its rows, exact bytes, its JSON, the way back to a schedule."""

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from builders import (
    BF16,
    F32,
    F64,
    ONE,
    Graph,
    aten,
    planned,
    scheduled,
    simulator,
    two_layers,
)

from zcompile import comm
from zcompile.errors import PlanError
from zcompile.passes import Place
from zcompile.passes.extract import extract
from zcompile.passes.graph import calls
from zcompile.schedule import planner
from zcompile.schedule.construct import lean
from zcompile.schedule.costs import Costs
from zcompile.schedule.describe import from_plan, to_plan
from zcompile.schedule.devices import device
from zcompile.schedule.links import default_link
from zcompile.schedule.plan import VERSION, Plan
from zcompile.schedule.simulate import AtRest, Simulator


def mixed(world=3, rank=0, compute=F32):
    """Two gathers, a reduce-scatter of two uneven gradients, an all-reduce.

    mm, mm_1, add_tensor; t, mm_2, t_1, mm_3, sum_dim_int_list"""
    g = Graph(world, rank)
    x, bias = g.input("x", 2, 5, dtype=compute), g.input("bias", 3, dtype=compute)
    wa = g.unshard(g.shard("a", 5, 4), 5, compute, of="layer.a")
    wb = g.unshard(g.shard("b", 4, 3), 4, compute, of="layer.b")
    h = g.mm(x, wa)
    y = g.call(aten.add.Tensor, g.mm(h, wb), bias, name="y")
    return g.out(
        y,
        g.reduce(g.mm(g.call(aten.t.default, x), h), "layer.a"),
        g.reduce(g.mm(g.call(aten.t.default, h), y), "layer.b"),
        g.all_reduce(g.call(aten.sum.dim_IntList, y, [0], name="total"), "bias"),
    )


def plan(gm=None, world=3, rank=0, depth=1, **rules):
    return planned(gm or mixed(world, rank), world, depth=depth, **rules)


def by_kind(made):
    return {row.kind: row for row in made.collectives}


def whole_step(world=3):
    """Forward and backward of two layers, of which each gathers both."""
    graphs = [("forward", two_layers(world)), ("backward", mixed(world))]
    step = extract(graphs, world=world, native=False, fused=False)
    # Both graphs call their parameters alike, so that they are gathered twice.
    gathers = [replace(g, parameter=g.parameter.removeprefix("layer.")) for g in step.gathers]
    step = replace(step, gathers=tuple(gathers), parameters=step.parameters[:2])
    costs = Costs(device("cpu"), default_link("cpu", world), lines=("a", "b"))
    return Simulator(step, costs, AtRest(parameters=100, optimizer=200))


# Rows


def test_rows_follow_the_order_of_issue():
    made = plan(cap=ONE).collectives
    assert [(row.key, row.kind, row.parameters, row.issue, row.wait) for row in made] == [
        ("gather.0", "all-gather", ("layer.a",), "mm", "mm"),
        ("gather.1", "all-gather", ("layer.b",), "mm", "mm_1"),
        ("reduce.0", "reduce-scatter", ("layer.a",), "t_1", "total"),
        ("reduce.1", "reduce-scatter", ("layer.b",), "total", ""),
        ("all_reduce.0", "all-reduce", ("bias",), "", ""),
    ]  # fmt: skip


def test_anchors_are_operations_of_the_graph():
    made = plan()
    (graph,) = made.graphs
    assert graph.direction == "forward"
    assert graph.nodes == ("mm", "mm_1", "y", "t", "mm_2", "t_1", "mm_3", "total")
    for row in made.collectives:
        assert {row.issue, row.wait, row.release} <= {*graph.nodes, ""}


def test_a_row_says_where_its_parameters_are_read_last():
    made = plan()
    assert [row.release for row in made.collectives] == ["mm_1", "", ""]
    gm = scheduled(mixed(), 3)
    (mark,) = calls(gm.graph, torch.ops.zero.release.default)
    assert mark.prev.name == "mm_1"


def test_a_bucket_kept_for_backward_has_no_release():
    g = Graph()
    w = g.unshard(g.shard("w", 4), 4)
    (row,) = plan(g.out(g.neg(w), w), world=2).collectives
    assert row.release == ""


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_names_the_operation_that_needs_the_gather(depth):
    g = Graph()
    shards = [g.shard(f"w{i}", 4) for i in range(3)]
    uses = [g.neg(g.unshard(s, 4)) for s in shards]
    made = plan(g.out(*uses), world=2, cap=ONE, depth=depth)
    assert [row.wait for row in made.collectives] == [use.name for use in uses]


def test_keys_are_numbered_in_each_graph():
    sim = whole_step()
    made = to_plan(sim, planner.fixed(sim, frozenset(), ONE, 1), name="000")
    assert [row.key for row in made.of("forward")] == ["gather.0", "gather.1"]
    assert [row.key for row in made.of("backward")] == [
        "gather.0", "gather.1", "reduce.0", "reduce.1", "all_reduce.0",
    ]  # fmt: skip
    assert made.of("inference") == ()


def test_every_row_and_every_parameter_has_a_reason():
    sim = whole_step()
    for keep in (frozenset(), frozenset({"a"})):
        for cap, depth in ((ONE, 0), (ONE, 2), (10**6, 1)):
            made = to_plan(sim, planner.fixed(sim, keep, cap, depth), name="000")
            assert all(row.reason for row in made.collectives)
            assert all(p.reason for p in made.parameters)


def test_reasons_are_those_of_the_place():
    reasons = [row.reason for row in plan(depth=0).collectives]
    assert reasons[0].startswith("2 merged into one: ")
    assert "issued at its use" in reasons[0]
    assert "finished where it is issued" in reasons[1]
    assert all("; exposed " in reason for reason in reasons)
    late = [row.reason for row in plan(cap=ONE, depth=1).collectives]
    assert "merged" not in late[1]
    assert "ahead of its use, its transfer takes" in late[1]
    assert "awaited where its transfer" in late[2]


def test_residency():
    sim = whole_step()
    made = to_plan(sim, planner.fixed(sim, frozenset({"a"}), ONE, 0), name="000")
    assert {p.name: p.residency for p in made.parameters} == {"a": "kept", "b": "gathered"}
    assert made.kept() == {"a"}
    assert [row.parameters for row in made.of("backward") if row.kind == "all-gather"] == [("b",)]
    assert [row.release for row in made.of("forward")] == ["", "mm_1"]


def test_a_replicated_parameter():
    g = Graph()
    gm = g.out(g.neg(g.replicate(g.input("p", 4))))
    (parameter,) = plan(gm, world=2).parameters
    assert (parameter.residency, parameter.bytes, parameter.shard_bytes) == ("replicated", 16, 16)


def test_a_plan_says_what_it_was_made_for():
    sim = whole_step()
    found = planner.fixed(sim, frozenset(), ONE, 0)
    made = to_plan(sim, found, name="mine", budget=5000, notes=["one"])
    assert (made.name, made.world, made.device, made.budget) == ("mine", 3, "cpu", 5000)
    assert (made.costs, made.notes) == (("a", "b"), ("one",))
    assert made.fingerprint == sim.step.fingerprint != ""
    assert made.timeline == sim.timeline(found.schedule)
    assert [graph.direction for graph in made.graphs] == ["forward", "backward"]


# Bytes


def test_bytes_point_to_point():
    rows = by_kind(plan())
    whole = (5 * 4 + 4 * 3) * 4
    for kind in ("all-gather", "reduce-scatter"):
        assert (rows[kind].bytes, rows[kind].dtype) == (whole, "float32")
        assert rows[kind].sent == whole * 2 // 3  # nothing is padded: an average over ranks
        assert rows[kind].primitive == "p2p"
    assert rows["all-reduce"].bytes == 3 * 4
    assert rows["all-reduce"].sent == 2 * (3 * 4) * 2 // 3
    assert rows["all-reduce"].primitive == "all_reduce"


def test_bytes_of_the_backends_own_collectives_include_padding():
    rows = by_kind(plan(native=True))
    chunks = (2 * 4 + 2 * 3) * 4  # the largest shard of each
    assert rows["all-gather"].bytes == rows["reduce-scatter"].bytes == (5 * 4 + 4 * 3) * 4
    assert rows["all-gather"].sent == rows["reduce-scatter"].sent == chunks * 2
    assert rows["all-gather"].primitive == "all_gather_into_tensor"
    assert rows["reduce-scatter"].primitive == "reduce_scatter_tensor"
    assert rows["all-reduce"].primitive == "all_reduce"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_sent_are_what_the_dialect_counts_on_paper(world):
    """The graph's own operations run, on groups that exist on paper; the plan is their average."""
    counted = {"all-gather": 0, "reduce-scatter": 0}
    for rank in range(world):
        gm = scheduled(mixed(world, rank), world, depth=1)
        before = comm.traffic()
        inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        gm(*[torch.zeros(v.shape) for v in inputs])
        moved = comm.traffic() - before
        counted["all-gather"] += moved.gather_bytes
        counted["reduce-scatter"] += moved.reduce_bytes
    rows = by_kind(plan(world=world))
    for kind, total in counted.items():
        assert rows[kind].sent == total // world


def test_dtypes_on_the_wire():
    """bf16 compute: gradients travel as bf16 point to point, as fp32 where the backend sums."""
    p2p, native = (by_kind(plan(mixed(compute=BF16), native=n)) for n in (False, True))
    assert {kind: row.dtype for kind, row in p2p.items()} == {
        "all-gather": "bfloat16", "reduce-scatter": "bfloat16", "all-reduce": "float32",
    }  # fmt: skip
    assert {kind: row.dtype for kind, row in native.items()} == {
        "all-gather": "bfloat16", "reduce-scatter": "float32", "all-reduce": "float32",
    }  # fmt: skip
    assert p2p["reduce-scatter"].bytes * 2 == native["reduce-scatter"].bytes == 32 * 4


def test_a_gradient_wider_than_the_reduction_travels_narrow():
    g = Graph()
    gm = g.out(g.reduce(g.neg(g.input("x", 4, dtype=F64)), "a", F64, F32))
    (row,) = plan(gm, world=2).collectives
    assert (row.dtype, row.bytes, row.sent) == ("float32", 16, 8)


def test_one_rank_sends_nothing():
    made = plan(world=1)
    assert {row.primitive for row in made.collectives} == {"none"}
    assert [row.sent for row in made.collectives] == [0, 0, 0]
    assert made.sent("all-gather") == made.sent() == 0


def test_sent_adds_up_by_kind():
    made = plan(cap=ONE)
    assert made.sent("all-gather") == 20 * 4 * 2 // 3 + 12 * 4 * 2 // 3
    assert made.sent("all-reduce") == 16
    assert made.sent("broadcast") == 0
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    assert made.sent() == sum(made.sent(kind) for kind in kinds)


# JSON


@pytest.mark.parametrize("native", [False, True])
def test_json_and_back(native):
    made = plan(native=native)
    again = Plan.from_json(made.to_json())
    assert again == made
    assert isinstance(again.collectives[0].parameters, tuple)
    assert isinstance(again.parameters[0].shape, tuple)
    assert again.timeline.memory.total() == made.timeline.memory.total()


def test_a_plan_without_a_timeline_and_back():
    made = replace(plan(), timeline=None)
    assert Plan.from_json(made.to_json()) == made


def raw(**changes):
    return {**json.loads(plan().to_json()), **changes}


def loading(values):
    with pytest.raises(ValueError) as error:
        Plan.from_json(json.dumps(values))
    return str(error.value)


def test_json_says_its_version():
    assert raw()["version"] == VERSION == 2


def test_another_version_is_refused():
    assert loading(raw(version=1)) == "the plan has schema version 1; this is version 2"


@pytest.mark.parametrize("values", [{}, {"graph": "000"}, [], 3])
def test_json_without_a_version_is_refused(values):
    assert loading(values) == "the plan has schema version None; this is version 2"


def test_a_field_that_is_unknown_is_named():
    assert loading(raw(colour="red")) == "plan has the unknown field 'colour'"
    collectives = raw()["collectives"]
    collectives[1]["isue"] = "mm"
    assert loading(raw(collectives=collectives)) == "collectives[1] has the unknown field 'isue'"
    timeline = raw()["timeline"]
    assert loading(raw(timeline={**timeline, "x": 1})) == "timeline has the unknown field 'x'"
    events = [{**timeline["events"][0], "y": 1}]
    assert loading(raw(timeline={**timeline, "events": events})) == (
        "timeline.events[0] has the unknown field 'y'"
    )


@pytest.mark.parametrize("field", ["graphs", "parameters", "collectives", "world", "device"])
def test_a_field_that_is_missing_is_named(field):
    values = raw()
    del values[field]
    assert loading(values).endswith(f"missing 1 required positional argument: '{field}'")


def test_a_field_of_a_row_that_is_missing_is_named():
    collectives = raw()["collectives"]
    del collectives[0]["wait"]
    assert loading(raw(collectives=collectives)).startswith("collectives[0]: ")
    timeline = raw()["timeline"]
    del timeline["memory"]["times"]
    assert loading(raw(timeline=timeline)).startswith("timeline.memory: ")


def test_what_is_of_another_form_is_named():
    assert loading(raw(collectives={})) == "collectives is no list"
    assert loading(raw(graphs=["forward"])) == "graphs[0] is no object"
    assert loading(raw(timeline=3)) == "timeline is no object"


def test_a_value_of_another_type_is_named():
    collectives = raw()["collectives"]
    collectives[0]["parameters"] = 5
    said = loading(raw(collectives=collectives))
    assert said == "collectives.0.parameters is 5: Input should be a valid tuple"
    collectives = raw()["collectives"]
    collectives[1]["sent"] = "much"
    assert loading(raw(collectives=collectives)).startswith("collectives.1.sent is 'much': ")


def test_fields_with_a_default_may_be_missing():
    values = raw()
    for field in ("timeline", "budget", "costs", "notes", "fingerprint"):
        del values[field]
    for row in values["collectives"]:
        del row["reason"], row["release"]
    made = Plan.from_json(json.dumps(values))
    assert (made.timeline, made.budget, made.costs) == (None, None, ())
    assert made.collectives == tuple(
        replace(row, reason="", release="") for row in plan().collectives
    )


def test_a_plan_cannot_be_changed():
    made = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.world = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.collectives[0].bytes = 2


# From a plan to a schedule


@pytest.mark.parametrize("keep", [frozenset(), frozenset({"a"}), frozenset({"a", "b"})], ids=len)
@pytest.mark.parametrize(("cap", "depth"), [(ONE, 0), (ONE, 1), (70, 2), (10**6, 3)])
def test_a_plan_is_the_schedule_that_it_was_made_of(keep, cap, depth):
    sim = whole_step()
    found = planner.fixed(sim, keep, cap, depth)
    made = to_plan(sim, found, name="000")
    assert from_plan(sim, made) == found.schedule
    assert from_plan(sim, Plan.from_json(made.to_json())) == found.schedule


def test_what_the_planner_finds_comes_back_too():
    sim = whole_step()
    leanest = sim.replay(lean(sim)).peak
    for limit in (None, leanest, leanest + 100):
        found = planner.plan(sim, limit, may_keep=["a", "b"])
        again = from_plan(sim, to_plan(sim, found, name="000"))
        assert again == found.schedule
        assert sim.replay(again) == found.replay


def test_a_parameter_that_is_gathered_twice_keeps_its_order_of_use():
    g = Graph()
    w = g.shard("w", 4)
    gm = g.out(g.neg(g.unshard(w, 4)), g.call(aten.exp.default, g.unshard(w, 4)))
    sim = simulator(gm, 2)
    found = planner.fixed(sim, frozenset(), ONE, 0)
    assert from_plan(sim, to_plan(sim, found, name="000")) == found.schedule


def edited(change):
    """The schedule of a plan in which `change` replaced rows; rows by kind and number."""
    sim = simulator(mixed(), 3)
    made = planned(mixed(), 3, cap=ONE)
    return from_plan(sim, replace(made, collectives=tuple(change(list(made.collectives)))))


def test_a_moved_issue_moves_the_bucket_to_its_place_in_the_order():
    def order(change):
        return [(b.kind, b.members, b.issue, b.wait) for b in edited(change).buckets]

    a, b = ("all-gather", (0,)), ("all-gather", (1,))
    da, db, bias = ("reduce-scatter", (0,)), ("reduce-scatter", (1,)), ("all-reduce", (2,))
    assert order(lambda rows: rows) == [
        (*a, 0, 0), (*b, 1, 1), (*da, 5, 5), (*db, 7, 7), (*bias, 8, 8),
    ]  # fmt: skip
    late = lambda rows: [*rows[:2], replace(rows[2], issue="", wait=""), *rows[3:]]
    assert order(late) == [(*a, 0, 0), (*b, 1, 1), (*db, 7, 7), (*da, 8, 8), (*bias, 8, 8)]
    # At one position the rows' own order holds.
    early = lambda rows: [replace(rows[1], issue="mm"), rows[0], *rows[2:]]
    assert order(early)[:2] == [(*b, 0, 1), (*a, 0, 0)]


def refused(change):
    with pytest.raises(PlanError) as error:
        edited(change)
    return str(error.value)


def test_a_row_of_a_graph_that_is_not_there():
    assert refused(lambda rows: [replace(rows[0], graph="backward"), *rows[1:]]) == (
        "gather.0: there is no backward graph in this step"
    )


def test_a_row_of_a_parameter_that_is_not_there():
    assert refused(lambda rows: [replace(rows[0], parameters=("x",)), *rows[1:]]) == (
        "gather.0: the forward graph has no all-gather of 'x', or the plan has it more than once"
    )


def test_a_row_too_many():
    assert refused(lambda rows: [*rows, rows[0]]).startswith(
        "gather.0: the forward graph has no all-gather of 'layer.a', or the plan has it more"
    )


def test_a_row_too_few():
    assert refused(lambda rows: rows[:-1]) == (
        "the plan has no row for the all-reduce of 'bias' in forward: add it to a row of that kind"
    )


def test_a_row_of_another_dtype():
    assert refused(lambda rows: [replace(rows[0], dtype="int8"), *rows[1:]]).startswith(
        "gather.0: dtype='int8', but 'layer.a' travels in float32"
    )


def test_a_parameter_without_a_row():
    sim, made = simulator(mixed(), 3), planned(mixed(), 3, cap=ONE)
    with pytest.raises(PlanError, match=r"the plan has no row for 'layer\.a'"):
        from_plan(sim, replace(made, parameters=made.parameters[1:]))


@pytest.mark.parametrize("what", ["issue", "wait"])
def test_an_anchor_that_is_no_operation(what):
    assert refused(lambda rows: [replace(rows[0], **{what: "mm_9"}), *rows[1:]]) == (
        f"gather.0: {what}='mm_9' is not an operation of the forward graph. A plan of another "
        "model, shape or version has other names"
    )


def test_a_plan_of_a_file_places_as_the_one_that_was_written():
    made = Plan.from_json(plan(cap=ONE).to_json())
    before, after = (Place(p.of("forward"), 3)(mixed()).code for p in (plan(cap=ONE), made))
    assert before == after
