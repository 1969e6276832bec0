"""An engine-only job of many ranks on one machine: python benchmarks/many_ranks.py [--ranks 64] [--iterations 10]

Starts the processes, connects them, runs the iterations, says goodbye, and prints how long each took, beside the ideal iteration
and what the machine had to do it with. Exit status 1 if a thread or descriptor was left behind.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from statistics import median

from rrfp.compare.group import Group, Job
from rrfp.policy import Policy


@dataclass(frozen=True)
class Times:
    """Seconds. left_behind: what ranks still held after closing; empty if all is well."""

    start: float
    iterations: list[float]
    end: float
    left_behind: list[str]


def measure(ranks: int, iterations: int, job: Job) -> Times:
    """Raises RuntimeError naming the rank if one fails or is not done in time."""
    begin = time.monotonic()
    group = Group(ranks)
    with group:
        start = time.monotonic() - begin
        seconds = [group.run(job).seconds for _ in range(iterations)]
        begin = time.monotonic()
    return Times(start, seconds, time.monotonic() - begin, group.left_behind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, default=20.0, help="a forward sleeps so long, a backward twice that")
    parser.add_argument("--hint", default="announced")
    options = parser.parse_args()
    forward = options.forward_ms / 1e3
    job = Job(Policy(hint=options.hint), options.microbatches, {"F": forward, "B": 2 * forward})
    times = measure(options.ranks, options.iterations, job)
    ideal = 3 * forward * (options.microbatches + options.ranks - 1)
    print(f"{options.ranks} ranks, {options.iterations} iterations of {options.microbatches} microbatches, "
          f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"start   {times.start:8.2f} s")
    print(f"run     {sum(times.iterations):8.2f} s, an iteration {median(times.iterations):.3f} s (ideal {ideal:.3f} s, "
          f"x {median(times.iterations) / ideal:.3f})")
    print(f"end     {times.end:8.2f} s")
    print(f"left    {'; '.join(times.left_behind) or 'nothing'}")
    return 1 if times.left_behind else 0


if __name__ == "__main__":
    sys.exit(main())
