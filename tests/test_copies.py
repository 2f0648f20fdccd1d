"""The copy of a shard in the dtype that it is gathered in: exact, and never an old one."""

import warnings

import pytest
import torch
from parity import close, compare_state, options, same_bits, whole
from stepping import Normed, compare, parameters, train
from torch import nn, optim

import zcompile
from benchmarks.elementwise import OPTIMIZERS
from zcompile import OptionError, ZeroError, ZeroWarning, copies, fuse
from zcompile.codegen.kernel import COPY

BF16 = torch.bfloat16


def test_a_copy_is_made_anew_when_asked_and_goes_with_its_shard():
    shard = torch.randn(5, 3)
    first = copies.fresh(shard, BF16)
    assert same_bits(first, shard.to(BF16))
    shard.mul_(2)
    assert copies.last(shard, BF16) is first and not same_bits(first, shard.to(BF16))
    assert copies.fresh(shard, BF16) is first and same_bits(first, shard.to(BF16))
    assert copies.fresh(shard, torch.float32) is copies.last(shard, torch.float32) is shard
    before = len(copies._copies)
    del shard
    assert len(copies._copies) == before - 1


# What the fused step writes


def copied(make, params):
    """The optimizer, fused, with a copy of each parameter."""
    low = {p: torch.full_like(p, 7, dtype=BF16, requires_grad=False) for p in params}
    return fuse(make(params), copies=low)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernel_rounds_the_new_parameter_to_nearest_even(name):
    params, optimizer = train(lambda params: copied(OPTIMIZERS[name], params))
    compare((params, optimizer), train(OPTIMIZERS[name], dtype=torch.float64, fused=False))
    kept = optimizer.step.fused.copies
    assert len(kept) == len(params)
    assert all(same_bits(kept[p], p.detach().to(BF16)) for p in params)
    programs = optimizer.step.fused.programs.values()
    assert programs and all(COPY in program.kernel.buffers() for program in programs)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_ties_and_values_that_are_not_finite(dtype):
    """SGD by a rate of 1 from 0 makes any value: ties both ways, subnormals, an overflow."""
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000, 0x00018000, 1]
    bits += [0x3F801000, 0x3F803000, 0x33000000, 0x33000001, 0x477FF000]  # ties of float16
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, -values, torch.tensor([float("nan"), float("inf"), -float("inf")])])
    p = nn.Parameter(torch.zeros_like(values))
    low = torch.empty_like(p, dtype=dtype, requires_grad=False)
    p.grad = -values
    fuse(optim.SGD([p], lr=1.0), copies={p: low}).step()
    torch.testing.assert_close(p.detach(), values, rtol=0, atol=0, equal_nan=True)
    there = ~values.isnan()
    assert same_bits(low[there], values.to(dtype)[there])
    assert low[~there].isnan().all()


def test_what_no_kernel_steps_is_copied_too():
    for make in (lambda p: Normed(p, lr=1.0), lambda p: optim.LBFGS(p)):
        p = nn.Parameter(torch.randn(5))
        low = torch.zeros(5, dtype=BF16)
        optimizer = make([p])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZeroWarning)
            fuse(optimizer, copies={p: low})
            assert same_bits(low, p.detach().to(BF16))
            before = low.clone()
            p.grad = torch.randn(5)
            optimizer.step(*[lambda p=p: (p * p).sum()][: isinstance(optimizer, optim.LBFGS)])
        assert same_bits(low, p.detach().to(BF16)) and not same_bits(low, before)


def test_a_copy_that_does_not_go_with_its_parameter_is_refused():
    p, other = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))
    for copy in (torch.zeros(3, 4, dtype=BF16), torch.zeros(4, 3), torch.zeros(3, 4, dtype=BF16).T):
        with pytest.raises(OptionError, match="must be in bfloat16 or float16 and lie like"):
            fuse(optim.SGD([p], lr=1.0), copies={p: copy})
    with pytest.raises(OptionError, match=r"a \(4, 3\) parameter that the optimizer does not hold"):
        fuse(optim.SGD([p], lr=1.0), copies={other: torch.zeros(4, 3, dtype=BF16)})


def test_bytes_per_element():
    """AdamW reads a gradient, a parameter, two moments; it writes the last three and the copy."""
    for grad, expected in ((torch.float32, 30), (BF16, 28)):
        params = parameters()
        optimizer = copied(OPTIMIZERS["adamw"], params)
        for _ in range(2):
            for p in params:
                p.grad_dtype = grad
                p.grad = torch.ones_like(p, dtype=grad)
            optimizer.step()
        kernel = list(optimizer.step.fused.programs.values())[-1].kernel
        assert kernel.bytes_per_element() == expected


def test_a_gradient_in_bf16_is_widened_and_no_more():
    make = OPTIMIZERS["adamw"]
    results = []
    for dtype in (BF16, torch.float32):
        params = parameters()
        optimizer = fuse(make(params))
        for step in range(4):
            for p in params:
                draw = torch.Generator().manual_seed(step)
                grad = torch.randn(p.shape, generator=draw).to(BF16)
                p.grad_dtype = dtype
                p.grad = grad.to(dtype)
            optimizer.step()
        results.append((params, optimizer))
    compare(*results, tolerance=0)


@pytest.mark.parametrize("change", ["layout", "size", "freed"])
def test_a_copy_that_no_longer_goes_with_its_parameter_is_refused(change):
    p = nn.Parameter(torch.zeros(4, 4))
    low = torch.zeros(4, 4, dtype=BF16)
    optimizer = fuse(optim.SGD([p], lr=1.0), copies={p: low})
    p.grad = torch.ones(4, 4)
    optimizer.step()
    if change == "layout":
        p.data, p.grad = torch.zeros(4, 4).t(), torch.ones(4, 4).t()
    elif change == "size":
        p.data = torch.zeros(8, 8)
        p.grad = torch.ones(8, 8)
    else:
        low.untyped_storage().resize_(0)
    with pytest.raises(OptionError, match="lie like its float32 parameter"):
        optimizer.step()


