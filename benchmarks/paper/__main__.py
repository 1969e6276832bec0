"""The RRFP paper's experiments, ours beside theirs (docs/paper.md).

Simulated at the paper's size: table1 table2 table3 table45 table7 table8 jitter limits figure5 figure6, and `fit` (what the assumptions
rest on). Real processes: figure2, emulated (rows of table 1 and 3 at up to 16 stages), appendix-e (trains a tiny GPT).
"""

import argparse
import sys
from pathlib import Path

from benchmarks.paper import figures, tables
from benchmarks.paper.emulated import emulated
from benchmarks.paper.training import appendix_e
from rrfp.values import at_least_one

SIMULATED = {**tables.EXPERIMENTS, "figure5": figures.figure5, "figure6": figures.figure6}
EXPERIMENTS = (*SIMULATED, "figure2", "emulated", "appendix-e")
COUNTS = {"jitter": 30, "fit": 1, "figure6": 100, "figure2": 300, "appendix-e": 500}
"""How many draws, iterations or repeats, as in the paper; 3 draws for the others."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS, metavar="EXPERIMENT")
    parser.add_argument("--count", type=at_least_one, help="draws to average over; for jitter, figure2, figure6 and appendix-e"
                        " iterations or repeats (default: as in the paper, else 3)")
    parser.add_argument("--stages", type=at_least_one, default=4, help="of appendix-e's training (default %(default)s)")
    parser.add_argument("--picture", type=Path, help="where appendix-e draws its loss curves")
    options = parser.parse_args(arguments)
    different = 0
    for name in options.experiments:
        count = options.count or COUNTS.get(name, 3)
        if name == "figure2":
            figures.figure2(count)
        elif name == "emulated":
            emulated(options.count)
        elif name == "appendix-e":
            different += appendix_e(iterations=count, stages=options.stages, picture=options.picture)
        else:
            SIMULATED[name](count)
        print(flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
