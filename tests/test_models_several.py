"""Several models in a process, averages and copies of a model, and changes made to it in place."""

import copy

import pytest
import torch
from parity import close, compare_gradients, compare_state, options, sgd, whole
from torch import nn
from torch.nn import functional as F


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self, width=11):
        super().__init__()
        self.one = nn.Linear(6, width)
        self.two = nn.Linear(width, 5)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def loss_of(model, seed):
    return model(numbers(seed, 4, 6)).pow(2).sum(-1).mean()


def prepare(stage, make=Net):
    """A model, its compiled form and its plain twin."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    return model, torch.compile(model, backend="zero", options=options(stage)), plain


def train(rank, world, compiled, plain, ours, theirs, steps, first=0, clip=None):
    for step in range(first, first + steps):
        loss_of(compiled, step * world + rank).backward()
        (sum(loss_of(plain, step * world + r) for r in range(world)) / world).backward()
        if clip:
            clip(compiled, plain)
        compare_gradients(compiled._orig_mod, plain, 1e-5, f"at step {step}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def discriminator():
    return nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(0.2), nn.Linear(7, 1))


def gan_step(make, judge, for_make, for_judge, noise, real, weight=1.0):
    """One alternating step. `noise`, `real`: one batch for each rank that is simulated."""
    loss = 0
    for z, x in zip(noise, real, strict=True):
        fake = make(z).detach()
        loss = loss + F.softplus(judge(fake)).mean() + F.softplus(-judge(x)).mean()
    (loss * weight).backward()
    for_judge.step()
    for_judge.zero_grad()
    loss = sum(F.softplus(-judge(make(z))).mean() for z in noise)
    (loss * weight).backward()
    for_make.step()
    for_make.zero_grad()
    for_judge.zero_grad()


def gan(rank, world):
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        models = [Net(), discriminator()]
        plain = copy.deepcopy(models)
        ours, theirs = ([sgd(m.parameters()) for m in pair] for pair in (models, plain))
        compiled = [torch.compile(m, backend="zero", options=options(stage)) for m in models]
        for step in range(3):
            noise = [numbers(step * world + r, 4, 6) for r in range(world)]
            real = [numbers(100 + step * world + r, 4, 5) for r in range(world)]
            gan_step(*compiled, *ours, noise[rank : rank + 1], real[rank : rank + 1])
            gan_step(*plain, *theirs, noise, real, 1 / world)
        for model, twin, a, b in zip(models, plain, ours, theirs, strict=True):
            compare_state(model, twin, a, b, 1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_gan_with_alternating_steps(ranks, world):
    ranks(gan, world=world)


def distillation(teacher, student, seed):
    x = numbers(seed, 4, 6)
    with torch.no_grad():
        target = teacher(x)
    return (student(x) - target).pow(2).mean()


def teacher_and_student(rank, world):
    for stage in (1, 2, 3):
        model, compiled, plain = prepare(stage)
        teacher = Net(15).requires_grad_(False)
        plain_teacher = copy.deepcopy(teacher)
        compiled_teacher = torch.compile(teacher, backend="zero", options=options(stage))
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        for step in range(3):
            distillation(compiled_teacher, compiled, step * world + rank).backward()
            for r in range(world):
                (distillation(plain_teacher, plain, step * world + r) / world).backward()
            compare_gradients(model, plain, 1e-5, f"at step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        compare_state(model, plain, ours, theirs, 1e-5)
        compare_state(teacher, plain_teacher, ours, theirs, 0.0)
        assert world == 1 or teacher.one.weight.to_local().shape[0] < 15


def test_teacher_and_student(ranks):
    ranks(teacher_and_student)


def same_class_twice(rank, world):
    """Two models of one class and two compiled forms of one model do not disturb each other."""
    for stage in (1, 3):
        model, compiled, plain = prepare(stage)
        other, other_compiled, other_plain = prepare(stage, lambda: Net(13))
        again = torch.compile(model, backend="zero", options=options(stage))
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        more, their_more = sgd(other.parameters()), sgd(other_plain.parameters())
        for step in range(2):
            train(rank, world, compiled, plain, ours, theirs, 1, 2 * step)
            train(rank, world, other_compiled, other_plain, more, their_more, 1, step)
            train(rank, world, again, plain, ours, theirs, 1, 2 * step + 1)
        compare_state(model, plain, ours, theirs, 1e-5)
        compare_state(other, other_plain, more, their_more, 1e-5)


def test_two_models_of_a_class_and_two_compilations_of_a_model(ranks):
    ranks(same_class_twice)


def part_compiled(rank, world):
    """Only a submodule is compiled: it is all that is trained through the backend."""
    for stage in (1, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Tanh(), nn.Linear(5, 3))
        plain = copy.deepcopy(model)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        model[0].compile(backend="zero", options=options(stage))
        for step in range(3):
            loss_of(model, step * world + rank).backward()
            (sum(loss_of(plain, step * world + r) for r in range(world)) / world).backward()
            compare_gradients(model, plain, 1e-5, f"at step {step}")
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        compare_state(model, plain, ours, theirs, 1e-5)


def test_compiling_a_submodule_trains_the_whole_model(ranks):
    ranks(part_compiled)


def ema(rank, world, early):
    """An average kept in a deep copy, made before or after sharding."""
    for stage in (1, 2, 3):
        model, compiled, plain = prepare(stage)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        if not early:
            train(rank, world, compiled, plain, ours, theirs, 1)
        average, expected = copy.deepcopy(model), copy.deepcopy(plain)
        for each in (average, expected):
            each.requires_grad_(False)
        for step in range(1, 4):
            train(rank, world, compiled, plain, ours, theirs, 1, step)
            with torch.no_grad():
                for each, source in ((average, model), (expected, plain)):
                    for p, q in zip(each.parameters(), source.parameters(), strict=True):
                        p.lerp_(q, 0.25) if step % 2 else p.mul_(0.75).add_(q, alpha=0.25)
        compare_state(model, plain, ours, theirs, 1e-5)
        compare_state(average, expected, ours, theirs, 1e-5)
        x = numbers(9, 4, 6)
        with torch.no_grad():
            close(average(x), expected(x), 1e-5, "the average, not compiled")
            used = torch.compile(average, backend="zero", options=options(stage))
            close(used(x), expected(x), 1e-5, "the average, compiled")
            close(used(x), expected(x), 1e-5, "the average, compiled")
            close(compiled(x), plain(x), 1e-5, "the model itself")


@pytest.mark.parametrize("early", [False, True])
def test_average_in_a_deep_copy(ranks, early):
    ranks(ema, early)


def swa(rank, world):
    for stage in (1, 3):
        model, compiled, plain = prepare(stage)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        train(rank, world, compiled, plain, ours, theirs, 1)
        averages = [torch.optim.swa_utils.AveragedModel(m) for m in (model, plain)]
        for step in range(1, 4):
            train(rank, world, compiled, plain, ours, theirs, 1, step)
            for average, source in zip(averages, (model, plain), strict=True):
                average.update_parameters(source)
        compare_state(*averages, ours, theirs, 1e-5)


def test_averaged_model_of_torch(ranks):
    ranks(swa)


def initialised(rank, world):
    """nn.init and in-place arithmetic on sharded parameters."""
    for stage in (1, 2, 3):
        model, compiled, plain = prepare(stage)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        train(rank, world, compiled, plain, ours, theirs, 1)
        table = numbers(3, 11, 6)
        for each in (model, plain):
            nn.init.constant_(each.two.weight, 0.3)
            nn.init.zeros_(each.two.bias)
            with torch.no_grad():
                each.one.weight.copy_(table)
                each.one.bias.add_(0.5).clamp_(-0.4, 0.7)
                each.one.bias.data.mul_(2)
        train(rank, world, compiled, plain, ours, theirs, 2, 1)
        compare_state(model, plain, ours, theirs, 1e-5)
        nn.init.normal_(model.one.weight, std=2.0)
        nn.init.xavier_uniform_(model.two.weight)
        bound = (6 / 16) ** 0.5
        values = whole(model.two.weight.detach())
        assert 0.5 * bound < values.abs().max() <= bound, "the fans are those of the whole"
        assert len(values.unique()) == 55, "ranks drew different values"
        assert 1.2 < whole(model.one.weight.detach()).std() < 2.8


def test_initialisation_in_place(ranks):
    ranks(initialised)


def loaded(rank, world):
    """A plain full state dict goes into the sharded model, and the sharded one into itself."""
    for stage in (1, 2, 3):
        model, compiled, plain = prepare(stage)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        train(rank, world, compiled, plain, ours, theirs, 2)
        torch.manual_seed(5)
        saved = Net().state_dict()
        for each in (model, plain):
            assert not any(each.load_state_dict(saved))
        compare_state(model, plain, ours, theirs, 1e-5)
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        train(rank, world, compiled, plain, ours, theirs, 2, 2)
        compare_state(model, plain, ours, theirs, 1e-5)
        model.load_state_dict(kept)
        plain.load_state_dict(saved)
        compare_state(model, plain, ours, theirs, 1e-5)


def test_load_state_dict_of_whole_and_of_sharded_values(ranks):
    ranks(loaded)


def clip_norm(compiled, plain):
    mine = nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert expected > 0.1
    close(mine, expected, 1e-5, "norm of the gradients")


def clip_inf_norm(compiled, plain):
    mine = nn.utils.clip_grad_norm_(compiled.parameters(), 0.01, norm_type=float("inf"))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=float("inf"))
    close(mine, expected, 1e-5, "largest gradient")


def clip_value(compiled, plain):
    for each in (compiled, plain):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)


def clipped(rank, world):
    for stage in (1, 2, 3):
        for clip in (clip_norm, clip_inf_norm, clip_value):
            model, compiled, plain = prepare(stage)
            ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
            train(rank, world, compiled, plain, ours, theirs, 2, clip=clip)
            compare_state(model, plain, ours, theirs, 1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_gradient_clipping(ranks, world):
    ranks(clipped, world=world)


def written(rank, world):
    """Writes through an index or a view, through .data, and out of a sharded parameter."""
    failures = []
    for change in (set_row, copy_to_data, copy_out):
        model, compiled, plain = prepare(3)
        with torch.no_grad():
            compiled(numbers(0, 4, 6))
        try:
            with torch.no_grad():
                close(change(model), change(plain), 1e-5, "what was written")
                close(model.one.weight, plain.one.weight, 1e-5, "the parameter")
        except Exception as error:  # All changes are tried, and reported together.
            failures.append(f"{change.__name__}: {type(error).__name__}: {str(error)[:200]}")
    assert not failures, "\n".join(failures)
    # A view of the gathered copy is not the parameter. It cannot be written back, so it refuses.
    with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        model.one.weight[:, 2].zero_()


def set_row(model):
    model.one.weight[3] = 0.5
    return model.one.weight


def copy_to_data(model):
    model.one.weight.data.copy_(numbers(3, 11, 6))
    return model.one.weight


def copy_out(model):
    return torch.zeros(11, 6).copy_(model.one.weight)


def test_writes_through_an_index_and_through_data_are_never_lost(ranks):
    ranks(written)
