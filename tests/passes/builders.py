"""Tiny graphs for pass tests: building, printing, and running them on ranks that are threads.

g = Graph(world=3)
w = g.shard("w", 5, 4)                  # this rank's rows of a (5, 4) parameter
g.out(g.mm(x, g.unshard(w, 5)))
text(placed(g.module(), world=3))       # one line per node
"""

from __future__ import annotations

import operator
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile import collectives, comm, dialect
from zcompile.layout import owned_rows
from zcompile.passes import Place, Release, verify
from zcompile.passes.extract import extract
from zcompile.schedule import describe, planner
from zcompile.schedule.costs import Costs
from zcompile.schedule.devices import device
from zcompile.schedule.links import NATIVE, default_link
from zcompile.schedule.plan import Collective, Plan
from zcompile.schedule.simulate import Simulator

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHORT = {
    F32: "f32", BF16: "bf16", F16: "f16", F64: "f64", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64",
}  # fmt: skip


class Graph:
    """A graph under construction. Each call gets its `val` from the operation itself, run on fake
    tensors; the group "g" it is built for exists on paper."""

    def __init__(self, world: int = 2, rank: int = 0) -> None:
        self.world, self.rank = world, rank
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        comm.register(comm.Group("g", rank, world))

    def input(self, name: str, *shape: int, dtype: torch.dtype = F32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def shard(self, name: str, rows: int, *rest: int, dtype: torch.dtype = F32) -> fx.Node:
        first, last = owned_rows(rows, self.world, self.rank)
        return self.input(name, last - first, *rest, dtype=dtype)

    def call(self, target: Callable[..., Any], *args: Any, name: str | None = None) -> fx.Node:
        def value(a: Any) -> Any:
            return a.meta["val"] if isinstance(a, fx.Node) else a

        if name is None and str(target).endswith(".default"):
            name = str(target).split(".")[-2]  # mm, where torch's graphs have mm_default
        node = self.graph.create_node("call_function", target, args, {}, name)
        with self.mode:
            node.meta["val"] = target(*torch.utils._pytree.tree_map(value, args))
        return node

    def unshard(
        self,
        shard: fx.Node,
        rows: int,
        dtype: torch.dtype = F32,
        reduce_dtype: torch.dtype = F32,
        *,
        group: str = "g",
        of: str | None = None,
        name: str | None = None,
    ) -> fx.Node:
        args = (shard, rows, dtype, reduce_dtype, group, of or shard.name)
        return self.call(dialect.UNSHARD, *args, name=name)

    def replicate(self, param: fx.Node, dtype: torch.dtype = F32) -> fx.Node:
        return self.call(dialect.REPLICATE, param, dtype, F32, "g", param.name)

    def reduce(
        self, grad: fx.Node, of: str, dtype: torch.dtype = F32, reduce_dtype: torch.dtype = F32
    ) -> fx.Node:
        return self.call(dialect.REDUCE_GRAD, grad, dtype, reduce_dtype, "g", of)

    def all_reduce(
        self, grad: fx.Node, of: str, dtype: torch.dtype = F32, reduce_dtype: torch.dtype = F32
    ) -> fx.Node:
        return self.call(dialect.ALL_REDUCE_GRAD, grad, dtype, reduce_dtype, "g", of)

    def mm(self, a: fx.Node, b: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(aten.mm.default, a, b, name=name)

    def neg(self, a: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(aten.neg.default, a, name=name)

    def out(self, *nodes: Any) -> fx.GraphModule:
        self.graph.output(tuple(nodes))
        return self.module()

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph)


# Printing


def text(gm: fx.GraphModule) -> str:
    """One line per node, `name: dtype[shape] = target(args)`. A call that gives nothing has no
    name, one that gives a list no type: its items have one."""
    return "\n".join(map(line, gm.graph.nodes)) + "\n"


def body(gm: fx.GraphModule) -> str:
    """`text` without the placeholders."""
    lines = [line(n) for n in gm.graph.nodes if n.op != "placeholder"]
    return "\n".join(lines) + "\n"


def line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_show(node.args[0])}"
    value = node.meta.get("val", node.meta.get("example_value"))
    name = _show(node)
    if isinstance(value, Tensor):
        name += f": {SHORT[value.dtype]}[{','.join(map(str, value.shape))}]"
    if node.op == "placeholder":
        return name
    if node.target is operator.getitem:
        return f"{name} = {_show(node.args[0])}[{node.args[1]}]"
    arguments = [*map(_show, node.args), *(f"{k}={_show(v)}" for k, v in node.kwargs.items())]
    call = f"{target(node)}({', '.join(arguments)})"
    return call if value is None and not node.users else f"{name} = {call}"


def target(node: fx.Node) -> str:
    if node.op == "call_method":
        return f".{node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def targets(gm: fx.GraphModule) -> list[str]:
    return [target(n) for n in gm.graph.nodes if n.op == "call_function"]


def _show(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name.replace("getitem", "item").replace("_default", "")
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_show, value))}]"
    if isinstance(value, torch.dtype):
        return SHORT[value]
    return repr(value) if isinstance(value, str) else str(value)


