"""The runner: order contract, notes, recorder, verification between passes."""

import logging
from dataclasses import dataclass

import pytest
from builders import Graph, aten

from zcompile import planning
from zcompile.backend import Build
from zcompile.comm import Group
from zcompile.errors import GraphError, ZeroError
from zcompile.options import Options
from zcompile.passes import Lower, Partition, Place, Release, Residency, verify
from zcompile.pipeline import check_order, describe, run


@dataclass(frozen=True)
class Named:
    """A pass that does nothing."""

    name: str
    after: tuple[str, ...] = ()

    def __call__(self, gm):
        return gm


@dataclass(frozen=True)
class Grow(Named):
    """Adds nodes behind the first, or removes what nothing uses."""

    by: int = 0

    def __call__(self, gm):
        first = next(iter(gm.graph.nodes))
        with gm.graph.inserting_after(first):
            for _ in range(self.by):
                gm.graph.call_function(aten.neg.default, (first,))
        if self.by < 0:
            gm.graph.eliminate_dead_code()
        return gm


@dataclass(frozen=True)
class Fresh(Named):
    """Gives another module."""

    def __call__(self, gm):
        return graph()


class Recording:
    def __init__(self):
        self.seen = []

    def graph(self, gm, label, note):
        self.seen.append((label, len(gm.graph.nodes), note.rsplit(",", 1)[0]))


def graph():
    g = Graph()
    return g.out(g.neg(g.input("x", 4)))


def refusal(passes, done=()):
    with pytest.raises(ZeroError) as error:
        check_order(passes, done)
    return str(error.value)


def test_a_wrong_order_names_both_passes_and_all_that_is_scheduled():
    assert refusal([Release(), Place((), 2), Lower(2, 0)]) == (
        "pass 'release' builds on 'place', which comes later in: release -> place -> lower"
    )


@pytest.mark.parametrize(
    ("wrong", "needs"),
    [
        ([Residency(), Partition()], "pass 'residency' builds on 'partition'"),
        ([Place((), 2), Residency()], "pass 'place' builds on 'residency'"),
        ([Release(), Place((), 2)], "pass 'release' builds on 'place'"),
        ([Lower(2, 0), Place((), 2)], "pass 'lower' builds on 'place'"),
        ([Place((), 2), Lower(2, 0), Release()], "pass 'lower' builds on 'release'"),
    ],
)
def test_every_pass_says_what_it_builds_on(wrong, needs):
    assert refusal(wrong).startswith(needs)


def test_an_optional_pass_may_be_missing():
    check_order([Place((), 2), Lower(2, 0)])


def test_what_ran_on_earlier_graphs_counts():
    passes = [Named("b", after=("a",)), Named("a")]
    refusal(passes)
    check_order(passes, done=("a",))


def test_nothing_runs_in_a_wrong_order():
    gm, recorder = graph(), Recording()
    with pytest.raises(ZeroError):
        run(gm, [Grow("grow", by=2), Named("b", after=("c",)), Named("c")], recorder=recorder)
    assert len(gm.graph.nodes) == 3
    assert recorder.seen == []


def test_the_recorder_is_shown_every_graph():
    recorder = Recording()
    run(graph(), [Grow("grow", by=2), Grow("shrink", by=-1)], recorder=recorder)
    assert recorder.seen == [
        ("grow.before", 3, ""),
        ("grow.after", 5, "Grow(name='grow', after=(), by=2): nodes 3 -> 5 (+2)"),
        ("shrink.before", 5, ""),
        ("shrink.after", 3, "Grow(name='shrink', after=(), by=-1): nodes 5 -> 3 (-2)"),
    ]


def test_each_pass_logs_its_op_count_and_time(caplog):
    with caplog.at_level(logging.INFO, logger="zcompile"):
        run(graph(), [Residency(), Grow("grow", by=1)])
    first, second = (record.getMessage() for record in caplog.records)
    head, milliseconds = first.rsplit(", ", 1)
    assert head == "Residency(keep_all=False, keep=frozenset()): nodes 3 -> 3 (+0)"
    assert milliseconds.endswith(" ms")
    assert 0 <= float(milliseconds.removesuffix(" ms")) < 60_000
    assert second.startswith("Grow(name='grow', after=(), by=1): nodes 3 -> 4 (+1), ")


def test_a_pass_may_give_another_module():
    gm = graph()
    assert run(gm, [Named("same")]) is gm
    assert run(gm, [Fresh("fresh")]) is not gm


def test_every_pass_is_verified_behind_itself():
    seen = []
    run(graph(), [Grow("a", by=1), Grow("b", by=1)],
        verify=lambda gm, name: seen.append((name, len(gm.graph.nodes))))  # fmt: skip
    assert seen == [("a", 4), ("b", 5)]


def test_a_broken_graph_stops_the_pipeline_and_was_recorded():
    @dataclass(frozen=True)
    class Break(Named):
        def __call__(self, gm):
            gm.graph.output_node().prepend(next(iter(gm.graph.nodes)))
            return gm

    recorder = Recording()
    with pytest.raises(GraphError, match=r"^pass 'break' left an ill-formed graph"):
        run(graph(), [Break("break"), Named("later")], verify=verify, recorder=recorder)
    assert [label for label, *_ in recorder.seen] == ["break.before", "break.after"]


def test_a_pipeline_prints_as_it_will_run():
    passes = [Place((), 2), Release(), Lower(2, 0)]
    assert describe(passes) == (
        "1. Place(0 collectives, world=2)\n"
        "2. Release()\n"
        "3. Lower(world=2, rank=0, native=False, pg='', copies=False, forward=True)\n"
    )


def test_the_backend_schedules_in_an_order_that_holds():
    build = Build(Options(), Group("g", 0, 2), None)
    check_order([Partition(), Residency(), *build.passes((), "backward")])
    assert [p.name for p in build.passes((), "backward")] == ["place", "release", "lower"]
    without = Build(Options(disable=("release",)), Group("g", 0, 2), None)
    check_order([Partition(), Residency(), *without.passes((), "forward")])
    assert [p.name for p in without.passes((), "forward")] == ["place", "lower"]


@pytest.mark.parametrize(("stage", "keeps"), [(1, True), (2, True), (3, False)])
def test_stages_are_residency(stage, keeps, monkeypatch):
    """Below 3 everything that is gathered stays for backward; in 3 what the planner says."""
    recorder, joint = Recording(), graph()
    monkeypatch.setattr(
        planning, "min_cut_rematerialization_partition", lambda gm, *_, **k: (gm, gm)
    )
    monkeypatch.setattr(planning, "saved_tensors_first", lambda *_: None)
    options, names = Options(stage=stage), frozenset({"w"})
    assert planning.cut(options, joint, names, [], {"num_fwd_outputs": 1}, recorder) == (
        joint,
        joint,
    )
    label, _, note = recorder.seen[1]
    assert label == "joint.residency.after"
    assert note.startswith(f"Residency(keep_all={keeps}, keep=frozenset({{'w'}})): ")
