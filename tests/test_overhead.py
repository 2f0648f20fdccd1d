"""What the backend does on the host in a step, by counting: Python calls into zcompile."""

import sys
from collections import Counter
from pathlib import Path

import torch
from parity import options
from torch import nn
from torch._dynamo.utils import counters

import zcompile

HOME = str(Path(zcompile.__file__).parent)
LAYERS = 4


def calls_per_step(rank, world, engine):
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opts = options(3, engine=engine, bucket_bytes=1)
    compiled = torch.compile(model, backend="zero", options=opts)
    x = torch.ones(2, 16, requires_grad=True)
    steps = []
    for _ in range(5):
        seen = Counter()

        def count(frame, event, argument, seen=seen):
            if event == "call" and frame.f_code.co_filename.startswith(HOME):
                seen[Path(frame.f_code.co_filename).name] += 1

        graphs = counters["stats"]["unique_graphs"]
        sys.setprofile(count)
        compiled(x).sum().backward()
        sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((dict(seen), counters["stats"]["unique_graphs"] - graphs))
    return steps


def _fixed(seen):
    """Without what depends on which rank comes first."""
    return {name: calls for name, calls in seen.items() if name != "shared.py"}


def test_a_step_does_no_graph_work_and_little_python(ranks):
    for steps in ranks(calls_per_step, "eager"):
        assert steps[0][1] == 1, "one compilation, on the first call"
        for seen, compiled in steps[1:]:
            assert compiled == 0
            assert _fixed(seen) == _fixed(steps[1][0]), "the same work in every step"
        seen = steps[-1][0]
        # Each layer is gathered twice and reduced once; each of those is a start and a wait.
        collectives = 3 * LAYERS
        assert set(seen) <= {
            "backend.py", "control.py", "dialect.py", "comm.py", "layout.py", "buffers.py",
            "collectives.py", "copies.py", "parameter.py", "shared.py", "first_call.py",
            "_torch.py",
        }  # fmt: skip
        # Finding that this function was called before.
        assert seen["first_call.py"] <= 12 and seen["_torch.py"] <= 12
        assert seen["backend.py"] <= 5 and seen["control.py"] <= 6, "a few a graph"
        # Beside them two graphs publish their parameters and wait for their readers.
        assert seen["dialect.py"] <= 3 * collectives + 4
        assert seen["comm.py"] <= 20 * collectives
        # Announcing, reading and acknowledging, with one peer.
        assert seen["shared.py"] <= 50 * collectives
        # Wrapping gradients as DTensors; not a gather, which would be a graph break.
        assert seen.get("parameter.py", 0) <= 4 * LAYERS
