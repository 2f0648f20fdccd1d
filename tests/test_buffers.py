"""Host memory is used again, and little is kept while nothing uses it."""

import pytest
import torch

from zcompile import buffers

KIB = 2**10
LIKE = torch.empty(0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(buffers, "SMALLEST_BYTES", 4 * KIB)
    monkeypatch.setattr(buffers, "IDLE_BYTES", 64 * KIB)
    monkeypatch.setattr(buffers, "_idle", [])


def empty(kib):
    return buffers.empty((kib, KIB // 4), LIKE, torch.float32)


def kept():
    """KiB, of blocks that are idle."""
    return sum(block.nbytes // KIB for block in buffers._idle)


@pytest.mark.parametrize("kib", [8, 100])
def test_memory_of_a_dead_tensor_is_used_again(kib):
    first = empty(kib)
    address, part = first.data_ptr(), first[1:2]
    assert first.shape == (kib, KIB // 4) and address % buffers.ALIGNMENT == 0
    del first
    assert empty(kib).data_ptr() != address, "a view of it is alive"
    del part
    assert empty(kib).data_ptr() == address


def test_two_live_tensors_never_share_memory():
    tensors = [empty(kib) for kib in (8, 8, 100, 100)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [t.unique().tolist() for t in tensors] == [[0], [1], [2], [3]]


def test_so_much_is_kept_in_the_blocks_that_were_used_last():
    tensors = [empty(kib) for kib in (40, 20, 30)]
    for _ in range(3):
        del tensors[0]
    assert kept() == 50, "20 and 30, not 40"


def test_a_larger_block_is_kept_until_the_next_request():
    small, large = empty(20), empty(100)
    del small, large
    assert kept() == 120
    other = empty(8)
    assert kept() == 20
    del other
    large, larger = empty(100), empty(200)
    del large, larger
    assert kept() == 20 + 8 + 200


def test_nothing_is_kept_once_it_is_forgotten():
    tensor = empty(8)
    empty(8)
    buffers.forget()
    assert kept() == 0
    del tensor
    assert kept() == 8


def test_small_requests_are_the_allocators():
    empty(2)
    assert kept() == 0
