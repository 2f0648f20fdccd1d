"""extract: which bytes are alive when, by hand and against a count of real tensors' storages."""

import operator

import pytest
import torch
from builders import Graph, aten
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.dialect import ALL_REDUCE_GRAD, REDUCE_GRAD, UNSHARD
from zcompile.passes.extract import extract, operations


def step(*graphs, fused=False):
    directions = ["forward", "backward"] if len(graphs) == 2 else ["forward"]
    return extract(list(zip(directions, graphs)), world=2, native=False, fused=fused)


def live(*graphs, **options):
    (curve,) = step(*graphs, **options).live.values()
    return list(curve)


# What is alive. x: 16 B everywhere, as inputs are held by whoever calls.


def test_a_value_lives_from_its_making_to_its_last_reading():
    g = Graph()
    x = g.input("x", 4)
    a = g.neg(x)
    b = g.neg(a)
    assert live(g.out(g.call(aten.add.Tensor, a, g.neg(b)))) == [
        16,
        32, 32,  # a
        48, 48,  # b is made, a is still read
        64, 48,  # neg_2; b ends behind it
        64, 32,  # the sum, which leaves
    ]  # fmt: skip


def test_what_nothing_reads_lives_while_it_is_made():
    g = Graph()
    x = g.input("x", 4)
    g.neg(x)
    assert live(g.out(g.neg(x))) == [16, 32, 16, 32, 32]


@pytest.mark.parametrize(
    "view",
    [
        lambda g, a: g.call(aten.t.default, a),
        lambda g, a: g.call(aten.view.default, g.call(aten.t.default, a), [2, 2, 1]),
        lambda g, a: g.call(aten.slice.Tensor, a, 0, 0, 1),
        lambda g, a: g.call(aten.expand.default, a, [8, 2, 2]),
        lambda g, a: g.call(operator.getitem, g.call(aten.split.Tensor, a, 1), 1),
    ],
    ids=["t", "chain", "slice", "expand", "split"],
)
def test_a_view_lives_in_what_it_is_a_view_of(view):
    g = Graph()
    x = g.input("x", 2, 2)
    made = view(g, g.neg(x))
    last = g.call(aten.sum.default, made)
    gm = g.out(last, g.neg(x))
    count = len(operations(gm))
    # neg's 16 B from slot 1 to the sum, whatever the size of the view; the sum's 4 B leave.
    between = [32] * (2 * (count - 2))
    assert live(gm) == [16, *between, 36, 20, 36, 36]
    free = [op for op in step(gm).ops if op.name not in ("neg", "sum_1", "neg_1")]
    assert all((op.flops, op.bytes) == (0, 0) for op in free)


def test_each_part_of_a_tuple_lives_by_itself():
    g = Graph()
    x = g.input("x", 4, 4)
    pair = g.call(aten.max.dim, x, 0)
    values, indices = (g.call(operator.getitem, pair, i) for i in (0, 1))
    a = g.neg(values)
    b = g.neg(g.neg(indices))
    # 64 for x; 16 of values until neg, 32 of indices until neg_1, both until their getitem.
    assert live(g.out(a, b)) == [
        64,
        112, 112, 112, 112, 112, 112,
        128, 112,  # neg of the values, which end here
        144, 112,  # neg_1 of the indices: 32 come, 32 go
        144, 112,
    ]  # fmt: skip


def test_a_part_that_nothing_takes_ends_with_the_last_part_that_is_taken():
    g = Graph()
    pair = g.call(aten.max.dim, g.input("x", 4, 4), 0)
    gm = g.out(g.neg(g.call(operator.getitem, pair, 0)))
    assert live(gm) == [64, 112, 112, 112, 80, 96, 80]


def two(saved, returned=(), tangent=4, use_x=False):
    """forward: a = neg(x), b = neg(a); backward reads what was saved and its tangent."""
    g = Graph()
    x = g.input("x", 4)
    a = g.neg(x, name="a")
    b = g.neg(a, name="b")
    nodes = {"x": x, "a": a, "b": b}
    forward = g.out(*[nodes[n] for n in [*returned, *saved]])
    h = Graph()
    given = [h.input(name, 4) for name in saved]
    t = h.input("tangent", tangent)
    first = h.neg(t, name="c")
    for each in given:
        first = h.call(aten.add.Tensor, first, each, name="d")
    return forward, h.out(h.neg(first, name="e"))


