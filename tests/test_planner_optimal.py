"""The planner against the optimum: exact search on small steps, which is itself checked against
plain enumeration of every schedule on the smallest."""

import itertools
import random

import pytest
from optimum import optimum
from random_steps import random_case

from zcompile.schedule import planner
from zcompile.schedule.simulate import Bucket, Schedule

GAP = 0.03
MOST = 300_000  # partial schedules of one exact search
SMALL = range(300)


def tiny(seed):
    return random_case(random.Random(seed), parameters=(1, 2), ops=(1, 3))


TINY = [seed for seed in range(60) if tiny(seed).collectives() <= 4]


def partitions(items):
    """All ways to cut a sequence of items into sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for cut in partitions(rest):
        yield [[first], *cut]
        for index in range(len(cut)):
            yield [*cut[:index], [first, *cut[index]], *cut[index + 1 :]]


def places(sim, kind, graph, members):
    """Every issue and wait of one bucket; none if its members cannot be merged."""
    step = sim.step
    if kind == "all-gather":
        rows = [step.gathers[m] for m in members]
        first, last = max(r.ready for r in rows), min(r.first for r in rows)
        first = max(first, step.start(graph))
        for issue in range(first, last + 1):
            yield Bucket(kind, graph, tuple(members), issue, last)
        return
    rows = [step.reductions[m] for m in members]
    first, last = max(r.ready for r in rows), min(r.needed for r in rows)
    for issue in range(first, last + 1):
        for wait in range(issue, last + 1):
            yield Bucket(kind, graph, tuple(members), issue, wait)


def every_schedule(case):
    sim = case.simulator()
    for count in range(len(case.may_keep) + 1):
        for kept in map(frozenset, itertools.combinations(case.may_keep, count)):
            classes = {}
            for m in sim.gathered(kept):
                g = case.step.gathers[m]
                classes.setdefault(("all-gather", g.graph, g.dtype), []).append(m)
            for m, r in enumerate(case.step.reductions):
                classes.setdefault((r.kind, r.graph, r.mergeable), []).append(m)
            cuts = [
                [[(key[0], key[1], pack) for pack in cut] for cut in partitions(members)]
                for key, members in classes.items()
            ]
            for cut in itertools.product(*cuts):
                packs = [pack for group in cut for pack in group]
                for row in itertools.product(*(tuple(places(sim, *pack)) for pack in packs)):
                    for order in itertools.permutations(row):
                        if all(a.issue <= b.issue for a, b in itertools.pairwise(order)):
                            yield Schedule(order, kept)


@pytest.mark.parametrize("seed", TINY)
def test_the_exact_search_finds_what_enumeration_finds(seed):
    case = tiny(seed)
    sim = case.simulator()
    least = float("inf")
    for schedule in every_schedule(case):
        replay = sim.replay(schedule)
        if case.budget is None or replay.peak <= case.budget:
            least = min(least, replay.seconds)
    assert optimum(case).seconds == pytest.approx(least, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", SMALL)
def test_the_planner_is_within_three_percent_of_the_optimum(seed):
    case = random_case(random.Random(seed), parameters=(1, 4), ops=(1, 10))
    assert case.collectives() <= 12
    sim = case.simulator()
    found = planner.plan(sim, case.budget, may_keep=case.may_keep)
    best = optimum(case, bound=found.replay.seconds, most=MOST)
    if best.schedule is None:  # nothing is faster
        return
    replay = sim.replay(best.schedule)
    assert replay.seconds == pytest.approx(best.seconds, rel=1e-9)
    assert case.budget is None or replay.peak <= case.budget
    assert found.replay.seconds <= best.seconds * (1 + GAP)


@pytest.mark.parametrize("seed", range(40))
def test_little_less_than_the_leanest_schedule_fits_nothing(seed):
    """A budget error is true: the exact search finds no schedule of much less memory either."""
    case = random_case(random.Random(seed), parameters=(1, 3), ops=(1, 6))
    sim = case.simulator()
    rest = case.at_rest.total()
    peak = int(sim.memory(planner.lean(sim, may_keep=case.may_keep)).max())
    less = int(rest + (peak - rest) * 0.9)
    assert optimum(case.within(less), most=MOST).schedule is None
