"""Measured once, on every rank the same: on two ranks, on one, on paper, and with broken files."""

import json
import os
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from zcompile import buffers, cache, calibrate, comm
from zcompile.control import fingerprint
from zcompile.errors import ZeroError, ZeroWarning
from zcompile.options import Options
from zcompile.schedule.links import ALL_REDUCE, GATHER, REDUCE, MeasuredLink, RingLink, Sample
from zcompile.world import join

CPU = torch.device("cpu")


@contextmanager
def quick(folder):
    """A cache in `folder` and few small sizes; yields the list of measurements made."""
    before = os.environ.get("ZCOMPILE_CACHE")
    measure, sizes = calibrate._measure, calibrate.SIZES
    made = []

    def counted(*args):
        made.append(1)
        return measure(*args)

    os.environ["ZCOMPILE_CACHE"] = str(folder)
    calibrate._measure, calibrate.SIZES = counted, (16 * 2**10, 256 * 2**10)
    try:
        yield made
    finally:
        calibrate._measure, calibrate.SIZES = measure, sizes
        del os.environ["ZCOMPILE_CACHE"]
        if before is not None:
            os.environ["ZCOMPILE_CACHE"] = before


def twice(rank, world, folders):
    """(figures, measurements made so far) of two calls, and what they left behind."""
    group, sent = join(Options(), CPU).group, comm.traffic()
    with quick(folders[rank]) as made:
        results = []
        for _ in range(2):
            found = calibrate.calibrate(group, CPU)
            results.append((found, len(made)))
    left = (comm.traffic() - sent, len(comm._in_flight), len(buffers._idle))
    return results, left


def test_all_ranks_get_one_table_and_measure_once(ranks, tmp_path):
    answers = ranks(twice, [tmp_path, tmp_path])
    (first, left), (other, _) = answers
    assert first == other
    (found, after_one), (again, after_two) = first
    assert (after_one, after_two) == (1, 1) and again == found
    assert left == (comm.Traffic(), 0, 0)
    link = found.link
    assert {kind: set(by) for kind, by in link.tables.items()} == {
        GATHER: {"p2p", "all_gather_into_tensor"},
        REDUCE: {"p2p", "reduce_scatter_tensor"},
        ALL_REDUCE: {"all_reduce"},
    }
    for primitives in link.tables.values():
        for samples in primitives.values():
            assert [s.bytes for s in samples] == [16 * 2**10, 256 * 2**10]
            assert all(s.transfer > 0 for s in samples)
    assert 0 <= link.share <= 1
    # Plans are priced by what lowering does on gloo.
    assert {name for by in found.costs().link.tables.values() for name in by} == {
        "p2p",
        "all_reduce",
    }
    assert not found.native
    assert len(list(tmp_path.rglob("*"))) == 2  # a folder and a file, nothing half written


def test_three_ranks_and_sizes_that_do_not_divide(ranks, tmp_path):
    answers = ranks(twice, [tmp_path] * 3, world=3)
    assert answers[0] == answers[1] == answers[2]
    (found, _), _ = answers[0][0]
    assert found.link.world == 3
    assert all(s.bytes % 3 == 0 for s in found.link.tables[GATHER]["p2p"])


def test_rank_0_alone_looks_for_the_file(ranks, tmp_path):
    here, empty = tmp_path / "here", tmp_path / "empty"
    ((kept, _), _), _ = ranks(twice, [here, here])[0]
    # Rank 1 has none: it gets rank 0's. Then only rank 1 has one: both measure, and none waits.
    answers = ranks(twice, [here, empty])
    for results, _ in answers:
        assert results == [(kept, 0), (kept, 0)]
    assert not empty.exists()
    first, other = ranks(twice, [empty, here])
    assert first == other and [made for _, made in first[0]] == [1, 1]


def spoiled(rank, world, folder, spoil):
    group = join(Options(), CPU).group
    with quick(folder) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrate.calibrate(group, CPU)
        if rank == 0:
            (file,) = Path(folder).rglob("*.json")
            file.write_text(spoil(file.read_text()))
        found = [calibrate.calibrate(group, CPU) for _ in range(2)]
    told = [str(w.message) for w in caught if issubclass(w.category, ZeroWarning)]
    return found, len(made), told


