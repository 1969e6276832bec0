"""`python -m rrfp.simulate`: the same as `rrfp simulate`."""

import sys

from rrfp.cli import main

if __name__ == "__main__":
    sys.exit(main(["simulate", *sys.argv[1:]]))
