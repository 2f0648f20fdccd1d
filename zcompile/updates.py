"""Who takes the gradients of a step that is compiled whole, by the name it has in graphs.

A graph holds names only, so that it can be printed, kept on disk and compared between ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from zcompile.errors import ZeroError

Tensors = Sequence[Tensor]


class Receiver(Protocol):
    def updated(self, params: Tensors) -> Mapping[str, int]:
        """Those of a graph's parameters that it updates as soon as their gradients are there, by
        name, and the bytes that each update reads and writes."""
        ...

    def held(self) -> int:
        """Bytes of gradients that a rank keeps from one micro-batch to the next."""
        ...

    def begin(self) -> None:
        """A forward graph whose backward graph will hand over gradients is about to run."""
        ...

    def receive(self, names: Sequence[str], grads: Tensors, left: Tensors) -> None:
        """Take this rank's rows of the mean gradients of these parameters. grads[i]: (rows, *rest)

        left[i]: (0, *rest), what autograd is given in place of a gradient. Where it has to be given
        the gradient after all, to add others to it, this grows into a copy.
        """
        ...


class Nobody:
    """Takes gradients and drops them, in a graph that runs by itself."""

    def updated(self, params: Tensors) -> Mapping[str, int]:
        return {}

    def held(self) -> int:
        return 0

    def begin(self) -> None:
        pass

    def receive(self, names: Sequence[str], grads: Tensors, left: Tensors) -> None:
        pass


_receivers: weakref.WeakValueDictionary[str, Receiver] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(receiver: Receiver) -> str:
    """-> the name, for as long as the receiver lives."""
    name = f"step.{next(_numbers)}"
    _receivers[name] = receiver
    return name


_nobody = Nobody()


def ignore(name: str) -> None:
    """Let a graph run by itself whose step is elsewhere."""
    _receivers[name] = _nobody


def find(name: str) -> Receiver:
    """Raises ZeroError where the step is gone."""
    try:
        return _receivers[name]
    except KeyError:
        raise ZeroError(
            f"a graph hands gradients to {name!r}, which does not exist (any more): keep what "
            "zcompile.compile_step returned for as long as its loss is"
        ) from None
