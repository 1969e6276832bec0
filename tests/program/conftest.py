"""`virtual`: engines under a virtual clock, from the engine's own tests."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("cluster")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))


@pytest.fixture(scope="session")
def virtual():
    """The classes of `tests/engine/cluster.py`."""
    from cluster import Call, Cluster

    return SimpleNamespace(Cluster=Cluster, Call=Call)
