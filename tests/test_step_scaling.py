"""compile_step with a loss scaler: an overflow on one rank leaves the step out on all."""

import copy
import warnings

import pytest
import torch
from parity import close, compare_state, options, whole
from test_fused_ranks import MAKES as OPTIMIZERS
from test_step import Net, batch, mse
from torch import nn, optim

from zcompile import LossScaler, ZeroWarning, compile_step


def scaled(rank, world, stage, accumulate):
    """fp16 against the same arithmetic by hand; in the second step one rank overflows."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    by_hand = copy.deepcopy(model)
    opts = options(stage, param_dtype="float16", reduce_dtype="float32")
    ours = OPTIMIZERS["momentum"](model.parameters())
    theirs = OPTIMIZERS["momentum"](by_hand.parameters())
    scaler = LossScaler(scale=1024.0, hysteresis=1, window=2)
    step = compile_step(
        model, mse, ours, accumulate=accumulate, clip=0.1, scaler=scaler, options=opts
    )
    compiled = torch.compile(by_hand, backend="zero", options=opts)
    said = []
    for seed in range(5):
        x, y = batch(seed * world + rank)
        if seed == 1 and rank == world - 1:
            x[0, 0] = 1e4
            y[0, 0] = 6e4
        scale = scaler.scale
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            loss = step(x, y)
        said += [str(w.message) for w in seen if issubclass(w.category, ZeroWarning)]
        parts = []
        for some, target in zip(x.chunk(accumulate), y.chunk(accumulate)):
            part = mse(compiled(some), target)
            (part * scale).backward()
            parts.append(part.detach())
        for p in by_hand.parameters():
            if p.grad is not None:
                p.grad /= scale * accumulate
        norm = nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
        if torch.isfinite(whole(norm)):
            theirs.step()
        theirs.zero_grad()
        if seed != 1:  # both are fp16, whose unit in the last place is 1e-3
            close(loss, torch.stack(parts).mean(), 1e-3, "loss")
        # fp16 gradients that are summed in another order, times a rate of 0.05
        compare_state(model, by_hand, ours, theirs, 2e-5)
    return scaler.state_dict(), said


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2), (2, 3), (4, 3)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, world, stage, accumulate):
    results = ranks(scaled, stage, accumulate, world=world)
    for state, said in results:
        # A good step, the overflow (512), two good ones (1024, a window), one more.
        assert state == {"scale": 1024.0, "good": 3, "forgiven": 0, "skipped": 1}
        (text,) = said
        assert "overflowed at a loss scale of 1024" in text and "first.weight" in text


def test_a_scale_beyond_what_the_loss_can_hold_is_an_overflow():
    """The default scale is 65536, and an fp16 loss ends at 65504."""
    model = nn.Linear(6, 3).half()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(hysteresis=1)
    assert scaler.scale == 65536
    step = compile_step(
        model, lambda y, _: (y - 0.5).square().mean(), optimizer, scaler=scaler, options=options(3)
    )
    with pytest.warns(ZeroWarning, match="overflowed at a loss scale of 65536"):
        loss = step(torch.ones(2, 6).half(), None)
    assert loss.dtype == torch.float16 and scaler.skipped == 1 and scaler.scale == 32768
    before = whole(model.weight).clone()
    step(torch.ones(2, 6).half(), None)
    assert scaler.skipped == 1 and not torch.equal(before, whole(model.weight))


def test_the_scale_follows_window_hysteresis_and_minimum():
    scaler = LossScaler(scale=8.0, window=2, hysteresis=2, minimum=2.0)
    seen = []
    for overflow in (True, True, False, False, True, True, True, True, True, True):
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == [8, 4, 4, 8, 8, 4, 4, 2, 2, 2]
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() and scaler.skipped == 8
