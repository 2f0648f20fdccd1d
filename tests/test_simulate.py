"""simulate: times, memory and timelines, by hand."""

from dataclasses import replace

import pytest
from hand_steps import DEVICE, Line, check_events, gather, pull, push, reduction, simulator

from zcompile.schedule.costs import Costs
from zcompile.schedule.plan import CATEGORIES
from zcompile.schedule.simulate import AtRest, Schedule, Simulator


def replayed(sim, *buckets, kept=()):
    return sim.replay(Schedule(buckets, frozenset(kept)))


# Times by hand


def test_without_collectives_a_step_is_its_operations():
    replay = replayed(simulator([1, 2, 3]))
    assert (replay.seconds, replay.starts, replay.stalls) == (6, (), ())


def test_a_gather_at_its_use_is_exposed():
    sim = simulator([1, 2], [gather("a", 1, size=8)])
    replay = replayed(sim, pull(0, 1, 1))
    assert (replay.seconds, replay.starts, replay.ends, replay.stalls) == (7, (1,), (5,), (4,))


def test_a_gather_that_is_issued_early_is_hidden_behind_operations():
    sim = simulator([1, 2], [gather("a", 1, size=8)])
    replay = replayed(sim, pull(0, 0, 1))
    assert (replay.seconds, replay.starts, replay.ends, replay.stalls) == (6, (0,), (4,), (3,))
    longer = simulator([5, 2], [gather("a", 1, size=8)])
    assert replayed(longer, pull(0, 0, 1)).stalls == (0,)
    assert replayed(longer, pull(0, 0, 1)).seconds == 7


def test_a_link_carries_one_transfer_after_the_other():
    sim = simulator([1, 1, 1], [gather("a", 1, size=6), gather("b", 2, size=4)])
    replay = replayed(sim, pull(0, 0, 1), pull(1, 0, 2))
    assert (replay.starts, replay.ends) == ((0, 3), (3, 5))
    assert replay.stalls == (2, 1)  # at 1 until 3; at 4 until 5
    assert replay.seconds == 6


def test_reductions_and_gathers_share_the_link():
    sim = simulator([1, 1, 1], [gather("b", 2, size=4)], [reduction("a", 1, 3, size=10)])
    replay = replayed(sim, push(0, 1, 3), pull(0, 1, 2))
    assert (replay.starts, replay.ends) == ((1, 6), (6, 8))
    assert replay.stalls == (0, 6)  # the reduction is over when it is awaited
    assert replay.seconds == 9


def test_an_idle_link_starts_when_something_is_issued():
    sim = simulator([1, 5, 1], [gather("a", 1), gather("b", 2)])
    replay = replayed(sim, pull(0, 1, 1), pull(1, 2, 2))
    assert (replay.starts, replay.ends) == ((1, 8), (3, 10))


def test_issues_and_finishes_take_the_compute_lane():
    sim = simulator([1, 2], [gather("a", 1, size=8)], line=Line(host=0.5, after=0.25))
    replay = replayed(sim, pull(0, 1, 1))
    assert (replay.starts, replay.ends, replay.stalls) == ((1.5,), (5.5,), (4,))
    assert replay.seconds == 5.5 + 0.25 + 2


def test_a_link_that_shares_the_compute_lane_slows_it_while_both_are_busy():
    line = Line(share=0.5)
    # 4 s of transfer take 2 of the 4 s of work that are done meanwhile.
    sim = simulator([4, 1], [gather("a", 1, size=8)], line=line)
    replay = replayed(sim, pull(0, 0, 1))
    assert (replay.ends, replay.stalls, replay.seconds) == ((4,), (0,), 7)
    # 1 s of work takes 2; then the lane stands still and gives nothing.
    sim = simulator([1, 1], [gather("a", 1, size=8)], line=line)
    replay = replayed(sim, pull(0, 0, 1))
    assert (replay.ends, replay.stalls, replay.seconds) == ((4,), (2,), 5)


def test_a_share_slows_issues_and_finishes_too():
    line = Line(share=0.5, host=1, after=1)
    sim = simulator([0, 0], [gather("a", 0, size=8), gather("b", 1, size=8)], line=line)
    replay = replayed(sim, pull(0, 0, 0), pull(1, 0, 1))
    # Issue 1 s; the second's at half the speed until 3; the finish of the first, from 5, as well.
    assert replay.starts == (1, 5)
    assert replay.ends == (5, 9)
    assert replay.stalls == (2, 2)
    assert replay.seconds == 10


