"""Ranks that read each other's memory: right values in any order, no waiting without end."""

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import script

from zcompile import comm, shared
from zcompile.layout import owned_rows
from zcompile.shared import Span


@dataclass(frozen=True)
class Collective:
    """One gather or reduction of several parameters of (rows[i], width)."""

    kind: str
    rows: tuple[int, ...]
    width: int
    dtype: torch.dtype  # at rest, or of the gradient
    wanted: torch.dtype  # of the gathered parameter


@dataclass
class Run:
    """What Control says of a run, without the store behind it."""

    failure: str | None = None
    runs: int = 0


_linked: dict[int, comm.Group] = {}


def linked(world, control=None):
    """The group of all ranks, connected once in each process."""
    if control is not None or world not in _linked:
        rank, pg = dist.get_rank(), dist.new_group(list(range(world)))
        link, reason = shared.connect(rank, lambda value: everyone(value, pg), control)
        assert link is not None, reason
        group = comm.Group(f"linked{world}", rank, world, pg, link=link)
        if control is not None:
            return group
        _linked[world] = group
    return _linked[world]


def everyone(value, pg=None):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=pg)
    return values


def tensor(rank, index, part, shape, dtype):
    """Values that only this rank, collective and parameter have, exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * index + part)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def issue(group, index, each):
    """-> what to check after the wait, and the sources, which may change from then on"""
    key, world, rank = f"k{index % 3}.{index}", group.world, group.rank
    if each.kind == "gather":
        wholes = [tensor(0, index, p, (n, each.width), each.dtype) for p, n in enumerate(each.rows)]
        shards = [w[slice(*owned_rows(len(w), world, rank))].clone() for w in wholes]
        results = comm.gather_start(shards, each.rows, each.wanted, group, key)
        return key, shards, results, [w.to(each.wanted) for w in wholes]
    shapes = [(n, each.width) for n in each.rows]
    every = [
        [tensor(r, index, p, s, each.dtype) for p, s in enumerate(shapes)] for r in range(world)
    ]
    mine = [grad.clone() for grad in every[rank]]
    results = comm.reduce_start(mine, group, key)
    expected = []
    for p, n in enumerate(each.rows):
        first, last = owned_rows(n, world, rank)
        expected.append(torch.stack([every[r][p][first:last] for r in group.peers()]))
    return key, mine, results, expected


def exchange(rank, world, collectives, seed, in_order, linked_ranks):
    """Issue and await in an order of this rank's own; at most 4 under way when `in_order`."""
    group = linked(world)
    if not linked_ranks:
        group = comm.Group("messages", rank, world, group.pg)
    order = random.Random(f"{seed} {rank}")
    before = comm.traffic()
    under_way, todo = [], list(enumerate(collectives))
    if not in_order:
        order.shuffle(todo)
    while todo or under_way:
        while todo and (not in_order or len(under_way) < 4):
            under_way.append(issue(group, *todo.pop(0)))
            if order.random() < 0.2:
                time.sleep(order.random() * 2e-3)
        at = 0 if in_order else order.randrange(len(under_way))
        key, sources, results, expected = under_way.pop(at)
        comm.wait(group, key)
        for source in sources:  # whoever reads too late, reads this
            source.fill_(99)
        for result, value in zip(results, expected, strict=True):
            assert torch.equal(result, value), (key, result, value)
    dist.barrier()
    return comm.traffic() - before


