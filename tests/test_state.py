"""Whole states, meta models, and torch's own checkpoints of a sharded model."""

import copy

import pytest
import torch
from parity import options, whole
from torch import nn

import zcompile


def make():
    torch.manual_seed(0)
    # A bias before a batch norm has a gradient of pure rounding, which Adam makes a whole step.
    return nn.Sequential(nn.Linear(8, 13, bias=False), nn.BatchNorm1d(13), nn.Linear(13, 5))


def trained(opts, steps=2):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="zero", options=opts) if opts else model
    step(compiled, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def round_trip(rank, world):
    model, optimizer = trained(options(3))
    plain, theirs = trained(None)
    full = zcompile.full_state_dict(model, optimizer)
    assert list(full["model"]) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert type(full["model"][key]) is torch.Tensor
        same(full["model"][key], value)
    for index, entry in theirs.state_dict()["state"].items():
        for key, value in entry.items():
            same(full["optimizer"]["state"][index][key], value)

    # Into a plain run, with nothing of ours.
    fresh, other = trained(None, steps=0)
    fresh.load_state_dict(full["model"])
    other.load_state_dict(copy.deepcopy(full["optimizer"]))  # it keeps the tensors it is given
    step(fresh, other, 2)

    # And into a sharded one, under another stage, of a file with entries of the user's.
    again, ours = trained(options(2), steps=1)
    zcompile.load_full_state_dict(again, {**full, "scheduler": {"last_epoch": 7}}, ours)
    step(again, ours, 2)
    for (_name, p), q in zip(again.named_parameters(), fresh.parameters(), strict=True):
        same(whole(p).detach(), q.detach())
        same(whole(ours.state[p]["exp_avg_sq"]), other.state[q]["exp_avg_sq"])

    rank0 = zcompile.full_state_dict(model, rank0_only=True)
    assert bool(rank0) == (rank == 0)


@pytest.mark.parametrize("world", [1, 3])
def test_whole_state_goes_to_a_plain_run_and_back(ranks, world):
    ranks(round_trip, world=world)


def wrong_state(rank, world):
    model, optimizer = trained(options(3))
    with pytest.raises(zcompile.ZeroError, match="the state needs the entries 'model' and 'opt"):
        zcompile.load_full_state_dict(model, zcompile.full_state_dict(model), optimizer)
    full = zcompile.full_state_dict(model, optimizer)
    with pytest.raises(zcompile.ZeroError, match="'model', 'optimizer': give the optimizer as"):
        zcompile.load_full_state_dict(model, full)
    with pytest.raises(zcompile.ZeroError, match="the state is empty: with rank0_only=True"):
        zcompile.load_full_state_dict(model, {})
    full["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(
        zcompile.ZeroError, match="saved optimizer has 4 parameters, this one has 5"
    ):
        zcompile.load_full_state_dict(model, full, optimizer)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for refuse in (
        lambda: zcompile.full_state_dict(model, foreign),
        lambda: zcompile.load_full_state_dict(model, full, foreign),
    ):
        with pytest.raises(
            zcompile.ZeroError, match="SGD that was given holds 2 parameters, and none"
        ):
            refuse()


def test_a_state_of_another_kind_is_refused(ranks):
    ranks(wrong_state)


class Scaled(nn.Sequential):
    """The first parameter has no dimension."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x) * self.scale


def plain_optimizer_state(rank, world, how):
    plain = Scaled(*make())
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step(plain, theirs, 2)
    model = Scaled(*make())
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if how == "whole step":
        mean = lambda y, _: y.square().mean()
        run = zcompile.compile_step(model, mean, optimizer, options=options(3))
    else:
        run = torch.compile(model, backend="zero", options=options(3))
        run(torch.ones(2, 8))
        model.load_state_dict(plain.state_dict())  # batch norm has moved
    if how == "fused":
        zcompile.fuse(optimizer)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step(plain, theirs, 2)
    if how == "whole step":
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
        run(x, x), run(x, x)
    else:
        step(run, optimizer, 2)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        same(whole(p).detach(), q.detach())
        same(whole(optimizer.state[p]["exp_avg_sq"]), theirs.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("how", ["plain", "fused", "whole step"])
def test_a_plain_optimizers_state_is_laid_out_at_the_next_step(ranks, how):
    ranks(plain_optimizer_state, how, world=3)


def part_of_rank_0(rank, world, file):
    model, _ = trained(options(3))
    before = zcompile.full_state_dict(model)
    if rank == 0:
        torch.save(model.state_dict(), file)
    torch.distributed.barrier()
    theirs = torch.load(file, weights_only=False)
    if rank == 0:
        model.load_state_dict(theirs)
    else:
        with pytest.raises(
            RuntimeError, match=r"rank 1 of 2\), and what is written into it is the part of rank 0"
        ):
            model.load_state_dict(theirs)
    for key, value in zcompile.full_state_dict(model).items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_a_file_of_one_ranks_rows_is_not_taken_for_anothers(ranks, tmp_path):
    ranks(part_of_rank_0, tmp_path / "rank0.pt")


def distributed_checkpoint(rank, world, folder):
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained(options(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    expected = copy.deepcopy(zcompile.full_state_dict(model, optimizer))
    dcp.save(state, checkpoint_id=folder)
    step(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
    got = zcompile.full_state_dict(model, optimizer)
    for key, value in expected["model"].items():
        torch.testing.assert_close(got["model"][key], value, rtol=0, atol=0)
    for index, entry in expected["optimizer"]["state"].items():
        for key, value in entry.items():
            got_value = got["optimizer"]["state"][index][key]
            torch.testing.assert_close(got_value, value, rtol=0, atol=0)


def test_torchs_distributed_checkpoint_round_trips(ranks, tmp_path):
    ranks(distributed_checkpoint, str(tmp_path / "ckpt"))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


def from_meta(rank, world):
    torch.manual_seed(5)
    plain = Tied()
    with torch.device("meta"):
        model = Tied()
    largest = [0]

    def fill(module):
        """Takes the plain model's values, and sees how much is whole meanwhile."""
        alive = sum(p.numel() for p in model.parameters() if type(p) is nn.Parameter)
        alive -= sum(p.numel() for p in model.parameters() if p.is_meta)
        largest[0] = max(largest[0], alive)
        source = {type(m): m for m in plain.modules()}[type(module)]
        for name, p in module.named_parameters(recurse=False):
            p.copy_(source.get_parameter(name))
        for name, b in module.named_buffers(recurse=False):
            b.copy_(source.get_buffer(name))

    zcompile.shard(model, init=fill, persistence_threshold=0)
    assert model.head.weight is model.embed.weight
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p).detach(), plain.get_parameter(name).detach())
    assert largest[0] <= 11 * 6
    assert not any(b.is_meta for b in model.buffers())

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    torch.manual_seed(9)
    zcompile.shard(model, persistence_threshold=0)
    torch.manual_seed(9)
    plain = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p).detach(), plain.get_parameter(name).detach())
    compiled = torch.compile(model, backend="zero", options=options(3))
    compiled(torch.ones(2, 40)).sum().backward()


def test_a_meta_model_is_made_shard_by_shard(ranks):
    ranks(from_meta, world=3)


def caches(rank, world, stages, folder):
    """Stage 2 and 3 differ in nothing that AOTAutograd's cache looks at."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    sent = []
    for stage in stages:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        opts = options(stage, engine="inductor")
        compiled = torch.compile(model, backend="zero", options=opts)
        for _ in range(2):
            before = zcompile.traffic()
            compiled(torch.ones(2, 16, requires_grad=True)).sum().backward()
        sent.append((zcompile.traffic() - before).gather_bytes)
    return sent


def test_two_stages_share_one_cache_folder(ranks, tmp_path):
    share = 2 * 16 * 16 * 4 // 2  # of two weights, to one other rank
    for sent in ranks(caches, (2, 3, 2, 3), str(tmp_path), timeout=300):
        assert sent == [share, 2 * share] * 2
