"""The helpers beside these tests, and those of tests/megatron, are modules of their own, not packages."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "megatron")]
