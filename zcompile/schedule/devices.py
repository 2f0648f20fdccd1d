"""Devices as data: dense peaks, memory and bandwidth from public datasheets.

Datasheets print peaks with sparsity where there is one; the dense half of it stands here. "float32"
is without TF32, which torch leaves off by default. Memory is the datasheet's GB as 10^9 bytes: what
a device has beyond that goes to the driver's context and the collectives' own buffers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from zcompile.errors import OptionError
from zcompile.schedule.costs import Device

GB = 10**9
TERA = 1e12

# Large matrix products reach 0.65 to 0.8 of the dense peak on NVIDIA's data-centre GPUs (the clock
# falls under the power limit) and streaming kernels 0.8 to 0.9 of the bandwidth.
GPU_EFFICIENCY = 0.7
# Public matrix-product benchmarks of MI300X stay near half of its peak, which assumes a clock that
# the power limit does not let it hold.
MI300X_EFFICIENCY = 0.5
# From the start of one small kernel to the start of the next in a stream whose launches run ahead.
GPU_LAUNCH_SECONDS = 3e-6
# One call of an operation or of a compiled kernel out of Python.
CPU_LAUNCH_SECONDS = 5e-6

# One core of a server CPU of the 2020s: two 512-bit multiply-adds a cycle at 2.5 GHz give
# 160 GFLOP/s, bfloat16 dot products twice that. calibrate.py replaces this by what it measures.
_CPU = Device(
    name="cpu",
    flops={"float32": 0.16 * TERA, "bfloat16": 0.32 * TERA, "float64": 0.08 * TERA},
    bandwidth=10 * GB,
    memory=16 * GB,
    launch=CPU_LAUNCH_SECONDS,
    efficiency=0.7,
    source="one core with AVX-512, by its width and clock; not measured",
    threads=1,
)

_V100 = Device(
    name="v100",
    # No bfloat16 units: it computes at the float32 rate.
    flops={"float16": 125 * TERA, "float32": 15.7 * TERA, "float64": 7.8 * TERA},
    bandwidth=900 * GB,
    memory=32 * GB,
    launch=GPU_LAUNCH_SECONDS,
    efficiency=GPU_EFFICIENCY,
    source="NVIDIA V100 Tensor Core GPU data sheet, column V100 SXM2 (32 GB), "
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf",
)


def _a100(name: str, gigabytes: int, bandwidth: float) -> Device:
    return Device(
        name=name,
        flops={
            "bfloat16": 312 * TERA,
            "float16": 312 * TERA,
            "float32": 19.5 * TERA,
            "float64": 19.5 * TERA,
        },
        bandwidth=bandwidth,
        memory=gigabytes * GB,
        launch=GPU_LAUNCH_SECONDS,
        efficiency=GPU_EFFICIENCY,
        source=f"NVIDIA A100 Tensor Core GPU data sheet, {gigabytes} GB SXM, "
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    )


def _hopper(name: str, gigabytes: int, bandwidth: float, source: str) -> Device:
    return Device(
        name=name,
        flops={
            "bfloat16": 989.5 * TERA,
            "float16": 989.5 * TERA,
            "float32": 67 * TERA,
            "float64": 67 * TERA,
        },
        bandwidth=bandwidth,
        memory=gigabytes * GB,
        launch=GPU_LAUNCH_SECONDS,
        efficiency=GPU_EFFICIENCY,
        source=source,
    )


_H100 = _hopper(
    "h100",
    80,
    3350 * GB,
    "NVIDIA H100 Tensor Core GPU data sheet, column H100 SXM, "
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
)
_H200 = _hopper(
    "h200",
    141,
    4800 * GB,
    "NVIDIA H200 Tensor Core GPU data sheet, column H200 SXM, "
    "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446",
)

_MI300X = Device(
    name="mi300x",
    flops={
        "bfloat16": 1307.4 * TERA,
        "float16": 1307.4 * TERA,
        "float32": 163.4 * TERA,
        "float64": 163.4 * TERA,
    },
    bandwidth=5300 * GB,
    memory=192 * GB,
    launch=GPU_LAUNCH_SECONDS,
    efficiency=MI300X_EFFICIENCY,
    source="AMD Instinct MI300X Accelerator data sheet, "
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
    "amd-instinct-mi300x-data-sheet.pdf",
)

DEVICES: Mapping[str, Device] = {
    each.name: each
    for each in (
        _CPU,
        _V100,
        _a100("a100-40gb", 40, 1555 * GB),
        _a100("a100", 80, 2039 * GB),
        _H100,
        _H200,
        _MI300X,
    )
}

ALIASES: Mapping[str, str] = {
    "v100-32gb": "v100",
    "a100-80gb": "a100",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "h200-sxm": "h200",
    "mi300": "mi300x",
}


def device(name: str) -> Device:
    """The record of a device, by name in any case.

    Raises:
        OptionError: no such device; names the value, the nearest names and all that are known.
    """
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in DEVICES:
        return DEVICES[key]
    near = difflib.get_close_matches(key, [*DEVICES, *ALIASES], n=2)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise OptionError(f"unknown device {name!r}{hint} Known devices: {', '.join(sorted(DEVICES))}.")
