"""`python -m rrfp ...`: see `rrfp.cli`."""

import sys

from rrfp.cli import main

sys.exit(main())
