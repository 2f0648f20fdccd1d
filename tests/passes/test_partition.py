"""partition: reads of one parameter become one, on graphs as Dynamo records them."""

from typing import Any

import pytest
import torch
from builders import F32, same, text
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.dialect import REPLICATE, UNSHARD
from zcompile.errors import GraphError
from zcompile.passes import Partition, verify


class Recorded:
    """A graph in Dynamo's words: call_method nodes, op packets, `example_value`s."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.root = module or torch.nn.Module()

    def input(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def read(self, param: fx.Node, op: Any = torch.ops.zero.unshard, local: bool = True) -> fx.Node:
        kept = self.graph.call_method("to_local", (param,)) if local else param
        rows = () if op in (torch.ops.zero.replicate, REPLICATE) else (4,)
        node = self.graph.call_function(op, (kept, *rows, F32, F32, "g", str(param)))
        with self.mode:
            node.meta["example_value"] = torch.empty(4, 4)
        return node

    def grad_mode(self, on: bool) -> None:
        self.graph.call_function(torch._C._set_grad_enabled, (on,))

    def use(self, *values: fx.Node) -> fx.Node:
        return self.graph.call_function(torch.add, (values[0], values[-1]))

    def out(self, *values: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(values))
        return fx.GraphModule(self.root, self.graph)


def partitioned(gm: fx.GraphModule) -> str:
    gm = Partition()(gm)
    verify(gm, "partition")
    return text(gm)


def test_reads_of_one_parameter_become_one():
    g = Recorded()
    x, w = g.input("x"), g.input("w")
    h = g.use(x, g.read(w))
    gm = g.out(g.use(h, g.read(w)))
    same(
        partitioned(gm),
        """
    x
    w
    to_local = .to_local(w)
    unshard: f32[4,4] = unshard(to_local, 4, f32, f32, 'g', 'w')
    add = add(x, unshard)
    add_1 = add(add, unshard)
    return [add_1]
    """,
    )


def test_parameters_stay_apart():
    g = Recorded()
    w, v = g.input("w"), g.input("v")
    gm = g.out(g.use(g.read(w), g.read(v)))
    before = text(gm)
    assert partitioned(gm) == before


@pytest.mark.parametrize(
    "op", [torch.ops.zero.unshard, UNSHARD, torch.ops.zero.replicate, REPLICATE],
    ids=["unshard packet", "unshard overload", "replicate packet", "replicate overload"],
)  # fmt: skip
def test_every_spelling_of_a_read_is_known(op):
    g = Recorded()
    w = g.input("w")
    gm = g.out(g.use(g.read(w, op), g.read(w, op)))
    Partition()(gm)
    assert [n.name for n in gm.graph.nodes if n.op == "call_method"] == ["to_local"]
    (add,) = [n for n in gm.graph.nodes if n.target is torch.add]
    assert add.args[0] is add.args[1]


def test_a_read_of_the_shard_itself_is_a_read_of_the_parameter():
    """Without DTensor in between there is no to_local."""
    g = Recorded()
    w = g.input("w")
    gm = g.out(g.use(g.read(w, local=False), g.read(w)))
    same(
        partitioned(gm),
        """
    w
    unshard: f32[4,4] = unshard(w, 4, f32, f32, 'g', 'w')
    add = add(unshard, unshard)
    return [add]
    """,
    )


def test_reads_under_no_grad_stay_apart():
    g = Recorded()
    w = g.input("w")
    first = g.read(w)
    g.grad_mode(False)
    quiet = g.use(g.read(w), g.read(w))
    g.grad_mode(True)
    gm = g.out(g.use(first, g.read(w)), quiet)
    same(
        partitioned(gm),
        """
    w
    to_local = .to_local(w)
    unshard: f32[4,4] = unshard(to_local, 4, f32, f32, 'g', 'w')
    _set_grad_enabled(False)
    to_local_1 = .to_local(w)
    unshard_1: f32[4,4] = unshard(to_local_1, 4, f32, f32, 'g', 'w')
    add = add(unshard_1, unshard_1)
    _set_grad_enabled(True)
    add_1 = add(unshard, unshard)
    return [add_1,add]
    """,
    )


def test_a_first_read_under_no_grad_does_not_serve_later_ones():
    g = Recorded()
    w = g.input("w")
    g.grad_mode(False)
    quiet = g.read(w)
    g.grad_mode(True)
    loud = g.read(w)
    gm = g.out(quiet, loud)
    Partition()(gm)
    assert list(gm.graph.output_node().args[0]) == [quiet, loud]


def test_an_unused_to_local_is_removed_and_a_used_one_kept():
    g = Recorded()
    w = g.input("w")
    g.graph.call_method("to_local", (w,))
    kept = g.graph.call_method("to_local", (w,))
    gm = g.out(kept)
    same(
        partitioned(gm),
        """
    w
    to_local_1 = .to_local(w)
    return [to_local_1]
    """,
    )


def wrapped(op: Any, *, reads: bool) -> fx.GraphModule:
    """A graph that runs `op` over a body, which reads the parameter twice."""
    inner = Recorded()
    w = inner.input("w")
    used = inner.use(inner.read(w), inner.read(w)) if reads else inner.use(w, w)
    outer = Recorded(torch.nn.Module())
    outer.root.body = inner.out(used)
    p = outer.input("p")
    body = outer.graph.get_attr("body")
    args = (p, body, body, (p,)) if op is torch.ops.higher_order.cond else (body, p)
    return outer.out(outer.graph.call_function(op, args))


CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def test_reads_in_a_checkpointed_body_become_one():
    gm = Partition()(wrapped(CHECKPOINT, reads=True))
    same(
        text(gm.body),
        """
    w
    to_local = .to_local(w)
    unshard: f32[4,4] = unshard(to_local, 4, f32, f32, 'g', 'w')
    add = add(unshard, unshard)
    return [add]
    """,
    )


def test_a_read_in_a_branch_is_refused():
    with pytest.raises(GraphError) as error:
        Partition()(wrapped(torch.ops.higher_order.cond, reads=True))
    assert str(error.value) == (
        "cond reads a sharded parameter inside its body, which ranks may run a different number "
        "of times. Read it before the branch"
    )


def test_a_branch_that_reads_nothing_is_fine():
    Partition()(wrapped(torch.ops.higher_order.cond, reads=False))


def nested(outer_op: Any, inner_op: Any) -> fx.GraphModule:
    """p -> outer_op { inner_op { read(p) } }"""
    inner = wrapped(inner_op, reads=True)
    outer = Recorded(torch.nn.Module())
    outer.root.outer_body = inner
    p = outer.input("p")
    body = outer.graph.get_attr("outer_body")
    args = (p, body, body, (p,)) if outer_op is torch.ops.higher_order.cond else (body, p)
    return outer.out(outer.graph.call_function(outer_op, args))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(CHECKPOINT, torch.ops.higher_order.cond), (torch.ops.higher_order.cond, CHECKPOINT)],
    ids=["branch in a checkpoint", "checkpoint in a branch"],
)
def test_a_read_in_a_nested_branch_is_refused(outer, inner):
    with pytest.raises(GraphError, match="cond reads a sharded parameter inside its body"):
        Partition()(nested(outer, inner))


def test_a_write_into_a_gathered_parameter_is_refused():
    g = Recorded()
    w = g.input("w")
    read = g.read(w)
    with g.mode:
        read.meta["example_value"].mul_(2.0)  # what Dynamo's propagation did to it
    with pytest.raises(GraphError) as error:
        Partition()(g.out(read))
    assert str(error.value) == (
        "the compiled code writes into parameter 'w' in place; the write would go to the "
        "gathered copy and be lost. Write outside of the compiled code"
    )


def test_a_graph_without_parameters_is_left_alone():
    g = Recorded()
    x = g.input("x")
    gm = g.out(g.use(x, x))
    before = text(gm)
    assert partitioned(gm) == before
