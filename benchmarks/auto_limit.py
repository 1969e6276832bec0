"""Does `auto` find the fastest limit that fits? python benchmarks/auto_limit.py [--ranks 4] [--microbatches 16] [--memory 2]

Emulated stages on the real engine, processes and transport. For each scenario one call runs at 1F1B's limits and is traced; from that alone,
as in training, limits are chosen within a memory of so many times 1F1B's on every rank. Then every fixed limit that fits runs on the same
draws, in turns with the choice and with 1F1B, and the table shows their medians: how much slower `auto` is than the best of them.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from rrfp.compare.group import Group, Job
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.limits import SHAPES, listed
from rrfp.simulate.measured import from_trace
from rrfp.simulate.memory import MARGIN, Room, choose, fitting
from rrfp.simulate.scenarios import SCENARIOS, draw

DEFAULT = ["uniform", "jitter-0.3", "lengths", "images-tokens", "mixed", "spikes", "paper-multimodal"]


def fixed(placement: Placement, microbatches: int, most: list[int]) -> dict[tuple[int, ...], str]:
    """Limits that fit on every rank, by what they are; shapes, numbers and slopes, each once."""
    top = most[0]
    names = [*SHAPES, *map(str, range(1, top + 1)), *(f"{first}-{last}" for first in range(1, top + 1) for last in range(1, first))]
    found = {}
    for name in names:
        limits = tuple(Policy(limit=name).limits(placement, microbatches))
        if all(limit <= bound for limit, bound in zip(limits, most, strict=True)) and sum(limits) >= sum(most) // 2:
            found.setdefault(limits, name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--memory", type=float, default=2.0, help="times 1F1B's, on every rank")
    parser.add_argument("--hint", default="announced")
    parser.add_argument("--unit-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--most", type=int, default=8, help="how many fixed limits to run, the best in simulation")
    parser.add_argument("--scenarios", nargs="+", default=DEFAULT, choices=list(SCENARIOS), metavar="NAME")
    options = parser.parse_args()
    placement, policy = Placement.looped(options.ranks), Policy(hint=options.hint)
    own = policy.limits(placement, options.microbatches)
    # The idle memory is what the extra activations take with their margin: this is about speed, not about what is measured.
    rooms = [Room(1.0, (options.memory - 1) * number * (1 + MARGIN)) for number in own]
    most = fitting(placement, options.microbatches, rooms)
    print(f"{options.ranks} stages, {options.microbatches} microbatches, F {options.unit_ms:g} ms on average, hint {options.hint}, seed {options.seed}; "
          f"1F1B holds {' '.join(map(str, own))}, {options.memory:g} times as much memory {' '.join(map(str, most))}; "
          f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{'scenario':18}{'1F1B s':>9}{'auto s':>9}{'best s':>9}  {'auto / best':>11}  {'auto':18}{'best fixed':18}", flush=True)
    with Group(options.ranks) as group:
        for scenario in options.scenarios:
            durations, delays = draw(scenario, options.ranks, options.microbatches, options.unit_ms / 1e3, options.seed)

            def run(limits, trace=None, durations=durations, delays=delays):
                job = Job(replace(policy, limit=listed(limits)), options.microbatches, durations, delays=delays, trace=trace)
                result = group.run(job)
                assert all(held <= limit for held, limit in zip(result.peaks, limits, strict=True)), "more memory than allowed"
                return result.seconds

            with tempfile.TemporaryDirectory() as folder:
                run(own, trace=Path(folder))
                costs = from_trace(Path(folder))
            chosen = choose(policy, costs, most, seconds=60).limits
            others = sorted(fixed(placement, options.microbatches, most).items(),
                            key=lambda item, costs=costs: costs.simulate(replace(policy, limit=item[1])).makespan)[: options.most]
            names = dict(others) | {tuple(own): "1f1b"}
            seconds = {limits: [] for limits in {chosen: None, tuple(own): None} | names}
            for _ in range(options.rounds):
                for limits, taken in seconds.items():
                    taken.append(run(limits))
            medians = {limits: median(taken) for limits, taken in seconds.items()}
            best = min(names, key=medians.__getitem__)
            print(f"{scenario:18}{medians[tuple(own)]:9.3f}{medians[chosen]:9.3f}{medians[best]:9.3f}  {medians[chosen] / medians[best]:11.3f}  "
                  f"{' '.join(map(str, chosen)):18}{names[best]:18}", flush=True)
    print(f"load at the end {os.getloadavg()[0]:.1f}: with much other work on the machine these are not the engine's figures")


if __name__ == "__main__":
    main()
