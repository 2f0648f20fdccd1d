"""What goes in and out of a model, control flow, evaluation and changing shapes."""

import contextlib
import copy
import dataclasses
import typing

import pytest
import torch
from parity import check, close, compare_gradients, compare_state, every_stage, options, sgd
from torch import nn
from torch.nn import functional as F

import zcompile.backend


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    hidden: torch.Tensor | None = None


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Results(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(6, 9)
        self.head = nn.Linear(9, 6)

    def forward(self, x, *, scale=None, mask=None, flags=(1, "on")):
        h = torch.tanh(self.layer(x))
        if mask is not None:
            h = h * mask["keep"]
        loss = self.head(h).pow(2).mean()
        if scale is not None:
            loss = loss * scale
        if self.kind == "dict":
            return {"loss": loss, "hidden": h, "none": None, "nested": [h.sum(), {"two": 2}]}
        if self.kind == "tuple":
            return loss, h, None
        if self.kind == "namedtuple":
            return Pair(loss, h)
        return Result(loss, h)


def kind_loss(kind, model, seed):
    x = numbers(seed, 4, 6)
    keep = {"keep": (numbers(seed, 9) > 0).float()}
    one, two, three = model(x), model(x, scale=2.0, flags=[1]), model(x, mask=keep, scale=x.max())
    if kind == "dict":
        assert set(one) == {"loss", "hidden", "none", "nested"} and one["none"] is None
        assert one["nested"][1] == {"two": 2}
        return one["loss"] + two["nested"][0] + three["hidden"].mean()
    if kind == "tuple":
        assert type(one) is tuple and one[2] is None
        return one[0] + two[0] + three[1].mean()
    if kind == "namedtuple":
        assert type(one) is Pair
        return one.first + two.first + three.second.mean()
    assert type(one) is Result
    return one.loss + two.loss + three.hidden.mean()


def kinds(rank, world):
    import functools

    for kind in ("dict", "tuple", "namedtuple", "dataclass"):
        torch._dynamo.reset()
        make, loss = functools.partial(Results, kind), functools.partial(kind_loss, kind)
        check(rank, world, make, loss, options(3), steps=2)


def test_results_of_every_kind_kwargs_and_none(ranks):
    ranks(kinds)


class Breaks(nn.Module):
    """A print and an .item() cut the graph; the parameters on both sides are compiled."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.a(x))
        print(end="")
        x = torch.tanh(self.b(x))
        x = x * (1.0 if x.abs().sum().item() > 0 else 2.0)
        return self.c(x).pow(2).mean()


class UsedInTheBreak(Breaks):
    """The parameter itself is used where Dynamo does not look."""

    def forward(self, x):
        x = torch.tanh(self.a(x))
        x = outside(self.b, self.c.weight, x)
        return self.c(x).pow(2).mean()


@torch._dynamo.disable
def outside(layer, weight, x):
    return layer(x) @ weight.T + weight.mean()


class Branches(Breaks):
    """The branch taken depends on a value that all ranks share; the number of rounds too."""

    def forward(self, x, which):
        layer = self.a if which.sum() > 0 else self.b
        for _ in range(int(which[0].abs()) + 1):
            x = torch.tanh(layer(x))
        return self.c(x).pow(2).mean()


class Loops(Breaks):
    def forward(self, x):
        for index in range(4):
            for name, layer in self.named_children():
                if name != "c" or index % 2:
                    x = torch.tanh(layer(x)) + index * layer.bias
        return x.pow(2).mean()


def plain_loss(model, seed):
    return model(numbers(seed, 4, 6))


def branch_loss(model, seed):
    step = seed // 2  # world 2
    which = torch.tensor([2.0, 3.0]) if step % 2 else torch.tensor([-1.0, -2.0])
    return model(numbers(seed, 4, 6), which)


@pytest.mark.parametrize("make", [Breaks, Loops])
def test_graph_breaks_and_loops_without_a_warning(ranks, make):
    ranks(every_stage, make, plain_loss)


def test_parameters_used_between_graphs(ranks):
    ranks(every_stage, UsedInTheBreak, plain_loss, {"quiet": False})


def test_data_dependent_branches(ranks):
    ranks(every_stage, Branches, branch_loss, {"steps": 4})


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(23, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 23)

    def forward(self, x):
        h = self.emb(x)
        h = h + torch.cumsum(self.mix(self.norm(h)), 1)
        if not self.training:
            h = self.drop(h)
        return self.head(h)


def language_loss(model, seed, length=5):
    x = tokens(seed, 23, 3, length + 1)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def generate(model, x, count, mode):
    with mode():
        for _ in range(count):
            x = torch.cat([x, model(x)[:, -1:].argmax(-1)], 1)
    return x


def evaluate(rank, world, mode_name, first, stages):
    """Training steps with a greedy generation of growing length between them."""
    mode = getattr(torch, mode_name)
    for stage in stages:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Language()
        plain = copy.deepcopy(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        if first:
            with mode():
                close(compiled(tokens(7, 23, 2, 4)), plain(tokens(7, 23, 2, 4)), 1e-5, "first")
        for step in range(3):
            language_loss(compiled, step * world + rank).backward()
            for r in range(world):
                (language_loss(plain, step * world + r) / world).backward()
            compare_gradients(model, plain, 1e-5, f"at step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            compiled.eval(), plain.eval()
            assert not model.training
            start = tokens(step, 23, 2, 2)
            with contextlib.nullcontext() if step else mode():
                close(compiled(start), plain(start), 1e-5, f"logits at step {step}")
            mine, expected = (generate(m, start, 4, mode) for m in (compiled, plain))
            assert torch.equal(mine, expected)
            compiled.train(), plain.train()
        compare_state(model, plain, ours, theirs, 1e-5)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_generation_between_training_steps(ranks, mode):
    ranks(evaluate, mode, False, (3,) if mode == "no_grad" else (1, 2, 3))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_first_call_is_an_evaluation(ranks, mode):
    ranks(evaluate, mode, True, (1, 2, 3) if mode == "no_grad" else (3,))


def lengths(rank, world):
    compiled_graphs = []
    compile_graph = zcompile.backend.compile_graph

    def counted(*args):
        compiled_graphs.append(args)
        return compile_graph(*args)

    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Language()
        plain = copy.deepcopy(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        compiled_graphs.clear()
        zcompile.backend.compile_graph = counted
        try:
            for step, length in enumerate([5, 5, 7, 4, 9, 6]):
                language_loss(compiled, step * world + rank, length).backward()
                for r in range(world):
                    (language_loss(plain, step * world + r, length) / world).backward()
                compare_gradients(model, plain, 1e-5, f"at step {step}")
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            zcompile.backend.compile_graph = compile_graph
        compare_state(model, plain, ours, theirs, 1e-5)
        assert len(compiled_graphs) == 2, "one static, one dynamic"


def test_a_new_length_each_step_compiles_twice(ranks):
    ranks(lengths)
