"""benchmarks/prediction.py: what it makes of its figures."""

from benchmarks.prediction import Row, _median, ranked


def row(*every, **more):
    return Row("", 0.0, 0, every=list(every), **more)


def test_only_plans_that_every_round_tells_apart_are_ranked():
    fast, slow = row((1, 10), (2, 20)), row((3, 30), (4, 40))
    assert ranked([fast, slow]) == ranked([slow, fast]) == (1, 1)
    assert ranked([fast, row((3, 9), (4, 19))]) == (0, 1)  # simulated the other way round
    assert ranked([fast, row((3, 30), (1, 40))]) == (0, 0)  # measured so in one round only
    assert ranked([fast, row((3, 10), (4, 20))]) == (0, 0)  # simulated as one and the same
    assert ranked([fast, slow, row((5, 5), (6, 6))]) == (1, 3)


def test_of_several_rounds_the_one_most_above_its_plan_is_shown():
    rounds = [
        Row("a", seconds, peak, predicted_seconds=seconds / 2, predicted_peak=planned)
        for seconds, peak, planned in [(1.0, 100, 100), (3.0, 90, 80), (2.0, 110, 110)]
    ]
    found = _median(rounds)
    assert (found.measured_peak, found.predicted_peak) == (90, 80)
    assert (found.measured_seconds, found.predicted_seconds) == (2.0, 1.0)
    assert found.every == [(1.0, 0.5), (3.0, 1.5), (2.0, 1.0)]
