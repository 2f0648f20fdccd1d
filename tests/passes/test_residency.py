"""residency: which nodes of a joint graph are tagged, and how."""

import pytest
from builders import BF16, Graph, aten, line
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.passes import Residency, verify

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def tags(gm):
    """name -> kept or again, for the tagged nodes."""
    word = {SAVE: "kept", AGAIN: "again"}
    return {n.name: word[n.meta["recompute"]] for n in gm.graph.nodes if "recompute" in n.meta}


def tagged(gm, **options):
    before = [line(n) for n in gm.graph.nodes]
    gm = Residency(**options)(gm)
    verify(gm, "residency")
    assert [line(n) for n in gm.graph.nodes] == before, "residency only tags"
    return tags(gm)


def two():
    g = Graph()
    x, a, b = g.input("x", 2, 4), g.shard("a", 4, 4), g.shard("b", 4, 4)
    wa, wb = g.unshard(a, 4, name="wa"), g.unshard(b, 4, name="wb")
    return g, x, wa, wb


def test_stage_3_gathers_again():
    g, x, wa, wb = two()
    assert tagged(g.out(g.mm(g.mm(x, wa), wb))) == {"wa": "again", "wb": "again"}


def test_stages_1_and_2_keep():
    g, x, wa, wb = two()
    assert tagged(g.out(g.mm(g.mm(x, wa), wb)), keep_all=True) == {"wa": "kept", "wb": "kept"}


def test_parameters_can_be_kept_by_name():
    g, x, wa, wb = two()
    gm = g.out(g.mm(g.mm(x, wa), wb))
    assert tagged(gm, keep=frozenset({"b"})) == {"wa": "again", "wb": "kept"}


def test_tags_override_every_region_of_activation_checkpointing():
    g, x, wa, wb = two()
    gm = g.out(g.mm(x, wa), wb)
    wa.meta["ac_graph_id"] = 7
    Residency()(gm)
    assert wa.meta["ac_graph_id"] == wb.meta["ac_graph_id"] == 10**9


def test_what_is_computed_from_gathered_parameters_alone_is_computed_again():
    g, x, wa, wb = two()
    t = g.call(aten.t.default, wa, name="t")
    both = g.call(aten.add.Tensor, t, wb, name="both")
    half = g.call(aten.mul.Tensor, both, 0.5, name="half")
    mixed = g.call(aten.mm.default, x, half, name="mixed")
    assert tagged(g.out(g.neg(mixed))) == {
        "wa": "again", "wb": "again", "t": "again", "both": "again", "half": "again",
    }  # fmt: skip


def test_what_is_computed_from_kept_parameters_is_left_to_the_partitioner():
    g, x, wa, _ = two()
    t = g.call(aten.t.default, wa, name="t")
    assert tagged(g.out(g.mm(x, t)), keep_all=True) == {"wa": "kept", "wb": "kept"}


def test_what_mixes_a_kept_and_a_gathered_parameter_is_not_computed_again():
    g, _, wa, wb = two()
    gm = g.out(g.call(aten.add.Tensor, wa, wb, name="both"))
    assert tagged(gm, keep=frozenset({"a"})) == {"wa": "kept", "wb": "again"}


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_replicated_parameter_is_cast_again_at_every_stage(keep_all):
    g = Graph()
    r = g.replicate(g.input("bias", 4), BF16)
    gm = g.out(g.call(aten.mul.Tensor, r, 2.0, name="twice"))
    assert tagged(gm, keep_all=keep_all) == {r.name: "again", "twice": "again"}


def test_random_numbers_are_not_drawn_again():
    g, _, wa, _ = two()
    gm = g.out(g.call(aten.bernoulli.default, wa, name="noise"))
    assert "noise" not in tagged(gm)


def test_a_write_is_not_done_again():
    g, _, wa, _ = two()
    gm = g.out(g.call(aten.mul_.Tensor, wa, 2.0, name="written"))
    assert "written" not in tagged(gm)


def test_reductions_are_not_tagged():
    g, _, wa, _ = two()
    assert tagged(g.out(g.reduce(wa, "a"))) == {"wa": "again", "wb": "again"}


def test_a_constant_is_left_alone():
    g, _, wa, wb = two()
    gm = g.out(wa, wb, g.call(aten.ones.default, [2], name="ones"))
    assert "ones" not in tagged(gm)
