"""fuse on sharded parameters: losses, gradients, parameters and states as in the plain run."""

import pytest
import torch
from parity import check, options
from torch import nn, optim

from zcompile.fused import fuse

MAKES = {
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
}


class Scaled(nn.Module):
    """Rows that do not divide by the ranks, a parameter of one element and a 0-dim one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 11), nn.Linear(11, 3)
        self.one, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.second(self.first(x).tanh() * self.one) * self.scale


def loss(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


def fused_against_plain(rank, world, stage, name):
    made = []

    def make(params):
        optimizer = MAKES[name](params)
        made.append(optimizer)
        return fuse(optimizer) if len(made) == 1 else optimizer

    check(rank, world, Scaled, loss, options(stage), steps=6, optimizer=make)
    return len(made[0].step.fused.programs), made[0].step.fused.warned


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2), (2, 3), (3, 3), (4, 1), (4, 3)])
def test_as_the_plain_run(ranks, world, stage, name):
    for programs, warned in ranks(fused_against_plain, stage, name, world=world):
        assert programs and not warned