def test_memory_that_was_freed_is_not_written():
    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = fuse(optim.SGD([p], lr=1.0))
    p.grad = torch.ones(4, 4)
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(ZeroError, match="was freed"):
        optimizer.step()


def test_a_lazily_negated_gradient_is_negated():
    p = nn.Parameter(torch.zeros(4))
    with pytest.warns(ZeroWarning, match="a view that negates"):
        optimizer = fuse(optim.SGD([p], lr=1.0))
        p.grad = torch._neg_view(torch.ones(4))
        optimizer.step()
    assert p.eq(1).all()


# Between ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 3)
    )


CHANGES = {
    "none": lambda model, optimizer: None,
    "in place": lambda model, optimizer: [p.mul_(0.5) for p in model.parameters()],
    "through data": lambda model, optimizer: [p.data.mul_(0.5) for p in model.parameters()],
    "of its part": lambda model, optimizer: [p.to_local().mul_(0.5) for p in model.parameters()],
    "loaded": lambda model, optimizer: model.load_state_dict(
        {k: v * 0.5 for k, v in model.state_dict().items()}
    ),
    "its own step": lambda model, optimizer: type(optimizer).step(optimizer),
}


def trained(rank, world, stage, fused, **more):
    """Losses, whole parameters and moments, with a change of CHANGES behind every step."""
    torch._dynamo.reset()
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    if fused:
        fuse(optimizer)
    opts = options(stage, param_dtype="bf16", **more)
    compiled = torch.compile(model, backend="zero", options=opts)
    losses, before = {}, "nothing"
    for step, (name, change) in enumerate([*CHANGES.items(), ("the last", CHANGES["none"])]):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step * world + rank))
        loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            change(model, optimizer)
        optimizer.zero_grad()
        losses[f"after {before}"], before = loss.item(), name
    held = [p._local_tensor in copies._copies for p in model.parameters()]
    found = [whole(p).detach() for p in model.parameters()]
    for p in model.parameters():
        found += [whole(optimizer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")]
    return losses, found, held


def as_without(rank, world, stage, engine):
    for fused in (True, False):
        plain = trained(rank, world, stage, fused, param_copy=False, engine=engine)
        losses, found, held = trained(rank, world, stage, fused, engine=engine)
        assert plain[2] == [False] * 6
        # A bias of three rows is not sharded, and a rank by itself has nobody to send to.
        assert held == [world > 1 and p.numel() >= 8 for p in net().parameters()]
        assert losses == plain[0]
        for ours, theirs in zip(found, plain[1], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("world", "stage", "engine"),
    [(1, 3, "eager"), (2, 3, "eager"), (3, 2, "eager"), (4, 1, "eager"), (2, 3, "inductor")],
)
def test_nothing_differs_to_the_last_bit(ranks, world, stage, engine):
    ranks(as_without, stage, engine, world=world, timeout=300)


def spoilt(rank, world, direction):
    """The gradient of the input, and what the model gives, when all copies were overwritten."""
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="zero", options=options(3, param_dtype="bf16"))
    x = torch.ones(8, 6, dtype=BF16, requires_grad=True)
    compiled(x).sum().backward()

    def spoil():
        for copy in copies._copies.values():
            copy.zero_()

    x.grad = None
    if direction == "forward":
        spoil()
    y = compiled(x)
    if direction == "backward":
        spoil()
    y.sum().backward()
    return bool(y.std() > 0), bool(x.grad.any())


def test_forward_makes_copies_and_backward_reads_them(ranks):
    assert set(ranks(spoilt, "forward", world=2)) == {(True, True)}
    assert set(ranks(spoilt, "backward", world=2)) == {(True, False)}, "it read zeros"


def evaluated_first(rank, world):
    model = net()
    compiled = torch.compile(model, backend="zero", options=options(3, param_dtype="bf16"))
    with torch.inference_mode():
        compiled(torch.ones(8, 6))
    for _ in range(3):
        compiled(torch.ones(8, 6)).float().sum().backward()


def test_an_evaluation_may_come_first(ranks):
    ranks(evaluated_first, world=2)


def whole_step(rank, world, stage, accumulate):
    """A compiled step in bf16 against the plain loop with the same options."""
    torch._dynamo.reset()
    loss = lambda y, target: (y.float() - target).square().mean()
    opts = options(stage, param_dtype="bf16")
    models = net(), net()
    ours, theirs = (optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ZeroWarning)
        step = zcompile.compile_step(models[0], loss, ours, accumulate=accumulate, options=opts)
        compiled = torch.compile(models[1], backend="zero", options=opts)
        for seed in range(5):
            draw = torch.Generator().manual_seed(seed * world + rank)
            x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)
            mine, parts = step(x, y), []
            for some, target in zip(x.chunk(accumulate), y.chunk(accumulate)):
                part = loss(compiled(some), target) / accumulate
                part.backward()
                parts.append(part.detach())
            theirs.step()
            theirs.zero_grad()
            # Both round the same values to bf16. Sums over micro-batches differ in their order: an
            # fp32 value at a tie may round the other way, 2^-8 of one weight among many.
            close(mine, sum(parts), 1e-5 if accumulate == 1 else 1e-3, f"loss of step {seed}")
    compare_state(*models, ours, theirs, 1e-6 if accumulate == 1 else 1e-3)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_compiled_step_in_bf16(ranks, world, accumulate):
    for stage in (1, 2, 3) if world == 2 else (3,):
        ranks(whole_step, stage, accumulate, world=world)
