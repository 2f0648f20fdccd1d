"""Host memory that gathers and reductions use again instead of asking the system for it.

A fresh page costs more than copying into it (the system clears it first), and a training step asks
for the same sizes over and over. A block returns here when the last tensor in it dies, wherever
that was; nothing has to be released by hand. On a GPU the caching allocator does the same.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

# Smaller tensors come out of the allocator's own free lists, with no fresh pages.
SMALLEST_BYTES = 2**20
# Vector loads and the network stack like whole cache lines.
ALIGNMENT = 64
# What is idle raises the peak by as much, and a fresh block costs little where pages are huge. So
# this much is kept, in the blocks that were given back last. A larger one is kept alone, until the
# next request: a parameter that is last in forward is first in backward.
IDLE_BYTES = 32 * 2**20

_idle: list[np.ndarray] = []  # in the order in which they were given back, the larger one last


def empty(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the device of `like`; on the CPU its memory is used again."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if like.device.type != "cpu" or size < SMALLEST_BYTES:
        return like.new_empty(shape, dtype=dtype)
    block = _block(size + ALIGNMENT)
    # The tensor holds the view, never the block: when the tensor's memory dies so does the view.
    view = block[-block.ctypes.data % ALIGNMENT :][:size]
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.from_numpy(view).view(dtype).view(shape)


def forget() -> None:
    """Give back what is idle."""
    _idle.clear()


def _block(nbytes: int) -> np.ndarray:
    same = [index for index, block in enumerate(_idle) if block.nbytes == nbytes]
    # numpy asks for huge pages, which torch does not: 512 times fewer page faults.
    block = _idle.pop(same[-1]) if same else np.empty(nbytes, np.uint8)
    _idle[:] = [each for each in _idle if each.nbytes <= IDLE_BYTES]
    return block


def _give_back(block: np.ndarray) -> None:
    every = [*_idle, block]
    small = [each for each in every if each.nbytes <= IDLE_BYTES]
    large = [each for each in every if each.nbytes > IDLE_BYTES]
    while sum(each.nbytes for each in small) > IDLE_BYTES:
        small.pop(0)
    _idle[:] = [*small, *large[-1:]]
