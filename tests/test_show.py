"""A plan as text, DOT and as the difference of two, and the command line."""

import dataclasses
import json
import re
import shutil
from html import unescape

import networkx as nx
import pydot
import pytest
from rich.console import Console
from show_samples import measured, sample
from typer.testing import CliRunner

from zcompile.cli import app
from zcompile.errors import ZeroError
from zcompile.schedule.plan import (
    Collective,
    Event,
    Graph,
    Memory,
    Parameter,
    Plan,
    Timeline,
)
from zcompile.show import dot, values
from zcompile.show.diff import diff, report
from zcompile.show.text import text


def tiny() -> Plan:
    """One gather that is exposed by 2 ms, and one reduction that is not."""
    rows = (
        Collective("gather.0", "forward", "all-gather", ("a.weight", "b.weight"), "bfloat16",
                   4_000_000, 3_000_000, "p2p", "mm", "mm_1", "add", "first of the step"),
        Collective("reduce.0", "backward", "reduce-scatter", ("a.weight", "b.weight"), "float32",
                   8_000_000, 6_000_000, "reduce_scatter_tensor", "mm_4", ""),
    )  # fmt: skip
    events = (
        Event("compute", "issue", "issue gather.0", "forward", 5.000, 5.000, "gather.0"),
        Event("gather", "transfer", "transfer gather.0", "forward", 5.000, 5.003, "gather.0"),
        Event("compute", "compute", "mm", "forward", 5.000, 5.001),
        Event("compute", "wait", "wait gather.0", "forward", 5.001, 5.003, "gather.0"),
        Event("compute", "compute", "mm_1 .. add", "forward", 5.003, 5.005),
        Event("compute", "compute", "mm_3", "backward", 5.005, 5.006),
        Event("compute", "issue", "issue reduce.0", "backward", 5.006, 5.006, "reduce.0"),
        Event("reduce", "transfer", "transfer reduce.0", "backward", 5.006, 5.008, "reduce.0"),
        Event("compute", "compute", "mm_4 .. sum", "backward", 5.006, 5.010),
    )
    memory = Memory(
        (5.000, 5.003, 5.006),
        {"parameters": (10, 10, 10), "gathered": (0, 40, 20), "workspace": (0, 0, 0)},
    )
    timeline = Timeline("simulated", 0.010, 0.008, 0.005, 0.002, 0.008, 50, 5.003, "mm_1",
                        {"forward/gather.0": 0.002}, events, memory)  # fmt: skip
    return Plan(
        "tiny",
        2,
        "CPU",
        (
            Graph("forward", ("mm", "mm_1", "add")),
            Graph("backward", ("mm_3", "mm_4", "sum")),
        ),
        (
            Parameter("a.weight", (1000, 1000), "bfloat16", 2_000_000, 2_000_000, "gathered"),
            Parameter("b.weight", (1000, 1000), "bfloat16", 2_000_000, 2_000_000, "kept", "cheap"),
        ),
        rows,
        timeline,
        100,
        ("compute: a model of a CPU",),
    )


def changed(plan, index, **fields):
    rows = list(plan.collectives)
    rows[index] = dataclasses.replace(rows[index], **fields)
    return dataclasses.replace(plan, collectives=tuple(rows))


# Text

TINY = """\
graph     key       of              MB   sent  dtype  by                     issue  wait  release  exposed ms
forward   gather.0  a.weight +1  4.000  3.000  bf16   p2p                    mm     mm_1  add            2.00
backward  reduce.0  a.weight +1  8.000  6.000  fp32   reduce_scatter_tensor  mm_4   end   -              0.00

residency  parameters    whole  at rest
gathered            1  2.00 MB  2.00 MB
kept                1  2.00 MB  2.00 MB

at the peak        share
parameters   10 B    20%
gathered     40 B    80%

         forward                                          backward
compute  ██████████xxxxxxxxxxxxxxxxxxxx██████████████████████████████████████████████████████████████████████
gather   ██████████████████████████████
reduce                                                               ████████████████████
memory   ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂
         0                                                                                           10.00 ms

tiny: 2 ranks of CPU, 9.00 MB sent per rank
simulated step 10.00 ms: compute 8.00, communication 5.00, exposed 2.00 (20.0%); bound 8.00 (1.250 of it)
peak 50 B in mm_1 at 3.00 ms, 50% of the budget of 100 B
compute: a model of a CPU
"""  # noqa: E501


