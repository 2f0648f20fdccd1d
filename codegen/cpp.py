"""A kernel as C++: one pass over memory, vectorised by the compiler (`omp simd`).

Elements come in segments (a parameter's shard each), whose buffers lie anywhere: the function gets
a table of addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from zcompile.codegen.kernel import INFIX, OPS, PIECE, RANDOM, Kernel, Line, Operand, salt

_STORED = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "uint16_t",
    torch.float16: "_Float16",
}

_PRELUDE = """\
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
"""

# Elements. One block asks for the memory of the fourth after it: the processor's own prefetching,
# over four arrays read and three written, leaves a tenth of the bandwidth unused.
_BLOCK = 64

_PREFETCH = f"""
template <int written, class T> static inline void prefetch(const T* block) {{
  const char* ahead = reinterpret_cast<const char*>(block + {4 * _BLOCK});
  for (size_t line = 0; line < {_BLOCK} * sizeof(T); line += 64)
    __builtin_prefetch(ahead + line, written);
}}
"""

_FROM_BF16 = """
static inline float from_bf16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
"""

_TO_BF16 = """
// Round to nearest even; a NaN stays one.
static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
"""

_AT_RANDOM = """
// 32 bits of a counter, as good as random (C. Wellons, lowbias32).
static inline uint32_t random_bits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Round to either neighbour, to each as often as the value is near it; a NaN stays one.
static inline uint16_t to_bf16_at_random(float value, uint32_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + (random >> 16)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
"""

_INFIX = {**INFIX, "div": "/"}
_SPELLED = {
    "neg": "-{0}",
    "not": "!{0}",
    "where": "{0} ? {1} : {2}",
    "reciprocal": "{one} / {0}",
    "rsqrt": "{one} / std::sqrt({0})",
    "sigmoid": "{one} / ({one} + std::exp(-{0}))",
    "sign": "({0} > 0) - ({0} < 0)",
    "isnan": "{0} != {0}",
    "isinf": "{0} - {0} != {0} - {0} && {0} == {0}",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
}

_EXTREMES = """
// A NaN on either side is the answer, as in torch.
template <class T> static inline T larger(T x, T y) { return x > y || x != x ? x : y; }
template <class T> static inline T smaller(T x, T y) { return x < y || x != x ? x : y; }
"""

_ENTRY = """
extern "C" void {name}(void* const* addresses, const int64_t* counts, const double* scalars,
                       int64_t segments, int threads) {{
  // A segment is taken in units of {unit} elements, the last one shorter.
  const auto units = [&](int64_t s) {{ return (counts[s] + {last}) / {unit}; }};
  int64_t total = 0;
  for (int64_t s = 0; s < segments; ++s) total += units(s);
  const int64_t share = (total + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int thread = 0; thread < threads; ++thread) {{
    const int64_t first = std::min(share * thread, total), last = std::min(first + share, total);
    for (int64_t s = 0, begin = 0; s < segments; begin += units(s++)) {{
      const int64_t low = std::max(first - begin, int64_t(0)) * {unit};
      const int64_t high = std::min((last - begin) * {unit}, counts[s]);
      if (low < high)
        piece(
            {arguments});
    }}
  }}
}}
"""

assert PIECE % _BLOCK == 0  # no block belongs to two sums

_VECTOR = 16  # elements, a cache line of float32: threads share none within a segment


def emit(kernel: Kernel) -> str:
    """The source of `extern "C" void <name>(...)`.

    Arguments: addresses (buffers x segments, buffers as in `kernel.buffers()`), counts (elements of
    each segment), scalars (segments x scalars, doubles), segments, threads.
    """
    return "\n".join(_lines(kernel)) + "\n"


def _lines(kernel: Kernel) -> Iterator[str]:
    real = "double" if kernel.compute == torch.float64 else "float"
    elements = kernel.elements()
    stored = {store.buffer for store in kernel.stores}
    for about in kernel.about:
        yield f"// {about}"
    yield _PRELUDE
    yield _PREFETCH
    if any(load.dtype == torch.bfloat16 for load in kernel.loads):
        yield _FROM_BF16
    if any(store.dtype == torch.bfloat16 and not store.random for store in kernel.stores):
        yield _TO_BF16
    random = any(store.random for store in kernel.stores)
    if random:
        yield _AT_RANDOM
    if any(line.op in ("maximum", "minimum") for line in kernel.body):
        yield _EXTREMES
    pointers = {
        buffer: f"{'' if buffer in stored else 'const '}{_STORED[dtype]}*"
        for buffer, dtype in elements.items()
    }
    pointers |= {total.buffer: f"{real}*" for total in kernel.sums}
    parameters = [f"{pointer} __restrict {buffer}_at" for buffer, pointer in pointers.items()]
    parameters += [f"const {real} {scalar}" for scalar in kernel.scalars]
    counted = ", int64_t count, int64_t first" if random else ", int64_t count"
    yield f"static void piece({', '.join(parameters)}{counted}) {{"
    if random:
        low, high = (f"uint32_t({half})" for half in RANDOM)
        yield f"  const uint32_t seed = {low} + ({high} << 16) + uint32_t(first);"
    varying = _varying(kernel)
    for line in kernel.body:
        if line.name not in varying:
            yield f"  {_statement(line, real)}"
    for total in kernel.sums:
        yield f"  {real} {total.buffer} = 0;"
    # Inlined: of a whole block the compiler knows the length, and needs no loop for a remainder.
    yield "  const auto block = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {"
    added = ", ".join(total.buffer for total in kernel.sums)
    yield f"#pragma omp simd{f' reduction(+ : {added})' if added else ''}"
    yield "    for (int64_t i = begin; i < end; ++i) {"
    for load in kernel.loads:
        yield f"      const {real} {load.buffer} = {_load(load.buffer, load.dtype, real)};"
    for line in kernel.body:
        if line.name in varying:
            yield f"      {_statement(line, real)}"
    for index, store in enumerate(kernel.stores):
        rounded = _rounded(store.value, store.dtype, real)
        if store.random:
            bits = f"random_bits((seed + uint32_t(i)) ^ {salt(index):#x}u)"
            rounded = f"to_bf16_at_random({store.value}, {bits})"
        yield f"      {store.buffer}_at[i] = {rounded};"
    for total in kernel.sums:
        yield f"      {total.buffer} += {total.value};"
    yield "    }"
    if kernel.sums:
        yield f"    if (end % {PIECE} == 0 || end == count) {{"
        for total in kernel.sums:
            yield f"      {total.buffer}_at[begin / {PIECE}] = {total.buffer};"
            yield f"      {total.buffer} = 0;"
        yield "    }"
    yield "  };"
    yield "  int64_t begin = 0;"
    yield f"  for (; begin + {_BLOCK} <= count; begin += {_BLOCK}) {{"
    for buffer in elements:
        ahead = "<1>" if buffer in stored else "<0>"
        yield f"    prefetch{ahead}({buffer}_at + begin);"
    yield f"    block(begin, begin + {_BLOCK});"
    yield "  }"
    yield "  if (begin < count) block(begin, count);"
    yield "}"
    arguments = [
        f"static_cast<{pointer}>(addresses[{index} * segments + s]) + "
        + ("low" if buffer in elements else f"low / {PIECE}")
        for index, (buffer, pointer) in enumerate(pointers.items())
    ]
    arguments += [
        f"{real}(scalars[s * {len(kernel.scalars)} + {index}])"
        for index in range(len(kernel.scalars))
    ]
    arguments += ["high - low", "low"] if random else ["high - low"]
    unit = PIECE if kernel.sums else _VECTOR
    yield _ENTRY.format(
        name=kernel.name, arguments=",\n            ".join(arguments), unit=unit, last=unit - 1
    ).rstrip()


def _varying(kernel: Kernel) -> set[str]:
    """What differs between elements; the rest of the body is computed once."""
    varying = {load.buffer for load in kernel.loads}
    for line in kernel.body:
        if varying.intersection(a for a in line.args if isinstance(a, str)):
            varying.add(line.name)
    return varying


def _statement(line: Line, real: str) -> str:
    kind = "bool" if OPS[line.op] == "?" else real
    return f"const {kind} {line.name} = {_expression(line, real)};"


def _load(buffer: str, dtype: torch.dtype, real: str) -> str:
    if dtype == torch.bfloat16:
        return f"from_bf16({buffer}_at[i])"
    return f"{buffer}_at[i]" if _STORED[dtype] == real else f"{real}({buffer}_at[i])"


def _rounded(value: str, dtype: torch.dtype, real: str) -> str:
    if dtype == torch.bfloat16:
        return f"to_bf16({value if real == 'float' else f'float({value})'})"
    return value if _STORED[dtype] == real else f"{_STORED[dtype]}({value})"


def _expression(line: Line, real: str) -> str:
    args = [_operand(a, real) for a in line.args]
    if line.op in _INFIX:
        return f"{args[0]} {_INFIX[line.op]} {args[1]}"
    if line.op in _SPELLED:
        return _SPELLED[line.op].format(*args, one=_operand(1.0, real))
    return f"std::{line.op}({', '.join(args)})"


def _operand(operand: Operand, real: str) -> str:
    if isinstance(operand, str):
        return operand
    if not math.isfinite(operand):
        limits = f"std::numeric_limits<{real}>"
        special = f"{limits}::{'quiet_NaN' if math.isnan(operand) else 'infinity'}()"
        return f"-{special}" if operand < 0 else special
    text = repr(operand)
    text = text if "." in text or "e" in text else f"{text}.0"
    return f"{text}f" if real == "float" else text
