"""Where in a sequence of random numbers the elements of a parameter stand, for a step that rounds
at random.

What an element draws in a step does not depend on which rank holds it: replicas stay equal, a
sharded parameter is rounded as the whole one is, and a run that goes on from a checkpoint rounds as
the one that was not interrupted, where the optimizer counts its steps. Sequences begin at a hash of
32 bits: where two overlap, two elements round alike, and neither is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from zcompile import comm
from zcompile.parameter import ZeroParameter


@dataclass
class Rounding:
    """taken: steps of parameters whose state has no count called "step"."""

    taken: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def take(self, param: Tensor, number: int, state: Mapping[str, Any]) -> int:
        """32 bits: where this rank's part of a parameter begins in its next step, which is counted.
        number: of the parameter among the optimizer's."""
        step: Any = state.get("step")
        if not (type(step) in (int, float) or (isinstance(step, Tensor) and step.dim() == 0)):
            step = self.taken.get(param, 0)
            self.taken[param] = step + 1
        return (_mixed(_mixed(number + 1) ^ int(step)) + _first(param)) % 2**32


def _mixed(x: int) -> int:
    """A hash of 32 bits: lowbias32 of C. Wellons."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def _first(param: Tensor) -> int:
    """The number of a part's first element in the whole."""
    if type(param) is ZeroParameter:
        if not param.spec.sharded:
            return 0
        row, _ = comm.find(param.spec.group).owned(param.spec.shape[0])
        return row * (param.numel() // max(param.spec.shape[0], 1))
    if isinstance(param, DTensor):  # of another library: other parts, other numbers is enough
        where = zip(param.device_mesh.get_coordinate() or (), param.placements, strict=True)
        parts = [at if placed.is_shard() else 0 for at, placed in where]
        return _mixed(sum(at << 12 * dim for dim, at in enumerate(parts)))
    return 0
