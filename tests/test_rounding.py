"""Rounding at random: to the bit against NumPy, unbiased, and the same for any number of ranks."""

import copy

import numpy as np
import pytest
import torch
from parity import same_bits
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zcompile
from zcompile import rounding
from zcompile.fused import fuse

BF16 = torch.bfloat16


def mixed(x):
    x = np.asarray(x, np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) % 2**32
    return x ^ (x >> np.uint64(16))


def rounded(values, number, step):
    """float32 to bfloat16, as the first store of a kernel does it."""
    begin = int(mixed(int(mixed(number + 1)) ^ step))
    random = mixed((begin + np.arange(values.numel())) % 2**32) >> np.uint64(16)
    bits = values.numpy().view(np.uint32).ravel().astype(np.uint64) + random
    made = torch.from_numpy((bits >> np.uint64(16)).astype(np.uint16).view(np.int16))
    return made.view(BF16).reshape(values.shape)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        params = [nn.Parameter(torch.randn(s).to(BF16)) for s in ((7, 5), (1000,), (0,), (1,))]
        optimizer = fuse(optim.SGD(params, lr=0.01), stochastic_rounding=True)
        for step in range(3):
            wanted = []
            for number, p in enumerate(params):
                p.grad = torch.randn(p.shape).to(BF16)
                exact = p.detach().float() + p.grad.float() * -0.01
                wanted.append(rounded(exact, number, step))
            optimizer.step()
            for p, w in zip(params, wanted, strict=True):
                assert same_bits(p.detach(), w)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("random", [True, False])
def test_small_steps_are_not_lost(random):
    """1 and below lie 2**-8 apart: steps of a 32nd of that move the mean, or nothing at all."""
    p = nn.Parameter(torch.ones(20_000, dtype=BF16))
    optimizer = fuse(optim.SGD([p], lr=2.0**-13), stochastic_rounding=random)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    moved = 1 - p.detach().float().mean().item()
    if not random:
        assert moved == 0
        return
    # Of 200 x 20,000 draws with p = 1/32 in units of 2**-8: the mean's deviation is 7e-5.
    assert moved == pytest.approx(200 * 2.0**-13, abs=5 * 7e-5)
    assert p.detach().float().std() > 0, "elements are rounded each by itself"


def test_what_a_bf16_holds_stays_and_so_do_nan_and_infinity():
    values = [0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), float("nan"), 9.2e-41]
    p = nn.Parameter(torch.tensor(values).to(BF16))
    before = p.detach().clone()
    optimizer = fuse(optim.SGD([p], lr=1.0), stochastic_rounding=True)
    for _ in range(20):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p.detach().nan_to_num(7.0), before.nan_to_num(7.0))
    assert same_bits(p.detach()[:4], before[:4])


def test_the_state_is_rounded_so_too():
    """In bf16 a mean of squares with beta2 = 0.999 stands still: the step is a quarter of a bit."""
    results = []
    for random in (True, False):
        p = nn.Parameter(torch.zeros(4000, dtype=BF16))
        optimizer = fuse(optim.Adam([p], betas=(0.9, 0.999)), stochastic_rounding=random)
        for step in range(300):
            p.grad = torch.full_like(p, 1.0 if step < 100 else 0.5)
            optimizer.step()
        results.append(optimizer.state[p]["exp_avg_sq"].float().mean().item())
    exact = 0.0
    for step in range(300):
        exact = 0.999 * exact + 0.001 * (1.0 if step < 100 else 0.25)
    assert results[0] == pytest.approx(exact, rel=0.01)
    assert abs(results[1] / exact - 1) > 0.05, "which is what rounding to nearest loses"


def test_a_run_that_goes_on_rounds_as_one_that_did_not_stop():
    def run(steps, optimizer, p, first=0):
        for step in range(first, steps):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
            optimizer.step()

    p = nn.Parameter(torch.ones(500, dtype=BF16))
    whole = fuse(optim.AdamW([p], lr=0.01), stochastic_rounding=True)
    run(3, whole, p)
    again = nn.Parameter(p.detach().clone())
    other = fuse(optim.AdamW([again], lr=0.01), stochastic_rounding=True)
    other.load_state_dict(copy.deepcopy(whole.state_dict()))
    run(6, whole, p, 3)
    run(6, other, again, 3)
    assert same_bits(p.detach(), again.detach())


