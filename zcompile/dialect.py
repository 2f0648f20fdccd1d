"""The zero:: operations: what partitioned parameters and gradients mean in a graph.

Two levels, each executable as it stands (a graph break, an eager region or a dump runs them):

| level | op | meaning |
|---|---|---|
| parameter | unshard | shard -> whole parameter in the compute dtype; gradient: reduce_grad |
| | replicate | replicated parameter -> compute dtype; gradient: all_reduce_grad |
| | reduce_grad | whole gradient -> this rank's rows of its mean |
| | all_reduce_grad | gradient of a replicated parameter -> its mean |
| bucket | gather_start, wait_ | all-gather of several parameters, issued and awaited |
| | publish_, drain_ | shards that gathers of this graph read, until its end |
| | reduce_start, reduce_finish | reduce-scatter of several gradients |
| | all_reduce_start, all_reduce_finish | all-reduce of several gradients |
| | mean, mean_ | what a reduce_finish computes once it has waited; mean_ of two ranks, in place |
| | update_ | reduced gradients, complete, for the optimizer that a step's name stands for |
| | release | the gathered parameters of a bucket are not used below |

`order` is a token that waits and all-reduces write and starts read, so that whatever compiles the
graph keeps them in order. (Inductor takes no operation that both writes and returns tensors.)
Group names stand for `comm.Group`s. Nothing here depends on the rank except what a fake
implementation must say about the shape of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from zcompile import collectives, comm, updates
from zcompile.control import fingerprint

LIBRARY = torch.library.Library("zero", "DEF")

SCHEMAS = (
    "unshard(Tensor shard, int rows, ScalarType dtype, ScalarType reduce_dtype, str group, "
    "str name) -> Tensor",
    "replicate(Tensor param, ScalarType dtype, ScalarType reduce_dtype, str group, str name)"
    " -> Tensor",
    "reduce_grad(Tensor grad, ScalarType dtype, ScalarType reduce_dtype, str group, str name)"
    " -> Tensor",
    "all_reduce_grad(Tensor grad, ScalarType dtype, ScalarType reduce_dtype, str group, "
    "str name) -> Tensor",
    "gather_start(Tensor[] shards, int[] rows, ScalarType dtype, str group, str key, "
    "Tensor? order=None) -> Tensor[]",
    "wait_(Tensor(a!)[] buffers, Tensor[] sources, str group, str key, Tensor(b!)? order=None)"
    " -> ()",
    "publish_(Tensor[] shards, int[] counts, str[] keys, ScalarType dtype, str group, "
    "bool forward, Tensor(a!) order) -> ()",
    "drain_(str group, Tensor(a!) order) -> ()",
    "reduce_start(Tensor[] grads, ScalarType reduce_dtype, str group, str key, "
    "Tensor? order=None) -> Tensor[]",
    "reduce_finish(Tensor[] grads, Tensor[] received, ScalarType dtype, ScalarType reduce_dtype, "
    "str group, str key) -> Tensor[]",
    "mean(Tensor[] grads, Tensor[] received, ScalarType dtype, ScalarType reduce_dtype, str group)"
    " -> Tensor[]",
    "mean_(Tensor(a!)[] received, Tensor[] grads, str group) -> ()",
    "all_reduce_start(Tensor[] grads, ScalarType reduce_dtype, str group, str key) -> Tensor",
    "all_reduce_finish(Tensor[] grads, Tensor flat, ScalarType dtype, str group, str key)"
    " -> Tensor[]",
    "all_reduce_(Tensor(a!) flat, str group, str key, Tensor(b!)? order=None) -> ()",
    "update_(Tensor[] grads, Tensor(a!)[] shards, Tensor(b!)[] left, str[] names, str step, "
    "Tensor(c!)? order=None) -> ()",
    "release(Tensor[] fulls, str key) -> ()",
    "order() -> Tensor",
)

for _schema in SCHEMAS:
    LIBRARY.define(_schema)

Implementation = Callable[..., Any]


def _implement(name: str) -> Callable[[Implementation], Implementation]:
    def register(function: Implementation) -> Implementation:
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def _fake(name: str) -> Callable[[Implementation], Implementation]:
    return torch.library.register_fake(f"zero::{name}", lib=LIBRARY)


# One collective for one parameter. The key is free: nothing else is in flight meanwhile.
_ALONE = "alone"


@_implement("unshard")
def _unshard(
    shard: Tensor, rows: int, dtype: torch.dtype, reduce_dtype: torch.dtype, group: str, name: str
) -> Tensor:
    where = comm.find(group)
    agree(where, "all-gather", name, (rows, *shard.shape[1:]), dtype)
    if where.native and where.pg is not None:
        shape = [rows, *shard.shape[1:]]
        flat = collectives.native_gather([shard], [shape], dtype, where.world, where.pg_name)
        comm.count("gather", flat.nbytes // where.world * (where.world - 1))
        return collectives.native_gathered(flat, [shape], where.world)[0]
    fulls = comm.gather_start([shard], [rows], dtype, where, _ALONE)
    comm.wait(where, _ALONE)
    return fulls[0]


@_fake("unshard")
def _(shard: Tensor, rows: int, dtype: torch.dtype, *_: Any) -> Tensor:
    return shard.new_empty((rows, *shard.shape[1:]), dtype=dtype)


@_implement("replicate")
def _replicate(param: Tensor, dtype: torch.dtype, *_: Any) -> Tensor:
    return param.to(dtype, copy=True)


@_fake("replicate")
def _(param: Tensor, dtype: torch.dtype, *_: Any) -> Tensor:
    return param.new_empty(param.shape, dtype=dtype)


@_implement("reduce_grad")
def _reduce_grad(
    grad: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype, group: str, name: str
) -> Tensor:
    where = comm.find(group)
    agree(where, "reduce-scatter", name, grad.shape, reduce_dtype)
    if grad.is_sparse:  # of nn.Embedding(sparse=True)
        grad = grad.to_dense()
    grad = grad.to(collectives.wire_dtype(grad.dtype, reduce_dtype)).contiguous()
    return _reduced([grad], dtype, reduce_dtype, where)[0]


def _reduced(
    grads: list[Tensor], dtype: torch.dtype, reduce_dtype: torch.dtype, where: comm.Group
) -> list[Tensor]:
    """One reduce-scatter of several gradients, now. grads: in the dtype in which they travel."""
    if where.native and where.pg is not None:
        flat = collectives.native_reduce(grads, reduce_dtype, where.world, where.pg_name)
        comm.count("reduce", flat.nbytes * (where.world - 1))
        owned = [last - first for first, last in (where.owned(g.shape[0]) for g in grads)]
        shapes = [g.shape for g in grads]
        return collectives.native_reduced(flat, shapes, owned, dtype, where.world)
    received = comm.reduce_start(grads, where, _ALONE)
    comm.wait(where, _ALONE)
    return _mean(grads, received, dtype, reduce_dtype, where.name)


@_fake("reduce_grad")
def _(grad: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype, group: str, *_: Any) -> Tensor:
    first, last = comm.find(group).owned(int(grad.shape[0]))
    return grad.new_empty((last - first, *grad.shape[1:]), dtype=dtype)


@_implement("all_reduce_grad")
def _all_reduce_grad(
    grad: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype, group: str, name: str
) -> Tensor:
    where = comm.find(group)
    agree(where, "all-reduce", name, grad.shape, reduce_dtype)
    if grad.is_sparse:
        grad = grad.to_dense()
    return _all_reduced([grad], dtype, reduce_dtype, group)[0]


def _all_reduced(
    grads: list[Tensor], dtype: torch.dtype, reduce_dtype: torch.dtype, group: str
) -> list[Tensor]:
    """One all-reduce of several gradients, now."""
    flat = _all_reduce_start(grads, reduce_dtype, group, _ALONE)
    return _all_reduce_finish(grads, flat, dtype, group, _ALONE)


@_fake("all_reduce_grad")
def _(grad: Tensor, dtype: torch.dtype, *_: Any) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


@_implement("gather_start")
def _gather_start(
    shards: list[Tensor],
    rows: list[int],
    dtype: torch.dtype,
    group: str,
    key: str,
    order: Tensor | None = None,
) -> list[Tensor]:
    return comm.gather_start(shards, rows, dtype, comm.find(group), key)


@_fake("gather_start")
def _(shards: list[Tensor], rows: list[int], dtype: torch.dtype, *_: Any) -> list[Tensor]:
    return [s.new_empty((n, *s.shape[1:]), dtype=dtype) for s, n in zip(shards, rows, strict=True)]


@_implement("wait_")
def _wait(
    buffers: list[Tensor], sources: list[Tensor], group: str, key: str, order: Tensor | None = None
) -> None:
    comm.wait(comm.find(group), key)


@_fake("wait_")
@_fake("publish_")
@_fake("drain_")
@_fake("mean_")
@_fake("update_")
def _(*_: Any) -> None:
    return None


@_implement("publish_")
def _publish(
    shards: list[Tensor],
    counts: list[int],
    keys: list[str],
    dtype: torch.dtype,
    group: str,
    forward: bool,
    order: Tensor,
) -> None:
    rest = iter(shards)
    parts = [list(islice(rest, count)) for count in counts]
    comm.publish(parts, keys, dtype, comm.find(group), forward)


@_implement("drain_")
def _drain(group: str, order: Tensor) -> None:
    comm.drain(comm.find(group))


@_implement("reduce_start")
def _reduce_start(
    grads: list[Tensor],
    reduce_dtype: torch.dtype,
    group: str,
    key: str,
    order: Tensor | None = None,
) -> list[Tensor]:
    sent = [grad.to(collectives.wire_dtype(grad.dtype, reduce_dtype)) for grad in grads]
    return comm.reduce_start(sent, comm.find(group), key)


@_fake("reduce_start")
def _(grads: list[Tensor], reduce_dtype: torch.dtype, group: str, *_: Any) -> list[Tensor]:
    where = comm.find(group)
    received = []
    for grad in grads:
        first, last = where.owned(int(grad.shape[0]))
        received.append(received_like(grad, last - first, reduce_dtype, where.world))
    return received


def received_like(grad: Tensor, rows: int, reduce_dtype: torch.dtype, world: int) -> Tensor:
    """An empty buffer for the other ranks' parts of the `rows` of a gradient that a rank owns."""
    dtype = collectives.wire_dtype(grad.dtype, reduce_dtype)
    return grad.new_empty((world - 1, rows, *grad.shape[1:]), dtype=dtype)


