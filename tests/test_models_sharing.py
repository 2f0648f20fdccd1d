"""Who uses a parameter, and how often: tied, repeated, accumulated, unused, frozen."""

import copy

import pytest
import torch
from parity import check, close, compare_gradients, compare_state, every_stage, options, sgd
from torch import nn
from torch.nn import functional as F

import zcompile


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class Tied(nn.Module):
    """The vocabulary of 23 is divided by no world from 2 to 4."""

    def __init__(self, vocabulary=23):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.emb(x))))


def tied_loss(model, seed):
    x = tokens(seed, 23, 4, 5)
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


def tied(rank, world):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        model = check(rank, world, Tied, tied_loss, options(stage))
        assert model.emb.weight is model.head.weight
        assert model.emb._parameters["weight"] is model.head._parameters["weight"]
        assert len(list(model.parameters())) == 3


@pytest.mark.parametrize("world", [2, 3])
def test_tied_weights_stay_one_parameter_and_train_like_one(ranks, world):
    ranks(tied, world=world)


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)
        self.layer = nn.Linear(7, 7)

    def forward(self, x):
        x = torch.tanh(self.layer(torch.tanh(x @ self.weight)))
        x = self.layer(x) @ self.weight
        return (x * self.weight.sum(0)).pow(2).mean()


def twice_loss(model, seed):
    return model(numbers(seed, 4, 7))


def two_forwards_loss(model, seed):
    return model(numbers(seed, 4, 7)) + 2 * model(numbers(seed + 100, 4, 7))


@pytest.mark.parametrize("world", [2, 3])
def test_parameter_and_module_used_twice_in_one_forward(ranks, world):
    ranks(every_stage, UsedTwice, twice_loss, world=world)


def test_two_forwards_before_one_backward(ranks):
    ranks(every_stage, UsedTwice, two_forwards_loss)


def accumulate(rank, world):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = UsedTwice()
        plain = copy.deepcopy(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        for step in range(3):
            for micro in range(3):
                seed = 100 * micro + step * world
                twice_loss(compiled, seed + rank).backward()
                for r in range(world):
                    (twice_loss(plain, seed + r) / world).backward()
                compare_gradients(model, plain, 1e-5, f"at step {step}, micro-batch {micro}")
            ours.step()
            theirs.step()
            ours.zero_grad(set_to_none=step % 2 == 0)
            theirs.zero_grad(set_to_none=step % 2 == 0)
        compare_state(model, plain, ours, theirs, 1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_three_backwards_before_one_step_accumulate(ranks, world):
    ranks(accumulate, world=world)


def repeated_backward(rank, world):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = UsedTwice()
        compiled = torch.compile(model, backend="zero", options=options(stage))
        twice_loss(compiled, rank).backward()
        model.zero_grad()
        compiled(numbers(rank, 4, 7)).backward()
        once = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}
        model.zero_grad()
        with torch._functorch.config.patch(donated_buffer=False):
            torch._dynamo.reset()
            loss = twice_loss(compiled, rank)
            loss.backward(retain_graph=True)
            loss.backward()
        for name, p in model.named_parameters():
            close(p.grad, 2 * once[name], 1e-5, f"twice the gradient of {name}")


def test_backward_twice_through_one_graph_doubles_the_gradient(ranks):
    ranks(repeated_backward)


class Unused(nn.Module):
    """`never` is not used; `extra` is used in some steps only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x, more):
        x = self.layer(x)
        return (self.extra(x) if more else x).pow(2).mean()


def never_more(model, seed):
    return model(numbers(seed, 4, 6), False)


def more_in_even_steps(model, seed):
    return model(numbers(seed, 4, 6), seed // 2 % 2 == 0)  # world 2


def more_in_odd_steps(model, seed):
    return model(numbers(seed, 4, 6), seed // 2 % 2 == 1)  # world 2


@pytest.mark.parametrize("loss", [never_more, more_in_even_steps, more_in_odd_steps])
def test_unused_parameters_get_no_gradient(ranks, loss):
    # check() compares `grad is None` of every parameter with the plain run at each step.
    ranks(every_stage, Unused, loss, {"steps": 4})


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(20, 30, bias=False)
        self.base.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(20, 4))
        self.b = nn.Parameter(torch.randn(4, 30))
        self.head = nn.Linear(30, 12)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + x @ self.a @ self.b)).pow(2).mean()


def lora_loss(model, seed):
    return model(numbers(seed, 4, 20))


def lora(rank, world):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        model = check(rank, world, LoRA, lora_loss, options(stage))
        optimizer = sgd(model.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage, primitive="p2p"))
        for _ in range(2):
            before = zcompile.traffic()
            loss = lora_loss(compiled, rank)
            between = zcompile.traffic()
            loss.backward()
            after = zcompile.traffic()
            optimizer.step()
            optimizer.zero_grad()
        frozen = {"base.weight", "head.bias"}
        local = {n: p.to_local().nbytes for n, p in model.named_parameters()}
        whole = {n: p.numel() * 4 for n, p in model.named_parameters()}
        gathered = sum(local.values()) * (world - 1)
        reduced = sum(whole[n] - local[n] for n in local if n not in frozen)
        assert (between - before).gather_bytes == gathered, (between - before, gathered)
        assert (between - before).reduce_bytes == 0
        assert (after - between).reduce_bytes == reduced, (after - between, reduced)
        assert (after - before).all_reduce_bytes == 0
        state = {n for n, p in model.named_parameters() if p in optimizer.state}
        assert state == {"a", "b", "head.weight"}, state


@pytest.mark.parametrize("world", [2, 3])
def test_frozen_weights_are_gathered_never_reduced_and_have_no_state(ranks, world):
    ranks(lora, world=world)


def thaw(rank, world):
    """Freeze a layer between steps and thaw it again."""
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = UsedTwice()
        plain = copy.deepcopy(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        for step in range(6):
            for each in (model, plain):
                each.layer.requires_grad_(step not in (2, 3))
            twice_loss(compiled, step * world + rank).backward()
            for r in range(world):
                (twice_loss(plain, step * world + r) / world).backward()
            compare_gradients(model, plain, 1e-5, f"at step {step}")
            for each in (ours, theirs):
                each.step()
                each.zero_grad()
        compare_state(model, plain, ours, theirs, 1e-5)


def test_freezing_and_thawing_between_steps(ranks):
    ranks(thaw)
