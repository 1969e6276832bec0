"""How long a simulated call takes: python benchmarks/simulate_speed.py [--ranks 256] [--microbatches 1024] [--modes MODE...]

Seconds of this process (its own, whatever else runs on the machine), microseconds per action, and the most memory that it held, each
mode in a process of its own.
"""

import argparse
import multiprocessing
import resource
import time

from rrfp.mode import parse_mode
from rrfp.simulate.costs import from_scenario

MODES = [f"{hint}:{limit}" for limit in ("1f1b", "2p") for hint in ("strict:1f1b", "ready:alt", "ready:fill-alt", "ready:announced")]


def measure(mode: str, ranks: int, microbatches: int, scenario: str) -> None:
    costs = from_scenario(scenario, stages=ranks, microbatches=microbatches, unit=0.02, seed=0)
    drawn = time.process_time()
    result = costs.simulate(parse_mode(mode))
    taken, actions = time.process_time() - drawn, len(result.spans)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{mode:24} {drawn:7.1f} {taken:9.1f} {taken / actions * 1e6:10.1f} {peak:9.2f} {result.makespan:13.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--scenario", default="mixed")
    parser.add_argument("--modes", nargs="+", default=MODES, metavar="MODE")
    options = parser.parse_args()
    print(f"{options.ranks} ranks, {options.microbatches} microbatches, scenario {options.scenario}")
    print(f"{'mode':24} {'draw s':>7} {'seconds':>9} {'us/action':>10} {'GiB':>9} {'simulated s':>13}", flush=True)
    for mode in options.modes:
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(mode, options.ranks, options.microbatches, options.scenario))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