@_implement("reduce_finish")
def _reduce_finish(
    grads: list[Tensor],
    received: list[Tensor],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    key: str,
) -> list[Tensor]:
    comm.wait(comm.find(group), key)
    return _mean(grads, received, dtype, reduce_dtype, group)


@_implement("mean")
def _mean(
    grads: list[Tensor],
    received: list[Tensor],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
) -> list[Tensor]:
    where = comm.find(group)
    means = []
    for grad, parts in zip(grads, received, strict=True):
        first, last = where.owned(grad.shape[0])
        means.append(collectives.mean_of_parts(grad[first:last], parts, reduce_dtype, dtype))
    return means


@_fake("mean")
@_fake("reduce_finish")
def _(grads: list[Tensor], received: list[Tensor], dtype: torch.dtype, *_: Any) -> list[Tensor]:
    return [parts.new_empty(parts.shape[1:], dtype=dtype) for parts in received]


@_implement("mean_")
def _mean_in_place(received: list[Tensor], grads: list[Tensor], group: str) -> None:
    where = comm.find(group)
    for parts, grad in zip(received, grads, strict=True):
        first, last = where.owned(grad.shape[0])
        own, dtype = grad[first:last], parts.dtype
        collectives.mean_of_parts(own, parts, dtype, dtype, out=parts[0])


