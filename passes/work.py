"""What one operation costs: its arithmetic, and the memory that it takes while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zcompile.passes.graph import hint

_aten = torch.ops.aten


def flops(node: fx.Node) -> float:
    """Of a matrix product, a convolution or attention; 0 for all others."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _CPU_ATTENTION:
        # Two matrix products of (queries, keys, width) forward, five backward.
        query, key = (_hinted(n.meta["val"]) for n in _queries(node))
        return _CPU_ATTENTION[packet] * 2.0 * query.numel() * key.shape[-2]
    count = flop_registry.get(packet)
    if count is None:
        return 0.0
    args = fx.map_arg(node.args, lambda n: _hinted(n.meta.get("val")))
    kwargs = fx.map_arg(node.kwargs, lambda n: _hinted(n.meta.get("val")))
    try:
        return float(count(*args, **kwargs, out_val=_hinted(node.meta.get("val"))))
    except Exception:  # a formula that does not know this form of the call
        return 0.0


def workspace(node: fx.Node) -> int:
    """Bytes that each thread takes: of attention on a CPU, by ATen's cpu/FlashAttentionKernel.cpp.

    Of a block of queries and one of keys the products, twice in backward; forward also the block's
    sums, maxima and result, all in float32 or wider. Not counted: a copy of a gradient that does
    not lie as its result does; what oneDNN's products in bfloat16 take, and keys and values packed
    for them.
    """
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _CPU_ATTENTION:
        return 0
    query, key = (_hinted(n.meta["val"]) for n in _queries(node))
    length, width = query.shape[-2:]
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    products = rows * min(key.shape[-2], 512)
    wide = max(4, query.element_size())
    low = products * query.element_size() if query.element_size() < 4 else 0
    if packet is _ATTENTION_BACKWARD:
        return wide * (2 * products + rows) + 2 * low
    return wide * (products + 2 * rows + rows * width) + low


def _queries(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first = 1 if node.target.overloadpacket is _ATTENTION_BACKWARD else 0
    return node.args[first : first + 2]


_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_CPU_ATTENTION = {_aten._scaled_dot_product_flash_attention_for_cpu: 2, _ATTENTION_BACKWARD: 5}


def _hinted(value: Any) -> Any:
    """A meta tensor of the traced sizes in place of a fake one with symbolic sizes."""
    if isinstance(value, torch.Tensor):
        return torch.empty([hint(n) for n in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_hinted(v) for v in value)
    return hint(value) if isinstance(value, torch.SymInt) else value
