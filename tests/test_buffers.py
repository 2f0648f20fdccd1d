"""Host memory is used again: small blocks for ever, a large one until the next request."""

import pytest
import torch

from zcompile import buffers

KIB = 2**10
LIKE = torch.empty(0)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(buffers, "SMALLEST_BYTES", 4 * KIB)
    monkeypatch.setattr(buffers, "LARGEST_BYTES", 64 * KIB)
    monkeypatch.setattr(buffers, "_free", {})
    monkeypatch.setattr(buffers, "_last_large", [])


def empty(kib):
    return buffers.empty((kib, KIB // 4), LIKE, torch.float32)


def kept():
    return sum(len(each) for each in buffers._free.values()), len(buffers._last_large)


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


def test_a_large_block_is_kept_until_the_next_request_only():
    large = empty(100)
    del large
    assert kept() == (0, 1)
    small = empty(8)
    assert kept() == (0, 0)
    del small
    assert kept() == (1, 0)


def test_small_requests_are_the_allocators():
    del_me = empty(2)
    del del_me
    assert kept() == (0, 0)