def test_text():
    assert text(tiny(), 110) == TINY


def test_a_little_of_a_large_budget_is_seen():
    plan = dataclasses.replace(tiny(), budget=10_000)
    (memory,) = [line for line in text(plan, 110).splitlines() if line.startswith("memory ")]
    assert set(memory.removeprefix("memory").strip()) == {"▁"}


def test_a_plan_is_one_line_in_a_debugger():
    assert repr(tiny()) == (
        "<plan of tiny: 2 ranks of CPU, 2 collectives, simulated step 10.00 ms, peak 0.0 MB>"
    )


def test_text_is_as_wide_as_it_may_be_and_keeps_every_figure():
    plan = sample(layers=3)
    for width in (80, 100, 132):
        made = text(plan, width)
        assert max(map(len, made.splitlines())) <= width
        rows = [line for line in made.splitlines() if "gather." in line]
        assert len(rows) == 12
        assert re.search(r" 33\.6 +29\.4  bf16 ", rows[0])
        assert rows[0].endswith(" 0.70")


def test_text_of_a_plan_without_a_timeline_or_collectives():
    bare = dataclasses.replace(tiny(), timeline=None, collectives=(), costs=())
    assert text(bare).splitlines()[-1] == "tiny: 2 ranks of CPU, 0 B sent per rank"
    assert "exposed" not in text(bare)


def test_names_in_brackets_are_no_markup():
    """rich reads [bold] as an instruction; here it is part of a name."""
    plan = changed(tiny(), 0, parameters=("layers[0].weight",), issue="mm[/]")
    assert "layers[0].weight" in text(plan)
    assert "mm[/]" in text(plan)


def test_memory_over_the_budget_is_not_hidden():
    plan = dataclasses.replace(tiny(), budget=25)
    assert "█" in next(line for line in text(plan).splitlines() if line.startswith("memory"))
    assert "200% of the budget of 25 B" in text(plan)


@pytest.mark.parametrize(
    ("size", "read"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (18.24e9, "18.2 GB"),
     (123e12, "123 TB"), (-5.5e6, "-5.50 MB")],
)  # fmt: skip
def test_amounts(size, read):
    assert values.amount(size) == read


# DOT


def test_operations_are_condensed_between_collectives():
    made = dot.graph(tiny())
    labels = {name: data["label"] for name, data in made.nodes(data=True)}
    assert [n for n in made if made.nodes[n]["kind"] == "operations"] == [
        "forward/0", "forward/1", "forward/3", "backward/0", "backward/1", "backward/3",
    ]  # fmt: skip
    assert labels["forward/1"] == "mm_1 .. add\n2 operations"
    assert labels["forward/3"] == "end of forward"
    assert list(made.successors("forward/gather.0")) == ["forward/1"]
    assert list(made.predecessors("backward/reduce.0")) == ["backward/0"]
    assert list(made.successors("backward/reduce.0")) == ["backward/3"]
    assert made["forward/gather.0"]["forward/1"]["color"] == dot.EXPOSED


def test_buckets_show_residency_and_exposed_time():
    label = dot.graph(tiny()).nodes["forward/gather.0"]["label"]
    assert f'BGCOLOR="{dot.RESIDENCY_COLOURS["gathered"]}">a.weight' in label
    assert f'BGCOLOR="{dot.RESIDENCY_COLOURS["kept"]}">b.weight' in label
    assert f'BGCOLOR="{dot.KIND_COLOURS["all-gather"]}"' in label
    assert "exposed 2.00 ms" in label


