"""Who owns a parameter, and who updates it: found among all live objects, as compilers hand us
tensors and never the model."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from zcompile._torch import OptimizedModule

T = TypeVar("T")


def outermost_owners(params: Sequence[Tensor]) -> list[nn.Module]:
    """The outermost modules that contain these parameters, the largest first.

    Compiled wrappers do not count. Found among all live modules: the backend is handed tensors,
    never the model.
    """
    if not params:
        return []
    wanted = {id(p) for p in params}
    modules = [
        m
        for m in live(nn.Module)
        if "_modules" in m.__dict__ and not isinstance(m, OptimizedModule)
    ]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    level = [m for m in modules if any(id(p) in wanted for p in m._parameters.values())]
    seen: dict[int, nn.Module] = {}
    while level:
        seen.update((id(m), m) for m in level)
        level = [p for m in level for p in parents.get(id(m), ()) if id(p) not in seen]
    roots = [m for m in seen.values() if id(m) not in parents]
    return sorted(roots, key=lambda m: (-sum(1 for _ in m.parameters()), type(m).__qualname__))


def live_optimizers() -> list[torch.optim.Optimizer]:
    return live(torch.optim.Optimizer)


def live(kind: type[T]) -> list[T]:
    """All objects of a class and its subclasses that the garbage collector tracks."""
    # Among a million objects a look into a dict takes half the time of issubclass. By id, as a
    # metaclass may forbid to hash its classes.
    kinds, new = dict[int, type](), [kind]
    while new:
        kinds.update((id(k), k) for k in new)
        found = {id(s): s for k in new for s in type.__subclasses__(k)}
        new = [s for key, s in found.items() if key not in kinds]
    return [o for o in gc.get_objects() if id(type(o)) in kinds]
