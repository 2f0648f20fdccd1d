"""Owners and optimizers are found among all live objects."""

import torch
from torch import nn

from zcompile.owners import live, live_optimizers, outermost_owners


class Unhashable(type):
    def __eq__(cls, other):
        return type.__eq__(cls, other)

    __hash__ = None


class Odd(metaclass=Unhashable):
    def __init__(self):
        self.here = [self]


class Base(nn.Module):
    pass


class Left(Base):
    pass


class Right(Base):
    pass


class Both(Left, Right):
    pass


def test_subclasses_by_every_way_are_found_once_beside_classes_without_a_hash():
    odd, made = Odd(), [Base(), Left(), Right(), Both(), nn.Module()]
    found = live(Base)
    assert [sum(each is m for each in found) for m in made] == [1, 1, 1, 1, 0]
    assert [each is odd for each in live(Odd)] == [True]


def test_optimizers_and_the_outermost_owner():
    class Mine(torch.optim.SGD):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Both())
    optimizer = Mine(model.parameters(), lr=0.1)
    assert any(each is optimizer for each in live_optimizers())
    assert outermost_owners([model[0].weight]) == [model]