def test_one_rank_moves_nothing():
    sim = simulator([1, 2], [gather("a", 1, size=8)], world=1)
    replay = replayed(sim, pull(0, 1, 1))
    assert (replay.seconds, replay.stalls) == (3, (0,))
    assert sim.primitive(pull(0, 1, 1)) == "none"


def test_a_graph_ends_before_the_next_begins():
    """Both stand at position 2: what forward awaits comes before what backward issues."""
    sim = simulator(
        [1, 1, 1], [gather("b", 2, graph=1)], [reduction("a", 1, 2, size=12)], ends=(2, 3)
    )
    replay = replayed(sim, push(0, 1, 2), pull(0, 2, 2, graph=1))
    assert (replay.starts, replay.ends) == ((1, 7), (7, 9))
    assert replay.stalls == (5, 2)
    assert [position for position, *_ in replay.stops] == [1, 2, 2, 3]


def test_measured_times_stand_in_for_the_models():
    step = simulator([1, 1, 1], ends=(2, 3)).step
    measured = {"forward/op1": 10.0, "backward/op2": 20.0, "backward/op0": 99.0}
    sim = Simulator(step, Costs(DEVICE, Line(), measured=measured))
    assert replayed(sim).seconds == 1 + 10 + 20


def test_when_operations_begin():
    sim = simulator([2, 0, 0, 2, 2], [gather("a", 3, size=8)])
    schedule = Schedule((pull(0, 0, 3),))
    # Two views in front of the wait at 3 begin when op0 is over, not when the wait is.
    assert list(sim.reached(sim.replay(schedule))) == [0, 2, 2, 4, 6, 8]
    shared = simulator([2, 2, 1], [gather("a", 2, size=6)], line=Line(share=0.5))
    # Both take until 3 + 2.5: in between in proportion.
    assert list(shared.reached(replayed(shared, pull(0, 0, 2)))) == [0, 2.75, 5.5, 6.5]
    empty = simulator([])
    assert list(empty.reached(replayed(empty))) == [0]


def test_the_bound():
    sim = simulator([1, 2], [gather("a", 1, size=8)], line=Line(host=0.5, after=0.25))
    assert sim.bound(Schedule((pull(0, 0, 1),))) == 4  # the link
    sim = simulator([9, 2], [gather("a", 1, size=8)], line=Line(0.5, 0.5, 0.25))
    assert sim.bound(Schedule((pull(0, 0, 1),))) == 11.75 + 2  # the lane, and what the link takes


# Memory by hand. Slots: in front of op0, op0, in front of op1, ...


def memory(sim, *buckets, kept=()):
    return [int(v) for v in sim.memory(Schedule(buckets, frozenset(kept)))]


def test_what_is_at_rest_and_alive_is_in_the_curve():
    sim = simulator([1, 1], live=(1, 2, 3, 4, 5), at_rest=AtRest(100, 200, 300))
    assert memory(sim) == [601, 602, 603, 604, 605]
    replay = replayed(sim)
    assert (replay.peak, replay.slot) == (605, 4)


def test_a_gathered_parameter_lives_from_its_issue_to_its_last_reading():
    sim = simulator([1, 1, 1], [gather("a", 1, 1, size=8)])
    assert memory(sim, pull(0, 1, 1)) == [0, 0, 8, 8, 0, 0, 0]
    assert memory(sim, pull(0, 0, 1)) == [8, 8, 8, 8, 0, 0, 0]


def test_a_parameter_that_is_kept_lives_until_backward_has_read_it():
    rows = [gather("a", 0, 0, size=8), gather("a", 2, 2, graph=1, size=8)]
    sim = simulator([1, 1, 1], rows, ends=(2, 3))
    lean = memory(sim, pull(0, 0, 0), pull(1, 2, 2, graph=1))
    assert lean == [8, 8, 0, 0, 8, 8, 0]
    assert memory(sim, pull(0, 0, 0), kept=["a"]) == [8, 8, 8, 8, 8, 8, 0]
    assert sim.pairs == {"a": (0, 1)}
    assert sim.gathered(frozenset()) == [0, 1]
    assert sim.gathered(frozenset({"a"})) == [0]


