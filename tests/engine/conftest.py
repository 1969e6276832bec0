"""`virtual`: engines of a whole pipeline under a virtual clock (`cluster.py`, which other folders use too)."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("cluster")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def virtual():
    """The classes of `cluster.py`."""
    from cluster import Call, Cluster, VirtualExecutor

    return SimpleNamespace(Cluster=Cluster, Call=Call, Executor=VirtualExecutor)
