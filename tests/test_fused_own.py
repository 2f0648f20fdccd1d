"""fuse(optimizer) of what users write: a kernel where one update is every element's, or as it is.

Tolerances are those of test_fused.py.
"""

import math

import pytest
import torch
from stepping import STEPS, ByRule, Normed, compare, train
from torch import optim

from zcompile.errors import ZeroWarning
from zcompile.fused import MOST_CASES


class Blend(optim.Optimizer):
    """A user's own: elementwise, with a count that is a Python number and a branch on it."""

    def __init__(self, params, lr, mix=0.25):
        super().__init__(params, {"lr": lr, "mix": mix})
        self.bound = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["average"] = torch.zeros_like(p)
                state["count"] += 1
                state["average"].lerp_(p.grad.sign(), group["mix"])
                rate = group["lr"] if state["count"] > 3 else group["lr"] * state["count"] / 3
                p.add_(state["average"].clamp(-self.bound, self.bound), alpha=-rate)


def test_a_user_s_own_optimizer():
    make = lambda p: Blend(p, 0.1)

    def loosen(optimizer, step):
        optimizer.bound = 0.25 if step < 5 else 0.5

    ours = train(make, change=loosen)
    assert ours[1].step.fused.programs and not ours[1].step.fused.warned
    compare(ours, train(make, dtype=torch.float64, fused=False, change=loosen))


def test_what_is_not_elementwise_runs_as_it_is_and_says_so():
    make = lambda p: Normed(p, 0.1)
    with pytest.warns(ZeroWarning, match="not fused: .*norm"):
        ours = train(make)
    compare(ours, train(make, fused=False), tolerance=0)


class Counted(Normed):
    """Keeps a count on itself, which a kernel would never advance."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.steps)


def test_a_step_with_side_effects_runs_as_it_is():
    make = lambda p: Counted(p, 0.1)
    with pytest.warns(ZeroWarning, match="sets the attribute 'steps'"):
        ours = train(make)
    assert ours[1].steps == STEPS
    compare(ours, train(make, fused=False), tolerance=0)


def counts_in_its_group(optimizer, group, p, state):
    group["steps"] = group.get("steps", 0) + 1
    p.sub_(p.grad, alpha=group["lr"] / group["steps"])


def knows_single_parameters(optimizer, group, p, state):
    p.sub_(p.grad, alpha=group["lr"] * (2 if id(p) in optimizer.fast else 1))


@pytest.mark.parametrize(
    ("rule", "why"),
    [(counts_in_its_group, "changes its param group"), (knows_single_parameters, "carries 'fast'")],
)
def test_what_a_kernel_would_miss_runs_as_it_is(rule, why):
    make = lambda p: ByRule(p, rule, **({"fast": {id(p[0])}} if "fast" in why else {}))
    with pytest.warns(ZeroWarning, match=why):
        ours = train(make)
    compare(ours, train(make, fused=False), tolerance=0)


def of_the_first_group(optimizer, group, p, state):
    p.sub_(p.grad, alpha=optimizer.param_groups[0]["lr"])


def counts_beside_parameters(optimizer, group, p, state):
    optimizer.state["t"] = optimizer.state.get("t", 0) + 1
    p.sub_(p.grad, alpha=group["lr"] / optimizer.state["t"])


def counts_in_a_list(optimizer, group, p, state):
    group["counts"][0] += 1
    p.sub_(p.grad, alpha=group["lr"] / group["counts"][0])


def by_its_place(optimizer, group, p, state):
    place = [q is p for q in group["params"]].index(True)
    p.sub_(p.grad, alpha=group["lr"] / (place + 1))


def by_those_before(optimizer, group, p, state):
    first = group["params"][0]
    p.sub_(p.grad * (1 + first.flatten()[0]), alpha=group["lr"])


def keeps_a_list(optimizer, group, p, state):
    if not state:
        state["all"] = [torch.zeros_like(p), torch.zeros_like(p)]
    for index, each in enumerate(state["all"]):
        each.mul_(0.3 * (index + 1)).add_(p.grad)
        p.sub_(each, alpha=group["lr"])


def calls_it(name):
    def rule(optimizer, group, p, state):
        p.sub_(state.setdefault(name, torch.zeros_like(p)).mul_(0.5).add_(p.grad), alpha=0.1)

    return rule


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (of_the_first_group, "reads another param group"),
        (counts_beside_parameters, "state beside the parameter's own"),
        (counts_in_a_list, "changes its param group"),
        (by_its_place, "depends on those before it"),
        (by_those_before, "cannot be traced|depends on those before it|many"),
        (keeps_a_list, "its state 'all' is a list"),
        *((calls_it(name), f"its state '{name}' cannot be the name")
          for name in ("param", "grad", "mul_1", "class", "exp avg", "grad_at", "i")),
    ],
)  # fmt: skip
def test_what_is_more_than_one_parameter_s_update_runs_as_it_is(rule, why):
    def make(params):
        params = list(params)
        groups = [params[:1], params[1:]] if rule is of_the_first_group else [params]
        groups = [{"params": g, "lr": 0.1 * (n + 1)} for n, g in enumerate(groups)]
        if rule is counts_in_a_list:
            groups = [{**g, "counts": [0]} for g in groups]
        return ByRule(groups, rule)

    with pytest.warns(ZeroWarning, match=why):
        ours = train(make)
    compare(ours, train(make, fused=False), tolerance=0)


def test_defaults_that_change_are_followed():
    def rule(optimizer, group, p, state):
        p.sub_(p.grad, alpha=optimizer.defaults["lr"])

    def change(optimizer, step):
        optimizer.defaults["lr"] = 0.1 * (step + 1)

    make = lambda params: ByRule(params, rule)
    ours = train(make, change=change)
    compare(ours, train(make, dtype=torch.float64, fused=False, change=change))
    assert not ours[1].step.fused.warned


class SameNames(optim.Optimizer):
    """Its state has the names of hyperparameters, of a gradient, and of a count in its group."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9, "step": 0.25})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for name in ("momentum", "lr"):
                    state.setdefault(name, torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                state["lr"].add_(p.grad, alpha=group["lr"])
                p.sub_(state["momentum"], alpha=group["lr"] * group["step"])
                p.add_(state["lr"], alpha=0.01 * state["step"])


def test_a_state_and_a_hyperparameter_of_one_name_are_two():
    compare(train(SameNames), train(SameNames, dtype=torch.float64, fused=False))


def adam_by_hand(root):
    """An Adam with counts that are Python numbers, whose root is `root`."""

    def rule(optimizer, group, p, state):
        if not state:
            state["count"], state["mean"], state["square"] = 0, torch.zeros_like(p), p * 0
        state["count"] += 1
        state["mean"].lerp_(p.grad, 0.1)
        state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        size = group["lr"] * root(1 - 0.99 ** state["count"]) / (1 - 0.9 ** state["count"])
        p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-size)

    return rule


