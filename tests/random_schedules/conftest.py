"""These tests drive the virtual cluster of tests/engine; their own helpers are modules beside them."""

import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("cluster", "runs")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "engine")]
