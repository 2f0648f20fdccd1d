"""A shard in the dtype that it is gathered in, beside the shard itself, where ranks share a host.

The others read it as it lies, whenever they come to it: no cast stands before a gather and nobody
waits. It is made anew at the beginning of each forward graph, whoever wrote the shard since, and
backward gathers what forward did. (Nothing tells reliably that a shard has not changed: torch's
fused optimizers, for one, write behind autograd's versions.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def fresh(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """The shard's copy in `dtype`, as the shard is now; the shard itself if that is its dtype."""
    if shard.dtype == dtype:
        return shard
    copy: Tensor | None = _copies.get(shard)
    if copy is None or copy.dtype != dtype:
        with torch.inference_mode(False):  # it outlives an evaluation
            copy = _copies[shard] = torch.empty_like(shard, dtype=dtype, requires_grad=False)
    with torch.no_grad():
        return copy.copy_(shard)


def last(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """The copy as it was last made."""
    if shard.dtype == dtype:
        return shard
    copy: Tensor | None = _copies.get(shard)
    return copy if copy is not None and copy.dtype == dtype else fresh(shard, dtype)
