"""The main claim: a sharded run is the unsharded run."""

import pytest
import torch
from parity import check, options
from torch import nn


class Net(nn.Module):
    """Sizes that no world from 2 to 4 divides; biases small enough to stay replicated or not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 10)
        self.up = nn.Linear(10, 17)
        self.norm = nn.LayerNorm(17)
        self.down = nn.Linear(17, 10)
        self.head = nn.Linear(10, 23, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.thin = nn.Parameter(torch.randn(1, 10))

    def forward(self, x, y):  # (batch, seq) each
        h = self.embed(x) * self.scale + self.thin
        h = h + self.down(self.norm(torch.tanh(self.up(h))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch_loss(model, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(23, (4, 5), generator=draw)
    y = torch.randint(23, (4, 5), generator=draw)
    return model(x, y)


def run(rank, world, opts, steps):
    check(rank, world, Net, batch_loss, opts, steps=steps)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sgd_run_equals_the_unsharded_run(ranks, stage, world):
    ranks(run, options(stage), 5, world=world)


@pytest.mark.parametrize("primitive", ["p2p", "native"])
@pytest.mark.parametrize("stage", [2, 3])
def test_either_primitive_carries_the_collectives(ranks, stage, primitive):
    ranks(run, options(stage, primitive=primitive), 3, world=3)
