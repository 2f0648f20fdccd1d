"""Trains a model sharded and plain on the same data, and compares everything.

The reference is plain single-process PyTorch: the mean over ranks of each rank's loss, which for
equal batches is the loss of the concatenated batch. Each rank computes it for itself.

Tolerances. fp32 sums over ranks and over the batch are taken in different orders, an error of a
few units in the last place (1.2e-7) per step relative to the largest term; SGD passes it on
linearly, so 1e-5 covers a handful of steps with room for cancellation.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

TOLERANCE = 1e-5

Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int], torch.Tensor]  # (model, seed of the batch) -> scalar


def sgd(params: Any) -> torch.optim.Optimizer:
    # Adam hides a wrong scale of the gradients; plain SGD with momentum does not.
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def options(stage: int, **more: Any) -> dict[str, Any]:
    """Options under which even tiny parameters are sharded."""
    return {
        "stage": stage,
        "engine": "eager",
        "persistence_threshold": 8,
        "calibrate": False,
        **more,
    }


def check(
    rank: int,
    world: int,
    make: Make,
    loss: Loss,
    opts: dict[str, Any],
    *,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    tolerance: float = TOLERANCE,
    quiet: bool = True,
) -> nn.Module:
    """Assert that losses, gradients, parameters, buffers and optimizer state are those of the
    plain run. Returns the trained model. `quiet`: no ZeroWarning may be raised."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    ours, theirs = optimizer(model.parameters()), optimizer(plain.parameters())
    compiled = torch.compile(model, backend="zero", options=opts)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(steps):
            mine = loss(compiled, step * world + rank)
            mine.backward()
            parts = [loss(plain, step * world + r) for r in range(world)]
            expected = sum(parts) / world
            expected.backward()
            close(mine, parts[rank], tolerance, f"loss at step {step}")
            compare_gradients(model, plain, tolerance, f"at step {step}")
            ours.step()
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
    compare_state(model, plain, ours, theirs, tolerance)
    if quiet:
        from zcompile import ZeroWarning

        zero = [str(w.message) for w in seen if issubclass(w.category, ZeroWarning)]
        assert not zero, zero
    return model


def every_stage(
    rank: int, world: int, make: Make, loss: Loss, more: dict[str, Any] | None = None
) -> None:
    """`check` in the three stages that shard. more: of its keyword arguments."""
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        check(rank, world, make, loss, options(stage), **(more or {}))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of 16-bit floats: NaNs and zeros have to be the same ones, too."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def close(a: Any, b: Any, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        whole(a).detach(),
        whole(b).detach(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


def compare_gradients(model: nn.Module, plain: nn.Module, tolerance: float, when: str) -> None:
    theirs = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        q = theirs[name]
        assert (p.grad is None) == (q.grad is None), f"gradient of {name} {when}: {p.grad} {q.grad}"
        if p.grad is not None:
            close(p.grad, q.grad, tolerance, f"gradient of {name} {when}")


def compare_state(
    model: nn.Module,
    plain: nn.Module,
    ours: torch.optim.Optimizer,
    theirs: torch.optim.Optimizer,
    tolerance: float,
) -> None:
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        close(p, q, tolerance, f"parameter {name}")
        mine, other = ours.state.get(p, {}), theirs.state.get(q, {})
        assert set(mine) == set(other), f"optimizer state of {name}: {set(mine)} {set(other)}"
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                close(mine[key], value, tolerance, f"optimizer state {key} of {name}")
    buffers = dict(plain.named_buffers())
    for name, b in model.named_buffers():
        close(b, buffers[name], tolerance, f"buffer {name}")
