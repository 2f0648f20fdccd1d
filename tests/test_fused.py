"""fuse(optimizer): every elementwise optimizer against its own arithmetic in double precision.

Tolerance: the reference is in fp64, so what differs is our rounding. One step of fp32 rounds each
operation by 2^-24 relative to its result; over STEPS steps a value gathers some ten of them:
1e-6 of the largest value of its tensor, or of the gradients, which are of order one and cancel.
"""

import warnings
import weakref

import numpy
import pytest
import torch
from stepping import compare, parameters, train
from torch import nn, optim

from benchmarks.elementwise import OPTIMIZERS
from zcompile.codegen import build
from zcompile.errors import OptionError, ZeroWarning
from zcompile.fused import fuse


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_the_optimizer_itself_in_double_precision(name):
    make = OPTIMIZERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ZeroWarning)  # nothing is stepped unfused
        ours = train(make)
    assert ours[1].step.fused.programs
    compare(ours, train(make, dtype=torch.float64, fused=False))


def test_a_scheduler_changes_the_rate_of_the_same_kernel():
    def halve(optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.1 / 2**step

    ours = train(OPTIMIZERS["adamw"], change=halve)
    compare(ours, train(OPTIMIZERS["adamw"], dtype=torch.float64, fused=False, change=halve))
    assert len(ours[1].step.fused.programs) == 2, "one for the first step, which makes the state"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_of_zero_changes_nothing(name):
    """A warm-up begins with it, and rows that were not looked up have gradients of zero."""
    params = parameters()
    optimizer = fuse(OPTIMIZERS[name](params))
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    for _ in range(2):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_torch_s_own_schedulers_work():
    params, optimizer = train(OPTIMIZERS["sgd"], steps=1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    torch.testing.assert_close(before - params[0], torch.full_like(before, 0.1))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_compiled_step_is_fused(scheduled):
    p = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([p], lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if scheduled else None
    step = torch.compile(optimizer.step, backend="zero")
    optimizer.step = step
    for call in (optimizer.step, optimizer.step, step):
        p.grad = torch.ones(3)
        call()
        if scheduler is not None:
            scheduler.step()
    assert optimizer.step.fused.programs
    assert p.tolist() == [-1.75 if scheduled else -3.0] * 3


def test_the_model_s_options_fuse_an_optimizer():
    model = nn.Linear(3, 3)
    optimizer = optim.AdamW(model.parameters())
    opts = {"engine": "eager", "optimizer": optimizer}
    compiled = torch.compile(model, backend="zero", options=opts)
    compiled(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.step.fused.programs and not optimizer.step.fused.warned


def test_what_is_no_optimizer_is_refused():
    compiled = torch.compile(nn.Linear(3, 3), backend="zero", options={"optimizer": "adamw"})
    with pytest.raises(OptionError, match="option 'optimizer' = 'adamw'"):
        compiled(torch.ones(1, 3))


def test_a_compiled_step_keeps_nothing_else_from_being_compiled():
    """Dynamo runs all of torch's own functions and modules through one and the same frame."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([p], lr=1.0)
    optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = torch.compile(optimizer.step, backend="zero")
    p.grad = torch.ones(3)
    optimizer.step()
    graphs = []
    torch.compile(nn.Linear(2, 2), backend=lambda gm, _: graphs.append(gm) or gm)(torch.ones(2))
    assert len(graphs) == 1


def test_a_user_s_function_of_that_name_is_compiled_as_it_is():
    p = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([p], lr=1.0)

    def step(x):
        optimizer.step()
        return x + 1

    p.grad = torch.ones(3)
    assert torch.compile(step, backend="zero")(torch.zeros(1)).item() == 1
    assert not hasattr(optimizer.step, "fused") and p.tolist() == [-1.0] * 3


def test_groups_that_branch_otherwise_move_other_bytes():
    with_it, without = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    groups = [{"params": [with_it], "momentum": 0.9}, {"params": [without], "momentum": 0.0}]
    optimizer = fuse(optim.SGD(groups, lr=0.1))
    moved = [optimizer.step.fused.bytes_moved(optimizer, g, g["params"][0])
             for g in optimizer.param_groups]  # fmt: skip
    assert moved == [20, 12]


def test_a_step_that_was_replaced_takes_no_more_requests():
    p = nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([p], lr=0.1)
    optimizer.step = lambda: None
    with pytest.warns(ZeroWarning, match="was replaced on this object and stays"):
        fuse(optimizer)
    with pytest.raises(OptionError, match="stochastic_rounding would have no effect"):
        fuse(optimizer, stochastic_rounding=True)
    with pytest.raises(OptionError, match="copies would have no effect"):
        fuse(optimizer, copies={p: torch.ones(4, dtype=torch.bfloat16)})


def test_a_compiled_step_takes_options(tmp_path):
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=2.0**-13)
    options = {"stochastic_rounding": True, "dump": str(tmp_path)}
    step = torch.compile(optimizer.step, backend="zero", options=options)
    p.grad = torch.ones_like(p)
    step()
    assert (p.detach() != 1).any() and len(list(tmp_path.rglob("*.cpp"))) == 1
    other = torch.compile(optim.SGD([p]).step, backend="zero", options={"stochastic": True})
    with pytest.raises(OptionError, match="unknown option 'stochastic'; did you mean"):
        other()


def test_a_weight_of_one_leaves_nothing_of_the_old_average():
    p = nn.Parameter(torch.ones(4))
    optimizer = fuse(optim.Adam([p], betas=(0.0, 0.99)))
    for value in (1e8, 1.0):
        p.grad = torch.full_like(p, value)
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].tolist() == [1.0] * 4


def test_a_rate_from_numpy_is_a_rate():
    def anneal(optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.1 * numpy.cos(step / 10)

    ours = train(OPTIMIZERS["sgd"], change=anneal)
    assert len(ours[1].step.fused.programs) == 1
    compare(ours, train(OPTIMIZERS["sgd"], dtype=torch.float64, fused=False, change=anneal))


def test_state_that_is_loaded_in_another_layout_is_not_read_as_if_it_were_not():
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        optimizer = optim.AdamW([p], lr=0.1)
        if fused:
            fuse(optimizer)
        for step in range(3):
            p.grad = torch.randn_like(p)
            optimizer.step()
            if step == 0:
                state = optimizer.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].contiguous()
        results.append(p.detach())
    torch.testing.assert_close(*results)


def test_state_that_a_step_no_longer_uses_stays_as_it_is():
    def switch_off(optimizer, step):
        optimizer.param_groups[0]["amsgrad"] = step < 4

    ours = train(OPTIMIZERS["amsgrad"], change=switch_off)
    compare(ours, train(OPTIMIZERS["amsgrad"], dtype=torch.float64, fused=False, change=switch_off))


def test_an_optimizer_that_needs_its_closure_gets_it():
    p = nn.Parameter(torch.ones(4))
    optimizer = fuse(optim.LBFGS([p]))

    def closure():
        optimizer.zero_grad()
        value = (p - 2).square().sum()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    torch.testing.assert_close(p.detach(), torch.full((4,), 2.0))


def test_a_state_dict_goes_either_way():
    make = OPTIMIZERS["adamw"]
    _, plain = train(make, steps=3, fused=False)
    params, optimizer = train(make, steps=1)
    optimizer.load_state_dict(plain.state_dict())
    assert float(optimizer.state[params[0]]["step"]) == 3
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 4
    saved = optimizer.state_dict()
    plain.load_state_dict(saved)
    assert float(plain.state[plain.param_groups[0]["params"][0]]["step"]) == 4


def test_hooks_closures_and_parameters_without_a_gradient():
    params = parameters()
    optimizer = fuse(OPTIMIZERS["adam"](params))
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    params[0].grad = torch.ones_like(params[0])
    before = params[1].detach().clone()
    assert optimizer.step(lambda: 7.0) == 7.0
    assert seen == ["post"] and torch.equal(before, params[1])
    assert params[1] not in optimizer.state and params[0] in optimizer.state


def test_no_gradient_is_held_between_steps():
    params = parameters()
    optimizer = fuse(OPTIMIZERS["adamw"](params))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    assert not any(ref() is not None for ref in held)


@pytest.mark.parametrize("by_the_optimizer", [False, True])
def test_a_grad_scaler_in_the_loop(by_the_optimizer):
    """With fused=True the scaler leaves it to the optimizer to divide and to skip."""
    results = []
    for fused in (True, False):
        params = parameters()
        optimizer = optim.AdamW(params, lr=0.01, fused=by_the_optimizer)
        if fused:
            fuse(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 else 1.0
            total = sum((p * p * factor).sum() for p in params)
            scaler.scale(total).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        assert float(optimizer.state[params[0]]["step"]) == 3
        results.append((params, optimizer))
    compare(*results)


def test_not_finite_and_subnormal_values_are_those_of_the_optimizer():
    special = [float("nan"), float("inf"), -float("inf"), 1e-42, -1e-42, 0.0, -0.0, 3e38]
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch.linspace(-1, 1, 16))
        optimizer = optim.Adam([p], lr=0.01, foreach=False)
        if fused:
            fuse(optimizer)
        for _ in range(3):
            p.grad = torch.tensor(special * 2)
            optimizer.step()
        results.append([p.detach(), *optimizer.state[p].values()])
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_states_of_another_dtype_are_rounded_once_a_step(dtype):
    """Each stored value is the fp64 arithmetic on the stored ones, rounded to nearest even."""
    make = lambda p: optim.SGD(p, lr=0.125, momentum=0.5)
    params, optimizer = train(make, steps=1, dtype=dtype)
    for _ in range(3):
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
        old = [(p.detach().double().clone(), b.double().clone()) for p, b in zip(params, buffers)]
        grads = [torch.full_like(p, 0.3) for p in params]
        for p, grad in zip(params, grads):
            p.grad = grad
        optimizer.step()
        for (p0, m0), p, grad in zip(old, params, grads):
            m = m0 * 0.5 + grad.double()
            assert torch.equal(optimizer.state[p]["momentum_buffer"], m.to(dtype))
            assert torch.equal(p.detach(), (p0 - 0.125 * m).to(dtype))


def test_the_source_of_each_kernel_is_written(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = fuse(torch.optim.AdamW(model.parameters()), dump=str(tmp_path))
    for _ in range(2):  # one that makes the state, one that goes on from it
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    files = sorted((tmp_path / "rank0" / "kernels").iterdir())
    kernels = {build.source(k, torch.device("cpu")) for k, *_ in optimizer.step.fused.programs}
    assert {(file.read_text(), file.name) for file in files} == kernels and len(files) == 2
    assert files[0].read_text().startswith("// torch.optim.adamw.AdamW, one step of every element")


def test_a_folder_that_comes_later_gets_what_was_built(tmp_path, monkeypatch):
    model = torch.nn.Linear(4, 4)
    optimizer = fuse(torch.optim.SGD(model.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    monkeypatch.setenv("ZCOMPILE_DUMP", str(tmp_path))
    fuse(optimizer)
    assert len(list(tmp_path.rglob("*.cpp"))) == 1
