"""The sum of the squares of many tensors, in one pass: the same bits on any number of threads.

Squares are taken and added in double precision, where no finite float32 overflows: the sum is
finite if and only if every element is. Every PIECE elements become one number, and so do those,
until one is left.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from zcompile.codegen import build
from zcompile.codegen.kernel import PIECE, Kernel, Line, Load, Sum
from zcompile.errors import ZeroWarning

_WIDE = torch.float64


def squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum over all elements of all `tensors`, which are on `device`: a float64 of shape ()."""
    tensors = [_in_a_row(t) for t in tensors if t.numel()]
    sums = torch.empty(sum(map(_pieces, tensors)), dtype=_WIDE, device=device)
    places = sums.split([_pieces(t) for t in tensors])
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        some = [(t, place) for t, place in zip(tensors, places, strict=True) if t.dtype == dtype]
        _reduce(squared(dtype), *zip(*some, strict=True))
    while sums.numel() > 1:
        less = torch.empty(_pieces(sums), dtype=_WIDE, device=device)
        _reduce(ADDED, [sums], [less])
        sums = less
    return sums.sum()  # of one, or of none


def squared(dtype: torch.dtype) -> Kernel:
    """The first stage, over what is kept in `dtype`."""
    body = (Line("square", "mul", ("x", "x")),)
    about = (f"Squares of {str(dtype).removeprefix('torch.')} elements, added in pieces",)
    name = "sum_of_squares"
    return Kernel(name, (Load("x", dtype),), (), body, (), _WIDE, about, (Sum("sums", "square"),))


ADDED = Kernel(
    "sum_of_sums", (Load("x", _WIDE),), (), (), (), _WIDE,
    ("The sums of a stage before, added in pieces",), (Sum("sums", "x"),),
)  # fmt: skip


def _in_a_row(tensor: Tensor) -> Tensor:
    """Its elements as they lie, in any order: a view, unless there are gaps between them. Of a
    complex tensor the real and imaginary parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    reached = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride != reached:
            return tensor.contiguous()
        reached *= extent
    return tensor.as_strided((tensor.numel(),), (1,))


def _pieces(tensor: Tensor) -> int:
    return -(-tensor.numel() // PIECE)


def _reduce(kernel: Kernel, tensors: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    run = _built(kernel, tensors[0].device)
    if run is None:
        for tensor, places in zip(tensors, sums, strict=True):
            _by_torch(kernel, tensor, places)
        return
    addresses = torch.tensor([[t.data_ptr() for t in some] for some in (tensors, sums)])
    counts = torch.tensor([t.numel() for t in tensors])
    run(addresses, counts, torch.empty(len(counts), 0, dtype=_WIDE))


@functools.cache
def _built(kernel: Kernel, device: torch.device) -> build.Run | None:
    try:
        return build.on(kernel, device)
    except build.CannotBuild as error:
        warnings.warn(
            f"norms are computed by torch, with a copy in double precision: {error}",
            ZeroWarning,
            stacklevel=7,
        )
        return None


def _by_torch(kernel: Kernel, tensor: Tensor, sums: Tensor) -> None:
    """Where no compiler is: piece by piece too, with a copy of the tensor in double precision."""
    wide = tensor.to(_WIDE)
    if kernel.body:
        wide = wide.square()
    wide = torch.nn.functional.pad(wide, (0, -wide.numel() % PIECE))
    torch.sum(wide.view(-1, PIECE), 1, out=sums)
