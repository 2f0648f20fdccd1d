"""no_sync: one reduction for several backward passes, and the gradients of one batch."""

import contextlib
import copy

import pytest
import torch
from parity import TOLERANCE, compare_gradients, compare_state, options, sgd
from test_equality import Net
from torch import nn

import zcompile
from zcompile import ZeroError


def batch(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(23, (2, 4, 5), generator=draw)


def train(rank, world, stage, engine, dtype=None):
    """Three steps of three passes each, two of them under no_sync, then one as ever."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
    opts = options(stage, engine=engine)
    zcompile.shard(model, opts)
    compiled = torch.compile(model, backend="zero", options=opts)
    sent = []
    for step in range(4):
        seeds = [step * 100 + 10 * part for part in range(3 if step < 3 else 1)]
        for seed in seeds:
            before = zcompile.traffic()
            if seed != seeds[-1]:
                with zcompile.no_sync(model):
                    compiled(*batch(seed + rank)).backward()
            else:
                compiled(*batch(seed + rank)).backward()
            moved = zcompile.traffic() - before
            sent.append(moved.reduce_bytes + moved.all_reduce_bytes)
        for seed in seeds:
            (sum(plain(*batch(seed + r)) for r in range(world)) / world).backward()
        compare_gradients(model, plain, TOLERANCE, f"at step {step}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    compare_state(model, plain, ours, theirs, TOLERANCE)
    return sent


@pytest.mark.parametrize(
    ("world", "stage", "engine"),
    [(1, 3, "eager"), (2, 1, "eager"), (2, 3, "eager"), (3, 2, "eager"), (2, 1, "inductor")],
)
def test_gradients_are_averaged_once(ranks, world, stage, engine):
    for sent in ranks(train, stage, engine, world=world, timeout=300):
        once = sent[-1]
        assert sent == [0, 0, once] * 3 + [once]
        assert once or world == 1


def two_models(rank, world):
    """Of the same names and shapes, both held at once: which is averaged first?"""
    makes = [nn.Linear(4, 4) for _ in range(6)]
    plain = copy.deepcopy(makes)
    opts = options(3)
    for model in makes:
        zcompile.shard(model, opts)
    compiled = [torch.compile(model, backend="zero", options=opts) for model in makes]
    with contextlib.ExitStack() as stack:
        for model in makes:
            stack.enter_context(zcompile.no_sync(model))
        for index, model in enumerate(compiled):
            (model(torch.ones(2, 4) * (rank + 1)).sum() * index).backward()
    sum(model(torch.ones(2, 4) * (rank + 1)).sum() for model in compiled).backward()
    for r in range(world):
        for index, model in enumerate(plain):
            (model(torch.ones(2, 4) * (r + 1)).sum() * (index + 1) / world).backward()
    for model, other in zip(makes, plain, strict=True):
        compare_gradients(model, other, TOLERANCE, "of one of six")


def test_models_of_the_same_names_are_not_mixed(ranks):
    ranks(two_models, world=2)


def cases(rank, world):
    model = nn.Linear(8, 8)
    with pytest.raises(ZeroError, match="no_sync: the model is not sharded yet"):
        zcompile.no_sync(model).__enter__()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opts = options(1)
    zcompile.shard(model, opts)
    compiled = torch.compile(model, backend="zero", options=opts)
    x = torch.ones(2, 8) * (rank + 1)
    with zcompile.no_sync(model):
        compiled(x).sum().backward()
    with pytest.raises(ZeroError, match="that was held under no_sync was never averaged"):
        optimizer.step()
    with torch.no_grad():  # looking at the model in between averages nothing
        compiled(x)
    with zcompile.no_sync(model), pytest.raises(RuntimeError, match="fake tensor"):
        compiled(torch.ones(2, 7))
    compiled(x).sum().backward()
    optimizer.step()
    mean = 2 * 2 * sum(r + 1 for r in range(world)) / world
    gradient = model.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, torch.full((8, 8), mean))
    copied = copy.deepcopy(model)
    assert torch.equal(copied.weight.full_tensor(), model.weight.full_tensor())


def test_what_is_held_is_neither_lost_nor_counted_twice(ranks):
    ranks(cases, world=2)


def crossing(rank, world):
    """Backward passes that do not run where their forward passes did, and one that is frozen."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    plain = copy.deepcopy(model)
    opts = options(1)
    zcompile.shard(model, opts)
    compiled = torch.compile(model, backend="zero", options=opts)
    x = torch.randn(4, 2, 8)
    with zcompile.no_sync(model):
        losses = [compiled(each).square().sum() for each in x[:2]]
    losses += [compiled(each).square().sum() for each in x[2:]]
    for loss in losses:
        loss.backward()
    for each in x:
        plain(each).square().sum().backward()
    compare_gradients(model, plain, TOLERANCE, "of four passes")
    with zcompile.no_sync(model):
        compiled(x[0]).square().sum().backward()
    compiled(x[0]).square().sum().backward()
    for each in (model, plain):
        for p in each.parameters():
            p.grad = None
        each.weight.requires_grad_(False)
    with zcompile.no_sync(model):
        compiled(x[0]).square().sum().backward()
    compiled(x[0]).square().sum().backward()
    (2 * plain(x[0]).square().sum()).backward()
    compare_gradients(model, plain, TOLERANCE, "with a frozen weight")


@pytest.mark.parametrize("world", [1, 2])
def test_passes_that_cross_and_parameters_that_freeze(ranks, world):
    ranks(crossing, world=world)
