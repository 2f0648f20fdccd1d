"""A kernel as Triton: one program per block of elements, the same source for NVIDIA and AMD.

Elements come in segments (a parameter's shard each), whose buffers lie anywhere: a table holds
their addresses. A program works on one block of one segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from zcompile.codegen.kernel import INFIX, RANDOM, Kernel, Line, Operand, salt
from zcompile.codegen.trace import NotElementwise

_HEAD = """\
import triton
import triton.language as tl
"""

_ROUND = '''

@triton.jit
def to_bf16(value, BY_HAND: tl.constexpr):
    """Round to nearest even. By hand for the interpreter, which truncates."""
    if BY_HAND:
        bits = value.to(tl.uint32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        even = tl.where(value == value, even, 0x7FC00000)
        value = even.to(tl.uint32).to(tl.float32, bitcast=True)
    return value.to(tl.bfloat16)
'''

_AT_RANDOM = '''

@triton.jit
def to_bf16_at_random(value, at):
    """Round to either neighbour, to each as often as the value is near it, by 32 bits of a counter
    that are as good as random (C. Wellons, lowbias32)."""
    x = (at ^ (at >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = ((bits + (x >> 16)) >> 16) << 16
    rounded = tl.where(value == value, rounded, 0x7FC00000)
    return rounded.to(tl.uint32).to(tl.float32, bitcast=True).to(tl.bfloat16)
'''

_TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
_SPELLED = {
    "div": "tl.div_rn({0}, {1})",
    "neg": "-{0}",
    "not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "abs": "tl.abs({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "sigmoid": "tl.sigmoid({0})",
    "tanh": "2.0 * tl.sigmoid(2.0 * {0}) - 1.0",
    "sign": "tl.where({0} > 0, 1.0, 0.0) - tl.where({0} < 0, 1.0, 0.0)",
    "isnan": "{0} != {0}",
    "isinf": 'tl.abs({0}) == float("inf")',
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}


def emit(kernel: Kernel) -> str:
    """The source of a module with one kernel, called like it.

    Its arguments: addresses (int64, buffers x segments, buffers as in `kernel.buffers()`), counts
    (elements of each segment, int64), scalars (segments x scalars, in `kernel.compute`), and of
    each program the segment (int32) and the first element in it (int64, a multiple of BLOCK).
    ALIGNED: every address is a multiple of 16. BY_HAND: bf16 is rounded without the GPU's own cast.

    Raises:
        NotElementwise: an operation has no equal in Triton.
    """
    return "\n".join(_lines(kernel)) + "\n"


def _lines(kernel: Kernel) -> Iterator[str]:
    wide = _TYPES[kernel.compute]
    buffers = kernel.buffers()
    addresses = [f"{buffer}_at" for buffer in buffers]
    values = ", ".join([*addresses, *kernel.scalars])
    if kernel.about:
        yield '"""' + "\n".join(kernel.about) + '\n"""\n'
    yield _HEAD.rstrip()
    if any(store.dtype == torch.bfloat16 and not store.random for store in kernel.stores):
        yield _ROUND.rstrip()
    random = any(store.random for store in kernel.stores)
    if random:
        yield _AT_RANDOM.rstrip()
    yield "\n\n@triton.jit"
    here = ", here" if random else ""
    yield f"def elements({values}{here}, inside, BY_HAND: tl.constexpr):"
    for load in kernel.loads:
        cast = f".to({wide})" if load.dtype != kernel.compute else ""
        yield f"    {load.buffer} = tl.load({load.buffer}_at, mask=inside){cast}"
    for line in kernel.body:
        yield f"    {line.name} = {_expression(line)}"
    if random:
        low, high = RANDOM
        yield f"    begin = {low}.to(tl.uint32) + ({high}.to(tl.uint32) << 16)"
        yield "    at = begin + here.to(tl.uint32)"
    for index, store in enumerate(kernel.stores):
        value = f"to_bf16({store.value}, BY_HAND)" if store.dtype == torch.bfloat16 else store.value
        if store.random:
            value = f"to_bf16_at_random({store.value}, at ^ {salt(index):#x})"
        yield f"    tl.store({store.buffer}_at, {value}, mask=inside)"
    for total in kernel.sums:
        # What lies outside was read as anything.
        yield f"    {total.buffer} = {total.value}"
        yield "    if inside is not None:"
        yield f"        {total.buffer} = tl.where(inside, {total.buffer}, 0.0)"
        yield f"    tl.store({total.buffer}_at, tl.sum({total.buffer}))"
    yield "\n\n@triton.jit"
    yield f"def {kernel.name}("
    yield "    addresses, counts, scalars, segment_of, first_of, segments,"
    yield "    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, BY_HAND: tl.constexpr,"
    yield "):"
    yield "    segment = tl.load(segment_of + tl.program_id(0))"
    yield "    first = tl.multiple_of(tl.load(first_of + tl.program_id(0)), BLOCK)"
    yield "    count = tl.load(counts + segment)"
    yield "    here = first + tl.arange(0, BLOCK)"
    for index, (buffer, dtype) in enumerate(buffers.items()):
        pointer = f"tl.pointer_type({_TYPES[dtype]})"
        address = f"tl.load(addresses + {index} * segments + segment)"
        yield f"    {buffer}_at = {address}.to({pointer})"
    yield "    if ALIGNED:"
    # As many elements of every buffer at a time: of more of the narrower ones, values would have to
    # change threads, through shared memory.
    elements = kernel.elements()
    width = 16 // max(dtype.itemsize for dtype in elements.values())
    for buffer, dtype in elements.items():
        yield f"        {buffer}_at = tl.multiple_of({buffer}_at, {width * dtype.itemsize})"
    for index, scalar in enumerate(kernel.scalars):
        yield f"    {scalar} = tl.load(scalars + segment * {len(kernel.scalars)} + {index})"
    each = [f"{buffer}_at + {'here' if buffer in elements else 'piece'}" for buffer in buffers]
    given = ", ".join([*each, *kernel.scalars]) + here
    if kernel.sums:
        yield "    piece = first // BLOCK"
    yield "    if first + BLOCK <= count:  # without a mask, every access is 16 bytes wide"
    yield f"        elements({given}, None, BY_HAND)"
    yield "    else:"
    yield f"        elements({given}, here < count, BY_HAND)"


def _expression(line: Line) -> str:
    args = [_operand(a) for a in line.args]
    if line.op in INFIX:
        return f"{args[0]} {INFIX[line.op]} {args[1]}"
    if line.op not in _SPELLED:
        raise NotElementwise(f"{line.op} has no equal in Triton")
    return _SPELLED[line.op].format(*args)


def _operand(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    return repr(operand) if math.isfinite(operand) else f'float("{operand}")'
