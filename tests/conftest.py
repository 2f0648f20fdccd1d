import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch.distributed as dist
from harness import Ranks


@pytest.hookimpl(tryfirst=True)  # before -m looks
def pytest_collection_modifyitems(items):
    for item in items:
        if "ranks" in item.fixturenames:
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def ranks():
    """Run a function on gloo ranks: see harness.Ranks."""
    every = Ranks()
    yield every
    every.close()


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """Every test starts in a process that belongs to no world."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
