"""The helpers beside these tests (frozen_costs.py) are modules of their own, not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
