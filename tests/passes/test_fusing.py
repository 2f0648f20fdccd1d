"""fusing: what Inductor stores, as the memory curve of a step has it."""

import pytest
from builders import Graph, aten
from test_extract_memory import live, step

from zcompile.passes.extract import extract


def chain():
    """x -> neg -> neg_1 -> mm -> neg_2 -> neg_3"""
    g = Graph()
    x = g.input("x", 4, 4)
    y = g.neg(g.neg(x))
    return g.out(g.neg(g.neg(g.mm(y, y))))


def test_what_only_fused_operations_read_is_never_stored():
    assert live(chain(), fused=False) == [64, 128, 128, 192, 128, 192, 128, 192, 128, 192, 128]
    assert live(chain(), fused=True) == [
        64, 64, 64,  # neg is computed inside of neg_1
        128, 128, 192, 128,  # neg_1 is read by mm; mm
        128, 128, 128, 128,  # neg_2 inside of neg_3, which writes over mm's result
    ]  # fmt: skip


def test_a_fused_operation_is_free_and_its_reader_reads_what_it_read():
    ops = {op.name: op for op in step(chain(), fused=True).ops}
    assert (ops["neg"].bytes, ops["neg_2"].bytes) == (0, 0)
    assert ops["neg_1"].bytes == 64 + 64  # x and itself
    assert ops["mm"].bytes == 64 + 64
    assert ops["neg_3"].bytes == 64 + 64
    assert ops["mm"].flops == 2 * 4 * 4 * 4


def test_two_fused_values_of_one_source_read_it_once():
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(g.call(aten.add.Tensor, g.neg(x), g.call(aten.exp.default, x), name="sum"))
    assert [op.bytes for op in step(gm, fused=True).ops] == [0, 0, 32]


@pytest.mark.parametrize("read", ["by a view that leaves", "by a view that mm reads", "by a mean"])
def test_what_needs_memory_is_stored(read):
    g = Graph()
    x = g.input("x", 4, 4)
    a = g.neg(x)
    view = g.call(aten.t.default, a)
    if read == "by a mean":
        gm = g.out(g.reduce(a, "w"))
    elif read == "by a view that leaves":
        gm = g.out(view)
    else:
        gm = g.out(g.mm(view, x))
    assert live(gm, fused=True)[1] == 128


def test_a_view_that_only_fused_operations_read_stores_nothing():
    g = Graph()
    x = g.input("x", 4, 4)
    gm = g.out(g.call(aten.sum.default, g.call(aten.t.default, g.neg(x))))
    assert live(gm, fused=True) == [64, 64, 64, 64, 64, 68, 68]


def test_a_parameter_is_read_where_the_operation_is_that_it_was_fused_into():
    g = Graph()
    w, x = g.shard("w", 4, 4), g.input("x", 4, 4)
    cast = g.neg(g.unshard(w, 4))
    y = g.call(aten.exp.default, x)
    gm = g.out(y, g.call(aten.add.Tensor, cast, y))
    (one,), (other,) = (step(gm, fused=f).gathers for f in (False, True))
    assert (one.first, one.last) == (0, 0)
    assert (other.first, other.last) == (0, 2)


def test_what_is_concatenated_on_a_cpu_is_stored_and_what_it_is_made_of_is_not():
    g = Graph()
    x = g.input("x", 4)
    both = g.call(aten.cat.default, [g.neg(x), g.call(aten.exp.default, x)])
    assert live(g.out(g.neg(both)), fused=True) == [
        16, 16, 16, 16, 16,  # neg and exp are written into their halves
        48, 48,  # both
        80, 80,  # the result, which one loop makes with it
    ]  # fmt: skip


def test_what_is_concatenated_and_put_in_another_order_is_there_together():
    """One loop reads both inputs, writes what they make and writes it again in another order; it
    may run as late as right before the next operation."""
    g = Graph()
    x = g.input("x", 4, 4)
    one, two = g.mm(x, x), g.mm(x, x)
    both = g.call(aten.cat.default, [one, two])
    turned = g.call(aten.clone.default, g.call(aten.t.default, both))
    assert live(g.out(g.mm(x, g.call(aten.view.default, turned, [4, 8]))), fused=True)[4:] == [
        192,  # x, one and two
        320, 320, 320, 320,  # both; a view
        448, 448, 448, 448,  # turned; a view
        320, 192,
    ]  # fmt: skip


@pytest.mark.parametrize("joined", [True, False])
def test_a_gradient_that_a_loop_makes_is_computed_where_it_travels(joined):
    g = Graph()
    x = g.input("x", 4, 4)
    grad = g.call(aten.sum.dim_IntList, x, [0]) if joined else g.mm(x, x)
    flat = g.call(aten.view.default, grad, [-1])
    made = step(g.out(g.all_reduce(flat, "b")), fused=True)
    (row,) = made.reductions
    assert row.joined == (0 if joined else None)
    (curve,) = made.live.values()
    assert list(curve) == ([64] * 5 if joined else [64, 128, 128, 128, 64])


def in_another_order(g, x, y):
    """Sums that read x in another order than they write."""
    yield g.call(aten.add.Tensor, g.call(aten.t.default, x), y)
    yield g.call(aten.add.Tensor, g.call(aten.t.default, g.neg(x)), y)
    yield g.call(aten.add.Tensor, g.neg(g.call(aten.t.default, x)), y)


@pytest.mark.parametrize("which", range(3))
def test_a_loop_does_not_write_over_what_it_reads_in_another_order(which):
    g = Graph()
    a = g.input("a", 4, 4)
    x = g.mm(a, a)
    total = list(in_another_order(g, x, a))[which]
    for node in reversed(g.graph.nodes):
        if not node.users and node is not total:
            g.graph.erase_node(node)
    made = step(g.out(g.mm(total, a)), fused=True)
    at = [op.name for op in made.ops].index(total.name)
    (curve,) = made.live.values()
    assert curve[2 * at + 1] == 3 * 64  # a, x and the sum


def concatenation(g):
    x = g.input("x", 4)
    both = g.call(aten.cat.default, [g.neg(x), g.call(aten.exp.default, x)])
    return g.out(g.mm(g.call(aten.view.default, g.neg(both), [2, 4]), g.input("y", 4, 4)))


def test_a_plan_on_paper_follows_the_rules_of_its_device_and_not_of_its_fake_tensors():
    of = lambda cpu: extract([("forward", concatenation(Graph()))], world=2, native=False,
                             fused=True, cpu=cpu)  # fmt: skip
    assert [{op.name: op.bytes > 0 for op in of(cpu).ops}["cat"] for cpu in (True, False)] == [
        True, False,
    ]  # fmt: skip