@_implement("all_reduce_start")
def _all_reduce_start(
    grads: list[Tensor], reduce_dtype: torch.dtype, group: str, key: str
) -> Tensor:
    flat = collectives.flatten(grads, reduce_dtype)
    comm.all_reduce_start(flat, comm.find(group), key)
    return flat


@_fake("all_reduce_start")
def _(grads: list[Tensor], reduce_dtype: torch.dtype, *_: Any) -> Tensor:
    return grads[0].new_empty((sum(grad.numel() for grad in grads),), dtype=reduce_dtype)


@_implement("all_reduce_finish")
def _all_reduce_finish(
    grads: list[Tensor], flat: Tensor, dtype: torch.dtype, group: str, key: str
) -> list[Tensor]:
    where = comm.find(group)
    comm.wait(where, key)
    return collectives.all_reduced(flat, [grad.shape for grad in grads], dtype, where.world)


@_fake("all_reduce_finish")
def _(grads: list[Tensor], flat: Tensor, dtype: torch.dtype, *_: Any) -> list[Tensor]:
    return [grad.new_empty(grad.shape, dtype=dtype) for grad in grads]


@_implement("all_reduce_")
def _all_reduce(flat: Tensor, group: str, key: str, order: Tensor | None = None) -> None:
    comm.all_reduce_start(flat, comm.find(group), key)


