"""place: rows that do not fit a graph are refused, with the row, the place and the remedy."""

import pytest
from builders import (
    BF16,
    F32,
    F64,
    Graph,
    all_reduction,
    aten,
    gather,
    reduction,
    two_gradients,
    two_layers,
)

from zcompile import comm
from zcompile.errors import PlanError
from zcompile.passes import Place


def refusal(gm, *plan):
    with pytest.raises(PlanError) as error:
        Place(plan, 2)(gm)
    return str(error.value)


def test_a_row_of_what_the_graph_does_not_have():
    plan = gather("a", "mm"), gather("c", "mm_1", key="gather.1")
    assert refusal(two_layers(2), *plan) == (
        "gather.1 (all-gather of c): the forward graph has no such collective, or the plan has it "
        "more than once"
    )


def test_a_parameter_in_two_rows():
    plan = gather("a b", "mm"), gather("b", "mm_1", key="gather.1")
    assert refusal(two_layers(2), *plan).startswith("gather.1 (all-gather of b): ")


def test_a_row_of_another_kind():
    assert refusal(two_gradients(2), all_reduction("a b", "")).startswith(
        "all_reduce.0 (all-reduce of a): the forward graph has no such collective"
    )


def test_a_collective_without_a_row():
    assert refusal(two_layers(2), gather("b", "mm_1")) == (
        "the plan has no row for the all-gather of a, which the graph needs: add it to a row of "
        "that kind"
    )


@pytest.mark.parametrize(("issue", "wait", "what"), [("mm_7", "mm", "issue"), ("mm", "x", "wait")])
def test_an_anchor_that_is_no_operation(issue, wait, what):
    name = {"issue": issue, "wait": wait}[what]
    assert refusal(two_layers(2), gather("a b", issue, wait)) == (
        f"gather.0 (forward): {what}={name!r} is not an operation of the graph. The plan lists "
        "them under graphs; a plan of another model, shape or version has other names"
    )


def test_a_gather_awaited_behind_its_use():
    assert refusal(two_layers(2), gather("b a", "neg", "mm_1")) == (
        "gather.0 (forward): wait='mm_1' comes behind mm, which needs a; await it further up"
    )


def test_a_wait_in_front_of_its_issue():
    assert refusal(two_layers(2), gather("a b", "mm", "neg")) == (
        "gather.0 (forward): wait='neg' comes before issue='mm'"
    )


def test_a_gradient_sent_before_it_is_there():
    assert refusal(two_gradients(2), reduction("a b", "neg_2", "")) == (
        "reduce.0 (forward): issue='neg_2' comes before neg_2, which it sends; issue it further "
        "down"
    )


def test_a_shard_gathered_before_it_is_there():
    g = Graph()
    a = g.neg(g.shard("a", 4))
    gm = g.out(g.call(aten.exp.default, g.unshard(a, 4, of="a")))
    assert refusal(gm, gather("a", "neg", "exp")).startswith(
        "gather.0 (forward): issue='neg' comes before neg, which it sends"
    )


def test_a_mean_awaited_behind_its_use():
    g = Graph()
    mean = g.reduce(g.neg(g.input("x", 4)), "a")
    gm = g.out(g.call(aten.exp.default, mean))
    assert refusal(gm, reduction("a", "exp", "")) == (
        "reduce.0 (forward): wait='' comes behind exp, which needs a; await it further up"
    )


def test_gathers_of_two_dtypes_cannot_be_merged():
    g = Graph()
    a, b = g.unshard(g.shard("a", 4), 4), g.unshard(g.shard("b", 4), 4, BF16)
    gm = g.out(g.neg(a), g.neg(b))
    assert refusal(gm, gather("a b", "neg")) == (
        "gather.0 (forward): b (bfloat16, g) cannot travel with a (float32, g); give it a row of "
        "its own"
    )


def test_gathers_of_two_groups_cannot_be_merged():
    g = Graph()
    comm.register(comm.Group("other", 0, 2))
    a, b = g.unshard(g.shard("a", 4), 4), g.unshard(g.shard("b", 4), 4, group="other")
    gm = g.out(g.neg(a), g.neg(b))
    assert "b (float32, other) cannot travel with a (float32, g)" in refusal(
        gm, gather("a b", "neg")
    )


@pytest.mark.parametrize("other", [(BF16, F32), (F32, F64)])
@pytest.mark.parametrize("op", ["reduce", "all_reduce"])
def test_reductions_of_two_dtypes_cannot_be_merged(op, other):
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(getattr(g, op)(g.neg(x), "a"), getattr(g, op)(g.neg(x), "b", *other))
    made = reduction("a b", "") if op == "reduce" else all_reduction("a b", "")
    assert "cannot travel with a (float32, float32, float32, g)" in refusal(gm, made)
