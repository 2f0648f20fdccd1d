"""Emitted Triton: run by its interpreter, and compiled for GPUs that are not there.

In a process with TRITON_INTERPRET=1 nothing compiles, so the interpreter runs in one of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stepping import train

from benchmarks.elementwise import OPTIMIZERS
from benchmarks.kernels import TARGETS, compiled, facts, kernel_of
from zcompile import norm
from zcompile.codegen import build, triton
from zcompile.codegen.kernel import RANDOM, Kernel, Line, Load, Store

pytest.importorskip("triton")

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")


def kernels(name):
    _, optimizer = train(OPTIMIZERS[name], steps=2)
    return [program.kernel for program in optimizer.step.fused.programs.values()]


def halves():
    """bf16 in and out, with arithmetic that rounds."""
    loads = (Load("x", BF16), Load("y", F32))
    body = (Line("total", "add", ("x", "y")), Line("half", "mul", ("total", 0.3)))
    stores = (Store("z", "half", BF16), Store("y", "total", F32))
    return Kernel("halves", loads, (), body, stores, F32)


def at_random():
    """The same, rounded at random."""
    stores = (Store("x", "half", BF16, True), Store("y", "total", F32), Store("z", "x", BF16, True))
    plain = halves()
    return Kernel("at_random", plain.loads, RANDOM, plain.body, stores, F32)


def run_by_the_interpreter():
    """In the process with TRITON_INTERPRET=1: the same values as by C++, for every optimizer."""
    counts = [5, 0, 1024, 1500]
    found = [(name, k) for name in OPTIMIZERS for k in kernels(name)] + [
        ("halves", halves()), ("at random", at_random()), ("sums", norm.ADDED),
        ("squares", norm.squared(F32)), ("squares of bf16", norm.squared(BF16)),
    ]  # fmt: skip
    for name, kernel in found:
        torch.manual_seed(0)
        made = {b: [torch.rand(n).to(d) for n in counts] for b, d in kernel.buffers().items()}
        if "y" in made:  # ties, and values that no bf16 holds
            special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-40])
            made["y"][0].copy_(special)
        scalars = torch.rand(len(counts), len(kernel.scalars), dtype=torch.float64)
        if set(RANDOM) <= set(kernel.scalars):
            scalars = torch.randint(2**16, scalars.shape).double()
        results = []
        for run in (build.on_cpu(kernel), build.by_triton(kernel, torch.device("cpu"))):
            mine = {b: [t.clone() for t in tensors] for b, tensors in made.items()}
            addresses = torch.tensor([[t.data_ptr() for t in mine[b]] for b in kernel.buffers()])
            run(addresses, torch.tensor(counts), scalars)
            results.append(mine)
        for store in kernel.stores:
            for ours, wanted in zip(results[1][store.buffer], results[0][store.buffer]):
                torch.testing.assert_close(
                    ours, wanted, rtol=2e-6 if store.dtype == F32 else 0, atol=1e-7, equal_nan=True,
                    msg=lambda text, name=name, b=store.buffer: f"{name}: {b}: {text}",
                )  # fmt: skip
        for total in kernel.sums:
            for ours, wanted, n in zip(results[1][total.buffer], results[0][total.buffer], counts):
                pieces = -(-n // build.BLOCK)
                torch.testing.assert_close(ours[:pieces], wanted[:pieces], rtol=1e-12, atol=0)
                assert torch.equal(ours[pieces:], wanted[pieces:]), "beyond the pieces"
    tensors = [torch.randn(n) for n in (*counts, build.BLOCK**2 + 1)]
    in_cpp = norm.squares(tensors, CPU)
    norm._built.cache_clear()
    build.on_cpu = lambda kernel: build.by_triton(kernel, CPU)
    torch.testing.assert_close(norm.squares(tensors, CPU), in_cpp, rtol=1e-12, atol=0)
    return len(found)


def test_values_by_the_interpreter():
    code = "import test_triton; print(test_triton.run_by_the_interpreter())"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(
             [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > len(OPTIMIZERS)


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_without_a_gpu(target):
    found = facts(compiled(kernels("adamw")[-1], target))
    # A block of 1024 on 128 threads: two accesses of four elements a thread and buffer (one of 8
    # on 256 lanes); AdamW loads four buffers and stores three.
    assert found.wide >= 7, found
    assert found.shared == 0 and not found.spills
    # 65,536 registers then hold six blocks of 128 threads: loads enough in flight.
    assert 16 < found.registers <= 80, found


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_rounding_at_random_compiles_without_a_gpu(target):
    found = facts(compiled(at_random(), target))
    assert found.wide >= 2 and found.shared == 0 and not found.spills


@pytest.mark.parametrize("target", TARGETS)
def test_buffers_of_several_dtypes_share_nothing_between_threads(target):
    kernel = kernel_of("adamw", copied=True)
    assert kernel.bytes_per_element() == 28
    found = facts(compiled(kernel, target))
    # Parameter and two moments, read and written; gradient and copy are 8 bytes beside these 16.
    assert found.wide >= 6 and found.shared == 0 and not found.spills, found


def test_addresses_that_are_not_aligned_are_not_read_sixteen_bytes_at_a_time():
    """The control of the test above: without the hint, no access is wide."""
    assert facts(compiled(kernels("adamw")[-1], "sm_90", aligned=False)).wide == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_kernel_of_many_values_spills(target):
    """The control of `not spills`."""
    loads = tuple(Load(f"x{i}", F32) for i in range(100))
    body = tuple(Line(f"y{i}", "mul", (f"x{i}", f"x{99 - i}")) for i in range(100))
    # A store may change what is loaded behind it, so every load comes first.
    stores = tuple(Store(f"x{i}", f"y{i}", F32) for i in range(100))
    found = facts(compiled(Kernel("many", loads, (), body, stores, F32), target))
    assert found.spills, found


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("target", TARGETS)
def test_a_sum_compiles_without_a_gpu(target, dtype):
    """It is also the control of `shared == 0`: threads of several warps add up their sums."""
    found = facts(compiled(norm.squared(dtype), target))
    assert found.shared > 0 and not found.spills, found
    if (target, dtype) != ("gfx942", BF16):  # 256 lanes of 1,024 elements: 4 each
        assert found.wide >= 1, found


GOLDEN = '''\
import triton
import triton.language as tl


@triton.jit
def to_bf16(value, BY_HAND: tl.constexpr):
    """Round to nearest even. By hand for the interpreter, which truncates."""
    if BY_HAND:
        bits = value.to(tl.uint32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        even = tl.where(value == value, even, 0x7FC00000)
        value = even.to(tl.uint32).to(tl.float32, bitcast=True)
    return value.to(tl.bfloat16)


@triton.jit
def elements(x_at, y_at, z_at, inside, BY_HAND: tl.constexpr):
    x = tl.load(x_at, mask=inside).to(tl.float32)
    y = tl.load(y_at, mask=inside)
    total = x + y
    half = total * 0.3
    tl.store(z_at, to_bf16(half, BY_HAND), mask=inside)
    tl.store(y_at, total, mask=inside)


@triton.jit
def halves(
    addresses, counts, scalars, segment_of, first_of, segments,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, BY_HAND: tl.constexpr,
):
    segment = tl.load(segment_of + tl.program_id(0))
    first = tl.multiple_of(tl.load(first_of + tl.program_id(0)), BLOCK)
    count = tl.load(counts + segment)
    here = first + tl.arange(0, BLOCK)
    x_at = tl.load(addresses + 0 * segments + segment).to(tl.pointer_type(tl.bfloat16))
    y_at = tl.load(addresses + 1 * segments + segment).to(tl.pointer_type(tl.float32))
    z_at = tl.load(addresses + 2 * segments + segment).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        x_at = tl.multiple_of(x_at, 8)
        y_at = tl.multiple_of(y_at, 16)
        z_at = tl.multiple_of(z_at, 8)
    if first + BLOCK <= count:  # without a mask, every access is 16 bytes wide
        elements(x_at + here, y_at + here, z_at + here, None, BY_HAND)
    else:
        elements(x_at + here, y_at + here, z_at + here, here < count, BY_HAND)
'''


def test_the_source():
    assert triton.emit(halves()) == GOLDEN
