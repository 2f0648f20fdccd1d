"""Never a hang: ranks that differ, raise, die or leave. Each is a script with real processes."""

import re

import pytest
from launch import script

pytestmark = pytest.mark.ranks

HEAD = """
import os, sys, time, torch
from torch import nn
rank = int(os.environ["RANK"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
    def forward(self, x, flip=False):
        h = self.first(x)
        h = self.third(h) if flip else self.second(h)
        return h.square().mean()

def step(model, **kwargs):
    loss = model(torch.ones(2, 8), **kwargs)
    loss.backward()
    return loss

model = Net()
options = {"stage": 3, "engine": "eager", "persistence_threshold": 8, "calibrate": False}
compiled = torch.compile(model, backend="zero", options=options)
step(compiled); step(compiled)
"""


@pytest.fixture
def run(tmp_path):
    def go(body, world=2, timeout=300):
        path = tmp_path / "train.py"
        path.write_text(HEAD + body)
        return script(path, world, timeout=timeout)

    return go


def test_a_branch_taken_on_one_rank_is_an_error_on_every_rank_that_names_it(run):
    ends = run("step(compiled, flip=rank == 1)\n")
    for end in ends:
        assert end.code == 1
        assert "the ranks would run different collectives, so none was started" in end.output
        assert re.search(r"rank 0: all-gather \[.*'second\.weight'", end.output), end.output
        assert re.search(r"rank 1: all-gather \[.*'third\.weight'", end.output), end.output


def test_code_outside_of_a_graph_on_one_rank_is_an_error_on_every_rank(run):
    ends = run("model.second(torch.ones(8)) if rank == 1 else step(compiled)\n")
    for end in ends:
        assert end.code == 1
        assert "second.weight (8, 8) torch.float32, outside of a compiled graph" in end.output


def test_a_rank_that_raises_is_named_with_its_error_on_the_others(run):
    ends = run(
        "if rank == 1:\n    raise ValueError('the loader of rank one is empty')\nstep(compiled)\n"
    )
    assert "ValueError: the loader of rank one is empty" in ends[1].output
    assert ends[0].code == 1 and ends[0].seconds < 60
    assert "rank 1 failed: ValueError: the loader of rank one is empty" in ends[0].output


def test_a_rank_that_raises_but_lives_on_is_still_heard(run):
    """The others wait on its open connection, which never breaks by itself."""
    ends = run(
        "from zcompile import control\n"
        "if rank == 1:\n"
        "    try:\n"
        "        raise ValueError('caught late')\n"
        "    except ValueError as error:\n"
        "        sys.excepthook(type(error), error, None)\n"
        "    time.sleep(20)\n"
        "    sys.exit(3)\n"
        "begin = time.monotonic()\n"
        "try:\n"
        "    step(compiled)\n"
        "finally:\n"
        "    print('waited', time.monotonic() - begin)\n"
    )
    assert "rank 1 failed: ValueError: caught late" in ends[0].output
    assert float(ends[0].output.split("waited ")[1].split()[0]) < 10


def test_a_killed_rank_is_named(run):
    ends = run("if rank == 1:\n    os.kill(os.getpid(), 9)\nstep(compiled)\n")
    assert ends[0].code == 1 and ends[0].seconds < 60
    assert "rank 1 no longer answers: its process was killed" in ends[0].output


def test_a_rank_with_fewer_batches_is_named(run):
    ends = run("if rank == 0:\n    step(compiled)\n")
    assert ends[0].code == 1
    assert "rank 1 ended its process while rank 0 was still waiting for it" in ends[0].output


def test_slow_compilation_on_one_rank_does_not_trip_the_others_timeout(tmp_path):
    """The data group's timeout is 5 s; rank 1 takes 12 s longer to compile."""
    path = tmp_path / "train.py"
    slow = (
        "import torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "dist.init_process_group('gloo', timeout=timedelta(seconds=5))\n"
        "import zcompile.backend as b\n"
        "whole = b.compile_graph\n"
        "def late(*a, **k):\n"
        "    import os, time\n"
        "    time.sleep(12 if os.environ['RANK'] == '1' else 0)\n"
        "    return whole(*a, **k)\n"
        "b.compile_graph = late\n"
    )
    path.write_text(slow + HEAD + "print('loss', float(step(compiled)))\n")
    for end in script(path, 2, timeout=300):
        assert end.code == 0, end.output
        assert "loss" in end.output


def test_models_that_differ_between_ranks_are_refused_before_anything_moves(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, zcompile\nfrom torch import nn\n"
        "zcompile.shard(nn.Linear(8, 4 + int(os.environ['RANK'])), persistence_threshold=0)\n"
    )
    for end in script(path, 2, timeout=300):
        assert end.code == 1
        assert "rank 0: parameter weight (4, 8) torch.float32" in end.output
        assert "rank 1: parameter weight (5, 8) torch.float32" in end.output