def test_a_state_called_step_need_not_be_a_count():
    from stepping import ByRule

    def rule(optimizer, group, p, state):
        step = state.setdefault("step", torch.zeros_like(p))
        p.sub_(step.mul_(0.9).add_(p.grad), alpha=group["lr"])

    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = fuse(ByRule([p], rule), stochastic_rounding=True)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert not optimizer.step.fused.warned and (p.detach() < 1).all()


def test_switched_on_later():
    p = nn.Parameter(torch.ones(500, dtype=BF16))
    optimizer = fuse(optim.SGD([p], lr=2.0**-13))
    for random in (False, True):
        fuse(optimizer, stochastic_rounding=random)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert bool((p.detach() != 1).any()) == random


class Exact(nn.Module):
    """Gradients are dyadic and the same on every rank: no sum rounds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Parameter(torch.randn(7, 5).to(BF16))
        self.one = nn.Parameter(torch.ones(1, dtype=BF16))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=BF16))

    def forward(self, x):
        return (self.wide * x).sum() + self.one.sum() * 0.25 + self.scale * 0.125


def trained(compile_it):
    model = Exact()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    step = compile_it(model, optimizer)
    for number in range(4):
        x = torch.randint(-8, 9, (7, 5), generator=torch.Generator().manual_seed(number))
        step((x / 8).to(BF16))
    return model, optimizer


def by_hand(model, optimizer):
    fuse(optimizer, stochastic_rounding=True)

    def step(x):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_options(stage, whole):
    def compile_it(model, optimizer):
        options = {"stage": stage, "engine": "eager", "persistence_threshold": 2}
        options["stochastic_rounding"] = True
        if whole:
            return zcompile.compile_step(model, None, optimizer, options=options)
        compiled = torch.compile(model, backend="zero", options={**options, "optimizer": optimizer})

        def step(x):
            compiled(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return compile_it


def sharded_against_whole(rank, world, stage, whole):
    wanted, _ = trained(by_hand)
    model, optimizer = trained(by_options(stage, whole))
    found = zcompile.full_state_dict(model)
    for name, value in wanted.state_dict().items():
        assert same_bits(found[name], value), (rank, name)
    return len(optimizer.step.fused.programs)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2), (3, 3), (4, 1)])
def test_ranks_round_as_one_process_does(ranks, world, stage, whole):
    assert all(ranks(sharded_against_whole, stage, whole, world=world))


def places(rank, world):
    """Where parts begin that torch's own DTensors hold, on a mesh of two replicas."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.ones(8, 2)
    apart = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    alike = distribute_tensor(whole, mesh, [Replicate(), Replicate()])
    return rank, rounding._first(apart), rounding._first(alike)


def test_replicas_of_another_library_s_parameters_round_alike(ranks):
    _, apart, alike = zip(*sorted(ranks(places, world=4)))
    assert apart[0] == apart[2] != apart[1] == apart[3]
    assert len(set(alike)) == 1


def test_a_closure_that_a_foreign_optimizer_gets_itself_is_told_of():
    from stepping import ByRule

    p = nn.Parameter(torch.ones(4, dtype=BF16))
    rule = lambda optimizer, group, p, state: p.sub_(p.grad, alpha=group["lr"])
    optimizer = fuse(ByRule([p], rule), stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    with pytest.warns(zcompile.ZeroWarning, match=r"given a closure\. It rounds to nearest"):
        optimizer.step(lambda: None)


def test_what_no_kernel_steps_says_that_it_rounds_to_nearest():
    p = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    optimizer = fuse(optim.Adafactor([p]), stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    with pytest.warns(zcompile.ZeroWarning, match="not fused: .* It rounds to nearest"):
        optimizer.step()
