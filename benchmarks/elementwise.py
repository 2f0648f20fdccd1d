"""Every elementwise optimizer of torch.optim, in the forms that differ in their arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, lr_decay=0.01),
    "adadelta": lambda p: optim.Adadelta(p),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
}
