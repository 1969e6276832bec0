"""What the engine costs: python benchmarks/engine_overhead.py [--repeats 5] [--ranks 8] [--microbatches 32]

Stages that sleep (20 ms a forward, 40 ms a backward) under Megatron's own 1F1B (its function, gloo, in the same processes), under
RRFP in fixed order (strict 1f1b), and under RRFP by readiness with every hint, at the limits 1f1b and eager. All contenders take
turns, so that a busy machine hurts them alike; the table shows medians. `ideal` is 3F(M+P-1). `simulated` is what the policy
itself does at these times with messages that take no time: only what lies above it is the engine's cost.
"""

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial

from rrfp.compare.baselines import make_baselines
from rrfp.compare.group import Contenders, Group, Job, Outcome
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.simulate.clock import simulate

HINTS = ("announced", "bf", "fb", "b-first", "f-first", "alt", "fill", "fill-alt", "1f1b")


# ---------------------------------------------------------------------- contenders and the table
@dataclass(frozen=True, eq=False)
class Contender:
    name: str
    job: Job
    simulated: float
    """Seconds that the policy itself takes."""


def contenders(options, ideal: float) -> list[Contender]:
    ranks, microbatches, forward = options.ranks, options.microbatches, options.forward_ms / 1e3
    seconds = {"F": forward, "B": 2 * forward}
    placement = Placement.looped(ranks)
    durations = {(kind, s, m): seconds[kind] for kind in seconds for s in range(ranks) for m in range(microbatches)}

    def one(label: str, policy: Policy) -> Contender:
        return Contender(f"{label} {policy.hint}, {policy.limit}", Job(policy, microbatches, seconds),
                         simulate(policy, placement, microbatches, durations).makespan)

    found = [] if options.no_megatron else [Contender("Megatron's 1F1B", Job("megatron-1f1b", microbatches, seconds), ideal)]
    found.append(one("strict", Policy(hint="1f1b", mode="strict")))
    return found + [one("ready", Policy(hint=hint, limit=limit)) for limit in ("1f1b", "eager") for hint in options.hints]


def table(outcomes: dict[Contender, list[Outcome]], ideal: float) -> list[str]:
    reference = next(statistics.median(o.seconds for o in outcomes[c]) for c in outcomes if c.name.startswith("strict"))
    lines = [" ".join([f"{'':24} {'median s':>8} {'quartiles':>15} {'x ideal':>8} {'simulated':>9} {'x simulated':>11} {'x strict':>8} ",
                       "time by cause, peak in flight per stage"])]
    for contender, runs in outcomes.items():
        seconds = [outcome.seconds for outcome in runs]
        middle = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        lines.append(f"{contender.name:24} {middle:8.3f} {low:7.3f} {high:7.3f} {middle / ideal:8.4f} "
                     f"{contender.simulated / ideal:9.4f} {middle / contender.simulated:11.4f} {middle / reference:8.4f}  "
                     f"{_shares(runs)} {' '.join(map(str, runs[-1].peaks))}")
    return lines


def _shares(runs: list[Outcome]) -> str:
    """Mean over ranks and runs, percent."""
    total: dict[str, int] = {}
    for parts in (parts for outcome in runs for parts in outcome.parts):
        for cause, nanoseconds in parts.items():
            total[cause] = total.get(cause, 0) + nanoseconds
    whole = sum(total.values())
    return " ".join(f"{cause} {100 * value / whole:.1f}" for cause, value in total.items() if value) + " |" if whole else ""


def verdicts(outcomes: dict[Contender, list[Outcome]], ideal: float) -> list[str]:
    def median(contender):
        return statistics.median(outcome.seconds for outcome in outcomes[contender])

    strict = next(c for c in outcomes if c.name.startswith("strict"))
    cost = median(strict) / strict.simulated
    lines = [f"strict: {median(strict) / ideal:.4f} x ideal (goal: at most 1.03)"]
    for contender in outcomes:
        if contender.name.startswith("ready"):
            # A hint whose own order is worse (or better) than 1F1B's is held to what simulation says of it.
            ratio = median(contender) / contender.simulated / cost
            if ratio > 1.01:
                lines.append(f"{contender.name}: {ratio:.4f} x what strict's cost and its own order explain (goal: at most 1.01)")
    return lines if len(lines) > 1 else [*lines, "ready: every hint within 1% of what strict's cost and its own order explain"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hints", nargs="*", default=HINTS)
    parser.add_argument("--no-megatron", action="store_true")
    options = parser.parse_args()
    ideal = 3 * options.forward_ms / 1e3 * (options.microbatches + options.ranks - 1)
    todo = contenders(options, ideal)
    outcomes: dict[Contender, list[Outcome]] = {contender: [] for contender in todo}
    minutes = (options.repeats + 0.3) * len(todo) * ideal * 1.05 / 60
    print(f"{options.ranks} stages, {options.microbatches} microbatches, F {options.forward_ms:g} ms, "
          f"B {2 * options.forward_ms:g} ms, ideal {ideal:.3f} s; {len(os.sched_getaffinity(0))} cores, "
          f"load {os.getloadavg()[0]:.1f}; about {minutes:.1f} minutes", flush=True)
    baselines = make_baselines(() if options.no_megatron else ("megatron-1f1b",))  # imported once, before the ranks are forked
    load = os.getloadavg()[0]
    with Group(options.ranks, stage=partial(Contenders, baselines=baselines)) as group:
        for contender in todo[:3]:
            group.run(contender.job)  # connections and buffers
        for repeat in range(options.repeats):
            for contender in todo if repeat % 2 == 0 else todo[::-1]:
                outcomes[contender].append(group.run(contender.job))
            load = max(load, os.getloadavg()[0])
            print(f"round {repeat + 1} of {options.repeats} done, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print("\n".join([*table(outcomes, ideal), *verdicts(outcomes, ideal)]))
    if load > len(os.sched_getaffinity(0)):
        print(f"the load reached {load:.1f}: the machine was busy with other work, and these are not the engine's figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
