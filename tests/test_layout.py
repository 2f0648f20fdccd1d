"""Who owns which rows: torch.chunk's rule, as DTensor's Shard(0) has it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from zcompile.comm import Group
from zcompile.layout import chunk_rows, owned_rows

ROWS = st.integers(0, 200)
WORLDS = st.integers(1, 17)


@pytest.mark.parametrize(
    ("rows", "world", "owned"),
    [
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (5, 3, [(0, 2), (2, 4), (4, 5)]),
        (4, 3, [(0, 2), (2, 4), (4, 4)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
        (0, 3, [(0, 0), (0, 0), (0, 0)]),
        (7, 1, [(0, 7)]),
    ],
)
def test_rows_by_rank(rows, world, owned):
    assert [owned_rows(rows, world, rank) for rank in range(world)] == owned


@given(ROWS, WORLDS)
def test_every_row_has_one_owner_and_ranks_follow_each_other(rows, world):
    owned = [owned_rows(rows, world, rank) for rank in range(world)]
    assert [row for first, last in owned for row in range(first, last)] == list(range(rows))
    assert all(first <= last for first, last in owned)


@given(ROWS, WORLDS)
def test_the_chunk_is_the_largest_shard(rows, world):
    sizes = [last - first for first, last in (owned_rows(rows, world, r) for r in range(world))]
    assert chunk_rows(rows, world) == max(sizes) == sizes[0]


@given(st.integers(1, 200), WORLDS)
def test_the_rule_is_that_of_torch_chunk(rows, world):
    chunks = torch.arange(rows).chunk(world)
    for rank in range(world):
        first, last = owned_rows(rows, world, rank)
        want = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(first, last)) == want


@given(st.integers(1, 200), WORLDS)
def test_the_rule_is_that_of_dtensor(rows, world):
    for rank in range(world):
        size, offset = Shard.local_shard_size_and_offset(rows, world, rank)
        first, last = owned_rows(rows, world, rank)
        assert (last - first, first) == (size, min(offset, rows))


def test_a_group_says_what_it_or_a_peer_owns():
    group = Group("paper", rank=1, world=3)
    assert group.owned(5) == (2, 4)
    assert group.owned(5, 2) == (4, 5)
    assert group.peers() == [0, 2]