def same(actual: str, golden: str) -> None:
    """Compare with an indented text; a mismatch shows a diff, and `actual` to copy."""
    assert actual == textwrap.dedent(golden).lstrip("\n")


# Planning


ONE, BIG = 1, 10**6  # bytes: every parameter is its own bucket, or all that can share one


def simulator(
    gm: fx.GraphModule, world: int = 2, native: bool = False, direction: str = "forward"
) -> Simulator:
    """Of a step that is one graph, by the published figures of a CPU."""
    link = default_link("cpu", world)
    if native:
        link = replace(link, primitives=NATIVE)
    step = extract([(direction, gm)], world=world, native=native, fused=False)
    return Simulator(step, Costs(device("cpu"), link))


def planned(
    gm: fx.GraphModule, world: int = 2, *, cap: int = BIG, depth: int = 0, **of: Any
) -> Plan:
    """A plan by rules: buckets of up to `cap` bytes, issued and awaited `depth` buckets apart."""
    sim = simulator(gm, world, **of)
    return describe.to_plan(sim, planner.fixed(sim, frozenset(), cap, depth), name="000")


def rows(gm: fx.GraphModule, world: int = 2, **rules: Any) -> tuple[Collective, ...]:
    return planned(gm, world, **rules).collectives


def placed(gm: fx.GraphModule, world: int = 2, **rules: Any) -> fx.GraphModule:
    """What a plan by rules makes of a graph; see `planned`."""
    gm = Place(rows(gm, world, **rules), world)(gm)
    verify(gm, "place")
    return gm


def scheduled(gm: fx.GraphModule, world: int = 2, **rules: Any) -> fx.GraphModule:
    """`placed`, and marked where gathered values end."""
    gm = Release()(placed(gm, world, **rules))
    verify(gm, "release")
    return gm


def gather(names: str, issue: str, wait: str | None = None, key: str = "gather.0") -> Collective:
    """A row by hand. names: parameters, between blanks; without a wait awaited where issued."""
    return _row("all-gather", names, issue, wait, key)


def reduction(names: str, issue: str, wait: str | None = None, key: str = "reduce.0") -> Collective:
    return _row("reduce-scatter", names, issue, wait, key)


def all_reduction(
    names: str, issue: str, wait: str | None = None, key: str = "all_reduce.0"
) -> Collective:
    return _row("all-reduce", names, issue, wait, key)


def _row(kind: str, names: str, issue: str, wait: str | None, key: str) -> Collective:
    wait = issue if wait is None else wait
    return Collective(key, "forward", kind, tuple(names.split()), "", 0, 0, "", issue, wait)


def two_layers(world: int = 3) -> fx.GraphModule:
    """neg, mm = . @ a, mm_1 = . @ b"""
    g = Graph(world)
    x, a, b = g.input("x", 2, 5), g.shard("a", 5, 4), g.shard("b", 4, 3)
    wa, wb = g.unshard(a, 5), g.unshard(b, 4)
    return g.out(g.mm(g.mm(g.neg(x), wa), wb))


