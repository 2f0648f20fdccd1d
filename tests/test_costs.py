"""Devices and links by hand: rooflines, rings and trees, tables between and beyond their lines."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.errors import OptionError, ZeroError
from zcompile.schedule.costs import Costs, Device
from zcompile.schedule.devices import ALIASES, DEVICES, device
from zcompile.schedule.links import (
    ALL_REDUCE,
    GATHER,
    NODES,
    P2P,
    REDUCE,
    MeasuredLink,
    RingLink,
    Sample,
    Wire,
    default_link,
    link_from_json,
)
from zcompile.schedule.plan import KINDS
from zcompile.schedule.step import Op, Step

TOY = Device("toy", {"float32": 100.0, "bfloat16": 400.0}, 10.0, 1000, 1.0, 0.5, "")
INSIDE = Wire("inside", 100.0, 0.5, 0.001, "")  # 50 bytes a second
BETWEEN = Wire("between", 10.0, 1.0, 0.01, "")


def ring(world, ranks_per_node=4, **fields):
    return RingLink(world, ranks_per_node, INSIDE, BETWEEN, 20.0, 0.5, base=0.1, **fields)


# Devices


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        (Op("mm", 1000.0, 20.0, "float32"), 10 / 0.5 + 1),  # arithmetic
        (Op("mm", 1000.0, 20.0, "bfloat16"), 2.5 / 0.5 + 1),
        (Op("add", 10.0, 200.0, "float32"), 20 / 0.5 + 1),  # memory
        (Op("mm", 1000.0, 0.0, "int64"), 10 / 0.5 + 1),  # no figure: as float32
        (Op("view", 0.0, 0.0, "float32"), 0.0),
    ],
)
def test_an_operation_takes_what_the_roofline_says(op, seconds):
    assert TOY.seconds(op) == pytest.approx(seconds)


def test_measured_operations_take_the_place_of_the_models():
    ops = tuple(Op(name, 100.0, 0.0, "float32") for name in ("a", "b", "b"))
    step = Step(1, True, ("forward", "backward"), (2, 3), ops, (), (), (), {})
    costs = Costs(TOY, ring(1), measured={"forward/b": 0.25, "forward/gone": 9.0})
    assert costs.compute(step) == [pytest.approx(3.0), 0.25, pytest.approx(3.0)]


def test_an_h100_multiplies_at_seven_tenths_of_its_dense_peak():
    mm = Op("mm", 2.0 * 8192**3, 3 * 2.0 * 8192**2, "bfloat16")
    assert device("h100").seconds(mm) == pytest.approx(2 * 8192**3 / (0.7 * 989.5e12) + 3e-6)
    copy = Op("copy", 0.0, 2e9, "bfloat16")
    assert device("a100").seconds(copy) == pytest.approx(2e9 / (0.7 * 2039e9) + 3e-6)


@pytest.mark.parametrize("name", DEVICES)
def test_every_record_is_complete_and_cited(name):
    on = device(name)
    assert on.name == name and on.source
    assert name == "cpu" or "https://" in on.source
    assert {"float32", "float64"} <= set(on.flops)
    assert all(value > 0 for value in (*on.flops.values(), on.bandwidth, on.memory, on.launch))
    assert 0 < on.efficiency <= 1
    # A byte takes longer than an operation on everything that computes.
    assert on.flops["float32"] > on.bandwidth


def test_names_are_found_in_any_case_and_by_alias():
    assert device(" H100 ") is device("h100")
    assert all(device(alias) is DEVICES[name] for alias, name in ALIASES.items())


def test_an_unknown_device_is_an_error_that_names_the_near_ones_and_all():
    with pytest.raises(OptionError) as error:
        device("h1000")
    assert str(error.value) == (
        "unknown device 'h1000'; did you mean 'h100' or 'h100-80gb'? Known devices: "
        "a100, a100-40gb, cpu, h100, h200, mi300x, v100."
    )
    with pytest.raises(ZeroError, match=r"unknown device 'quantum'\. Known"):
        default_link("quantum", 4)


# Rings


def test_a_ring_in_one_node_takes_a_step_per_other_rank():
    link = ring(4)
    assert link.transfer(GATHER, 300) == pytest.approx(0.1 + 3 * 0.001 + 300 / 50)
    assert link.transfer(REDUCE, 300) == link.transfer(GATHER, 300)


def test_a_ring_over_nodes_has_the_ports_of_a_node_and_enters_each_node_once():
    link = ring(12)  # three nodes; 4 ports of 10 bytes a second are slower than the inside's 50
    assert link.nodes == 3 and link.speed == 40
    steps = 2 * 0.01 + 9 * 0.001
    assert link.transfer(GATHER, 400) == pytest.approx(0.1 + steps + 400 / 40)
    assert ring(12, ranks_per_node=1).speed == 10
    assert ring(13).nodes == 4  # one rank in the last


def test_an_all_reduce_goes_round_twice_or_over_a_tree_whichever_is_shorter():
    link = ring(64)  # 16 nodes
    twice_round = 2 * (15 * 0.01 + 48 * 0.001)
    up_and_down = 2 * (3 * 0.001 + 4 * 0.01)
    small, large = 63, 63_000
    assert link.transfer(ALL_REDUCE, small) == pytest.approx(0.1 + up_and_down + 64 / 40)
    assert link.transfer(ALL_REDUCE, large) == pytest.approx(0.1 + twice_round + large / 40)


def test_copies_around_native_collectives_and_messages_are_priced():
    # 20 bytes a second of memory, half a second a call.
    native, messages = ring(4), ring(4, primitives=P2P)
    assert native.issue(GATHER, 400) == pytest.approx(0.5 + 2 * 100 / 20)  # pack one shard
    assert native.finish(GATHER, 400) == pytest.approx(0.5 + 2 * 400 / 20)  # cut the whole
    assert native.issue(REDUCE, 400) == pytest.approx(0.5 + 2 * 400 / 20)
    assert native.finish(REDUCE, 400) == pytest.approx(0.5 + 2 * 100 / 20)
    assert messages.issue(GATHER, 400) == pytest.approx(0.5 + 2 * 100 / 20)
    assert messages.finish(GATHER, 400) == messages.issue(REDUCE, 400) == 0.0
    assert messages.finish(REDUCE, 400) == pytest.approx(0.5 + (400 + 100) / 20)


@pytest.mark.parametrize("link", [ring(1), default_link("h100", 1), MeasuredLink(1, {})])
def test_one_rank_carries_nothing(link):
    for kind in KINDS:
        assert link.primitive(kind, 0) == "none"
        assert link.transfer(kind, 0) == link.issue(kind, 100) == link.finish(kind, 100) == 0.0


def test_a_thousand_h100s_are_bound_by_their_ports():
    link = default_link("h100", 1024)
    assert link.share == 0.0 and link.primitive(GATHER, 10) == "all_gather_into_tensor"
    sent = 2**30 * 1023 // 1024
    latency = 10e-6 + 127 * 4e-6 + 896 * 1.9e-6
    port = 8 * 400e9 / 8 * 0.9
    assert link.transfer(GATHER, sent) == pytest.approx(latency + sent / min(port, 450e9 * 0.78))
    assert default_link("h100", 8).nodes == 1
    assert default_link("v100", 16).speed == pytest.approx(8 * 50e9 / 8 * 0.9)


def test_gloo_shares_the_core_and_sends_messages():
    link = default_link("cpu", 4)
    assert link.share == 0.75 and link.nodes == 1
    assert link.primitive(GATHER, 100) == link.primitive(REDUCE, 100) == "p2p"
    assert link.primitive(ALL_REDUCE, 100) == "all_reduce"


def test_every_device_has_a_node_with_cited_wires():
    assert set(NODES) == set(DEVICES) - {"cpu"}
    for node in NODES.values():
        assert node.inside.source and node.between.source
        assert node.inside.speed > node.between.speed


@given(
    st.sampled_from(sorted(DEVICES)),
    st.integers(2, 4096),
    st.sampled_from(list(KINDS)),
    st.integers(0, 2**34),
    st.integers(0, 2**34),
)
def test_more_bytes_never_take_less(name, world, kind, a, b):
    link = default_link(name, world)
    a, b = sorted((a, b))
    for price in (link.transfer, link.issue, link.finish):
        assert 0 <= price(kind, a) <= price(kind, b) < math.inf


# Tables

TABLES = {
    GATHER: {
        "p2p": (Sample(100, 1.0, 2.0, 0.0), Sample(300, 1.0, 6.0, 0.0)),
        "all_gather_into_tensor": (Sample(100, 0.5, 4.0, 1.0), Sample(300, 0.5, 5.0, 1.0)),
    },
    REDUCE: {"p2p": (Sample(100, 0.0, 1.0, 3.0), Sample(200, 0.0, 2.0, 1.0))},
    ALL_REDUCE: {"all_reduce": (Sample(100, 0.1, 0.2, 0.3),)},
}


def measured(**fields):
    return MeasuredLink(4, TABLES, **{"share": 0.75, **fields})


def sent(whole):
    return whole * 3 // 4


def test_between_two_sizes_times_lie_on_the_line():
    link = measured().only({"p2p", "all_reduce"})
    assert link.transfer(GATHER, sent(200)) == pytest.approx(4.0)
    assert link.transfer(GATHER, sent(100)) == pytest.approx(2.0)
    assert link.issue(GATHER, 260) == pytest.approx(1.0)
    assert link.finish(REDUCE, 120) == pytest.approx(2.6)


def test_beyond_the_table_the_last_slope_goes_on_and_below_it_latency_stays():
    link = measured().only({"p2p", "all_reduce"})
    assert link.transfer(GATHER, sent(1100)) == pytest.approx(6.0 + 800 * 4 / 200)
    assert link.transfer(GATHER, 1) == pytest.approx(2.0)
    assert link.transfer(GATHER, 0) == 0.0
    assert link.finish(REDUCE, 10_000) == 0.0  # a slope that falls ends at nothing
    assert link.transfer(ALL_REDUCE, 10_000) == pytest.approx(0.2)  # one size is all there is


def test_the_cheapest_primitive_is_taken_by_size_for_all_three_times():
    link = measured()
    # p2p: 3.0 at 100, 7.0 at 300; native: 5.5 and 6.5; they meet at 266.7.
    assert link.primitive(GATHER, sent(264)) == "p2p"
    assert link.primitive(GATHER, sent(268)) == "all_gather_into_tensor"
    assert (link.issue(GATHER, 264), link.issue(GATHER, 268)) == (1.0, 0.5)
    assert link.finish(GATHER, 268) == 1.0
    assert link.transfer(GATHER, sent(300)) == pytest.approx(5.0)


def test_an_all_reduce_of_what_is_sent_is_found_by_its_whole_value():
    table = (Sample(100, 0.0, 1.0, 0.0), Sample(200, 0.0, 2.0, 0.0))
    link = MeasuredLink(4, {ALL_REDUCE: {"all_reduce": table}})
    assert link.transfer(ALL_REDUCE, 2 * 160 * 3 // 4) == pytest.approx(1.6)


def test_a_table_can_be_cut_to_what_lowering_can_use():
    assert measured().only({"p2p", "all_reduce"}).primitive(GATHER, sent(300)) == "p2p"
    with pytest.raises(ValueError, match=r"none of \['nccl'\] was measured for all-gather; known"):
        measured().only({"nccl"})


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({GATHER: {"p2p": ()}}, "the table of all-gather by p2p is empty"),
        ({GATHER: {"p2p": (Sample(2, 0, 1, 0), Sample(2, 0, 1, 0))}}, "sizes .* do not ascend"),
        ({GATHER: {"p2p": (Sample(2, 0, -1.0, 0),)}}, "holds a value that is no time"),
        ({GATHER: {"p2p": (Sample(2, 0, math.nan, 0),)}}, "holds a value that is no time"),
        ({"gather": {}}, "unknown kind of collective 'gather'"),
    ],
)
def test_a_table_that_is_none_is_refused(tables, why):
    with pytest.raises(ValueError, match=why):
        MeasuredLink(2, tables)


@st.composite
def links(draw):
    """Measured links whose tables rise."""
    sizes = sorted(draw(st.sets(st.integers(1, 2**30), min_size=1, max_size=6)))
    table, times = [], (0.0, 0.0, 0.0)
    for size in sizes:
        more = draw(st.tuples(*[st.floats(0, 10)] * 3))
        times = tuple(a + b for a, b in zip(times, more))
        table.append(Sample(size, *times))
    return MeasuredLink(draw(st.integers(2, 64)), {k: {"p2p": tuple(table)} for k in KINDS})


@given(links(), st.sampled_from(list(KINDS)), st.integers(1, 2**32), st.integers(1, 2**32))
def test_a_table_that_rises_prices_more_bytes_no_lower(link, kind, a, b):
    a, b = sorted((a, b))
    for price in (link.transfer, link.issue, link.finish):
        assert price(kind, a) <= price(kind, b) * (1 + 1e-9) + 1e-12


# JSON


@pytest.mark.parametrize("link", [ring(12), default_link("cpu", 3), measured(source="here")])
def test_a_link_is_read_back_as_it_was_written(link):
    again = link_from_json(link.to_json())
    assert again == link
    assert again.transfer(GATHER, 150) == link.transfer(GATHER, 150)
    if isinstance(link, RingLink):
        assert again == dataclasses.replace(link)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "a link is a JSON object"),
        ('{"link": "fast"}', "unknown form of link 'fast'; known: ring, measured"),
        ('{"link": "measured", "world": 2}', "not a measured link: KeyError.'tables'"),
        ('{"link": "measured", "world": 2, "tables": {"all-gather": {"p2p": [[1, 2]]}}}', "not a"),
    ],
)
def test_what_is_no_link_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        link_from_json(text)
