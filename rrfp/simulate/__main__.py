"""`python -m rrfp.simulate`: the same as `rrfp simulate`."""

import sys

from rrfp.simulate.command import main

if __name__ == "__main__":
    sys.exit(main())
