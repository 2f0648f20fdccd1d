"""The arithmetic around a collective: means, wire dtypes, packing and unpacking."""

import pytest
import torch
from builders import BF16, F32, F64, rows_of

from zcompile import collectives
from zcompile.layout import chunk_rows, owned_rows


def test_the_mean_is_summed_in_the_reduction_dtype():
    """1 + 2**-8 is not a bf16: a sum in bf16 would lose the small part every time."""
    own = torch.ones(2, dtype=BF16)
    received = torch.full((3, 2), 2.0**-8, dtype=BF16)
    mean = collectives.mean_of_parts(own, received, F32, F32)
    assert mean.dtype == F32
    assert mean.tolist() == [(1 + 3 * 2.0**-8) / 4] * 2
    assert collectives.mean_of_parts(own, received, BF16, F32).tolist() == [0.25] * 2


def test_the_mean_of_one_rank_is_its_own():
    own = torch.randn(3, 2)
    mean = collectives.mean_of_parts(own, own.new_empty(0, 3, 2), F32, F32)
    assert torch.equal(mean, own)


def test_the_mean_of_no_rows_is_no_rows():
    mean = collectives.mean_of_parts(torch.empty(0, 4), torch.empty(2, 0, 4), F32, BF16)
    assert (mean.shape, mean.dtype) == ((0, 4), BF16)


@pytest.mark.parametrize(
    ("grad", "reduce", "wire"),
    [(F32, F32, F32), (BF16, F32, BF16), (F32, BF16, BF16), (BF16, BF16, BF16),
     (F32, F64, F32), (BF16, torch.float16, BF16)],
)  # fmt: skip
def test_the_wire_is_never_wider_than_either(grad, reduce, wire):
    assert collectives.wire_dtype(grad, reduce) == wire


SHAPES = [(5, 4), (2,), (6, 1, 2), (1, 3)]


class Fake:
    """The backend's collectives, as functions of what this rank hands in."""

    def __init__(self, monkeypatch):
        self.sent = []
        monkeypatch.setattr(collectives, "_c10d", self)

    def all_gather_into_tensor(self, flat, world, pg):
        self.sent.append(flat)
        return flat

    def reduce_scatter_tensor(self, flat, op, world, pg):
        assert op == "sum"
        self.sent.append(flat)
        return flat

    def all_reduce(self, flat, op, pg):
        assert op == "sum"
        self.sent.append(flat)
        return flat

    def wait_tensor(self, flat):
        return flat


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_native_gather_packs_native_gathered_unpacks(monkeypatch, world, dtype):
    fake = Fake(monkeypatch)
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randn(s, generator=draw) for s in SHAPES]
    for rank in range(world):
        shards = [rows_of(w, world, rank) for w in wholes]
        collectives.native_gather(shards, SHAPES, dtype, world, "pg")
    chunk = sum(chunk_rows(s[0], world) * torch.Size(s[1:]).numel() for s in SHAPES)
    assert [(f.shape, f.dtype) for f in fake.sent] == [((chunk,), dtype)] * world
    gathered = collectives.native_gathered(torch.cat(fake.sent), SHAPES, world)
    for got, whole in zip(gathered, wholes, strict=True):
        assert torch.equal(got, whole.to(dtype))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_native_reduce_packs_native_reduced_unpacks(monkeypatch, world):
    fake = Fake(monkeypatch)
    draw = torch.Generator().manual_seed(0)
    grads = [[torch.randn(s, generator=draw) for s in SHAPES] for _ in range(world)]
    for each in grads:
        collectives.native_reduce(each, F32, world, "pg")
    summed = torch.stack(fake.sent).sum(0).chunk(world)
    for rank in range(world):
        owned = [last - first for first, last in (owned_rows(s[0], world, rank) for s in SHAPES)]
        got = collectives.native_reduced(summed[rank], SHAPES, owned, BF16, world)
        for index, shard in enumerate(got):
            mean = sum(each[index] for each in grads) / world
            assert shard.dtype == BF16
            torch.testing.assert_close(
                shard.float(), rows_of(mean, world, rank), rtol=1e-2, atol=1e-2
            )


def test_what_native_all_reduce_packs_all_reduced_unpacks(monkeypatch):
    Fake(monkeypatch)
    grads = [torch.randn(s) for s in SHAPES]
    flat = collectives.native_all_reduce(grads, F64, "pg")
    assert (flat.shape, flat.dtype) == ((20 + 2 + 12 + 3,), F64)
    for got, grad in zip(collectives.all_reduced(flat * 4, SHAPES, F32, 4), grads, strict=True):
        assert torch.equal(got, grad)


def test_flattened_tensors_are_a_copy():
    (one,) = [torch.ones(2)]
    collectives.flatten([one], F32).zero_()
    assert one.tolist() == [1, 1]
