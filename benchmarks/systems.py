"""The systems compared: each function takes a model and returns one training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.models import GPT

LEARNING_RATE = 3e-4

Step = Callable[[Tensor, Tensor], Tensor]  # (idx, targets) -> loss
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
System = Callable[[GPT, MakeOptimizer, str], Step]  # the last argument is "fp32" or "bf16"


def make_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of every system: torch's fused AdamW on the system's own parameters."""
    return AdamW(parameters, lr=LEARNING_RATE, fused=True)


def floor(model: GPT, make_optimizer: MakeOptimizer, dtype: str) -> Step:
    """Each process alone, compiled by Inductor: the time that no communication can beat."""
    optimizer = make_optimizer(model.parameters())
    return _step(torch.compile(model), optimizer, _autocast(dtype))


def ddp(model: GPT, make_optimizer: MakeOptimizer, dtype: str) -> Step:
    """DistributedDataParallel, eager."""
    optimizer = make_optimizer(model.parameters())
    return _step(DistributedDataParallel(model), optimizer, _autocast(dtype))


def ddp_inductor(model: GPT, make_optimizer: MakeOptimizer, dtype: str) -> Step:
    """DistributedDataParallel under torch.compile, which splits the graph at its buckets."""
    optimizer = make_optimizer(model.parameters())
    return _step(torch.compile(DistributedDataParallel(model)), optimizer, _autocast(dtype))


def fsdp2(
    model: GPT,
    make_optimizer: MakeOptimizer,
    dtype: str,
    *,
    reshard: bool | None = None,
    compiled: bool = False,
) -> Step:
    """FSDP2, one group per block and one for the rest.

    `reshard` is fully_shard's reshard_after_forward. Its default (None) is ZeRO-3 but for the
    root's group, which stays gathered; False is ZeRO-2. With `compiled` each block is compiled
    before it is sharded, as torchtitan does it.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for name, block in model.blocks.named_children():
        if compiled:
            block = torch.compile(block)
            model.blocks.register_module(name, block)
        shard(block)
    shard(model)
    return _step(model, make_optimizer(model.parameters()), nullcontext)


def zero(
    model: GPT, make_optimizer: MakeOptimizer, dtype: str, *, stage: int, whole: bool = False
) -> Step:
    """zcompile: the plain single-device script, and one argument. whole: compile_step."""
    # Measured in the second step and planned again: with four steps of warm-up none of it is timed.
    options: dict[str, int | str] = {"stage": stage, "replan_after": 1}
    if dtype == "bf16":
        options["param_dtype"] = "bfloat16"
    optimizer = make_optimizer(model.parameters())
    if whole:
        import zcompile  # not in the processes of the other systems

        return zcompile.compile_step(model, None, optimizer, options=options)
    return _step(torch.compile(model, backend="zero", options=options), optimizer, nullcontext)


SYSTEMS: dict[str, System] = {
    "floor": floor,
    "ddp": ddp,
    "ddp-inductor": ddp_inductor,
    "fsdp2": fsdp2,
    "fsdp2-compiled": partial(fsdp2, compiled=True),
    "fsdp2-zero2": partial(fsdp2, reshard=False),
    "zero-0": partial(zero, stage=0),
    "zero-1": partial(zero, stage=1),
    "zero-2": partial(zero, stage=2),
    "zero-3": partial(zero, stage=3),
    "zero-2-step": partial(zero, stage=2, whole=True),
    "zero-3-step": partial(zero, stage=3, whole=True),
}


def _autocast(dtype: str) -> Callable[[], AbstractContextManager[object]]:
    """Context for systems that keep fp32 parameters: bf16 runs their matmuls in bf16."""
    if dtype == "fp32":
        return nullcontext
    return partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def _step(
    model: Callable[..., Tensor],
    optimizer: Optimizer,
    context: Callable[[], AbstractContextManager[object]],
) -> Step:
    """Forward (under `context`), backward and update, the same for every system."""

    def step(idx: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = model(idx, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
