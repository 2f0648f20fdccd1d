"""Calls an optimizer's kernels: one launch steps all parameters that share one.

The kernel gets a table of addresses, so nothing is copied together; state that does not exist yet
is made as the optimizer would make it; new counts are stored in the form that they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zcompile.codegen import build
from zcompile.codegen.elementwise import Scalars
from zcompile.codegen.kernel import COPY, FACTOR, RANDOM, Kernel
from zcompile.codegen.trace import NotElementwise, Update, first_line
from zcompile.eligible import local_part
from zcompile.rounding import Rounding


@dataclass(frozen=True)
class Program:
    """A kernel that some parameters share, with all that it takes to call it."""

    kernel: Kernel
    scalars: Scalars
    run: build.Run


@dataclass(frozen=True)
class Segment:
    """A parameter that a kernel steps."""

    param: Tensor
    update: Update
    program: Program
    copy: Tensor | None
    number: int  # among the optimizer's parameters


def try_scalars(
    scalars: Scalars, hyper: Mapping[str, float], group: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Compute them once for two parameters: what fails here would fail in the middle of a step."""
    try:
        scalars(_given(scalars, hyper, group, [state, state]))
    except Exception as error:
        raise NotElementwise(
            f"its numbers cannot be computed apart: {first_line(error)}"
        ) from error


def _given(
    scalars: Scalars,
    hyper: Mapping[str, float],
    group: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The numbers that scalars are computed from: those of the group, and of each parameter."""
    given: dict[str, Any] = dict(hyper)
    for name in scalars.inputs:
        if name.startswith("state."):
            key = name.removeprefix("state.")
            given[name] = torch.tensor([float(state[key]) for state in states], dtype=torch.float64)
        elif name not in given:
            given[name] = float(group[name.removeprefix("hyper.")])
    return given


def by_program(segments: Sequence[Segment]) -> Iterator[tuple[Program, list[Segment]]]:
    found: dict[int, list[Segment]] = {}
    for segment in segments:
        found.setdefault(id(segment.program), []).append(segment)
    for members in found.values():
        yield members[0].program, members


def launch(
    program: Program,
    members: Sequence[Segment],
    hyper: Mapping[str, float],
    group: Mapping[str, Any],
    states: dict[Tensor, dict[str, Any]],
    factor: float,
    rounding: Rounding | None,
) -> None:
    kernel, scalars = program.kernel, program.scalars
    owned = [states.get(m.param, {}) for m in members]
    table, after = scalars(_given(scalars, hyper, group, owned))
    table = table.expand(len(members), -1)
    if FACTOR in kernel.scalars:
        table = torch.cat([table, table.new_full((len(members), 1), factor)], 1)
    if rounding is not None and RANDOM[0] in kernel.scalars:
        pairs = zip(members, owned, strict=True)
        begins = torch.tensor([rounding.take(m.param, m.number, state) for m, state in pairs])
        table = torch.cat([table, torch.stack([begins % 2**16, begins >> 16], 1)], 1)
    table = table.contiguous()
    tensors = [_tensors(program, m, state) for m, state in zip(members, owned, strict=True)]
    names = list(kernel.buffers())
    addresses = torch.tensor([[t[name].data_ptr() for t in tensors] for name in names])
    counts = torch.tensor([t["param"].numel() for t in tensors])
    program.run(addresses, counts, table)
    written = {store.buffer for store in kernel.stores}
    torch.autograd.graph.increment_version(
        [t[name] for t in tensors for name in written if t[name].numel()]
    )
    for key, values in after.items():
        _store(key, values.expand(len(members)).tolist(), members, owned, group)
    for member, state in zip(members, owned, strict=True):
        if state and member.param not in states:  # in the order in which the optimizer makes it
            keys = [name.removeprefix("state.") for name in member.update.outputs]
            states[member.param] = {key: state[key] for key in keys if key in state}


def _tensors(program: Program, member: Segment, state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's memory by buffer; state that does not exist yet is made."""
    param = local_part(member.param)
    assert member.param.grad is not None
    grad = local_part(member.param.grad)
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    found = {"param": param, "grad": grad}
    if member.copy is not None:
        found[COPY] = member.copy
    for name, dtype in program.kernel.buffers().items():
        if name not in found:
            if state.get(name) is None:
                state[name] = torch.empty_like(
                    member.param, dtype=dtype, memory_format=torch.preserve_format
                )
            found[name] = local_part(state[name])
    return found


def _store(
    key: str,
    values: Sequence[float],
    members: Sequence[Segment],
    owned: Sequence[dict[str, Any]],
    group: Mapping[str, Any],
) -> None:
    """New values of a scalar in the state, in the form that it has or that the optimizer gives."""
    for member, state, value in zip(members, owned, values, strict=True):
        before = state.get(key)
        if isinstance(before, Tensor):
            before.fill_(value)
        elif before is not None:
            state[key] = type(before)(value)
        else:
            state[key] = member.update.scalar(key, value, bool(group.get("capturable")))
