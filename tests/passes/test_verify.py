"""verify: a graph that breaks one rule is refused with that rule's name, and no other is."""

import operator

import pytest
from builders import BF16, F32, ONE, Graph, aten, placed, rows

from zcompile.dialect import (
    ALL_REDUCE_FINISH,
    GATHER_START,
    REDUCE_FINISH,
    REDUCE_START,
    RELEASE,
    UNSHARD,
    WAIT,
)
from zcompile.errors import GraphError
from zcompile.passes import Lower, Place, Release, verify
from zcompile.passes.graph import calls
from zcompile.passes.verify import RULES


def valid(stop=2):
    """Two buckets of gathers, two of reductions, one of all-reductions, scheduled."""
    g = Graph(world=3)
    x, bias = g.input("x", 2, 5), g.input("bias", 3)
    a, b = g.shard("a", 5, 4), g.shard("b", 4, 3)
    wa, wb = g.unshard(a, 5), g.unshard(b, 4)
    h = g.mm(x, wa)
    y = g.call(aten.add.Tensor, g.mm(h, wb), bias)
    gm = g.out(
        y,
        g.reduce(g.mm(g.call(aten.t.default, x), h), "a"),
        g.reduce(g.mm(g.call(aten.t.default, h), y), "b"),
        g.all_reduce(g.call(aten.sum.dim_IntList, y, [0]), "bias"),
    )
    for each in [Place(rows(gm, 3, cap=ONE, depth=1), 3), Release()][:stop]:
        gm = each(gm)
    return gm


def broken(gm, rule):
    """The complaint of `rule`, with the head that names the pass and it."""
    with pytest.raises(GraphError) as error:
        verify(gm, "mine")
    head = f"pass 'mine' broke the rule {rule!r}: "
    assert str(error.value).startswith(head), str(error.value)
    return str(error.value).removeprefix(head)


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_valid_graph_passes(stop):
    verify(valid(stop), "mine")


@pytest.mark.parametrize("native", [False, True])
def test_a_lowered_graph_passes(native):
    verify(Lower(3, 0, native, "pg")(valid()), "mine")


def test_every_rule_has_a_name_that_is_said_once():
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_an_ill_formed_graph_names_the_pass():
    gm = valid()
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    last = next(n for n in gm.graph.nodes if n.target is aten.mm.default)
    first.prepend(last)  # reads what is made below it
    with pytest.raises(GraphError, match=r"^pass 'mine' left an ill-formed graph: .*before it has"):
        verify(gm, "mine")


# Each start has one finish


def test_a_gather_that_is_never_awaited():
    gm = valid(1)
    gm.graph.erase_node(calls(gm.graph, WAIT)[0])
    text = broken(gm, "each_start_has_one_finish")
    assert "gather_start" in text
    assert text.endswith("is awaited 0 times, must be once")


def test_a_gather_that_is_awaited_twice():
    gm = valid(1)
    wait = calls(gm.graph, WAIT)[0]
    with gm.graph.inserting_after(wait):
        gm.graph.call_function(WAIT, wait.args)
    assert broken(gm, "each_start_has_one_finish").endswith("is awaited 2 times, must be once")


def test_a_gather_that_is_awaited_in_part():
    g = Graph()
    a, b = g.shard("a", 4), g.shard("b", 4)
    gm = placed(g.out(g.neg(g.unshard(a, 4)), g.neg(g.unshard(b, 4))))
    (wait,) = calls(gm.graph, WAIT)
    wait.args = (wait.args[0][:1], *wait.args[1:])
    with pytest.raises(GraphError):
        verify(gm, "mine")


@pytest.mark.parametrize("finish", [REDUCE_FINISH, ALL_REDUCE_FINISH], ids=str)
def test_a_reduction_that_is_never_awaited(finish):
    gm = valid(1)
    node = calls(gm.graph, finish)[0]
    for item in list(node.users):
        item.replace_all_uses_with(node.args[0][0])
        gm.graph.erase_node(item)
    gm.graph.erase_node(node)
    text = broken(gm, "each_start_has_one_finish")
    assert text.endswith("is awaited 0 times, must be once")
    assert "reduce_start" in text


