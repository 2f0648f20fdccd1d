"""In-place writes to sharded parameters, outside of a graph: what one device would hold."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from zcompile import ZeroError
from zcompile.sharding import is_sharded

ROW, COLUMN = torch.arange(6.0), torch.arange(7.0)[:, None]
WRITES = {
    "add_": lambda w, v: w.add_(1.0),
    "add_ of another": lambda w, v: w.add_(v),
    "clamp_": lambda w, v: w.clamp_(-0.1, 0.1),
    "lerp_": lambda w, v: w.lerp_(torch.ones(7, 6), 0.5),
    "mul_ by a row": lambda w, v: w.mul_(ROW),
    "mul_ by a column": lambda w, v: w.mul_(COLUMN),
    "+= a row": lambda w, v: w.__iadd__(ROW),
    "copy_ of a row": lambda w, v: w.copy_(ROW),
    "masked_fill_": lambda w, v: w.masked_fill_(torch.eye(7, 6).bool(), 0.1),
    "masked_fill_ of columns": lambda w, v: w.masked_fill_(ROW > 3, 0.1),
    "index_fill_": lambda w, v: w.index_fill_(0, torch.tensor([0, 4]), 0.3),
    "index_add_": lambda w, v: w.index_add_(1, torch.tensor([1]), COLUMN),
    "index_copy_ of another": lambda w, v: w.index_copy_(0, torch.arange(6, -1, -1), v),
    "fill_diagonal_": lambda w, v: w.fill_diagonal_(0.5),
    "tril_": lambda w, v: w.tril_(),
    "cumsum_": lambda w, v: w.cumsum_(0),
    "addmm_": lambda w, v: w.addmm_(torch.ones(7, 2), torch.ones(2, 6), alpha=0.1),
    "a slice": lambda w, v: w.__setitem__((slice(1, 3), 0), 0.7),
    "a slice of data": lambda w, v: w.data.__setitem__(slice(1, 3), 0.2),
}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(7, 6)) for _ in range(2))


def writes(rank, world, param_dtype):
    plain = Two()
    before = plain.w.detach().clone()
    model = zcompile.shard(copy.deepcopy(plain), param_dtype=param_dtype, persistence_threshold=8)
    for name, write in WRITES.items():
        with torch.no_grad():
            for made in (plain, model):
                made.w.copy_(before)
                write(made.w, made.v)
        # Exact: each is the same arithmetic on the same values, in fp32.
        torch.testing.assert_close(
            model.w.full_tensor().detach(), plain.w.detach(), rtol=0, atol=0, msg=name
        )
        assert not torch.equal(plain.w, before), name
        assert is_sharded(model.w)


@pytest.mark.parametrize("world", [1, 3])
def test_a_write_in_place_is_that_of_one_device(ranks, world):
    ranks(writes, None, world=world)


def test_a_write_in_place_is_not_rounded_to_what_is_computed_in(ranks):
    ranks(writes, "bf16")


def test_data_of_another_shape_is_refused():
    model = zcompile.shard(nn.Linear(6, 7), persistence_threshold=8)
    with pytest.raises(ZeroError, match=r"sharded as \(7, 6\) and its data cannot become \(6,\)"):
        model.weight.data = torch.zeros(6)


def _one_rank_gathers(rank, world):
    model = zcompile.shard(nn.Linear(6, 7), persistence_threshold=8)
    with pytest.raises(ZeroError, match=r"(?s)rank 1: full_tensor of weight.*call it on every"):
        model.weight.full_tensor() if rank else model(torch.ones(2, 6))
    dist.barrier()
    assert model.weight.full_tensor().shape == (7, 6)


def test_a_rank_that_gathers_alone_is_told(ranks):
    ranks(_one_rank_gathers)
