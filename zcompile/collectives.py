"""The arithmetic around a collective, as plain functions of tensors.

Eager dialect ops call them, and the lowering pass traces them into graphs, so that both compute
the same. Shapes: a bucket holds parameters of (rows[i], *rest[i]); world = N ranks; a chunk is
ceil(rows / N) rows, the largest shard. Flat native buffers hold every parameter's chunk, padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zcompile import buffers
from zcompile.layout import chunk_rows

BLOCK = 2**18  # elements whose sum stays in a core's cache

_c10d = torch.ops._c10d_functional
Shape = Sequence[int]


def native_gather(
    shards: Sequence[torch.Tensor], shapes: Sequence[Shape], dtype: torch.dtype, world: int, pg: str
) -> torch.Tensor:
    """Issue an all-gather of one flat padded buffer. -> (world * sum of chunk sizes,), in flight"""
    parts = []
    for shard, shape in zip(shards, shapes, strict=True):
        missing = chunk_rows(shape[0], world) - shard.shape[0]
        flat = shard.to(dtype).reshape(-1)
        parts.append(_pad(flat, missing * math.prod(shape[1:])))
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _c10d.all_gather_into_tensor(flat, world, pg)


def native_gathered(flat: torch.Tensor, shapes: Sequence[Shape], world: int) -> list[torch.Tensor]:
    """Wait for `native_gather` and cut it into parameters of `shapes`."""
    by_rank = _c10d.wait_tensor(flat).view(world, -1)
    fulls, start = [], 0
    for shape in shapes:
        size = chunk_rows(shape[0], world) * math.prod(shape[1:])
        piece = by_rank.narrow(1, start, size).reshape(-1)
        fulls.append(piece.narrow(0, 0, math.prod(shape)).view(shape))
        start += size
    return fulls


def native_reduce(
    grads: Sequence[torch.Tensor], reduce_dtype: torch.dtype, world: int, pg: str
) -> torch.Tensor:
    """Issue a reduce-scatter (sum) of one flat padded buffer. -> (sum of chunks,), in flight"""
    parts = []
    for grad in grads:
        missing = chunk_rows(grad.shape[0], world) * world - grad.shape[0]
        flat = grad.to(reduce_dtype).reshape(-1)
        parts.append(_pad(flat, missing * math.prod(grad.shape[1:])).view(world, -1))
    flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return _c10d.reduce_scatter_tensor(flat.reshape(-1), "sum", world, pg)


def native_reduced(
    flat: torch.Tensor,
    shapes: Sequence[Shape],
    owned: Sequence[int],
    dtype: torch.dtype,
    world: int,
) -> list[torch.Tensor]:
    """Wait for `native_reduce`, average, and cut out this rank's `owned[i]` rows of each."""
    flat = _c10d.wait_tensor(flat)
    shards, start = [], 0
    for shape, rows in zip(shapes, owned, strict=True):
        row = math.prod(shape[1:])
        piece = flat.narrow(0, start, rows * row).view(rows, *shape[1:])
        shards.append((piece * (1.0 / world)).to(dtype))
        start += chunk_rows(shape[0], world) * row
    return shards


def native_all_reduce(
    grads: Sequence[torch.Tensor], reduce_dtype: torch.dtype, pg: str
) -> torch.Tensor:
    """Issue an all-reduce (sum) of one flat buffer. -> (elements,), in flight"""
    return _c10d.all_reduce(flatten(grads, reduce_dtype), "sum", pg)


def flatten(grads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Copy tensors behind each other into one new flat buffer of `dtype`."""
    return torch.cat([grad.to(dtype).reshape(-1) for grad in grads])


def all_reduced(
    flat: torch.Tensor, shapes: Sequence[Shape], dtype: torch.dtype, world: int
) -> list[torch.Tensor]:
    """Average a summed flat buffer and cut it into tensors of `shapes`."""
    means, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        piece = flat.narrow(0, start, size).view(shape)
        means.append((piece * (1.0 / world)).to(dtype))
        start += size
    return means


def mean_of_parts(
    own: torch.Tensor,
    received: torch.Tensor,
    reduce_dtype: torch.dtype,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average this rank's rows of a gradient with the other ranks' parts of them.

    own: (rows, *rest); received: (world - 1, rows, *rest) -> (rows, *rest) in `dtype`, or `out`,
    which may be the first of the parts. Every part is widened to `reduce_dtype` before it is added,
    so parts may travel in a narrower dtype without rounding the sum. Block by block, so that a sum
    is still in the cache when it is divided.
    """
    if out is None:
        out = buffers.empty(tuple(own.shape), own, dtype)
    to, mine = out.view(-1), own.reshape(-1)
    parts = [part.reshape(-1) for part in received]
    for first in range(0, to.numel(), BLOCK):
        here = slice(first, first + BLOCK)
        into = to[here] if dtype == reduce_dtype else None
        total = mine[here].to(reduce_dtype)
        for part in parts:
            total = torch.add(total, part[here], out=into)
        torch.mul(total, 1.0 / (len(parts) + 1), out=to[here])
    return out


def mean_in_place(
    world: int, wire: torch.dtype, reduce_dtype: torch.dtype, dtype: torch.dtype
) -> bool:
    """Whether a mean is written over what was received: of one other rank, without a cast."""
    return world == 2 and wire == reduce_dtype == dtype


def all_reduce_bytes(nbytes: int, world: int) -> int:
    """What each rank sends for an all-reduce of `nbytes`: a reduce-scatter and an all-gather."""
    return 2 * nbytes * (world - 1) // world


def wire_dtype(grad: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of a gradient travel point to point: never wider than either."""
    return grad if grad.itemsize <= reduce_dtype.itemsize else reduce_dtype


def _pad(flat: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
