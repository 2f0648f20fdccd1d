"""A kernel in one pass over memory, before it is source of any language.

Elementwise: loads from some buffers, lines of arithmetic, stores to some buffers. Arithmetic is in
`compute`, whatever the buffers hold: a load widens, a store rounds to nearest even. Numbers that
are the same for a whole segment of elements (a learning rate, a bias correction) come as scalars.

A sum is the first stage of one: of every PIECE elements of a segment, in an order that neither the
number of threads nor the device's load changes. What is left is summed by another kernel alike.

Rounding at random adds 16 random bits below what a bfloat16 keeps. They are a hash of the element's
number in its segment, counted from where RANDOM says, and of the store's: every emitter's kernel,
on any number of threads, gives the same bits.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Operand = str | float  # a value's name, or a constant

# The scalar that a kernel multiplies a gradient by as it loads it (1 / loss scale, a clip's share).
FACTOR = "grad_factor"

# The buffer in which a kernel leaves the new parameter in another dtype.
COPY = "param_copy"

# Elements that a sum adds into one number.
PIECE = 1024

# The two halves, 16 bits each, of where in a sequence of random numbers a segment begins.
RANDOM = ("random_low", "random_high")

# Every operation that an emitter knows, and what it gives: a number ("x") or a truth value ("?").
OPS: dict[str, str] = {
    **dict.fromkeys("add sub mul div neg sqrt rsqrt exp log pow abs sign".split(), "x"),
    **dict.fromkeys("maximum minimum where floor ceil reciprocal tanh sigmoid".split(), "x"),
    **dict.fromkeys("eq ne lt le gt ge and or not isnan isinf".split(), "?"),
}


# Those that C++, Triton and Python write between their operands alike.
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """`name = op(*args)`. A where's first operand, and those of and, or, not, are truth values."""

    name: str
    op: str
    args: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Load:
    buffer: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Store:
    """The value `value`, rounded to `dtype`, into `buffer`. random: of both neighbours in bfloat16
    to each as often as the value is near it; the kernel then has the scalars RANDOM."""

    buffer: str
    value: str
    dtype: torch.dtype
    random: bool = False


@dataclass(frozen=True)
class Sum:
    """The sums of `value` over each PIECE elements of a segment, side by side in `buffer`, in the
    kernel's `compute`."""

    buffer: str
    value: str


# What sources in C++ and Triton call something else.
_RESERVED = frozenset(
    "param grad written block end begin count first low high i T x tl triton elements piece "
    "addresses counts scalars segments segment segment_of first_of here inside at threads total "
    "BLOCK ALIGNED BY_HAND prefetch to_bf16 from_bf16 random_bits larger smaller std "
    "alignas alignof asm auto bitand bitor bool case catch char compl const constexpr consteval "
    "constinit const_cast co_await co_return co_yield concept decltype default delete do double "
    "dynamic_cast enum explicit export extern false float friend goto inline int long mutable "
    "namespace new noexcept not_eq nullptr operator or_eq and_eq private protected public register "
    "reinterpret_cast requires short signed sizeof static static_assert static_cast struct switch "
    "template this throw true typedef typeid typename union unsigned using virtual void volatile "
    "wchar_t xor xor_eq char8_t char16_t char32_t".split()
)


def is_name(text: str) -> bool:
    """Whether a buffer or a scalar can be called so in every language."""
    plain = text.isidentifier() and text.isascii() and not keyword.iskeyword(text)
    line = text.rpartition("_")
    ours = text.endswith("_at") or (line[2].isdigit() and line[0].replace("n_", "not_") in OPS)
    return plain and not ours and text not in _RESERVED


def salt(store: int) -> int:
    """What tells the random numbers of a kernel's stores apart."""
    return store * 0x9E3779B9 % 2**32


@dataclass(frozen=True)
class Kernel:
    """A buffer that is loaded and stored is updated in place. about: lines for a header."""

    name: str
    loads: tuple[Load, ...]
    scalars: tuple[str, ...]
    body: tuple[Line, ...]
    stores: tuple[Store, ...]
    compute: torch.dtype
    about: tuple[str, ...] = ()
    sums: tuple[Sum, ...] = ()

    def __post_init__(self) -> None:
        known = {load.buffer for load in self.loads} | set(self.scalars)
        if both := set(self.buffers()) & set(self.scalars):
            raise ValueError(f"both a buffer and a scalar: {sorted(both)}")
        for line in self.body:
            if line.op not in OPS:
                raise ValueError(f"{line}: no such operation")
            missing = [a for a in line.args if isinstance(a, str) and a not in known]
            if missing or line.name in known:
                raise ValueError(f"{line}: undefined {missing} or defined twice")
            known.add(line.name)
        for store in self.stores:
            if store.value not in known:
                raise ValueError(f"{store}: undefined")
            if store.random and not (store.dtype == torch.bfloat16 and known.issuperset(RANDOM)):
                raise ValueError(f"{store}: only bfloat16 is rounded at random, by {RANDOM}")
        taken = known | set(self.elements())
        for total in self.sums:
            if total.value not in known or total.buffer in taken:
                raise ValueError(f"{total}: undefined, or into what has that name")
            taken.add(total.buffer)

    def elements(self) -> dict[str, torch.dtype]:
        """The buffers that hold a value an element, loaded ones first."""
        found = {load.buffer: load.dtype for load in self.loads}
        return found | {store.buffer: store.dtype for store in self.stores}

    def buffers(self) -> dict[str, torch.dtype]:
        """Every buffer, in the order of the table of addresses."""
        return self.elements() | {total.buffer: self.compute for total in self.sums}

    def bytes_per_element(self) -> int:
        """Bytes that one element moves: each load and each store once."""
        dtypes = [load.dtype for load in self.loads] + [store.dtype for store in self.stores]
        return sum(dtype.itemsize for dtype in dtypes)

    def text(self) -> str:
        """For a golden test and a log."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"kernel {self.name} in {_short(self.compute)}, scalars {', '.join(self.scalars)}"
        for load in self.loads:
            yield f"  {load.buffer} = load {_short(load.dtype)}"
        for line in self.body:
            yield f"  {line}"
        for store in self.stores:
            how = " at random" if store.random else ""
            yield f"  store {store.buffer} <- {store.value} as {_short(store.dtype)}{how}"
        for total in self.sums:
            yield f"  sums {total.buffer} <- {total.value}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
