"""Optimizers: groups, several of them, made early and late, with state, and of every kind.

Tolerances. An optimizer that divides by the root of a second moment turns a gradient of any size
into a step of size lr: for an element whose true gradient is near zero, rounding decides the
sign of the step. Such optimizers get an absolute tolerance of a hundredth of a step
(lr 0.01 -> 1e-4); SGD passes errors on linearly and keeps 1e-5.
"""

import copy

import pytest
import torch
from parity import check, close, compare_gradients, compare_state, options, sgd
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LambdaLR, StepLR


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 11)
        self.norm = nn.LayerNorm(11)
        self.two = nn.Linear(11, 5)

    def forward(self, x):
        return self.two(torch.tanh(self.norm(self.one(x)))).pow(2).sum(-1).mean()


def loss_of(model, seed):
    return model(numbers(seed, 4, 6))


class Twins:
    """A model, its plain twin, and as many optimizers of each as `optimizers` makes."""

    def __init__(self, rank, world, stage, optimizers):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.rank, self.world, self.count = rank, world, 0
        self.model = Net()
        self.plain = copy.deepcopy(self.model)
        self.optimizers = optimizers
        self.ours = self.theirs = ()
        self.compiled = torch.compile(self.model, backend="zero", options=options(stage))

    def make_optimizers(self):
        self.ours, self.theirs = self.optimizers(self.model), self.optimizers(self.plain)

    def both(self):
        return zip((self.model, self.plain), (self.ours, self.theirs), strict=True)

    def steps(self, count, after=None):
        for _ in range(count):
            seed, self.count = self.count * self.world, self.count + 1
            loss_of(self.compiled, seed + self.rank).backward()
            for r in range(self.world):
                (loss_of(self.plain, seed + r) / self.world).backward()
            compare_gradients(self.model, self.plain, 1e-5, f"at step {self.count}")
            for _, optimizers in self.both():
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if after:
                after()

    def compare(self, tolerance=1e-5):
        for mine, other in zip(self.ours, self.theirs, strict=True):
            compare_state(self.model, self.plain, mine, other, tolerance)
            for a, b in zip(mine.param_groups, other.param_groups, strict=True):
                assert len(a["params"]) == len(b["params"]) and a["lr"] == b["lr"]


def grouped(model):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.2},
    ]
    return [torch.optim.SGD(groups, lr=0.05, momentum=0.9)]


def disjoint(model):
    return [
        torch.optim.SGD(model.one.parameters(), lr=0.05, momentum=0.9),
        torch.optim.SGD([*model.norm.parameters(), *model.two.parameters()], lr=0.1),
    ]


def single(model):
    return [sgd(model.parameters())]


def from_names(model):
    return [sgd(model.named_parameters())]


def half(model):
    return [sgd(model.one.parameters())]


def adam(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def simple(rank, world, optimizers, when):
    """The optimizers are made before torch.compile's first call, or after it."""
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, optimizers)
        if when == "before":
            twins.make_optimizers()
        else:
            with torch.no_grad():
                twins.compiled(numbers(0, 4, 6))
            twins.make_optimizers()
        twins.steps(3)
        twins.compare()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("optimizers", [grouped, disjoint, from_names])
def test_groups_and_several_optimizers(ranks, optimizers, when):
    ranks(simple, optimizers, when)


def between_forward_and_backward(rank, world):
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, single)
        loss = loss_of(twins.compiled, rank)
        twins.make_optimizers()
        loss.backward()
        for r in range(world):
            (loss_of(twins.plain, r) / world).backward()
        for _, (optimizer,) in twins.both():
            optimizer.step()
            optimizer.zero_grad()
        twins.steps(2)
        twins.compare()


def test_optimizer_made_between_forward_and_backward(ranks):
    ranks(between_forward_and_backward)


def late_group(rank, world, before):
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, half)
        twins.make_optimizers()
        twins.steps(0 if before else 2)
        for each, (optimizer,) in twins.both():
            rest = [*each.norm.parameters(), *each.two.parameters()]
            for p in rest:
                p.grad = None
            optimizer.add_param_group({"params": rest, "lr": 0.2})
        twins.steps(2)
        twins.compare()


@pytest.mark.parametrize("before", [True, False])
def test_group_added_later(ranks, before):
    ranks(late_group, before)


def with_state(rank, world, optimizers, tolerance):
    """A few plain steps on the same batch, then the model is compiled and goes on."""
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, optimizers)
        twins.make_optimizers()
        for each, (optimizer,) in twins.both():
            for step in range(3):
                loss_of(each, step).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step < 2)
        twins.steps(3)
        twins.compare(tolerance)


