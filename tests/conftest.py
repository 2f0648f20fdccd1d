import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from harness import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Run a function on gloo ranks: see harness.Ranks."""
    every = Ranks()
    yield every
    every.close()
