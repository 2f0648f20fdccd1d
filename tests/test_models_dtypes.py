"""Mixed, integer, complex and double parameters, and autocast."""

import copy

import pytest
import torch
from parity import check, compare_state, options
from torch import nn

import zcompile

BF16 = 2**-7  # two units in the last place


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Mixed(nn.Module):
    """A bf16 model whose norms stay in fp32."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 11).bfloat16()
        self.norm = nn.LayerNorm(11)
        self.two = nn.Linear(11, 5).bfloat16()

    def forward(self, x):
        h = self.norm(self.one(x).float()).bfloat16()
        return self.two(torch.tanh(h)).float().pow(2).mean()


def mixed_loss(model, seed):
    return model(numbers(seed, 4, 6, dtype=torch.bfloat16))


class Quantised(nn.Module):
    """Frozen int8 weights with a trained scale, and a frozen bool mask."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (11, 6), dtype=torch.int8), False)
        self.keep = nn.Parameter(torch.rand(11, 6) > 0.3, False)
        self.scale = nn.Parameter(torch.rand(11, 1) / 9)
        self.out = nn.Linear(11, 5)

    def forward(self, x):
        weight = self.codes.float() * self.scale * self.keep
        return self.out(x @ weight.T).pow(2).mean()


def plain_loss(model, seed):
    return model(numbers(seed, 4, 6))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        y = torch.fft.rfft(x, dim=-1) * self.filter[0] + self.shift
        y = y * self.filter.sum(0)
        return (y.real.pow(2) + y.imag.abs()).mean()


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 11)
        self.norm = nn.LayerNorm(11)
        self.two = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x):
        return (self.scale * self.two(torch.tanh(self.norm(self.one(x))))).pow(2).mean()


def double_loss(model, seed):
    return model(numbers(seed, 4, 6, dtype=torch.float64))


def half_model():
    return Double().bfloat16()


def half_loss(model, seed):
    return model(numbers(seed, 4, 6, dtype=torch.bfloat16))


def small_sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


# bf16 gradients are rounded to 8 bits, once per rank here and once per micro-batch there; a few
# units in the last place of values near 1 remain. fp64 sums differ by 1e-16 times their size.
CASES = {
    "fp32 norms in a bf16 model": (Mixed, mixed_loss, 4 * BF16),
    "bf16 model": (half_model, half_loss, 4 * BF16),
    "int8 and bool parameters": (Quantised, plain_loss, 1e-5),
    "complex parameters": (Complex, plain_loss, 1e-5),
    "double model": (Double, double_loss, 1e-10),
}


def run(rank, world, name):
    make, loss, tolerance = CASES[name]
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        model = check(
            rank, world, make, loss, options(stage), optimizer=small_sgd, tolerance=tolerance
        )
        for (n, p), q in zip(model.named_parameters(), make().parameters(), strict=True):
            assert p.dtype == p.to_local().dtype == q.dtype, n
            assert p.requires_grad == q.requires_grad


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_dtype_trains_as_in_plain_pytorch(ranks, name, world):
    ranks(run, name, world=world)


def no_reduction_of_integers(rank, world):
    model = Quantised()
    zcompile.shard(model, options(3, primitive="p2p"))
    compiled = torch.compile(model, backend="zero", options=options(3, primitive="p2p"))
    before = zcompile.traffic()
    loss = plain_loss(compiled, rank)
    gathered = zcompile.traffic() - before
    sharded = {n: p.to_local() for n, p in model.named_parameters() if p.placements[0].is_shard()}
    assert set(sharded) == {"codes", "keep", "scale", "out.weight"}
    assert sharded["codes"].dtype == torch.int8 and sharded["keep"].dtype == torch.bool
    sent = sum(local.nbytes for local in sharded.values()) * (world - 1)
    assert gathered.gather_bytes == sent, "int8 and bool travel as one byte"
    loss.backward()
    assert model.codes.grad is None and model.keep.grad is None


def test_integers_travel_in_their_own_dtype(ranks):
    ranks(no_reduction_of_integers)


class Inside(nn.Module):
    """Autocast inside the model, with an island of fp32."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 11)
        self.two = nn.Linear(11, 11)
        self.three = nn.Linear(11, 5)

    def body(self, x):
        h = torch.tanh(self.one(x))
        assert h.dtype == torch.bfloat16
        with torch.amp.autocast("cpu", enabled=False):
            h = self.two(h.float())
        return self.three(h).float().pow(2).mean()

    def forward(self, x):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x)


class Around(Inside):
    def forward(self, x):
        return self.body(x)


def around_loss(model, seed):
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        return model(numbers(seed, 4, 6))


def alternating_loss(model, seed):
    """Autocast on and off in turn: each needs its own graph."""
    return around_loss(model, seed) if seed // 2 % 2 else plain_loss(model, seed)  # world 2


class Either(Inside):
    def forward(self, x):
        h = self.two(torch.tanh(self.one(x)))
        return self.three(h).float().pow(2).mean()


@pytest.mark.parametrize(
    "make,loss", [(Inside, plain_loss), (Around, around_loss), (Either, alternating_loss)]
)
def test_autocast(ranks, make, loss):
    ranks(autocast, make, loss)


def autocast(rank, world, make, loss):
    """The parameters and gradients are fp32; bf16 rounding happens at the same places."""
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        model = check(
            rank, world, make, loss, options(stage), optimizer=small_sgd, tolerance=BF16, steps=4
        )
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def scaled(rank, world):
    """A GradScaler's unscale and skip: an infinite gradient on one rank stops every rank."""
    for stage in (1, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Double().float()
        plain = copy.deepcopy(model)
        ours, theirs = small_sgd(model.parameters()), small_sgd(plain.parameters())
        compiled = torch.compile(model, backend="zero", options=options(stage))
        mine, other = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
        for step in range(4):
            factor = [float("inf") if (step, r) == (2, 1) else 1.0 for r in range(world)]
            mine.scale(plain_loss(compiled, step * world + rank) * factor[rank]).backward()
            for r in range(world):
                loss = plain_loss(plain, step * world + r) * factor[r] / world
                other.scale(loss).backward()
            for scaler, optimizer in ((mine, ours), (other, theirs)):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        assert mine.get_scale() == other.get_scale() == 4.0
        compare_state(model, plain, ours, theirs, 1e-5)


def test_gradient_scaler(ranks):
    ranks(scaled)
