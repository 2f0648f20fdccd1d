"""Dumps: which files exist, that a graph file runs by itself, and what the schedule says."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from builders import Graph, aten, planned

from zcompile import comm
from zcompile.dump import Dump
from zcompile.passes import Lower, Place, Release, Residency
from zcompile.pipeline import run
from zcompile.schedule.plan import Plan
from zcompile.show import text as show


def graph(world=3, rank=0):
    g = Graph(world, rank)
    x, w, bias = g.input("x", 2, 5), g.shard("w", 5, 4), g.input("bias", 4)
    y = g.call(aten.add.Tensor, g.mm(x, g.unshard(w, 5)), g.replicate(bias))
    return g.out(y, g.reduce(g.mm(g.call(aten.t.default, x), y), "w"), g.all_reduce(y, "bias"))


def dumped(folder, world=3, rank=0, native=False):
    dump = Dump(str(folder), comm.Group("g", rank, world))
    gm = graph(world, rank)
    plan = planned(gm, world, depth=1, native=native)
    dump.plan(plan)
    passes = [Place(plan.collectives, world), Release(), Lower(world, rank, native, "pg")]
    dump.append("pipeline.txt", "one\n")
    dump.append("pipeline.txt", "two\n")
    run(gm, passes, graph="forward", recorder=dump)
    return dump.folder


def shapes(file):
    """What a graph file prints when it is run."""
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300, check=True
    ).stdout


def test_files(tmp_path):
    folder = dumped(tmp_path)
    assert folder == tmp_path / "rank0" / "000"
    assert sorted(file.name for file in folder.iterdir()) == [
        "01.forward.place.before.py",
        "02.forward.place.after.py",
        "03.forward.release.before.py",
        "04.forward.release.after.py",
        "05.forward.lower.before.py",
        "06.forward.lower.after.py",
        "pipeline.txt",
        "plan.json",
        "plan.txt",
    ]
    assert (folder / "pipeline.txt").read_text() == "one\ntwo\n"


def test_each_compilation_and_each_rank_has_a_folder(tmp_path):
    folders = [dumped(tmp_path), dumped(tmp_path), dumped(tmp_path, rank=2)]
    assert [str(f.relative_to(tmp_path)) for f in folders] == [
        "rank0/000",
        "rank0/001",
        "rank2/000",
    ]


def test_a_file_is_headed_by_the_pass_that_made_it_and_its_time(tmp_path):
    folder = dumped(tmp_path)
    first = (folder / "02.forward.place.after.py").read_text().split("\n")
    assert re.fullmatch(
        r'"""forward\.place\.after  Place\(3 collectives, world=3\): '
        r"nodes \d+ -> \d+ \([+-]\d+\), \d+\.\d ms",
        first[0],
    ), first[0]
    assert first[2] == "Runs by itself: python 02.forward.place.after.py"


def test_a_dumped_graph_runs_with_python(tmp_path):
    folder = dumped(tmp_path)
    assert shapes(folder / "02.forward.place.after.py") == "(2, 4)\n(2, 4)\n(2, 4)\n"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_point_to_point_graph_runs(tmp_path, rank, capsys):
    folder = dumped(tmp_path, rank=rank)
    rows = [2, 2, 1][rank]
    for file in sorted(folder.glob("*.py")):
        runpy.run_path(str(file), run_name="__main__")
        assert capsys.readouterr().out == f"(2, 4)\n({rows}, 4)\n(2, 4)\n", file.name


def test_every_native_graph_of_one_rank_runs(tmp_path, capsys):
    folder = dumped(tmp_path, world=1, native=True)
    for file in sorted(folder.glob("*.py")):
        runpy.run_path(str(file), run_name="__main__")
        assert capsys.readouterr().out == "(2, 4)\n(5, 4)\n(2, 4)\n", file.name


def test_a_lowered_native_graph_runs(tmp_path, capsys):
    """Its collectives need a process group, which a file by itself does not have."""
    folder = dumped(tmp_path, world=3, native=True)
    runpy.run_path(str(folder / "06.forward.lower.after.py"), run_name="__main__")
    assert capsys.readouterr().out == "(2, 4)\n(2, 4)\n(2, 4)\n"