# Gathered values are used after the wait


def early_use(view=False):
    g = Graph()
    w, x = g.shard("w", 4, 4), g.input("x", 4, 4)
    start = g.call(GATHER_START, [w], [4], F32, "g", "gather.0")
    whole = g.call(operator.getitem, start, 0)
    read = g.call(aten.t.default, whole, name="turned") if view else whole
    used = None if view == "only" else g.mm(x, read, name="early")
    g.call(WAIT, [whole], [w], "g", "gather.0")
    return g.out(used if used is not None else g.mm(x, read))


@pytest.mark.parametrize("view", [False, True])
def test_a_gathered_value_that_is_read_before_the_wait(view):
    text = broken(early_use(view), "gathered_values_are_used_after_the_wait")
    assert "%early" in text
    assert "reads getitem before" in text
    assert "wait_" in text


def test_a_view_before_the_wait_reads_nothing():
    verify(early_use("only"), "mine")


# Nothing is used after its release


def released_early(view=False):
    gm = valid()
    mark = calls(gm.graph, RELEASE)[0]
    (full,) = mark.args[0]
    output = gm.graph.output_node()
    if view:
        with gm.graph.inserting_before(mark):
            turned = gm.graph.call_function(aten.t.default, (full,))
    with gm.graph.inserting_before(output):
        gm.graph.create_node(
            "call_function", aten.neg.default, (turned if view else full,), name="late"
        )
    return gm


@pytest.mark.parametrize("view", [False, True])
def test_a_use_after_the_release(view):
    text = broken(released_early(view), "nothing_is_used_after_its_release")
    assert "%late" in text
    assert "uses getitem after" in text
    assert "zero.release" in text


def test_a_use_of_a_piece_after_the_release():
    gm = valid()
    mark = calls(gm.graph, RELEASE)[0]
    (full,) = mark.args[0]
    with gm.graph.inserting_before(mark):
        pieces = gm.graph.call_function(aten.split.Tensor, (full, 2))
        piece = gm.graph.call_function(operator.getitem, (pieces, 0))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.neg.default, (piece,))
    broken(gm, "nothing_is_used_after_its_release")


# Keys are unique


def test_two_gathers_under_one_key():
    gm = valid(1)
    for node in calls(gm.graph, GATHER_START):
        node.args = (*node.args[:4], "gather.0")
    assert broken(gm, "keys_are_unique") == "two collectives in flight have the key 'gather.0'"


def test_two_reductions_under_one_key():
    gm = valid(1)
    for node in calls(gm.graph, REDUCE_START):
        node.args = (*node.args[:3], "reduce.0")
    assert broken(gm, "keys_are_unique") == "two collectives in flight have the key 'reduce.0'"


# Gathered shapes are whole


def test_an_unshard_with_too_few_rows():
    gm = valid(0)
    node = calls(gm.graph, UNSHARD)[0]
    node.args = (node.args[0], 6, *node.args[2:])
    text = broken(gm, "gathered_shapes_are_whole")
    assert text.endswith("has 5 rows, must have 6")


def test_an_unshard_with_another_dtype():
    gm = valid(0)
    node = calls(gm.graph, UNSHARD)[0]
    node.args = (*node.args[:2], BF16, *node.args[3:])
    text = broken(gm, "gathered_shapes_are_whole")
    assert text.endswith("has dtype torch.float32, must have torch.bfloat16")


# As many row counts as shards


def test_a_gather_with_too_few_row_counts():
    gm = valid(1)
    node = calls(gm.graph, GATHER_START)[0]
    node.args = (node.args[0], [], *node.args[2:])
    with pytest.raises(GraphError, match=r"has 1 shards and 0 row counts$"):
        verify(gm, "mine")


def test_the_first_complaint_is_raised():
    """A graph that breaks several rules gives one readable error, not a list."""
    gm = valid(1)
    for node in calls(gm.graph, GATHER_START):
        node.args = (*node.args[:4], "gather.0")
    gm.graph.erase_node(calls(gm.graph, WAIT)[0])
    with pytest.raises(GraphError) as error:
        verify(gm, "mine")
    assert str(error.value).count("broke the rule") == 1
