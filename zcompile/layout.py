"""Which rows of a parameter a rank owns: torch.chunk's rule, which DTensor's Shard(0) follows."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chunk_rows(rows: int, world: int) -> int:
    """Rows of the largest shard: ceil(rows / world)."""
    return -(-rows // world)


def largest_shard(shape: Sequence[int], world: int) -> int:
    """Elements of the largest shard of a tensor of `shape`: the same on every rank."""
    return chunk_rows(shape[0], world) * math.prod(shape[1:])


def owned_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """First and one-past-last row that `rank` owns; empty for the ranks past the end."""
    chunk = chunk_rows(rows, world)
    first = min(rank * chunk, rows)
    return first, min(first + chunk, rows)