def test_what_is_saved_lives_until_backward_has_read_it():
    # x 16; a, b; then c, d, e over a tangent of 16 B that c reads.
    assert live(*two(saved=["a"])) == [
        16, 32, 32, 48,  # x, a, b: b is read by nothing
        48, 64, 48, 64, 32, 48, 32,  # a and the tangent; c, d (a's last), e
    ]  # fmt: skip


def test_what_forward_returns_lives_on():
    assert live(*two(saved=[], returned=["b"])) == [
        16, 32, 32, 48,
        48, 64, 48, 64, 48,
    ]  # fmt: skip


def test_a_batch_that_is_saved_is_still_held_by_whoever_calls():
    saved, plain = live(*two(saved=["x"])), live(*two(saved=[]))
    assert saved[0] == plain[0] == 16
    assert saved[-1] == plain[-1] == 32  # x and e


def test_a_tangent_ends_where_it_was_read():
    small, large = (live(*two(saved=["a"], tangent=n)) for n in (4, 4))
    assert small == large
    # It is there from the beginning of backward on, and not before.
    assert large[4] - large[3] == 16 - 16  # b ends, the tangent comes


def test_a_saved_value_that_backward_does_not_read_ends_at_once():
    g = Graph()
    forward = g.out(g.neg(g.input("x", 4), name="a"))
    h = Graph()
    h.input("a", 4)
    backward = h.out(h.neg(h.input("tangent", 2)))
    assert live(forward, backward) == [16, 32, 40, 32, 24]


def test_shards_and_gathered_parameters_are_not_in_the_curve():
    g = Graph()
    x = g.input("x", 4)
    whole = g.unshard(g.shard("w", 4), 4)
    turned = g.call(aten.view.default, whole, [4])
    assert live(g.out(g.call(aten.add.Tensor, x, turned))) == [16, 16, 16, 32, 32]


def test_a_shard_that_forward_only_hands_on_is_at_rest():
    g = Graph()
    x, w = g.input("x", 4), g.shard("w", 4)
    forward = g.out(g.neg(x), w)
    h = Graph()
    t, shard = h.input("tangent", 4), h.shard("w", 4)
    backward = h.out(h.call(aten.mul.Tensor, t, h.unshard(shard, 4)))
    assert live(forward, backward) == [16, 32, 48, 64, 48]


def test_means_are_not_in_the_curve_and_a_gradient_ends_with_its_making():
    g = Graph()
    x = g.input("x", 4)
    gm = g.out(g.reduce(g.neg(x), "a"), g.all_reduce(g.neg(x), "b"))
    assert live(gm) == [16, 32, 16, 32, 16]


def test_a_gradient_that_operations_read_too_lives_until_they_have():
    """Its reduction may be over by then."""
    for behind in (False, True):
        g = Graph()
        x = g.input("x", 4)
        grad = g.neg(x)
        mean = g.reduce(grad, "a") if not behind else None
        norm = g.call(aten.sum.default, grad)
        mean = g.reduce(grad, "a") if behind else mean
        made = step(g.out(norm, mean))
        assert list(made.live["activations"]) == [16, 32, 32, 36, 20]
        assert made.reductions[0].ready == 1


# Against a count


@st.composite
def programs(draw, inputs):
    """Operations on (4, 4) values, each with the indices of what it reads, and what leaves."""
    ops = "neg neg add mm t half max unshard reduce all_reduce".split()
    kind = st.tuples(st.sampled_from(ops), st.integers(0, 99), st.integers(0, 99))
    return (
        draw(st.lists(kind, min_size=1, max_size=12)),
        draw(st.sets(st.integers(0, 99))),
        inputs,
    )