def test_a_root_of_a_count_is_one_kernel_for_every_count():
    make = lambda params: ByRule(params, adam_by_hand(lambda x: math.sqrt(x)))
    _, optimizer = ours = train(make, steps=20)
    compare(ours, train(make, steps=20, dtype=torch.float64, fused=False))
    assert len(optimizer.step.fused.programs) <= 4, "with and without a state; two shapes of those"


def test_a_step_that_is_another_for_every_count_stops_being_compiled():
    root = math.sqrt  # what no tracer sees
    make = lambda params: ByRule(params, adam_by_hand(root))
    with pytest.warns(ZeroWarning, match=r"another step for every value of state\.count"):
        _, optimizer = ours = train(make, steps=20)
    compare(ours, train(make, steps=20, dtype=torch.float64, fused=False))
    assert len(optimizer.step.fused.programs) <= 4 * MOST_CASES


def test_a_count_that_becomes_a_tensor_is_one_for_each_parameter():
    def rule(optimizer, group, p, state):
        state["count"] = state.get("count", 0) + 1
        p.sub_(p.grad * torch.full((), state["count"]), alpha=group["lr"])

    make = lambda params: ByRule(params, rule)
    compare(train(make), train(make, dtype=torch.float64, fused=False))


def makes_up_for_rounding(optimizer, group, p, state):
    lost = state.setdefault("lost", torch.zeros_like(p))
    old = p.clone()
    p.add_(lost.sub_(p.grad, alpha=group["lr"] * 1e-3))
    lost.add_(old.sub_(p))


def test_a_rounded_parameter_that_is_read_back_runs_as_it_is():
    make = lambda p: ByRule(p, makes_up_for_rounding)
    with pytest.warns(ZeroWarning, match="reads back"):
        ours = train(make, dtype=torch.bfloat16)
    compare(ours, train(make, dtype=torch.bfloat16, fused=False), tolerance=0)


def is_marked(optimizer, group, p, state):
    p.sub_(p.grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


def test_a_mark_on_a_parameter_is_seen():
    def mark(optimizer, step):
        optimizer.param_groups[0]["params"][0].scale = 3.0

    make = lambda p: ByRule(p, is_marked)
    ours = train(make, change=mark)
    assert ours[1].step.fused.programs
    compare(ours, train(make, dtype=torch.float64, fused=False, change=mark))
