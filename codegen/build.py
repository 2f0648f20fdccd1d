"""From a kernel's source to something that can be called. Built once, kept on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from zcompile import cache
from zcompile._torch import load_cpp
from zcompile.codegen import cpp, triton
from zcompile.codegen.kernel import PIECE, Kernel
from zcompile.codegen.trace import NotElementwise, first_line


class CannotBuild(Exception):
    """No compiler, or one that fails; says which."""


# (addresses (buffers, segments), counts (segments,), scalars (segments, scalars)): the first two
# int64 and the last in double precision, all on the host.
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def source(kernel: Kernel, device: torch.device) -> tuple[str, str]:
    """What a kernel is for a device, and the name of a file for it."""
    text, suffix = (
        (cpp.emit(kernel), "cpp") if device.type == "cpu" else (triton.emit(kernel), "py")
    )
    return text, f"{kernel.name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.{suffix}"


BLOCK = PIECE  # elements of a Triton program

# Inductor writes vectors out by hand, so it switches off what turns a loop into them: even `omp
# simd` does nothing then, and a square root that may set errno stays a call. It lets the sign of a
# zero go, which an optimizer's own step keeps.
_FLAGS = ("-ftree-loop-vectorize", "-fno-math-errno", "-fsigned-zeros")


@functools.cache
def on_cpu(kernel: Kernel) -> Run:
    """Compiled by the compiler that Inductor uses, with its flags but for `_FLAGS`.

    Raises:
        CannotBuild: no compiler is installed, or it refuses the source.
    """
    try:
        library = load_cpp(cpp.emit(kernel), extra_flags=_FLAGS)
    except Exception as error:
        raise CannotBuild(first_line(error)) from error
    call = getattr(library, kernel.name)
    call.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int]
    call.restype = None

    def run(addresses: torch.Tensor, counts: torch.Tensor, scalars: torch.Tensor) -> None:
        assert addresses.dtype == counts.dtype == torch.int64 and scalars.dtype == torch.float64
        assert addresses.is_contiguous() and counts.is_contiguous() and scalars.is_contiguous()
        threads = torch.get_num_threads()
        given = [t.data_ptr() for t in (addresses, counts, scalars)]
        call(*given, len(counts), threads)

    return run


@functools.cache
def by_triton(kernel: Kernel, device: torch.device) -> Run:
    """Compiled for the GPU `device`; for the CPU, run by Triton's interpreter.

    Raises:
        CannotBuild: Triton is not installed, or has no word for an operation.
    """
    try:
        function = jitted(kernel)
    except (ImportError, NotElementwise) as error:
        raise CannotBuild(str(error)) from error

    def run(addresses: torch.Tensor, counts: torch.Tensor, scalars: torch.Tensor) -> None:
        segments, firsts = programs(counts, BLOCK)
        if not len(segments):
            return
        there = lambda values, dtype: values.to(device, dtype, non_blocking=True)
        on_cpu = device.type == "cpu"
        with contextlib.nullcontext() if on_cpu else torch.cuda.device(device):
            function[(len(segments),)](
                there(addresses, torch.int64),
                there(counts, torch.int64),
                there(scalars, kernel.compute),
                there(segments, torch.int32),
                there(firsts, torch.int64),
                len(counts),
                BLOCK=BLOCK,
                ALIGNED=not (addresses[: len(kernel.elements())] % 16).any().item(),
                BY_HAND=on_cpu,
            )

    return run


def on(kernel: Kernel, device: torch.device) -> Run:
    """A kernel as `device` runs it. Raises CannotBuild."""
    return on_cpu(kernel) if device.type == "cpu" else by_triton(kernel, device)


def programs(counts: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each Triton program: its segment, and the first element in it."""
    blocks = (counts + block - 1) // block
    segments = torch.arange(len(counts)).repeat_interleave(blocks)
    before = blocks.cumsum(0) - blocks  # programs of earlier segments
    return segments, (torch.arange(len(segments)) - before[segments]) * block


def jitted(kernel: Kernel) -> Any:
    """The function of a kernel's Triton source, which is kept as a file: Triton reads it."""
    text, file = source(kernel, torch.device("cuda"))
    path = cache.folder() / "kernels" / file
    if not path.exists() or path.read_text() != text:
        cache.write(path, text)
    spec = importlib.util.spec_from_file_location(f"zcompile_kernels.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.name)