def test_a_graph_named_lambda_runs(tmp_path, capsys):
    """AOTAutograd's graphs are called `<lambda>`, which is no name in a file."""
    g = Graph()
    g.out(g.neg(g.input("x", 3)))
    gm = torch.fx.GraphModule(nn.Module(), g.graph, class_name="<lambda>")
    dump = Dump(str(tmp_path), comm.Group("g", 0, 2))
    run(gm, [Residency()], recorder=dump)
    runpy.run_path(str(dump.folder / "02.residency.after.py"), run_name="__main__")
    assert capsys.readouterr().out == "(3,)\n"


def test_symbolic_sizes_become_the_ones_of_the_trace(tmp_path, capsys):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    g = Graph()
    x = g.graph.placeholder("x")
    n = g.graph.placeholder("n")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x.meta["val"] = mode.from_tensor(torch.empty(7, 3))
        n.meta["val"] = x.meta["val"].shape[0]
    g.graph.output((g.graph.call_function(aten.view.default, (x, [n, 3])), n))
    dump = Dump(str(tmp_path), comm.Group("g", 0, 2))
    dump.graph(g.module(), "mine", "")
    runpy.run_path(str(dump.folder / "01.mine.py"), run_name="__main__")
    assert capsys.readouterr().out == "(7, 3)\n7\n"


def test_the_plan_is_written_as_json_and_as_text(tmp_path):
    folder = dumped(tmp_path)
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan == planned(graph(), 3, depth=1)
    assert (folder / "plan.txt").read_text() == show.text(plan)
    assert [row.kind for row in plan.collectives] == ["all-gather", "all-reduce", "reduce-scatter"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The folder of a real compilation on one rank."""
    root = tmp_path_factory.mktemp("compiled")
    options = {
        "engine": "eager", "persistence_threshold": 0, "bucket_bytes": 4096, "dump": str(root),
    }  # fmt: skip
    model = torch.compile(nn.Linear(6, 4), backend="zero", options=options)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    (folder,) = (root / "rank0").iterdir()
    return folder


def test_torch_compile_writes_every_pass(compiled):
    expected = [
        "01.partition.before", "02.partition.after", "03.joint.residency.before",
        "04.joint.residency.after", "05.backward.sink.before", "06.backward.sink.after",
    ]  # fmt: skip
    for direction in ("forward", "backward"):
        for name in ("place", "release", "lower"):
            for when in ("before", "after"):
                expected.append(f"{len(expected) + 1:02d}.{direction}.{name}.{when}")
    assert sorted(file.stem for file in compiled.glob("*.py")) == expected
    assert sorted(f.name for f in compiled.iterdir() if f.suffix != ".py") == [
        "pipeline.txt", "plan.json", "plan.txt",
    ]  # fmt: skip


def test_the_pipeline_is_written_with_its_options(compiled):
    passes = (
        "1. Place({0} collectives, world=1)\n"
        "2. Release()\n"
        "3. Lower(world=1, rank=0, native=False, pg='', copies=False, forward={1})\n"
    )
    text = (compiled / "pipeline.txt").read_text()
    # Weight and bias in one gather; backward needs neither, and reduces both together.
    forward, backward = passes.format(1, True), passes.format(1, False)
    assert text == f"forward:\n{forward}backward:\n{backward}"


def test_another_plan_of_the_step_has_a_name_of_its_own(tmp_path):
    dump = Dump(str(tmp_path), comm.Group("g", 0, 3))
    dump.plan(planned(graph(), 3))
    dump.plan(planned(graph(), 3, cap=1), "measured")
    assert sorted(file.name for file in dump.folder.iterdir()) == [
        "measured.json", "measured.txt", "plan.json", "plan.txt",
    ]  # fmt: skip


def test_one_plan_is_written_of_forward_and_backward(compiled):
    plan = Plan.from_json((compiled / "plan.json").read_text())
    assert [(row.graph, row.kind) for row in plan.collectives] == [
        ("forward", "all-gather"), ("backward", "reduce-scatter"),
    ]  # fmt: skip
    assert [graph.direction for graph in plan.graphs] == ["forward", "backward"]
    assert {p.name for p in plan.parameters} == {"weight", "bias"}
    assert plan.name == "000"


@pytest.mark.parametrize("stage", ["partition", "residency", "forward", "backward"])
def test_every_graph_of_a_compilation_runs(compiled, stage, capsys):
    files = sorted(compiled.glob(f"*.{stage}.*.py"))
    assert files
    for file in files:
        capsys.readouterr()
        runpy.run_path(str(file), run_name="__main__")
        assert "(" in capsys.readouterr().out, file.name