@pytest.mark.parametrize("optimizers,tolerance", [(single, 1e-5), (adam, 1e-4)])
def test_optimizer_with_state_is_taken_over(ranks, optimizers, tolerance):
    ranks(with_state, optimizers, tolerance)


def pending_gradient(rank, world):
    """Gradients of an uncompiled backward are in place when the first compiled call comes."""
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, single)
        twins.make_optimizers()
        loss_of(twins.model, 50 + rank).backward()
        for r in range(world):
            (loss_of(twins.plain, 50 + r) / world).backward()
        twins.steps(2)
        twins.compare()


def test_gradients_from_before_the_first_call_count(ranks):
    ranks(pending_gradient)


def scheduled(rank, world):
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, grouped)
        twins.make_optimizers()
        schedulers = [
            ChainedScheduler(
                [
                    LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2)),
                    StepLR(optimizer, 2, 0.5),
                    CosineAnnealingLR(optimizer, 8),
                ]
            )
            for _, (optimizer,) in twins.both()
        ]
        twins.steps(4, after=lambda each=schedulers: [s.step() for s in each])
        twins.compare()
        rates = [g["lr"] for g in twins.ours[0].param_groups]
        assert rates == [g["lr"] for g in twins.theirs[0].param_groups] and rates[0] != 0.05


def test_learning_rate_schedulers(ranks):
    ranks(scheduled)


def closure(rank, world):
    """optimizer.step(closure)."""
    for stage in (1, 2, 3):
        twins = Twins(rank, world, stage, plain_sgd)
        twins.make_optimizers()
        for step in range(2):

            def mine(twins=twins, step=step):
                twins.model.zero_grad()
                loss = loss_of(twins.compiled, step)  # the same batch on every rank
                loss.backward()
                return loss

            def other(twins=twins, step=step):
                twins.plain.zero_grad()
                loss = loss_of(twins.plain, step)
                loss.backward()
                return loss

            close(twins.ours[0].step(mine), twins.theirs[0].step(other), 1e-4, "loss")
        for (name, p), q in zip(
            twins.model.named_parameters(), twins.plain.parameters(), strict=True
        ):
            close(p, q, 1e-3, name)


def plain_sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def test_a_step_with_a_closure(ranks):
    ranks(closure)


def kinds(lr=0.01):
    """Name -> optimizer class and arguments, tolerance."""
    o, cases = torch.optim, {}
    for way in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        name = " ".join(f"{k}={v}" for k, v in way.items())
        cases[f"SGD {name}"] = (o.SGD, {"momentum": 0.9, "nesterov": True, **way}, 1e-5)
        cases[f"AdamW {name}"] = (o.AdamW, way, 1e-4)
        cases[f"Adam {name}"] = (o.Adam, {"amsgrad": True, "weight_decay": 0.1, **way}, 1e-4)
        cases[f"Adagrad {name}"] = (o.Adagrad, way, 1e-4)
        if "foreach" in way:
            others = ["RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"]
            for kind in others + ["ASGD"] * way["foreach"]:
                cases[f"{kind} {name}"] = (getattr(o, kind), way, 1e-4)
    cases["RMSprop centered"] = (o.RMSprop, {"momentum": 0.9, "centered": True}, 1e-4)
    cases["Muon"] = (o.Muon, {}, 1e-3)
    return cases


def of_kind(rank, world, names):
    failures = []
    for name in names:
        kind, arguments, tolerance = kinds()[name]

        def optimizer(params, kind=kind, arguments=arguments):
            if kind is torch.optim.Muon:
                params = [p for p in params if p.dim() == 2]
            return kind(params, lr=0.01, **arguments)

        torch._dynamo.reset()
        try:
            check(
                rank, world, Net, loss_of, options(3), optimizer=optimizer, tolerance=tolerance,
                quiet=kind is not torch.optim.Muon,
            )  # fmt: skip
        except Exception as error:  # All kinds are tried, and reported together.
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("way", ["foreach=True", "foreach=False", "fused=True", "other"])
def test_optimizers_of_torch(ranks, way):
    every = [n for n in kinds() if (way in n if way != "other" else "=" not in n)]
    ranks(of_kind, every)


def refused(rank, world):
    """DTensor has no rule for an operation of theirs: an error, never a silent wrong step."""
    o = torch.optim
    for kind, arguments in (
        (o.LBFGS, {}),
        (o.Adafactor, {}),
        (o.Rprop, {"foreach": True}),
        (o.Rprop, {"foreach": False}),
        (o.ASGD, {"foreach": False}),
    ):
        torch._dynamo.reset()
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            check(
                rank, world, Net, loss_of, options(3), quiet=False,
                optimizer=lambda params, k=kind, a=arguments: k(params, lr=0.01, **a),
            )  # fmt: skip


def test_optimizers_that_cannot_be_sharded_raise(ranks):
    ranks(refused)