def test_a_gradient_is_whole_until_it_is_awaited_and_a_part_of_its_mean_lives_on():
    sim = simulator([1, 1, 1], [], [reduction("a", 1, 3, size=8)])
    # 8 B whole, 4 B of others' parts while in flight, 4 B of the mean.
    assert memory(sim, push(0, 1, 1)) == [0, 0, 16, 4, 4, 4, 4]
    assert memory(sim, push(0, 2, 3)) == [0, 0, 8, 8, 12, 12, 16]


def test_a_mean_lies_where_the_other_rank_s_part_was_received():
    sim = simulator([1, 1, 1], [], [reduction("a", 1, 3, size=8, in_place=True)])
    # 8 B whole, 4 B received, which become the mean.
    assert memory(sim, push(0, 1, 1)) == [0, 0, 12, 4, 4, 4, 4]
    assert memory(sim, push(0, 2, 3)) == [0, 0, 8, 8, 12, 12, 12]


def test_a_gradient_that_is_cast_for_the_wire_is_there_twice():
    row = reduction("a", 0, 1, size=4, grad_bytes=8, result_bytes=4)
    sim = simulator([1], [], [row])
    assert memory(sim, push(0, 0, 1)) == [8 + 2 + 4, 8 + 2 + 4, 8 + 2 + 4 + 4]


def test_an_all_reduce_has_a_buffer_of_everything():
    row = reduction("a", 0, 1, size=8, kind="all-reduce", result_bytes=8)
    sim = simulator([1], [], [row])
    assert memory(sim, push(0, 0, 1, kind="all-reduce")) == [16, 16, 24]


def test_one_rank_holds_no_buffers_and_gathers_only_casts():
    rows = [gather("a", 0, 0, size=8), gather("b", 0, 0, size=8, cast=True)]
    sim = simulator([1], rows, [reduction("a", 0, 1, size=8, result_bytes=8)], world=1)
    assert memory(sim, pull((0, 1), 0, 0)) == [8, 8, 0]
    assert memory(sim, push(0, 0, 0)) == [16, 8, 8]


def test_a_backends_own_collectives_have_flat_buffers():
    rows = [gather("a", 0, 1, size=8), gather("b", 0, 0, size=4)]
    sim = simulator([1, 1], rows, native=True)
    # Alone: the flat buffer becomes the parameter; this rank's part is packed beside it.
    assert memory(sim, pull(0, 0, 0)) == [8 + 4, 8, 8, 8, 0]
    # Merged: 12 B flat and 6 B of this rank until both are cut out of it.
    assert memory(sim, pull((0, 1), 0, 0)) == [12 + 6 + 12, 12, 8, 8, 0]
    rows = [gather("a", 1, 1, size=8), gather("b", 1, 1, size=4)]
    early = simulator([1, 1], rows, native=True)
    assert memory(early, pull((0, 1), 0, 1)) == [18, 18, 18 + 12, 12, 0]
    sim = simulator([1], [], [reduction("a", 0, 1, size=8)], native=True)
    assert memory(sim, push(0, 0, 0)) == [8 + 8 + 4 + 4, 4, 4]


def test_flat_buffers_are_padded():
    """Five rows on four ranks are padded to eight: a rank sends two rows to three others."""
    rows = [gather("a", 0, size=20, sent=24)]
    sim = simulator([1], rows, world=4, native=True)
    assert memory(sim, pull(0, 0, 0)) == [32 + 8, 32, 0]
    row = reduction("a", 0, 1, size=20, sent=24, result_bytes=5)
    sim = simulator([1], [], [row], world=4, native=True)
    assert memory(sim, push(0, 0, 0)) == [20 + 32 + 8 + 5, 5, 5]


# A timeline


def busy():
    """Two graphs, a gather in each, a reduction and an all-reduce, on a link that shares."""
    rows = [gather("a", 1, 1, size=8), gather("b", 3, 3, graph=1, size=4)]
    grads = [
        reduction("a", 3, 5, graph=1, size=6),
        reduction("c", 4, 5, graph=1, size=2, kind="all-reduce"),
    ]
    sim = simulator(
        [2, 1, 3, 1, 2], rows, grads, ends=(2, 5), live=tuple(range(11)),
        line=Line(0.25, 0.5, 0.25), at_rest=AtRest(40, 80, 7),
    )  # fmt: skip
    buckets = (
        pull(0, 0, 1), pull(1, 2, 3, graph=1), push(0, 3, 4, graph=1),
        push(1, 5, 5, graph=1, kind="all-reduce"),
    )  # fmt: skip
    return sim, Schedule(buckets)


