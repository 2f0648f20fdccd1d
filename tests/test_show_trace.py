"""A plan as a trace that Perfetto and chrome://tracing open."""

import dataclasses
import json
from collections import defaultdict

import pytest
from show_samples import measured, sample
from test_show import tiny

from zcompile.show import trace


def by_phase(rows):
    found = defaultdict(list)
    for row in rows:
        found[row["ph"]].append(row)
    return found


@pytest.mark.parametrize("plans", [[tiny()], [sample(layers=4), measured(sample(layers=4))]])
def test_trace_rows_have_what_the_format_requires(plans):
    made = json.loads(trace.trace(plans))
    rows = made["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "C", "s", "t", "f"}
    for row in rows:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(row)
        assert row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0
            assert row["cat"] in {"compute", "issue", "wait", "finish", "transfer"}
    assert {row["pid"] for row in rows} == set(range(1, len(plans) + 1))


def test_lanes_are_threads_and_times_begin_at_zero():
    rows = by_phase(trace.to_events([tiny()])["traceEvents"])
    names = {row["tid"]: row["args"]["name"] for row in rows["M"] if row["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "gather", "reduce"]
    slices = {row["name"]: row for row in rows["X"]}
    wait = slices["wait gather.0"]
    assert (names[wait["tid"]], round(wait["ts"]), round(wait["dur"])) == ("compute", 1000, 2000)
    assert min(row["ts"] for row in rows["X"]) == 0
    about = slices["transfer gather.0"]["args"]
    assert (about["parameters"], about["bytes"]) == ("a.weight, b.weight", 4_000_000)
    assert about["reason"] == "first of the step"


def test_arrows_lead_from_issue_over_transfer_to_wait():
    rows = by_phase(trace.to_events([tiny()])["traceEvents"])
    paths = defaultdict(list)
    for phase in ("s", "t", "f"):
        for row in rows[phase]:
            paths[row["id"]].append((phase, row["tid"], round(row["ts"])))
    # The reduction is awaited at the graph's end, where nothing stands: its arrow ends with it.
    assert sorted(paths.values()) == [
        [("s", 1, 0), ("t", 2, 0), ("f", 1, 1000)],
        [("s", 1, 6000), ("f", 3, 6000)],
    ]
    assert all(row["bp"] == "e" for row in rows["f"])


def test_a_wait_that_never_stood_still_ends_its_arrow_where_it_is_awaited():
    plan = tiny()
    events = tuple(e for e in plan.timeline.events if e.kind != "wait")
    plan = dataclasses.replace(plan, timeline=dataclasses.replace(plan.timeline, events=events))
    ends = [r for r in trace.to_events([plan])["traceEvents"] if r["ph"] == "f"]
    assert [round(row["ts"]) for row in ends] == [3000, 6000]


def test_every_arrow_attaches_to_a_slice_and_points_ahead():
    plans = [sample(layers=4), measured(sample(layers=4))]
    rows = trace.to_events(plans)["traceEvents"]
    slices = {(r["pid"], r["tid"], r["ts"]) for r in rows if r["ph"] == "X"}
    arrows = defaultdict(list)
    for row in rows:
        if row["ph"] in "stf":
            assert (row["pid"], row["tid"], row["ts"]) in slices
            arrows[row["id"]].append(row)
    assert len(arrows) == sum(len(plan.collectives) for plan in plans)
    for path in arrows.values():
        assert [r["ph"] for r in path] in (["s", "t", "f"], ["s", "f"])
        assert [r["ts"] for r in path] == sorted(r["ts"] for r in path)
        assert len({r["pid"] for r in path}) == 1


def test_counters_add_up_and_know_the_budget():
    rows = by_phase(trace.to_events([tiny()])["traceEvents"])["C"]
    parts = [row["args"] for row in rows if row["name"] == "memory (bytes)"]
    total = [row["args"] for row in rows if row["name"] == "memory in all (bytes)"]
    assert parts[1] == {"parameters": 10, "gathered": 40}
    assert (
        [row["in use"] for row in total] == [sum(part.values()) for part in parts] == [10, 50, 30]
    )
    assert {row["budget"] for row in total} == {100}


def test_a_plan_without_a_timeline_has_no_trace():
    with pytest.raises(ValueError, match="'tiny' holds no timeline: plan it, or measure a step"):
        trace.trace([dataclasses.replace(tiny(), timeline=None)])