def build(program, names):
    """-> the graph, and its values that leave."""
    ops, leaving, _ = program
    g = Graph()
    values = [g.input(name, 4, 4) for name in names]
    shards = {i: g.shard(f"w{i}", 4, 4) for i, (kind, *_) in enumerate(ops) if kind == "unshard"}
    means = []
    for index, (kind, a, b) in enumerate(ops):
        a, b = values[a % len(values)], values[b % len(values)]
        if kind == "unshard":
            values.append(g.unshard(shards[index], 4))
        elif kind in ("reduce", "all_reduce"):
            if a.target is not UNSHARD:
                means.append(getattr(g, kind)(a, f"w{index}"))
        elif kind == "half":
            pieces = g.call(aten.split.Tensor, g.neg(a), 2)
            half = g.call(operator.getitem, pieces, 1)
            values.append(
                g.call(aten.expand.default, g.call(aten.slice.Tensor, half, 0, 0, 1), [4, 4])
            )
        elif kind == "max":
            pair = g.call(aten.max.dim, a, index % 2)
            best = g.call(operator.getitem, pair, 0)
            values.append(g.call(aten.expand.default, best, [4, 4]))
        elif kind == "t":
            values.append(g.call(aten.t.default, a))
        elif kind == "neg":
            values.append(g.neg(a))
        else:
            target = aten.add.Tensor if kind == "add" else aten.mm.default
            values.append(g.call(target, a, b))
    out = {values[i % len(values)]: None for i in sorted(leaving)}
    return g, [*out], means


class Count:
    """Runs graphs on real tensors and keeps every one of them, so that a storage has an address of
    its own; then asks on each slot which storages somebody still reads."""

    def __init__(self):
        self.slots = []  # of each slot: "before" or the operation
        self.born, self.reads, self.bytes = {}, {}, {}
        self.forever, self.kept, self.position = set(), [], 0

    def storage(self, tensor):
        key = tensor.untyped_storage().data_ptr()
        self.bytes[key] = tensor.untyped_storage().nbytes()
        return key

    def keys(self, value):
        tensors = value if isinstance(value, (tuple, list)) else [value]
        return {self.storage(t) for t in tensors if isinstance(t, torch.Tensor)}

    def run(self, gm, given, first):
        """given: storages by name of what an earlier graph passes on."""
        env, outside = {}, set()
        begin = 2 * self.position
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                if node.name in given:
                    env[node] = given[node.name]
                else:
                    env[node] = torch.zeros(node.meta["val"].shape)
                    if node.name.startswith("w"):
                        outside |= self.keys(env[node])
                for key in self.keys(env[node]) - outside:
                    self.born.setdefault(key, begin)
                    self.reads.setdefault(key, set()).add(begin)
                    if first:
                        self.forever.add(key)
            elif node.op == "output":
                left = {n.name: env[n] for n in node.args[0]}
            elif node.target in (UNSHARD, REDUCE_GRAD, ALL_REDUCE_GRAD):
                env[node] = torch.zeros(node.meta["val"].shape)
                outside |= self.keys(env[node])
            else:
                slot = 2 * self.position + 1
                read = set().union(*(self.keys(env[n]) for n in node.all_input_nodes))
                args = torch.fx.map_arg(node.args, env.__getitem__)
                env[node] = node.target(*args)
                for key in (read | self.keys(env[node])) - outside:
                    self.born.setdefault(key, slot)
                    self.reads.setdefault(key, set()).add(slot)
                self.position += 1
            self.kept.append(env.get(node))
        return {name: value for name, value in left.items() if not self.keys(value) & outside}

    def curve(self):
        found = []
        for slot in range(2 * self.position + 1):
            alive = {
                key
                for key, born in self.born.items()
                if born <= slot and (key in self.forever or slot <= max(self.reads[key]))
            }
            found.append(sum(self.bytes[key] for key in alive))
        return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(1), programs(2))
def test_the_curve_is_a_count_of_storages(one, two):
    g, left, means = build(one, ["x"])
    saved = [n for i, n in enumerate(left) if i % 2 == 0]
    forward = g.out(*left, *means)
    names = ["tangent", *(n.name for n in saved if n.target is not UNSHARD)]
    h, gone, others = build(two, names)
    backward = h.out(*gone, *others)
    count = Count()
    passed = count.run(forward, {}, True)
    given_ = {n: v for n, v in passed.items() if n in names}
    for name, value in passed.items():
        if name not in names:
            count.forever |= count.keys(value)
    for value in count.run(backward, given_, False).values():
        count.forever |= count.keys(value) & set(count.born)
    assert live(forward, backward) == count.curve()