def cut(text):
    return text[: len(text) // 2]


def of_others(text):
    raw = json.loads(text)
    raw["key"]["hosts"] = ["elsewhere"]
    return json.dumps(raw)


def without_times(text):
    raw = json.loads(text)
    raw["value"]["link"]["tables"]["all-gather"]["p2p"][0][2] = None
    return json.dumps(raw)


def without_speed(text):
    raw = json.loads(text)
    raw["value"]["device"]["bandwidth"] = 0
    return json.dumps(raw)


def no_object(text):
    return "[1]"


@pytest.mark.parametrize("spoil", [cut, of_others, without_times, without_speed, no_object])
def test_a_file_that_cannot_be_used_is_told_once_and_measured_again(ranks, tmp_path, spoil):
    (found, made, told), (other, also, silent) = ranks(spoiled, tmp_path, spoil)
    assert made == also == 2
    assert found == other and found[0] == found[1]
    assert len(told) == 1 and "cannot be used" in told[0] and "links" in told[0]
    assert silent == []


def unwritable(rank, world, file):
    group = join(Options(), CPU).group
    with quick(Path(file) / "cache"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calibrate.calibrate(group, CPU)
    return found, [str(w.message) for w in caught if issubclass(w.category, ZeroWarning)]


def test_a_cache_that_cannot_be_written_costs_a_warning(ranks, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (first, told), (other, silent) = ranks(unwritable, file)
    assert first == other and silent == []
    assert "cannot be written" in told[-1] and "set ZCOMPILE_CACHE" in told[-1]


def elsewhere(rank, world, folder):
    group = join(Options(), CPU).group
    with quick(folder), pytest.raises(ZeroError, match="measure the links between the ranks"):
        if rank == 0:
            calibrate.calibrate(group, CPU)
        else:
            group.control.agree(fingerprint(["something else"]), lambda: ["something else"])
    return True


def test_ranks_that_do_not_all_measure_are_told_so(ranks, tmp_path):
    assert ranks(elsewhere, tmp_path) == [True, True]


def without_control(rank, world, folder):
    group = join(Options(check=False), CPU).group
    assert group.control is None
    with quick(folder):
        return calibrate.calibrate(group, CPU)


def test_without_a_control_group_the_groups_own_serves(ranks, tmp_path):
    first, other = ranks(without_control, tmp_path)
    assert first == other and isinstance(first.link, MeasuredLink)


def test_one_rank_measures_its_device_only(tmp_path):
    group = comm.Group("alone", 0, 1)
    with quick(tmp_path) as made:
        found = calibrate.calibrate(group, CPU)
        assert calibrate.calibrate(group, CPU) == found and len(made) == 1
    assert found.link == MeasuredLink(1, {}, 0.0, found.link.source)
    on = found.device
    assert set(on.flops) == {"float32", "bfloat16"}
    # Between a slow machine and any there is: a figure in the wrong unit falls outside.
    assert 1e8 < on.flops["float32"] < 1e13 and 1e8 < on.bandwidth < 1e12
    assert 1e-8 < on.launch < 1e-2 and on.memory > 2**28
    assert [line.split(":")[0] for line in found.costs().lines] == ["device cpu", "link"]


def test_a_group_on_paper_has_published_figures(tmp_path):
    with quick(tmp_path) as made:
        found = calibrate.calibrate(comm.Group("paper", 0, 64), CPU)
    assert not made and not list(tmp_path.iterdir())
    assert isinstance(found.link, RingLink) and found.link.world == 64
    assert found.costs().link is found.link
    assert found.costs().lines[-1] == "link: published"


def test_the_slowest_rank_counts_and_no_size_takes_longer_than_a_larger_one():
    one = {GATHER: {"p2p": [Sample(1, 0.9, 2.0, 0.0), Sample(2, 0.5, 3.0, 0.1)]}}
    two = {GATHER: {"p2p": [Sample(1, 0.1, 1.0, 0.2), Sample(2, 0.4, 4.0, 0.3)]}}
    expected = {GATHER: {"p2p": (Sample(1, 0.5, 2.0, 0.2), Sample(2, 0.5, 4.0, 0.3))}}
    assert calibrate._slowest_tables([one, two]) == expected
    assert calibrate._slowest_tables([two, one]) == expected


# The files


def test_the_folder_is_the_nearest_that_is_named(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("ZCOMPILE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == Path("/home/someone/.cache/zcompile")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.folder() == Path("/caches/zcompile")
    monkeypatch.setenv("ZCOMPILE_CACHE", "~/mine")
    assert cache.folder() == Path("/home/someone/mine")


def test_keys_that_differ_have_files_that_differ(monkeypatch, tmp_path):
    monkeypatch.setenv("ZCOMPILE_CACHE", str(tmp_path))
    cache.store("steps", {"graph": "a", "world": 2}, [1, 2])
    assert cache.load("steps", {"world": 2, "graph": "a"}, list) == [1, 2]
    assert cache.load("steps", {"graph": "a", "world": 4}, list) is None
    assert cache.load("links", {"graph": "a", "world": 2}, list) is None


def test_jobs_that_write_at_once_leave_a_whole_file(monkeypatch, tmp_path):
    monkeypatch.setenv("ZCOMPILE_CACHE", str(tmp_path))
    key, stop = {"graph": "a"}, threading.Event()
    cache.store("steps", key, [0] * 50_000)

    def job(number):
        while not stop.is_set():
            cache.store("steps", key, [number] * 50_000)

    jobs = [threading.Thread(target=job, args=(number,)) for number in range(3)]
    for each in jobs:
        each.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(50):
                values = cache.load("steps", key, list)
                assert len(values) == 50_000 and len(set(values)) == 1
    finally:
        stop.set()
        for each in jobs:
            each.join()
    assert len(list(tmp_path.rglob("*.json"))) == 1 and len(list(tmp_path.rglob(".*"))) == 0