@_fake("all_reduce_")
def _(*_: Any) -> None:
    return None


@_implement("update_")
def _update(
    grads: list[Tensor],
    shards: list[Tensor],
    left: list[Tensor],
    names: list[str],
    step: str,
    order: Tensor | None = None,
) -> None:
    updates.find(step).receive(names, grads, left)


@_implement("release")
def _release(fulls: list[Tensor], key: str) -> None:
    return None


@_fake("release")
def _(*_: Any) -> None:
    return None


@_implement("order")
@_fake("order")
def _order() -> Tensor:
    return torch.empty(1, dtype=torch.uint8)


def _save_for_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    param, reduce_dtype, group, name = inputs[0], *inputs[-3:]
    ctx.reduction = (param.dtype, reduce_dtype, group, name)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (torch.ops.zero.reduce_grad(grad, *ctx.reduction), *[None] * 5)


def _replicate_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (torch.ops.zero.all_reduce_grad(grad, *ctx.reduction), *[None] * 4)


torch.library.register_autograd(
    "zero::unshard", _unshard_backward, setup_context=_save_for_reduction, lib=LIBRARY
)
torch.library.register_autograd(
    "zero::replicate", _replicate_backward, setup_context=_save_for_reduction, lib=LIBRARY
)


def agree(
    group: comm.Group, what: str, name: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Outside of a planned graph each collective is checked on its own before it starts."""
    if group.control is None:
        return
    line = f"{what} of {name} {tuple(shape)} {dtype}, outside of a compiled graph"
    group.control.agree(fingerprint([line]), lambda: [line])


def average(group: str, sharded: bool, specs: Sequence[Any], grads: list[Tensor]) -> list[Tensor]:
    """Average whole gradients of several parameters over the ranks: reduce_grad or all_reduce_grad
    of all of them in one collective, in the dtype that they have. specs: ParamSpecs."""
    where, dtype = comm.find(group), grads[0].dtype
    names = ", ".join(f"{s.name} {tuple(g.shape)}" for s, g in zip(specs, grads, strict=True))
    agree(where, "averaging", names, (), dtype)
    if not sharded:
        return _all_reduced(grads, dtype, dtype, group)
    return _reduced(grads, dtype, dtype, where)


# Names for passes, so that none of them spells an op as a string.
UNSHARD = torch.ops.zero.unshard.default
REPLICATE = torch.ops.zero.replicate.default
REDUCE_GRAD = torch.ops.zero.reduce_grad.default
ALL_REDUCE_GRAD = torch.ops.zero.all_reduce_grad.default
GATHER_START = torch.ops.zero.gather_start.default
WAIT = torch.ops.zero.wait_.default
PUBLISH = torch.ops.zero.publish_.default
DRAIN = torch.ops.zero.drain_.default
REDUCE_START = torch.ops.zero.reduce_start.default
REDUCE_FINISH = torch.ops.zero.reduce_finish.default
MEAN = torch.ops.zero.mean.default
MEAN_IN_PLACE = torch.ops.zero.mean_.default
ALL_REDUCE_START = torch.ops.zero.all_reduce_start.default
ALL_REDUCE_FINISH = torch.ops.zero.all_reduce_finish.default
ALL_REDUCE = torch.ops.zero.all_reduce_.default
UPDATE = torch.ops.zero.update_.default
ORDER = torch.ops.zero.order.default
RELEASE = torch.ops.zero.release.default
