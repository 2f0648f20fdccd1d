"""An optimizer's steps on parameters of several shapes, fused or as it is; optimizers by a rule."""

import torch
from torch import nn, optim

from zcompile.fused import fuse

STEPS = 12


SHAPES = [(3, 5), (7,), (), (0,), (1,), (130, 33)]


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def train(make, steps=STEPS, dtype=torch.float32, fused=True, change=None):
    params = parameters(dtype)
    optimizer = make(params)
    if fused:
        fuse(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        if change is not None:
            change(optimizer, step)
        optimizer.step()
    return params, optimizer


def compare(ours, reference, tolerance=1e-6):
    (params, optimizer), (wanted, plain) = ours, reference
    for p, w in zip(params, wanted):
        close(p, w, tolerance)
        state, other = optimizer.state[p], plain.state[w]
        assert list(state) == list(other)
        for key, value in other.items():
            if isinstance(value, list):
                assert all(map(torch.equal, state[key], value))
            elif isinstance(value, torch.Tensor):
                assert state[key].shape == value.shape
                close(state[key], value, tolerance)
            else:
                assert state[key] == value and type(state[key]) is type(value)


def close(value, wanted, tolerance):
    scale = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(
        value.detach().double(), wanted.detach().double(), rtol=0, atol=tolerance * max(scale, 1.0)
    )


class Normed(optim.Optimizer):
    """Not elementwise."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-8), alpha=group["lr"])


class ByRule(optim.Optimizer):
    """Its step is `rule(optimizer, group, parameter, its state)` for each parameter."""

    def __init__(self, params, rule, **attributes):
        super().__init__(params, {"lr": 0.1})
        self.__dict__.update(attributes)
        type(self).rule = staticmethod(rule)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(self, group, p, self.state[p])