def test_keys_are_numbered_in_each_graph():
    sim, schedule = busy()
    assert sim.keys(schedule) == ["gather.0", "gather.0", "reduce.0", "all_reduce.0"]


def test_events_are_those_of_the_replay():
    made, replay = check_events(*busy())
    assert made.seconds == replay.seconds
    assert [e.kind for e in made.events if e.lane == "compute"][:5] == [
        "issue", "compute", "wait", "finish", "compute",
    ]  # fmt: skip
    work = [e for e in made.events if e.kind == "compute"]
    assert [e.name for e in work] == ["op0", "op1", "op2", "op3", "op4"]
    assert [e.graph for e in work] == ["forward"] * 2 + ["backward"] * 3


def test_every_thread_of_an_operation_takes_its_workspace_while_it_runs():
    sim = simulator([1, 1, 1], [gather("a", 0, 2, size=4)])
    ops = [replace(op, workspace=w) for op, w in zip(sim.step.ops, (0, 7, 0))]
    costs = replace(sim.costs, device=replace(sim.costs.device, threads=3))
    sim = Simulator(replace(sim.step, ops=tuple(ops)), costs)
    schedule = Schedule((pull(0, 0, 0),))
    assert list(sim.memory(schedule)) == [4, 4, 4, 4 + 21, 4, 4, 0]
    assert max(sim.timeline(schedule).memory.values["workspace"]) == 21


def test_operations_with_nothing_between_them_are_one_event():
    sim = simulator([1, 1, 1, 1], [gather("a", 3)], ends=(2, 4))
    made = sim.timeline(Schedule((pull(0, 3, 3),)))
    assert [e.name for e in made.events if e.kind == "compute"] == ["op0 .. op1", "op2", "op3"]


def test_a_timeline_says_where_time_goes():
    sim, schedule = busy()
    made, replay = sim.timeline(schedule), sim.replay(schedule)
    assert (made.source, made.compute_seconds) == ("simulated", 9)
    assert made.communication_seconds == 4 + 2 + 3 + 1
    assert made.exposed_seconds == made.seconds - 9
    assert made.bound_seconds == sim.bound(schedule) == 9 + 4 * 0.75 + 0.25 * 10
    assert list(made.exposed) == [
        "forward/gather.0", "backward/gather.0", "backward/reduce.0", "backward/all_reduce.0",
    ]  # fmt: skip
    assert list(made.exposed.values()) == list(replay.stalls)
    # Beside its stalls a step loses the host's part, and what the link takes of the lane.
    lost = 4 * 0.75 + 0.25 * (10 - sum(replay.stalls))
    assert made.exposed_seconds == pytest.approx(sum(replay.stalls) + lost)


def test_where_nothing_but_stalls_is_lost_they_add_up_to_it():
    sim = simulator([1, 1, 1], [gather("a", 1, size=6), gather("b", 2, size=4)])
    made = sim.timeline(Schedule((pull(0, 0, 1), pull(1, 0, 2))))
    assert made.exposed == {"forward/gather.0": 2, "forward/gather.1": 1}
    assert made.exposed_seconds == 3


def test_a_timeline_says_what_memory_is_for():
    sim, schedule = busy()
    made, replay = sim.timeline(schedule), sim.replay(schedule)
    curve = made.memory
    assert set(curve.values) == set(CATEGORIES) - {"workspace"}
    assert all(len(values) == len(curve.times) for values in curve.values.values())
    assert list(curve.times) == sorted(curve.times)
    assert (curve.times[0], made.peak_bytes) == (0, max(curve.total()))
    assert set(curve.values["parameters"]) == {40}
    assert set(curve.values["optimizer"]) == {80}
    assert min(curve.values["activations"]) >= 7
    assert made.peak_bytes == replay.peak
    assert made.peak_node == sim.step.ops[min(replay.slot // 2, 4)].name
    at = [t for t, total in zip(curve.times, curve.total()) if total == made.peak_bytes]
    assert made.peak_seconds in at
