"""What deciding ahead costs and saves: python -m benchmarks.decide_ahead [--stages 8] [--microbatches 32] [--draws 10]

Simulated, in units of the mean action F. Per scenario, the makespan of a call whose ranks decide what comes next when they start
an action, over one in which they decide when it has ended and deciding costs nothing: what is lost by not looking at what
becomes ready meanwhile. Then the same ratio for calls that decide late, where every decision costs some share of an action: where
that is above the first, deciding ahead pays. Medians over draws.
"""

import argparse
import statistics

from rrfp.mode import parse_mode
from rrfp.placement import Placement
from rrfp.simulate.clock import simulate
from rrfp.simulate.scenarios import SCENARIOS, draw

POLICIES = ("ready:announced", "ready:announced:2p", "ready:bf:2p", "strict:1f1b")
COSTS = (0.005, 0.01, 0.02, 0.05, 0.1)


def ratios(policy: str, scenario: str, stages: int, microbatches: int, draws: int) -> list[float]:
    """Median ratios to deciding late at no cost: decided ahead, then late at each of `COSTS`."""
    found: list[list[float]] = []
    for seed in range(draws):
        durations, delays = draw(scenario, stages, microbatches, 1.0, seed)

        def makespan(**options) -> float:
            return simulate(parse_mode(policy), Placement.looped(stages), microbatches, durations, delays, **options).makespan

        least = makespan()
        found.append([makespan(decide_ahead=True) / least, *(makespan(decision=cost) / least for cost in COSTS)])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS)
    options = parser.parse_args()
    for policy in options.policies:
        print(f"\n{policy}\n| scenario | ahead | " + " | ".join(f"late at {cost:.1%}" for cost in COSTS) + " |")
        print("|" + " --- |" * (2 + len(COSTS)))
        rows = {name: ratios(policy, name, options.stages, options.microbatches, options.draws) for name in options.scenarios}
        rows["geometric mean"] = list(map(statistics.geometric_mean, zip(*rows.values(), strict=True)))
        for name, row in rows.items():
            print(f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in row) + " |", flush=True)


if __name__ == "__main__":
    main()
