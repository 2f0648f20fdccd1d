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
# A larger one, kept while it is not used, would raise the peak by more than its fresh pages cost.
# It is kept until the next request: a parameter that is last in forward is first in backward.
LARGEST_BYTES = 64 * 2**20
# Vector loads and the network stack like whole cache lines.
ALIGNMENT = 64

_free: dict[int, list[np.ndarray]] = {}
_last_large: list[np.ndarray] = []  # at most one


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


def _block(nbytes: int) -> np.ndarray:
    kept = _free.get(nbytes) or [each for each in _last_large if each.nbytes == nbytes]
    _last_large.clear()
    # numpy asks for huge pages, which torch does not: 512 times fewer page faults.
    return kept.pop() if kept else np.empty(nbytes, np.uint8)


def _give_back(block: np.ndarray) -> None:
    if block.nbytes <= LARGEST_BYTES:
        _free.setdefault(block.nbytes, []).append(block)
    else:
        _last_large[:] = [block]
