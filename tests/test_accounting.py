"""Bytes: sent, at rest, and alive inside the step, against the formulas."""

import gc

import pytest
import torch
from parity import options
from torch import nn

import zcompile
from zcompile import comm


def blocks(count=6, width=32):
    layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*layers)


def train(rank, model, opts, steps=2, width=32):
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="zero", options=opts)
    for _ in range(steps):
        before = zcompile.traffic()
        # Without a gradient for its input the first layer's weight is not needed in backward.
        compiled(torch.ones(2, width, requires_grad=True)).square().mean().backward()
        sent = zcompile.traffic() - before
        optimizer.step()
    return optimizer, sent


def sent_bytes(rank, world, stage, primitive, dtype):
    model = blocks(count=3)
    opts = options(stage, primitive=primitive, param_dtype=dtype)
    _, sent = train(rank, model, opts)
    return sent, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("primitive", ["p2p", "native"])
def test_bytes_sent_are_the_formulas(ranks, world, primitive):
    """Rows divide evenly: no padding anywhere."""
    for stage in (0, 1, 2, 3):
        for sent, elements in ranks(sent_bytes, stage, primitive, None, world=world):
            share = elements * 4 * (world - 1) // world
            if stage == 0:
                assert (sent.gather_bytes, sent.reduce_bytes) == (0, 0)
                assert sent.all_reduce_bytes == 2 * share
            else:
                assert sent.gather_bytes == (2 if stage == 3 else 1) * share
                assert sent.reduce_bytes == share
                assert sent.all_reduce_bytes == 0


def test_bytes_follow_the_dtypes(ranks):
    """bf16 parameters gather in 2 bytes. Gradients travel in bf16 point to point, where they are
    widened before they are added, and in fp32 through the backend's own reduction."""
    for primitive, width in (("p2p", 2), ("native", 4)):
        for sent, elements in ranks(sent_bytes, 3, primitive, "bf16", world=2):
            assert sent.gather_bytes == 2 * elements * 2 // 2
            assert sent.reduce_bytes == elements * width // 2


def uneven(rank, world, primitive):
    model = nn.Linear(8, 10, bias=False)
    _, sent = train(rank, model, options(3, primitive=primitive), width=8)
    return sent


def test_padding_is_the_backends_not_the_messages(ranks):
    """10 rows on 4 ranks: 3, 3, 3, 1. A row is 32 bytes."""
    sent = ranks(uneven, "p2p", world=4)
    assert [s.gather_bytes for s in sent] == [2 * 3 * rows * 32 for rows in (3, 3, 3, 1)]
    assert [s.reduce_bytes for s in sent] == [32 * (10 - rows) for rows in (3, 3, 3, 1)]
    for s in ranks(uneven, "native", world=4):
        assert (s.gather_bytes, s.reduce_bytes) == (2 * 3 * 3 * 32, 3 * 3 * 32)


def at_rest(rank, world):
    model = blocks(width=64)
    optimizer, _ = train(rank, model, options(3), width=64)
    elements = sum(p.numel() for p in model.parameters())
    held = 0
    gc.collect()
    for p in model.parameters():
        held += p.to_local().nbytes + p.grad.to_local().nbytes
        held += sum(optimizer.state[p][key].to_local().nbytes for key in ("exp_avg", "exp_avg_sq"))
    # Everything of a parameter's size that this call made and that is still alive.
    alive = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, nn.Parameter) and t.numel() >= 64 * 64 // world
    }
    return held, sum(alive.values()), elements


@pytest.mark.parametrize("world", [2, 4])
def test_at_rest_a_rank_holds_16_bytes_over_the_world_per_parameter(ranks, world):
    for held, alive, elements in ranks(at_rest, world=world):
        assert held == pytest.approx(16 * elements / world, rel=0.02)
        assert alive <= held * 1.02, "something whole is still alive"


def alive_in_the_step(rank, world, depth, engine):
    """Count gathered parameters by their storage: born in gather_start, dead with it."""
    import weakref

    live, peak = set(), [0]
    original = comm.gather_start

    def counted(*args):
        fulls = original(*args)
        for full in fulls:
            storage = full.untyped_storage()
            live.add(storage.data_ptr())
            weakref.finalize(full, live.discard, storage.data_ptr())
        peak[0] = max(peak[0], len(live))
        return fulls

    comm.gather_start = counted
    try:
        width = 32
        # One parameter a bucket.
        opts = options(3, prefetch=depth, bucket_bytes=1, engine=engine)
        train(rank, blocks(count=6, width=width), opts, steps=3)
    finally:
        comm.gather_start = original
    return peak[0]


@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_more_than_depth_plus_one_buckets_are_alive(ranks, depth, engine):
    assert ranks(alive_in_the_step, depth, engine, timeout=300) == [depth + 1] * 2
