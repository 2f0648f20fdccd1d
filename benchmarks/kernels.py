"""What compilers make of the optimizers' kernels, and of a norm's, for GPUs that need not be there.

    python benchmarks/kernels.py

Each kernel is compiled for every architecture below, and what came out is counted: accesses of 16
bytes and narrower ones, registers a thread, shared memory, spills. Needs Triton, and no GPU. A run
of all of them writes benchmarks/results/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.elementwise import OPTIMIZERS
from zcompile.codegen import build
from zcompile.codegen.kernel import Kernel
from zcompile.fused import fuse
from zcompile.norm import squared

RESULTS = Path(__file__).parent / "results" / "kernels.json"
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Facts:
    """wide: loads and stores of 16 bytes; narrow: all others, those of the tables and of a
    segment's end among them; registers: a thread's, of 32 bits; shared: bytes."""

    wide: int
    narrow: int
    registers: int
    shared: int
    spills: bool


def compiled(kernel: Kernel, target: str, aligned: bool = True, warps: int = 4) -> Any:
    """What Triton makes of a kernel for one of TARGETS. aligned: addresses divide by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    scalars = "*fp64" if kernel.compute == torch.float64 else "*fp32"
    signature = {
        "addresses": "*i64", "counts": "*i64", "scalars": scalars, "segment_of": "*i32",
        "first_of": "*i64", "segments": "i32", "BLOCK": "constexpr", "ALIGNED": "constexpr",
        "BY_HAND": "constexpr",
    }  # fmt: skip
    constants = {"BLOCK": build.BLOCK, "ALIGNED": aligned, "BY_HAND": False}
    source = ASTSource(build.jitted(kernel), signature, constants, attrs={})
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": warps})


def facts(made: Any) -> Facts:
    """Read from the assembly, and from what the assembler says of the binary."""
    if "ptx" in made.asm:
        text = made.asm["ptx"]
        usage = _usage(made.asm["cubin"])
        return Facts(
            wide=len(re.findall(r"(?:ld|st)\.global[.\w]*\.v4\.b32", text)),
            narrow=len(re.findall(r"(?:ld|st)\.global(?!\S*v4)[.\w]*\.(?:b|u|f)\d+", text)),
            registers=usage["REG"],
            shared=max(made.metadata.shared, usage["SHARED"]),
            spills=bool(usage["LOCAL"] or usage["STACK"]),
        )
    text = made.asm["amdgcn"]
    count = lambda name: int(re.findall(rf"{name}:\s*(\d+)", text)[-1])
    return Facts(
        wide=len(re.findall(r"global_(?:load|store)_dwordx4", text)),
        narrow=len(re.findall(r"global_(?:load|store)_(?!dwordx4)\w+", text)),
        registers=count(r"\.vgpr_count"),
        shared=made.metadata.shared,
        spills=count(r"\.vgpr_spill_count") > 0,
    )


def _usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return {
        name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", said.stdout)
    }


def kernel_of(name: str, copied: bool = False) -> Kernel:
    """The kernel of an optimizer's second step, when its state is there. copied: with a bfloat16
    gradient, and a bfloat16 copy of the new parameter."""
    param = torch.nn.Parameter(torch.ones(64))
    optimizer = fuse(OPTIMIZERS[name]([param]))
    dtype = torch.bfloat16 if copied else torch.float32
    if copied:
        fuse(optimizer, copies={param: param.detach().to(dtype)})
        param.grad_dtype = dtype
    for _ in range(2):
        param.grad = torch.ones_like(param, dtype=dtype)
        optimizer.step()
    made: Kernel = list(optimizer.step.fused.programs.values())[-1].kernel
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    names = parser.parse_args().optimizers.split(",")
    table = Table(title="kernels, compiled for GPUs", show_lines=False)
    for head in ("", "", "16-byte accesses", "registers", "shared bytes", "spills"):
        table.add_column(head, justify="left" if not head else "right")
    record = {}
    kernels = {name: kernel_of(name) for name in names}
    kernels |= {f"{name}, bf16 copy": kernel_of(name, copied=True) for name in names}
    kernels |= {"sum of squares": squared(torch.float32), "of bf16": squared(torch.bfloat16)}
    for name, kernel in kernels.items():
        for target in TARGETS:
            found = facts(compiled(kernel, target))
            record[f"{name} {target}"] = asdict(found)
            table.add_row(
                name, target, str(found.wide), str(found.registers), str(found.shared),
                "yes" if found.spills else "none",
            )  # fmt: skip
    Console().print(table)
    import triton

    record["triton"] = triton.__version__
    if set(names) >= set(OPTIMIZERS):
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
