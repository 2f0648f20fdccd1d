"""Layers of torch.nn, and parameters that a model uses without a layer."""

import pytest
import torch
from parity import check, options
from torch import nn
from torch.nn.utils import parametrizations


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, seed):
        out, _ = self.rnn(numbers(seed, 3, 4, 5))
        return self.head(out).pow(2).mean()


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(5, 6), nn.GRUCell(6, 6)

    def forward(self, seed):
        x = numbers(seed, 4, 3, 5)
        h, c, g = torch.zeros(3, 6), torch.zeros(3, 6), torch.zeros(3, 6)
        for each in x:
            h, c = self.lstm(each, (h, c))
            g = self.gru(h, g)
        return g.pow(2).mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.same = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, kdim=5, vdim=7, add_bias_kv=True)

    def forward(self, seed):
        x = numbers(seed, 3, 4, 8)
        x, _ = self.same(x, x, x, need_weights=False)
        y, weights = self.cross(x, numbers(seed, 3, 4, 5), numbers(seed, 3, 4, 7))
        return y.pow(2).mean() + weights.pow(2).mean()


class Encoder(nn.Module):
    """Before each training step an evaluation, where eager PyTorch takes a fast path. (With a
    padding mask that path returns zeros at padded places, which compiled code never does.)"""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, seed, pad=None):
        return self.encoder(numbers(seed, 3, 4, 8), src_key_padding_mask=pad).pow(2).mean()


def encoder_loss(model, seed):
    pad = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]).bool()
    model.eval()
    with torch.no_grad():
        evaluated = model(seed).item()
    model.train()
    return model(seed, pad) * (1 + evaluated)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)

    def forward(self, seed):
        return self.all(numbers(seed, 3, 4, 8), numbers(seed + 50, 3, 5, 8)).pow(3).mean()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = nn.Conv1d(2, 4, 3, padding=1, groups=2)
        self.deep = nn.Conv2d(1, 5, 3, stride=2)
        self.back = nn.ConvTranspose2d(5, 3, 3, stride=2)
        self.norm = nn.GroupNorm(3, 3)
        self.act = nn.PReLU(3)

    def forward(self, seed):
        x = self.flat(numbers(seed, 3, 2, 9)).reshape(3, 1, 4, 9)
        return self.act(self.norm(self.back(self.deep(x)))).pow(2).mean()


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.padded = nn.Embedding(11, 6, padding_idx=0)
        self.bag = nn.EmbeddingBag(13, 6, mode="mean")
        self.both = nn.Bilinear(6, 6, 4)

    def forward(self, seed):
        x = tokens(seed, 11, 3, 5)
        bag = self.bag(tokens(seed, 13, 12), torch.tensor([0, 3, 7]))
        return self.both(self.padded(x).sum(1), bag).pow(2).mean()


class Collections(nn.Module):
    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([torch.randn(4, 5) / 2, torch.randn(5, 4) / 2])
        self.named = nn.ParameterDict({"up": torch.randn(4, 7) / 2, "down": torch.randn(7, 4) / 2})
        self.bias = nn.ParameterList([torch.zeros(4)])

    def forward(self, seed):
        x = numbers(seed, 3, 4)
        for index, each in enumerate(self.several):
            x = x @ each + (self.bias[0] if index else 0)
        x = torch.tanh(x) @ self.named["up"]
        return (x @ self.named["down"]).pow(2).mean() + sum(p.sum() for p in self.named.values())


class Raw(nn.Module):
    """Parameters as operands of each other, transposed, indexed, sliced, iterated, compared."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(5, 5) / 2) for _ in range(2))
        self.stack = nn.Parameter(torch.randn(3, 5, 5) / 2)

    def forward(self, seed):
        x = numbers(seed, 4, 5) @ (self.a @ self.b)
        x = x @ self.a.T + self.b[0] + self.a[1:3].sum(0) + self.b.mT.mean(0)
        for layer in self.stack:
            x = torch.tanh(x @ layer)
        x = x + len(self.stack) + self.stack.shape[1] * self.stack.view(-1, 5)[7]
        q, k = self.a.chunk(2, dim=1)
        x = x * torch.where(self.b > 0, self.b, 0.1 * self.b).norm(dim=0) + q.sum() * k.mean()
        return (x - torch.einsum("ij,kij->k", self.a, self.stack).sum()).pow(2).mean()


class Regularised(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.one, self.two = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, seed):
        loss = self.two(torch.tanh(self.one(numbers(seed, 4, 6)))).pow(2).mean()
        if self.inside:
            loss = loss + 0.1 * sum(p.pow(2).sum() for p in self.parameters())
        return loss


def outside_loss(model, seed):
    return model(seed) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.one, self.two = norm(nn.Linear(6, 7)), nn.Linear(7, 6)

    def forward(self, seed):
        return self.two(torch.tanh(self.one(numbers(seed, 4, 6)))).pow(2).mean()


class Checkerboard(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight):
        return weight * (torch.arange(weight.numel()).reshape(weight.shape) % 2)


def spectral(layer):
    return parametrizations.spectral_norm(layer)


def checkerboard(layer):
    return nn.utils.parametrize.register_parametrization(layer, "weight", Checkerboard()) or layer


def lstm():
    return Recurrent(nn.LSTM)


def gru():
    return Recurrent(nn.GRU)


def inside():
    return Regularised(True)


def outside():
    return Regularised(False)


def weight_normed():
    return Normed(parametrizations.weight_norm)


def own_parametrization():
    return Normed(checkerboard)


def seeded(model, seed):
    return model(seed)


CASES = {
    "LSTM": (lstm, seeded),
    "GRU": (gru, seeded),
    "cells": (Cells, seeded),
    "attention": (Attention, seeded),
    "encoder": (Encoder, encoder_loss),
    "transformer": (Transformer, seeded),
    "convolutions": (Convolutions, seeded),
    "embeddings": (Embeddings, seeded),
    "collections": (Collections, seeded),
    "raw parameters": (Raw, seeded),
    "regularised inside": (inside, seeded),
    "regularised outside": (outside, outside_loss),
    "weight norm": (weight_normed, seeded),
    "own parametrization": (own_parametrization, seeded),
}
# Their parameters meet code that Dynamo leaves to eager, so a warning is expected.
WARNS = {"LSTM", "GRU", "encoder", "regularised inside", "regularised outside"}


def run(rank, world, name):
    make, loss = CASES[name]
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        check(rank, world, make, loss, options(stage), steps=2, quiet=name not in WARNS)


@pytest.mark.parametrize("name", CASES)
def test_layer_trains_as_in_plain_pytorch(ranks, name):
    ranks(run, name)
