"""What the tests of reports share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulated import record


@pytest.fixture
def timeline(tmp_path):
    """`timeline(costs, mode, ...)` records a simulated call and gives its Timeline; each into a folder of its own."""
    count = 0

    def make(costs, *arguments, **options):
        nonlocal count
        count += 1
        return record(tmp_path / f"trace{count}", costs, *arguments, **options)

    return make
