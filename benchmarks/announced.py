"""Does the default hint keep on real processes what simulation promises? python benchmarks/announced.py [--ranks 8] [--seeds 3]

`announced` at the limit `1f1b` should never be slower than the fixed list at the same memory, and faster where messages are late or
microbatches differ. Real engine, processes and transport; stages sleep their drawn durations and messages are late as drawn. Strict and
ready take turns, seed by seed; a ratio is strict seconds / ready seconds of one seed, and the table shows its median over seeds beside what
the simulator says for the same draws. Greedy `alt` stands beside it: what waiting for announced work is worth.
"""

import argparse
import os
import statistics

from rrfp.compare.group import Group, Job
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.simulate.clock import simulate
from rrfp.simulate.scenarios import SCENARIOS, draw

STRICT = Policy(hint="1f1b", mode="strict")
RULES = {"announced": Policy(), "alt": Policy(hint="alt")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 15 on (the draws that no parameter was tuned on)")
    parser.add_argument(
        "--scenarios",
        nargs="+",
        default=["uniform", "jitter-0.3", "lengths", "images-tokens", "mixed", "spikes", "paper-multimodal"],
        choices=list(SCENARIOS),
        metavar="NAME",
    )
    options = parser.parse_args()
    placement, unit = Placement.looped(options.ranks), options.unit_ms / 1e3
    print(
        f"{options.ranks} stages, {options.microbatches} microbatches, F {options.unit_ms:g} ms on average, seeds 15 to "
        f"{14 + options.seeds}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    heads = [f"{name} {what}" for name in RULES for what in ("real", "simulated")]
    print(
        "scenario".ljust(18),
        "strict s".rjust(9),
        *(head.rjust(20) for head in heads),
        "peak in flight (strict = ready)",
        flush=True,
    )
    with Group(options.ranks) as group:
        for scenario in options.scenarios:
            rows, seconds, peaks = {head: [] for head in heads}, [], []
            for seed in range(15, 15 + options.seeds):
                durations, delays = draw(scenario, options.ranks, options.microbatches, unit, seed)

                def real(policy, durations=durations, delays=delays):
                    return group.run(Job(policy, options.microbatches, durations, delays=delays))

                def simulated(policy, durations=durations, delays=delays):
                    return simulate(policy, placement, options.microbatches, durations, delays).makespan

                strict = real(STRICT)
                seconds.append(strict.seconds)
                for name, policy in RULES.items():
                    ready = real(policy)
                    assert all(ours <= theirs for ours, theirs in zip(ready.peaks, strict.peaks, strict=True)), (
                        "more memory than the control"
                    )
                    rows[f"{name} real"].append(strict.seconds / ready.seconds)
                    rows[f"{name} simulated"].append(simulated(STRICT) / simulated(policy))
                peaks = strict.peaks
            cells = [f"{statistics.median(rows[head]):.3f}" for head in heads]
            print(
                scenario.ljust(18),
                f"{statistics.median(seconds):9.3f}",
                *(cell.rjust(20) for cell in cells),
                " ".join(map(str, peaks)),
                flush=True,
            )
    print(f"load at the end {os.getloadavg()[0]:.1f}: with much other work on the machine these are not the engine's figures")


if __name__ == "__main__":
    main()
