"""sink: the order of operations before and behind the pass, and that nothing else changes."""

import pytest
import torch
from builders import Graph, aten

from zcompile.passes import Sink, sink, verify


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sink, "SMALLEST_BYTES", 64)


def order(gm):
    return [n.name for n in gm.graph.nodes if n.op == "call_function"]


def sunk(gm):
    before = sorted(order(gm))
    gm = Sink()(gm)
    verify(gm, "sink")
    assert sorted(order(gm)) == before, "sink only moves"
    return order(gm)


def test_a_gradient_is_computed_behind_the_product_that_passes_it_on():
    g = Graph()
    x, up, w = g.input("x", 8, 8), g.input("up", 8, 8), g.shard("w", 8, 8)
    whole = g.unshard(w, 8, name="whole")
    xt = g.call(aten.t.default, x, name="xt")
    dw = g.mm(xt, up, name="dw")
    reduced = g.reduce(dw, "w")
    dx = g.mm(up, g.call(aten.t.default, whole, name="wt"), name="dx")
    names = sunk(g.out(reduced, dx))
    assert names == ["whole", "xt", "wt", "dx", "dw", reduced.name]


def test_a_large_value_is_computed_in_front_of_its_first_use():
    g = Graph()
    a, b, x = g.input("a", 16, 1), g.input("b", 1, 16), g.input("x", 4, 4)
    big = g.mm(a, b, name="big")  # 1024 bytes of 128
    other = g.neg(g.neg(x, name="one"), name="two")
    names = sunk(g.out(other, g.neg(big, name="use")))
    assert names == ["one", "two", "big", "use"]


def test_a_value_smaller_than_its_inputs_stays():
    g = Graph()
    a, b, x = g.input("a", 4, 64), g.input("b", 64, 4), g.input("x", 4, 4)
    g.mm(a, b, name="small")
    small = next(n for n in g.graph.nodes if n.name == "small")
    other = g.neg(x, name="one")
    assert sunk(g.out(other, g.neg(small, name="use"))) == ["small", "one", "use"]


def test_nothing_keeps_a_parameter_gathered_for_longer():
    g = Graph()
    a, x = g.input("a", 16, 1), g.input("x", 4, 4)
    whole = g.unshard(g.shard("w", 1, 16), 1, name="whole")
    big = g.mm(a, whole, name="big")
    other = g.neg(x, name="one")
    assert sunk(g.out(other, g.neg(big, name="use"))) == ["whole", "big", "one", "use"]


def test_random_numbers_and_writes_stay_where_they_are():
    g = Graph()
    x, y = g.input("x", 8, 8), g.input("y", 8, 8)
    drawn = g.call(aten.bernoulli.p, x, 0.5, name="drawn")
    written = g.call(aten.add_.Tensor, y, 1.0, name="written")
    one = g.neg(x, name="one")
    names = sunk(g.out(one, g.neg(drawn, name="use"), g.neg(written, name="too")))
    assert names == ["drawn", "written", "one", "use", "too"]


def test_the_graph_computes_the_same():
    g = Graph()
    a, b, x = g.input("a", 16, 1), g.input("b", 1, 16), g.input("x", 16, 16)
    big = g.mm(a, b, name="big")
    view = g.call(aten.t.default, big, name="view")
    chain = g.mm(x, x, name="chain")
    gm = g.out(g.mm(chain, view, name="end"), g.neg(big, name="use"))
    inputs = [torch.randn(16, 1), torch.randn(1, 16), torch.randn(16, 16)]
    before = gm(*inputs)
    after = Sink()(gm)(*inputs)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_only_names_a_mean_that_is_returned_comes_last():
    g = Graph()
    x = g.input("x", 8, 8)
    mean = g.reduce(x, "w")
    named = g.call(aten.view.default, g.call(aten.view.default, mean, [4, 8]), [4, 8], name="named")
    other = g.neg(x, name="other")
    names = sunk(g.out(named, other))
    assert names == [mean.name, "other", "view", "named"]


def test_a_view_of_a_mean_that_is_read_stays():
    g = Graph()
    x = g.input("x", 8, 8)
    mean = g.reduce(x, "w")
    named = g.call(aten.view.default, mean, [4, 8], name="named")
    names = sunk(g.out(named, g.neg(named, name="read"), g.neg(x, name="other")))
    assert names == [mean.name, "named", "read", "other"]


def test_a_product_stands_where_it_is_added():
    g = Graph()
    a, b, x = g.input("a", 4, 4), g.input("b", 4, 4), g.input("x", 4, 4)
    product = g.mm(a, b, name="product")
    read_twice = g.mm(b, a, name="read_twice")
    other = g.neg(x, name="other")
    total = g.call(aten.add.Tensor, product, other, name="total")
    more = g.call(aten.add.Tensor, read_twice, other, name="more")
    names = sunk(g.out(total, more, g.neg(read_twice, name="again")))
    assert names == ["read_twice", "other", "product", "total", "more", "again"]
