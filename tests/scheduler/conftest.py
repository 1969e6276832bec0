"""Makes `torch_side` importable; the tests of `rrfp schedule` use it too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
