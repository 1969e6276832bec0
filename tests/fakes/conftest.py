"""Fakes of GPUs and NCCL, and what runs on them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers lie beside the tests

from fake_cuda import Machine  # noqa: E402


@pytest.fixture
def machine():
    """machine(**options): started; stopped after the test."""
    made = []

    def make(**options) -> Machine:
        made.append(Machine(**options).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()
