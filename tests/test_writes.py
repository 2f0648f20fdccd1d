"""In-place writes to sharded parameters, outside of a graph: what one device would hold."""

import copy

import pytest
import torch
import torch.distributed as dist
from parity import whole
from torch import nn

import zcompile
from zcompile import ZeroError

ROW, COLUMN = torch.arange(6.0), torch.arange(7.0)[:, None]
WRITES = {
    "add_": lambda w: w.add_(1.0),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "lerp_": lambda w: w.lerp_(torch.ones(7, 6), 0.5),
    "mul_ by a row": lambda w: w.mul_(ROW),
    "mul_ by a column": lambda w: w.mul_(COLUMN),
    "+= a row": lambda w: w.__iadd__(ROW),
    "copy_ of a row": lambda w: w.copy_(ROW),
    "copy_ of itself": lambda w: w.copy_(torch.where(w > 0, w, w * 2)),
    "masked_fill_": lambda w: w.masked_fill_(torch.eye(7, 6).bool(), 0.1),
    "masked_fill_ of columns": lambda w: w.masked_fill_(ROW > 3, 0.1),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([0, 4]), 0.3),
    "index_add_": lambda w: w.index_add_(1, torch.tensor([1]), COLUMN),
    "fill_diagonal_": lambda w: w.fill_diagonal_(0.5),
    "tril_": lambda w: w.tril_(),
    "cumsum_": lambda w: w.cumsum_(0),
    "addmm_": lambda w: w.addmm_(torch.ones(7, 2), torch.ones(2, 6), alpha=0.1),
    "a slice": lambda w: w.__setitem__((slice(1, 3), 0), 0.7),
    "a slice of data": lambda w: w.data.__setitem__(slice(1, 3), 0.2),
}


def writes(rank, world, param_dtype):
    plain = nn.Linear(6, 7)
    model = zcompile.shard(copy.deepcopy(plain), param_dtype=param_dtype, persistence_threshold=8)
    assert tuple(model.weight.to_local().shape) != (7, 6) or world == 1
    for name, write in WRITES.items():
        with torch.no_grad():
            write(plain.weight), write(model.weight)
        # Exact: each is the same arithmetic on the same values.
        torch.testing.assert_close(
            whole(model.weight).detach(), plain.weight.detach(), rtol=0, atol=0, msg=name
        )
        assert type(model.weight).__name__ == "ZeroParameter"


@pytest.mark.parametrize("world", [1, 3])
def test_a_write_in_place_is_that_of_one_device(ranks, world):
    ranks(writes, None, world=world)


def test_a_write_in_place_keeps_the_precision_of_what_it_leaves(ranks):
    ranks(writes, "bf16")


def _one_rank_gathers(rank, world):
    model = zcompile.shard(nn.Linear(6, 7), persistence_threshold=8)
    with pytest.raises(ZeroError, match=r"rank 1: full_tensor of weight \(7, 6\)"):
        model.weight.full_tensor() if rank else model(torch.ones(2, 6))
    dist.barrier()
    assert model.weight.full_tensor().shape == (7, 6)


def test_a_rank_that_gathers_alone_is_told(ranks):
    ranks(_one_rank_gathers)