def test_every_collective_hangs_between_its_anchors():
    plan = sample(layers=4)
    made = dot.graph(plan)
    assert nx.is_directed_acyclic_graph(made)
    operations = [n for n in made if made.nodes[n]["kind"] == "operations"]
    assert nx.is_path(made, operations)
    for row in plan.collectives:
        (edge,) = made.out_edges(f"{row.graph}/{row.key}", data=True)
        assert edge[2]["kind"] == "wait"
        first = made.nodes[edge[1]]["label"].split(" .. ")[0].split("\n")[0]
        assert first == (row.wait or f"end of {row.graph}")


def test_dot_reads_back():
    plan = dataclasses.replace(sample(layers=3), name='a "quoted" \\ name')
    (read,) = pydot.graph_from_dot_data(dot.dot(plan))
    made = dot.graph(plan)
    nodes = {
        node.get_name().strip('"')
        for cluster in read.get_subgraphs()
        for node in cluster.get_nodes()
    }
    assert nodes == {*made.nodes, "legend"}
    ends = {
        tuple(e.strip('"') for e in (x.get_source(), x.get_destination())) for x in read.get_edges()
    }
    assert ends == set(made.edges)
    assert [c.get_label().strip('"') for c in read.get_subgraphs()] == [
        "forward",
        "backward",
        "legend",
    ]


@pytest.mark.skipif(not shutil.which("dot"), reason="Graphviz is not installed")
def test_svg():
    made = dot.svg(tiny())
    assert made.startswith("<?xml")
    assert "reduce-scatter reduce.0" in unescape(made).replace("\xa0", " ")


def test_without_graphviz_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ZeroError, match=r"no program `dot`: install it .*or write --format dot"):
        dot.svg(tiny())


# Differences


