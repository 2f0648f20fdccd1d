"""Custom autograd functions and every kind of hook."""

import copy

import pytest
import torch
from parity import close, compare_gradients, compare_state, every_stage, options, sgd, whole
from torch import nn


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Cube(torch.autograd.Function):
    """The cube with a gradient three times too small: only this backward gives it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x**3 * weight.sum(0)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        along = (grad * x**3).sum(0)
        return grad * x**2 * weight.sum(0), along.expand_as(weight)


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 7)
        self.weight = nn.Parameter(torch.randn(5, 7) / 4)

    def forward(self, x):
        return Cube.apply(self.layer(x), self.weight).pow(2).mean()


def plain_loss(model, seed):
    return model(numbers(seed, 4, 6))


def test_custom_autograd_function_of_a_parameter(ranks):
    ranks(every_stage, WithFunction, plain_loss)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 7)
        self.two = nn.Linear(7, 6)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x))).pow(2).mean()


def forward_hooks():
    model = Two()
    model.one.register_forward_hook(lambda module, args, out: out * 2)
    model.two.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(),))
    model.two.register_forward_hook(
        lambda module, args, kwargs, out: out + args[0].sum(), with_kwargs=True
    )
    model.register_forward_hook(lambda module, args, out: out * 3)
    return model


def backward_hooks():
    model = Two()
    model.one.register_full_backward_hook(lambda module, into, out: (into[0],))
    model.two.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    model.two.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
    return model


@pytest.mark.parametrize("make", [forward_hooks, backward_hooks])
def test_module_hooks(ranks, make):
    ranks(every_stage, make, plain_loss, {"quiet": False})


def tensor_hooks(rank, world, early):
    """Hooks on parameters, registered before or after sharding, see the mean gradient."""
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Two()
        plain = copy.deepcopy(model)
        seen = {model: [], plain: []}

        def hook(each, seen=seen):
            def scale(grad):
                seen[each].append(grad)
                return grad * 2

            def after(param):
                seen[each].append(param.grad.clone())

            each.one.weight.register_hook(scale)
            each.two.weight.register_post_accumulate_grad_hook(after)

        hook(plain)
        if early:
            hook(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        if not early:
            with torch.no_grad():
                compiled(numbers(0, 4, 6))
            hook(model)
        for step in range(3):
            plain_loss(compiled, step * world + rank).backward()
            (sum(plain_loss(plain, step * world + r) for r in range(world)) / world).backward()
            compare_gradients(model, plain, 1e-5, f"at step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        compare_state(model, plain, ours, theirs, 1e-5)
        assert len(seen[model]) == len(seen[plain]) == 6
        mine = sorted(whole(g).abs().sum().item() for g in seen[model])
        expected = sorted(g.abs().sum().item() for g in seen[plain])
        close(torch.tensor(mine), torch.tensor(expected), 1e-4, "gradients that the hooks saw")


@pytest.mark.parametrize("early", [False, True])
def test_tensor_hooks_on_parameters(ranks, early):
    ranks(tensor_hooks, early)


def optimizer_in_backward(rank, world):
    """One optimizer per parameter, stepped by its own hook."""
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Two()
        plain = copy.deepcopy(model)
        compiled = torch.compile(model, backend="zero", options=options(stage))
        with torch.no_grad():
            compiled(numbers(0, 4, 6))
        for each in (model, plain):
            for p in each.parameters():
                optimizer = sgd([p])

                def step(param, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step)
        for step in range(3):
            plain_loss(compiled, step * world + rank).backward()
            (sum(plain_loss(plain, step * world + r) for r in range(world)) / world).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is None
            close(p, q, 1e-5, f"parameter {name}")


def test_optimizer_step_inside_backward(ranks):
    ranks(optimizer_in_backward)


def gradients_by_grad(rank, world):
    """torch.autograd.grad instead of backward, of parameters and of the input."""
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Two()
        plain = copy.deepcopy(model)
        compiled = torch.compile(model, backend="zero", options=options(stage))
        for step in range(3):
            x = numbers(step * world + rank, 4, 6).requires_grad_()
            mine = torch.autograd.grad(compiled(x), [x, *model.parameters()])
            total = sum(plain_loss(plain, step * world + r) for r in range(world)) / world
            expected = torch.autograd.grad(total, list(plain.parameters()))
            for index, (a, b) in enumerate(zip(mine[1:], expected, strict=True)):
                close(a, b, 1e-5, f"gradient {index} at step {step}")
            close(mine[0], torch.autograd.grad(plain(x), x)[0], 1e-5, "gradient of the input")


def test_autograd_grad(ranks):
    ranks(gradients_by_grad)
