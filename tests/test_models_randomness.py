"""Buffers, dropout and activation checkpointing."""

import copy

import pytest
import torch
from parity import close, compare_gradients, compare_state, every_stage, options, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Norms(nn.Module):
    """Batch statistics, a buffer updated by hand, and one that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        x = F.relu(self.norm(self.conv(x))).mean(-1) * self.scale
        return self.head(x)


def buffers(rank, world):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Norms()
        plain = copy.deepcopy(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        for step in range(3):
            x = numbers(step, 6, 3, 8)  # the same on every rank
            mine, expected = compiled(x).pow(2).mean(), plain(x).pow(2).mean()
            mine.backward()
            expected.backward()
            close(mine, expected, 1e-5, f"loss at step {step}")
            compare_gradients(model, plain, 1e-5, f"at step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        compare_state(model, plain, ours, theirs, 1e-5)
        assert model.calls == 3 and model.norm.num_batches_tracked == 3
        assert set(model.state_dict()) == set(plain.state_dict())
        model.eval(), plain.eval()
        with torch.no_grad():
            close(compiled(x), plain(x), 1e-5, "with running statistics")
        compare_state(model, plain, ours, theirs, 1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_buffers_advance_as_in_the_plain_run(ranks, world):
    ranks(buffers, world=world)


class Dropped(nn.Module):
    """Dropout between two linear maps; the second output is the mask itself."""

    def __init__(self, recompute=False):
        super().__init__()
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        self.recompute = recompute

    def block(self, x):
        h = self.up(x)
        mask = F.dropout(torch.ones_like(h), 0.5, self.training)
        return self.down(torch.tanh(h) * mask), mask

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.block, x, use_reentrant=False)
        return self.block(x)


def dropout(rank, world, recompute):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Dropped(recompute)
        up, down = model.up.weight.detach().clone(), model.down.weight.detach().clone()
        compiled = torch.compile(model, backend="zero", options=options(stage))
        torch.manual_seed(100 + rank)
        masks = []
        for step in range(3):
            x = numbers(step, 8, 16).requires_grad_()
            out, mask = compiled(x)
            out.pow(2).sum().backward()
            masks.append(mask.detach())
            a, b, z = (t.clone().requires_grad_() for t in (up, down, x.detach()))
            expected = (torch.tanh(z @ a.T) * mask.detach()) @ b.T
            expected.pow(2).sum().backward()
            close(out, expected, 1e-5, "output under its own mask")
            close(x.grad, z.grad, 1e-4, "gradient of the input under the forward's mask")
            for p, q in ((model.up, a), (model.down, b)):
                mean = torch.stack(gather(q.grad, world)).mean(0)
                close(p.weight.grad, mean, 1e-4, "gradient under the forwards' masks")
            model.zero_grad()
        assert set(masks[0].unique().tolist()) == {0.0, 2.0}
        assert not torch.equal(masks[1], masks[2]), "a new mask each step"
        theirs = gather(masks[2], world)
        assert not torch.equal(theirs[0], theirs[1]), "ranks seeded differently draw differently"
        model.eval()
        out, mask = compiled(x)
        assert torch.equal(mask, torch.ones_like(mask))


def gather(tensor, world):
    out = [torch.empty_like(tensor) for _ in range(world)]
    torch.distributed.all_gather(out, tensor.contiguous())
    return out


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_uses_the_mask_that_forward_drew(ranks, recompute):
    ranks(dropout, recompute)


def same_seed(rank, world):
    """The masks are those that the eager model draws from the same seed on the first call."""
    model = Dropped()
    torch.manual_seed(7)
    _, expected = model(numbers(0, 8, 16))
    compiled = torch.compile(model, backend="zero", options=options(3))
    for _ in range(2):
        torch.manual_seed(7)
        assert torch.equal(compiled(numbers(0, 8, 16))[1], expected)


def test_dropout_draws_the_mask_of_the_eager_model(ranks):
    ranks(same_seed)


class Blocks(nn.Module):
    """Checkpointed and plain blocks in turn, the last of them nested."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 17), nn.GELU(), nn.Linear(17, 10))
            for _ in range(3)
        )

    def last(self, x):
        return checkpoint(self.blocks[2], x, use_reentrant=False) + x

    def forward(self, x):
        x = x + checkpoint(self.blocks[0], x, use_reentrant=False)
        x = x + self.blocks[1](x)
        x = checkpoint(self.last, x, use_reentrant=False)
        return x.pow(2).mean()


def blocks_loss(model, seed):
    return model(numbers(seed, 4, 10))


@pytest.mark.parametrize("world", [2, 3])
def test_checkpointed_blocks(ranks, world):
    ranks(every_stage, Blocks, blocks_loss, world=world)


class Outer(nn.Module):
    """Checkpoint around a call of the compiled model."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 17), nn.Tanh(), nn.Linear(17, 10))

    def forward(self, x):
        return self.inner(x)


def around_loss(model, seed):
    x = numbers(seed, 4, 10).requires_grad_()
    return checkpoint(model, x, use_reentrant=False).pow(2).mean()


def test_checkpoint_around_the_compiled_model(ranks):
    ranks(every_stage, Outer, around_loss)