def printed(found):
    console = Console(width=200, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(report(found))
    return capture.get()


def test_a_plan_does_not_differ_from_itself():
    found = diff(sample(layers=3), sample(layers=3))
    assert not found
    assert {total.change() for total in found.totals} == {"="}
    assert "The schedules are the same" in printed(found)


def test_measured_times_are_no_other_schedule():
    plan = sample(layers=3)
    found = diff(plan, measured(plan))
    assert not found
    assert found.b.endswith("(measured)")
    assert next(t for t in found.totals if t.name == "step").change() != "="


def test_a_collective_that_moved():
    a = tiny()
    b = changed(a, 1, issue="sum", wait="", key="reduce.7")
    (move,) = diff(a, b).moves
    assert (move.what, move.graph, move.a, move.b) == ("issue", "backward", "mm_4", "sum")
    assert move.note == "1 op later"
    (move,) = diff(b, a).moves
    assert move.note == "1 op earlier"


def test_a_move_says_what_it_costs():
    a = tiny()
    b = changed(a, 0, wait="add")
    late = dataclasses.replace(b.timeline, exposed={"forward/gather.0": 0.0005})
    (move,) = diff(a, dataclasses.replace(b, timeline=late)).moves
    assert move.note == "1 op later; exposed 2.00 -> 0.50 ms"


def test_a_bucket_that_was_split():
    a = tiny()
    first = a.collectives[0]
    parts = [
        dataclasses.replace(first, key=f"gather.{i}", parameters=(name,), bytes=2_000_000)
        for i, name in enumerate(first.parameters)
    ]
    b = dataclasses.replace(a, collectives=(*parts, a.collectives[1]))
    (change,) = diff(a, b).buckets
    assert change.a == "2 parameters in 1 (gather.0), 4.00 MB"
    assert change.b == "2 parameters in 2 (gather.0 +1), 4.00 MB"
    assert not diff(a, b).moves


def test_kept_parameters_and_the_gathers_that_go():
    found = diff(sample(layers=3), sample(layers=3, stage=2))
    assert {(c.a, c.b) for c in found.residency} == {("gathered", "kept")}
    assert len(found.residency) == 14
    assert [c.note for c in found.buckets] == ["only in A: B keeps them"] * 6
    assert {c.b for c in found.moves} == {"not released"}
    sent = next(t for t in found.totals if t.name == "sent, all-gather")
    assert sent.change() == "-50.0%"


def test_parameters_of_one_plan_only():
    a = tiny()
    b = dataclasses.replace(a, parameters=a.parameters[:1])
    (change,) = diff(a, b).residency
    assert (change.name, change.a, change.b) == ("b.weight", "kept", "")


# The command line


@pytest.fixture
def files(tmp_path):
    plans = {"a.json": tiny(), "b.json": sample(layers=3), "c.json": sample(layers=3, stage=2)}
    for name, plan in plans.items():
        (tmp_path / name).write_text(plan.to_json())
    return tmp_path


def run(folder, *arguments):
    paths = [str(folder / a) if a.endswith((".json", ".out", ".html")) else a for a in arguments]
    return CliRunner().invoke(app, ["show", *paths])


def test_show(files):
    done = run(files, "a.json")
    assert done.exit_code == 0
    assert "forward   gather.0  a.weight +1" in done.stdout
    assert run(files, "a.json", "--format", "json").stdout == tiny().to_json() + "\n"
    assert run(files, "a.json", "--format", "dot").stdout == dot.dot(tiny())


def test_show_writes_a_file_and_knows_its_ending(files):
    assert run(files, "a.json", "-o", "page.html").exit_code == 0
    assert (files / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert run(files, "b.json", "c.json", "-f", "trace", "-o", "t.out").exit_code == 0
    assert json.loads((files / "t.out").read_text())["traceEvents"]
    assert run(files, "a.json", "-o", "plan.trace.json").exit_code == 0
    assert json.loads((files / "plan.trace.json").read_text())["traceEvents"]


def test_show_diff(files):
    done = run(files, "--diff", "b.json", "c.json")
    assert done.exit_code == 0
    assert "Residency (14)" in done.stdout
    raw = json.loads(run(files, "--diff", "b.json", "c.json", "-f", "json").stdout)
    assert len(raw["residency"]) == 14


def broken(plan, change):
    raw = json.loads(plan.to_json())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, r"x\.json: no such file\. Plans are written by"),
        ("{", r"x\.json is not JSON: line 1, column 2"),
        ("[1]", r"schema version None; this is version 2"),
        (broken(tiny(), lambda r: r.update(version=1)), r"schema version 1; this is version 2"),
        (broken(tiny(), lambda r: r["collectives"][1].pop("kind")), r"collectives\[1\].*'kind'"),
        (
            broken(tiny(), lambda r: r["collectives"][1].update(isue="mm")),
            r"collectives\[1\] has the unknown field 'isue'",
        ),
        (
            broken(tiny(), lambda r: r["collectives"][1].update(bytes="many")),
            r"collectives\.1\.bytes is 'many': Input should be a valid integer",
        ),
        (
            broken(tiny(), lambda r: r["timeline"]["memory"].pop("times")),
            r"timeline\.memory: .*'times'",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_remedy(tmp_path, written, said):
    if written is not None:
        (tmp_path / "x.json").write_text(written)
    done = run(tmp_path, "x.json")
    assert done.exit_code == 2
    assert re.search(said, done.stderr), done.stderr
    assert "Traceback" not in done.output
    assert written in (None, "{") or "docs/plan-schema.md" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--diff", "a.json"], "--diff takes two plans, not 1"),
        (["a.json", "b.json", "c.json"], "one plan or two can be shown, not 3"),
        (["a.json", "b.json", "-f", "svg"], "choose of text, trace, html, or add --diff"),
        (["--diff", "a.json", "b.json", "-f", "dot"], "choose of text, json, html"),
        (["a.json", "-o", "plan.pdf"], "plan.pdf ends in none of .trace.json, .json, .txt"),
    ],
)
def test_what_does_not_go_together(files, arguments, said):
    done = run(files, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_an_anchor_that_is_no_operation_is_named(files):
    (files / "d.json").write_text(changed(tiny(), 0, issue="mm_9").to_json())
    done = run(files, "d.json")
    assert done.exit_code == 0
    assert "forward/gather.0: issue names 'mm_9', which is no operation of the forward graph" in (
        done.stderr
    )