def two_gradients(world: int = 3) -> fx.GraphModule:
    """Of a (5, 2) and b (4, 3): neg, neg_1, neg_2."""
    g = Graph(world)
    x, y = g.input("x", 5, 2), g.input("y", 4, 3)
    return g.out(g.reduce(g.neg(x), "a"), g.neg(y), g.reduce(g.neg(y), "b"))


# Running


class _Wire:
    """Every rank shows a value and sees all of them."""

    def __init__(self, world: int) -> None:
        self.barrier, self.slots = threading.Barrier(world, timeout=30), [None] * world

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        seen = list(self.slots)
        self.barrier.wait()
        return seen


class _Rank(fx.Interpreter):
    """Runs a graph with collectives that go over a `_Wire`. What a collective brings is NaN until
    it was awaited, so that a graph that reads too early gives a wrong answer."""

    def __init__(self, gm: fx.GraphModule, rank: int, world: int, wire: _Wire) -> None:
        super().__init__(gm)
        self.rank, self.world, self.wire = rank, world, wire
        self.fills: dict[str, Callable[[], None]] = {}
        self.real: dict[int, Tensor] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        namespace = getattr(target, "namespace", "")
        if namespace in ("zero", "_c10d_functional"):
            name = target._schema.name.split("::")[1]
            return getattr(self, f"do_{name}")(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def owned(self, rows: int, rank: int | None = None) -> tuple[int, int]:
        return owned_rows(rows, self.world, self.rank if rank is None else rank)

    def whole(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat(self.wire.exchange(self.rank, shard)).to(dtype)

    def parts(self, grad: Tensor) -> list[Tensor]:
        """Every rank's part of the rows that this rank owns, this rank's own first."""
        first, last = self.owned(grad.shape[0])
        everyone = self.wire.exchange(self.rank, grad)
        return [g[first:last] for g in (grad, *everyone[: self.rank], *everyone[self.rank + 1 :])]

    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self.wire.exchange(self.rank, value)).sum(0)

    # parameter level

    def do_unshard(self, shard: Tensor, rows: int, dtype: Any, *_: Any) -> Tensor:
        assert self.whole(shard, dtype).shape[0] == rows
        return self.whole(shard, dtype)

    def do_replicate(self, param: Tensor, dtype: Any, *_: Any) -> Tensor:
        return param.to(dtype)

    def do_reduce_grad(self, grad: Tensor, dtype: Any, reduce_dtype: Any, *_: Any) -> Tensor:
        total = torch.stack([p.to(reduce_dtype) for p in self.parts(grad)]).sum(0)
        return (total / self.world).to(dtype)

    def do_all_reduce_grad(self, grad: Tensor, dtype: Any, reduce_dtype: Any, *_: Any) -> Tensor:
        return (self.sum(grad.to(reduce_dtype)) / self.world).to(dtype)

    # bucket level, before and after lowering

    def do_gather_start(
        self, shards: Any, rows: Any, dtype: Any, group: str, key: str, order: Any = None
    ) -> list[Tensor]:
        wholes = [self.whole(s, dtype) for s in shards]
        assert [w.shape[0] for w in wholes] == list(rows)
        return self.later(key, wholes)

    def later(self, key: str, values: Sequence[Tensor]) -> list[Tensor]:
        buffers = [torch.full_like(v, float("nan")) for v in values]
        self.fills[key] = lambda: [b.copy_(v) for b, v in zip(buffers, values)]
        return buffers

    def do_wait_(self, buffers: Any, sources: Any, group: str, key: str, order: Any = None) -> None:
        self.fills.pop(key)()

    def do_reduce_start(
        self, grads: Any, reduce_dtype: Any, group: str, key: str, order: Any = None
    ) -> list[Tensor]:
        wire = [collectives.wire_dtype(g.dtype, reduce_dtype) for g in grads]
        received = [self.parts(g.to(d))[1:] for g, d in zip(grads, wire)]
        empty = [g[slice(*self.owned(g.shape[0]))].to(d)[None][:0] for g, d in zip(grads, wire)]
        return self.later(key, [torch.stack(r) if r else e for r, e in zip(received, empty)])

    def do_reduce_finish(
        self, grads: Any, received: Any, dtype: Any, reduce_dtype: Any, group: str, key: str
    ) -> list[Tensor]:
        self.fills.pop(key)()
        return self.do_mean(grads, received, dtype, reduce_dtype, group)

    def do_mean(
        self, grads: Any, received: Any, dtype: Any, reduce_dtype: Any, group: str
    ) -> list[Tensor]:
        own = [g[slice(*self.owned(g.shape[0]))] for g in grads]
        return [collectives.mean_of_parts(o, r, reduce_dtype, dtype) for o, r in zip(own, received)]

    def do_mean_(self, received: Any, grads: Any, group: str) -> None:
        for parts, grad in zip(received, grads):
            own = grad[slice(*self.owned(grad.shape[0]))]
            parts[0].copy_((own + parts[0]) / 2)

    def do_all_reduce_start(self, grads: Any, reduce_dtype: Any, group: str, key: str) -> Tensor:
        total = self.sum(collectives.flatten(grads, reduce_dtype))
        return self.later(key, [total])[0]

    def do_all_reduce_finish(
        self, grads: Any, flat: Tensor, dtype: Any, group: str, key: str
    ) -> list[Tensor]:
        self.fills.pop(key)()
        return collectives.all_reduced(flat, [g.shape for g in grads], dtype, self.world)

    def do_all_reduce_(self, flat: Tensor, group: str, key: str, order: Any = None) -> None:
        total = self.sum(flat.clone())
        flat.fill_(float("nan"))
        self.fills[key] = lambda: flat.copy_(total)

    def do_publish_(
        self, shards: Any, counts: Any, keys: Any, dtype: Any, group: str, forward: Any, order: Any
    ) -> None:
        assert sum(counts) == len(shards) and len(counts) == len(keys)

    def do_drain_(self, group: str, order: Any) -> None:
        pass

    def do_release(self, fulls: Any, key: str) -> None:
        # Whoever reads a released parameter gets NaN.
        for full in fulls:
            full.fill_(float("nan"))

    def do_order(self) -> Tensor:
        return torch.empty(1, dtype=torch.uint8)

    # the backend's own

    def native(self, value: Tensor) -> Tensor:
        pending = torch.full_like(value, float("nan"))
        self.real[id(pending)] = value
        return pending

    def do_all_gather_into_tensor(self, flat: Tensor, world: int, pg: str) -> Tensor:
        assert world == self.world
        return self.native(torch.cat(self.wire.exchange(self.rank, flat)))

    def do_reduce_scatter_tensor(self, flat: Tensor, op: str, world: int, pg: str) -> Tensor:
        assert (op, world) == ("sum", self.world)
        return self.native(self.sum(flat).chunk(world)[self.rank].clone())

    def do_all_reduce(self, flat: Tensor, op: str, pg: str) -> Tensor:
        assert op == "sum"
        return self.native(self.sum(flat))

    def do_wait_tensor(self, pending: Tensor) -> Tensor:
        return pending.copy_(self.real.pop(id(pending)))


def simulate(modules: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
    """Run one graph per rank, ranks as threads. -> each rank's outputs.

    Asserts that nothing is left in flight."""
    world = len(modules)
    wire, answers, errors = _Wire(world), [None] * world, []

    def run(rank: int) -> None:
        try:
            each = _Rank(modules[rank], rank, world, wire)
            answers[rank] = each.run(*[t.clone() for t in inputs[rank]])
            assert not each.fills and not each.real, "something was issued and never awaited"
        except BaseException as error:
            errors.append(error)
            wire.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return answers


def rows_of(whole: Tensor, world: int, rank: int) -> Tensor:
    first, last = owned_rows(whole.shape[0], world, rank)
    return whole[first:last].clone()
