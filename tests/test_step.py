"""compile_step: the same training as the plain loop, with gradients that are never all alive."""

import copy
import json
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from parity import TOLERANCE, close, compare_state, options
from stepping import Normed
from test_fused_ranks import MAKES as OPTIMIZERS
from torch import nn, optim
from torch._dynamo.utils import counters

import zcompile
from zcompile import LossScaler, OptionError, Step, ZeroError, ZeroWarning, compile_step


class Net(nn.Module):
    """Rows that do not divide by the ranks, a tied weight, a 0-dim parameter, an unused one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 11), nn.Linear(11, 11, bias=False)
        self.third = nn.Linear(11, 3)
        self.tied = self.second
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(9, 2))

    def forward(self, x):
        x = self.second(self.first(x).tanh()).relu()
        return self.third(self.tied(x)) * self.scale


def mse(y, target):
    return (y - target).square().mean()


def batch(seed, rows=8):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=draw), torch.randn(rows, 3, generator=draw)


def plain_step(model, optimizer, world, seed, clip, loss_fn=mse):
    losses = [loss_fn(model(x), y) for x, y in (batch(seed * world + r) for r in range(world))]
    (sum(losses) / world).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach() for loss in losses], norm


class Counted(Step):
    def _finish(self):
        self.late += len(self.kept)
        super()._finish()


def against_plain(
    rank, world, stages, name, accumulate, clip, make=Net, engine="eager", quiet=True
):
    """Losses, norms, parameters and states. The tolerance is parity's, for orders of summation.
    Returns how many parameters were updated only behind backward, by stage."""
    late = []
    for stage in stages:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        plain = copy.deepcopy(model)  # which has no hooks
        for each in (model, plain):
            getattr(each, "watch", lambda: None)()
        ours = OPTIMIZERS[name](model.parameters())
        theirs = OPTIMIZERS[name](plain.parameters())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step = compile_step(
                model, mse, ours, accumulate=accumulate, clip=clip,
                options=options(stage, engine=engine),
            )  # fmt: skip
            step.__class__ = Counted
            step.late = 0
            for seed in range(5):
                mine = step(*batch(seed * world + rank))
                losses, norm = plain_step(plain, theirs, world, seed, clip)
                close(mine, losses[rank], TOLERANCE, f"loss of step {seed}")
                if clip:
                    assert step.norm == pytest.approx(float(norm), rel=1e-5)
                assert all(p.grad is None for p in model.parameters())
        compare_state(model, plain, ours, theirs, TOLERANCE)
        said = [str(w.message) for w in seen if issubclass(w.category, ZeroWarning)]
        assert not (quiet and said), said
        late.append(step.late)
    return late


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (4, None), (1, 0.1), (4, 0.1)])
@pytest.mark.parametrize(
    ("world", "name"), [(1, "adamw"), (2, "momentum"), (3, "adamw"), (4, "momentum")]
)
def test_as_the_plain_loop(ranks, world, name, accumulate, clip):
    stages = (1, 2, 3) if world == 2 else (3,)
    for late in ranks(against_plain, stages, name, accumulate, clip, world=world):
        # All are updated during backward, unless one needs the norm of all, or stage 1 averages
        # only once.
        waits = [clip is not None or (stage == 1 and accumulate > 1) for stage in stages]
        assert [count > 0 for count in late] == waits


@pytest.mark.parametrize("world", [1, 2])
def test_as_the_plain_loop_with_inductor(ranks, world):
    for clip in (None, 0.1):
        args = (3,), "adamw", 2, clip, Net, "inductor"
        for (late,) in ranks(against_plain, *args, world=world, timeout=300):
            assert (late > 0) == (clip is not None)


class Broken(Net):
    """Two graphs, both of which read `second`."""

    def forward(self, x):
        x = self.second(self.first(x).tanh())
        torch._dynamo.graph_break()
        return self.third(self.tied(x)) * self.scale


class Outside(Net):
    """Reads a parameter where nothing is compiled, besides in a graph."""

    def forward(self, x):
        return super().forward(x) + self.penalty()

    @torch._dynamo.disable
    def penalty(self):
        return self.third.weight.square().sum() * 0.1


class Hooked(Net):
    def watch(self):
        self.second.weight.register_hook(lambda grad: grad * 0.5)


@pytest.mark.parametrize("make", [Broken, Outside, Hooked])
def test_a_gradient_that_is_not_complete_in_one_graph_is_waited_for(ranks, make):
    quiet = make is not Outside
    for late in ranks(against_plain, (2, 3), "momentum", 2, None, make, "eager", quiet, world=2):
        assert all(late)
    assert ranks(against_plain, (3,), "momentum", 1, None, make, "eager", quiet, world=1) != [[0]]


def gradients_alive(rank, world, accumulate):
    """The most bytes of mean gradients alive at once, and those of all."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    optimizer = optim.AdamW(model.parameters())
    opts = options(3, bucket_bytes=1)
    step = compile_step(
        model, lambda y, _: y.square().mean(), optimizer, accumulate=accumulate, options=opts
    )
    alive, peak = {}, [0]

    class Watched(type(step)):
        def receive(self, names, grads, left):
            for grad in grads:
                key = grad.untyped_storage().data_ptr()
                alive[key] = grad.numel() * 4
                weakref.finalize(grad, alive.pop, key, None)
            peak[0] = max(peak[0], sum(alive.values()))
            super().receive(names, grads, left)

    step.__class__ = Watched
    for _ in range(3):
        step(torch.ones(4, 32), None)
    return peak[0], sum(p.to_local().numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_is_freed_by_its_update(ranks, world):
    for peak, all_of_them in ranks(gradients_alive, 1, world=world):
        assert peak <= 2 * all_of_them / 6, "one, and the next that is being received"
    for peak, all_of_them in ranks(gradients_alive, 2, world=world):
        assert peak >= all_of_them, "control: those of an earlier micro-batch are kept"


def planned_gradients(rank, world, stage, accumulate, folder):
    """Bytes of gradients that the plan counts at least, and those of a rank's shards."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    optimizer = optim.AdamW(model.parameters())
    opts = {**options(stage), "dump": f"{folder}/{stage}-{accumulate}"}
    step = compile_step(
        model, lambda y, _: y.square().mean(), optimizer, accumulate=accumulate, options=opts
    )
    step(torch.ones(4, 32), None)
    least = []
    for plan in Path(opts["dump"], f"rank{rank}").rglob("plan.json"):
        curves = json.loads(plan.read_text())["timeline"]["memory"]["values"]
        least.append(min(curves["gradients"]))
    return min(least), sum(p.to_local().numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_counts_what_earlier_micro_batches_leave(ranks, stage, tmp_path):
    for least, _ in ranks(planned_gradients, stage, 1, str(tmp_path), world=2):
        assert least == 0
    for least, shards in ranks(planned_gradients, stage, 2, str(tmp_path), world=2):
        assert least == (2 * shards if stage == 1 else shards), "whole until the last, or a shard"


def rates(rank, world):
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    step = compile_step(model, mse, optimizer, options=options(3, replan_after=0))
    counters.clear()
    seen = []
    for seed in range(5):
        step(*batch(seed))
        scheduler.step()
        programs = len(optimizer.step.fused.programs)
        seen.append((counters["stats"]["unique_graphs"], programs))
    return seen, counters["graph_break"]


def test_another_rate_compiles_nothing(ranks):
    for seen, breaks in ranks(rates, world=2):
        assert not breaks
        assert len(set(seen[1:])) == 1, "the second step finds states, which the first made"
        assert {graphs for graphs, _ in seen} == {1}


# Optimizers that no kernel steps, and what looks at gradients


def test_an_optimizer_that_is_not_elementwise_steps_itself():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    plain = copy.deepcopy(model)
    ours, theirs = Normed(model.parameters(), lr=0.1), Normed(plain.parameters(), lr=0.1)
    step = compile_step(model, mse, ours, accumulate=2, options=options(3))
    with pytest.warns(ZeroWarning, match="Normed steps 2 of 2 parameters itself"):
        for seed in range(3):
            step(*batch(seed))
            plain_step(plain, theirs, 1, seed, None)
    compare_state(model, plain, ours, theirs, TOLERANCE)


def test_hooks_of_the_optimizer_see_the_gradients():
    model = nn.Linear(6, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append(all(p.grad is not None for p in o.param_groups[0]["params"]))
    )
    step = compile_step(model, mse, optimizer, options=options(3))
    step(*batch(0))
    assert seen == [True]


def test_a_model_that_returns_its_loss():
    class Losing(nn.Linear):
        def forward(self, x, target):
            return mse(super().forward(x), target)

    torch.manual_seed(0)
    model = Losing(6, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = compile_step(model, None, optimizer, accumulate=2, options=options(3))
    x, target = batch(0)
    first = step(x, target=target)
    assert not first.requires_grad and step(x, target=target) < first


def test_a_model_that_returns_no_loss_is_told():
    class Tupled(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(), x

    model = Tupled(6, 3)
    step = compile_step(model, None, optim.SGD(model.parameters(), lr=0.1), options=options(3))
    with pytest.raises(ZeroError, match=r"the loss must be a tensor of one number, not .*tuple"):
        step(torch.ones(2, 6))


# What changes between steps, and who else is in the graph


def test_what_is_asked_for_later_is_heeded():
    torch.manual_seed(0)
    model, step = made()
    plain = copy.deepcopy(model)
    theirs = optim.SGD(plain.parameters(), lr=0.1)
    seen = []

    def both(clip=None):
        step(*batch(0))
        plain_step(plain, theirs, 1, 0, clip)

    both()
    step.clip = 0.01
    both(0.01)
    step.clip = None
    for each in (model, plain):
        each.weight.register_hook(lambda grad: grad * 0.5)
    both()
    step.optimizer.register_step_pre_hook(lambda o, *_: seen.append(model.bias.grad is not None))
    both()
    assert seen == [True]
    close(model.weight, plain.weight, TOLERANCE, "weight")
    close(model.bias, plain.bias, TOLERANCE, "bias")


def adversary(rank, world):
    """Two models whose parameters have the same names, of which the step updates one."""
    torch.manual_seed(0)
    make, judge = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))
    plain, plain_judge = copy.deepcopy(make), copy.deepcopy(judge)
    ours, theirs = optim.SGD(make.parameters(), lr=0.1), optim.SGD(plain.parameters(), lr=0.1)
    zcompile.shard(judge, options(3))
    step = compile_step(make, lambda y, _: judge(y).square().mean(), ours, options=options(3))
    for seed in range(3):
        x, _ = batch(seed)
        step(x, None)
        plain_judge(plain(x)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    compare_state(make, plain, ours, theirs, TOLERANCE)


@pytest.mark.parametrize("world", [1, 2])
def test_another_model_s_gradients_are_its_own(ranks, world):
    ranks(adversary, world=world)


def test_many_steps_are_all_compiled():
    torch._dynamo.reset()
    counters.clear()
    for _ in range(10):
        made()[1](*batch(0))
    assert counters["stats"]["unique_graphs"] == 10


# Refusals


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"accumulate": 0}, "accumulate = 0 must be a whole number, at least 1"),
        ({"accumulate": 1.5}, "accumulate = 1.5 must be a whole number"),
        ({"clip": -1.0}, "clip = -1.0 must be a number above 0, or None"),
        ({"clip": float("nan")}, "clip = nan must be a number above 0"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler is a GradScaler: give a zcompile.Loss"),
        ({"options": {"stagee": 3}}, "did you mean 'stage'"),
    ],
)
def test_values_that_are_refused(arguments, text):
    model = nn.Linear(6, 3)
    with pytest.raises(OptionError, match=text):
        compile_step(model, mse, optim.SGD(model.parameters(), lr=0.1), **arguments)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"scale": 0.5}, "scale = 0.5 must be at least 1.0"),
        ({"window": 0}, "window = 0 must be at least 1"),
        ({"hysteresis": 0}, "hysteresis = 0"),
        ({"minimum": 0}, "minimum = 0 must be above 0"),
    ],
)
def test_scalers_that_are_refused(values, text):
    with pytest.raises(OptionError, match=text):
        LossScaler(**values)


def made(**more):
    model = nn.Linear(6, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return model, compile_step(model, mse, optimizer, options=options(3), **more)


def test_a_batch_that_cannot_be_cut():
    _, step = made(accumulate=3)
    with pytest.raises(ZeroError, match=r"shape \(8, 6\) cannot be cut into accumulate=3"):
        step(*batch(0))


def test_tensors_that_are_no_batches():
    _, step = made(accumulate=2)
    with pytest.raises(ZeroError, match=r"these differ there: \(8, 6\), \(4, 3\)"):
        step(batch(0)[0], torch.zeros(4, 3))


def test_where_a_step_cannot_be_called():
    model, step = made()
    with torch.no_grad(), pytest.raises(ZeroError, match="a compiled step trains"):
        step(*batch(0))
    with zcompile.no_sync(model), pytest.raises(ZeroError, match="call it outside of no_sync"):
        step(*batch(0))


def test_a_loss_that_is_no_number():
    model = nn.Linear(6, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = compile_step(model, lambda y, t: y - t, optimizer, options=options(3))
    with pytest.raises(ZeroError, match=r"must be a tensor of one number, not one of shape"):
        step(*batch(0))


def test_a_gradient_from_elsewhere_is_named():
    model, step = made()
    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(ZeroError, match="parameter 'weight' already holds a gradient"):
        step(*batch(0))


def test_a_step_that_fails_leaves_the_next_one_as_it_would_be():
    torch.manual_seed(0)
    model, step = made(accumulate=2)
    plain = copy.deepcopy(model)
    theirs = optim.SGD(plain.parameters(), lr=0.1)
    x, y = batch(0)
    step(x, y)
    with pytest.raises(Exception, match="size"):
        step(x, y[:, :2])
    step(x, y)
    for _ in range(2):
        mse(plain(x), y).backward()
        theirs.step()
        theirs.zero_grad()
    close(model.weight, plain.weight, TOLERANCE, "weight")


def test_parameters_of_no_model():
    model = nn.Linear(6, 3)
    optimizer = optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    step = compile_step(model, mse, optimizer, options=options(3))
    with pytest.raises(ZeroError, match=r"shape \(2,\) that is not the model's"):
        step(*batch(0))