COLLECTIVES = st.builds(
    Collective,
    st.sampled_from(["gather", "reduce"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.sampled_from([0, 1, 3, 64, 5000]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]),
)


@pytest.mark.parametrize("world", [2, 3, 4])
@settings(max_examples=15, deadline=None)
@given(collectives=st.lists(COLLECTIVES, min_size=1, max_size=12), in_order=st.booleans())
def test_any_collectives_in_any_order_give_the_values_and_bytes_of_messages(
    ranks, world, collectives, in_order
):
    ours = ranks(exchange, collectives, 1, in_order, True, world=world)
    assert ours == ranks(exchange, collectives, 2, in_order, False, world=world)


def large(rank, world):
    group = linked(world)
    rows, width = 4001, 2048  # 33 MB
    whole = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    first, last = group.owned(rows)
    (full,) = comm.gather_start([whole[first:last]], [rows], torch.float32, group, "large")
    comm.wait(group, "large")
    assert torch.equal(full, whole)
    (parts,) = comm.reduce_start([whole + rank], group, "large")
    comm.wait(group, "large")
    for slot, peer in enumerate(group.peers()):
        assert torch.equal(parts[slot], whole[first:last] + peer)


def test_large_parameters(ranks):
    ranks(large, world=3)


def memory(tensor):
    return Span(tensor.data_ptr(), tensor.nbytes)


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_one_call_copies_no_more_than_the_system_takes(sizes):
    pieces = [torch.randint(255, (size,), dtype=torch.uint8) for size in sizes]
    copies = [torch.zeros_like(piece) for piece in pieces]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_MAX_SPANS", 3)
        patch.setattr(shared, "_MAX_BYTES", 50)
        sources, targets = [memory(p) for p in pieces], [memory(c) for c in copies]
        for batch in shared._batches(sources, targets):
            assert len(batch) <= 3 and sum(size for *_, size in batch) <= 50
        shared.read(os.getpid(), sources, targets)
    for piece, copy in zip(pieces, copies, strict=True):
        assert torch.equal(piece, copy)


def test_memory_that_is_not_there_is_an_error():
    target = torch.zeros(8)
    with pytest.raises(OSError, match="reading the memory of process"):
        shared.read(os.getpid(), [Span(4096, 32)], [memory(target)])


def flooded(rank, world, count):
    """Rank 0 announces more than its socket takes before rank 1 listens."""
    group = linked(world)
    shard = torch.full((1, 4), float(rank))
    if rank == 1:
        time.sleep(1.0)
    fulls = [
        comm.gather_start([shard], [world], torch.float32, group, f"flood {i}")[0]
        for i in range(count)
    ]
    for i in reversed(range(count)):
        comm.wait(group, f"flood {i}")
    assert all(full[:, 0].tolist() == list(range(world)) for full in fulls)
    link = group.link
    assert not any(link._outbox.values()) and not link._mine


def test_more_under_way_than_a_socket_holds(ranks):
    ranks(flooded, 3000)


def left_behind(rank, world):
    """Rank 0 issues in a run that an exception ends; rank 1 never comes that far."""
    control = Run(runs=1)
    group = linked(world, control)
    if rank == 0:
        comm.gather_start([torch.full((1, 4), -1.0)], [world], torch.float32, group, "k")
    dist.barrier()
    control.runs = 2
    (full,) = comm.gather_start(
        [torch.full((1, 4), float(rank))], [world], torch.float32, group, "k"
    )
    comm.wait(group, "k")
    assert full[:, 0].tolist() == [0.0, 1.0]
    dist.barrier()
    group.link.close()


def test_what_a_failed_run_left_behind_is_never_read(ranks):
    ranks(left_behind)


def heard(rank, world):
    control = Run()
    group = linked(world, control)
    if rank == 0:
        comm.gather_start([torch.zeros(1, 4)], [world], torch.float32, group, "k")
        control.failure = "rank 1 failed"
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="another rank failed"):
            comm.wait(group, "k")
        assert time.monotonic() - begin < 2
    dist.barrier()
    group.link.close()


def test_a_published_failure_ends_the_wait(ranks):
    ranks(heard)


def other_sizes(rank, world):
    group = linked(world, Run())
    with pytest.raises(RuntimeError, match=r"rank \d sends \[\d+\] bytes where \[\d+\] are exp"):
        comm.gather_start([torch.zeros(1, 4 + rank)], [world], torch.float32, group, "k")
        comm.wait(group, "k")
    dist.barrier()
    group.link.close()


def test_other_sizes_than_expected_are_an_error(ranks):
    ranks(other_sizes)


def refused(rank, world):
    original = shared.read

    def denied(*args):
        raise PermissionError(1, "Operation not permitted")

    if rank == world - 1:
        shared.read = denied
    try:
        link, reason = shared.connect(rank, everyone, None)
    finally:
        shared.read = original
    assert link is None
    return reason


def test_ranks_that_may_not_read_each_other_all_say_so(ranks):
    (reason,) = set(ranks(refused, world=3))
    assert reason == "rank 2 cannot reach rank 0: [Errno 1] Operation not permitted"


def strangers(rank, world):
    """Another process than the rank answers at its number, as in a container of its own."""
    original = os.getpid
    os.getpid = lambda: os.getppid()
    try:
        return shared.connect(rank, everyone, None)
    finally:
        os.getpid = original


def test_a_rank_that_is_not_where_its_number_says_is_not_read(ranks):
    for link, reason in ranks(strangers):
        assert link is None and re.search("rank 0 (cannot reach|reads another)", reason)


def chosen(rank, world, primitive):
    from parity import options
    from torch import nn

    import zcompile

    model = nn.Linear(8, 8)
    zcompile.shard(model, **options(3, primitive=primitive))
    return comm.find(model.weight.spec.group).link is not None


@pytest.mark.parametrize(
    ("primitive", "links"), [("auto", True), ("p2p", False), ("native", False)]
)
def test_which_primitive_reads_memory(ranks, primitive, links):
    assert ranks(chosen, primitive) == [links] * 2


KILLED = """
import os, sys, time, torch
import torch.distributed as dist
from torch import nn
rank = int(os.environ["RANK"])
print("process", os.getpid(), flush=True)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
options = {"stage": 3, "engine": "eager", "persistence_threshold": 8, "calibrate": False}
compiled = torch.compile(model, backend="zero", options=options)
compiled(torch.ones(2, 64)).sum().backward()
from zcompile import comm
assert comm.find(model[0].weight.spec.group).link is not None
if rank in DIE:
    os.kill(os.getpid(), 9)
begin = time.monotonic()
try:
    compiled(torch.ones(2, 64)).sum().backward()
finally:
    print("waited", time.monotonic() - begin, flush=True)
    os._exit(1)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("die", [[1], [0, 1, 2]])
def test_killed_ranks_end_the_wait_and_leave_nothing(tmp_path, die):
    path = tmp_path / "train.py"
    path.write_text(KILLED.replace("DIE", str(die)))
    for rank, end in enumerate(script(path, 3, timeout=300)):
        if rank in die:
            assert end.code == -9, end.output
        else:
            assert float(end.output.split("waited ")[1].split()[0]) < 10, end.output
        pid = end.output.split("process ")[1].split()[0]
        assert f"zcompile-{pid}-" not in Path("/proc/net/unix").read_text()
