"""Simulated iterations of the paper's workloads: its four systems, our controls, our best, and the ladder between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from benchmarks.paper.workloads import AGREEMENT, ASSUMED, Variation, Workload
from rrfp.mode import parse_mode
from rrfp.simulate.clock import Result
from rrfp.simulate.costs import Costs
from rrfp.simulate.rendezvous import simulate_megatron_1f1b

MEGATRON = "megatron-1f1b"
PAPER = {"1F1B": MEGATRON, "ZB": "strict:zb-h1:{stages}", "RRFP": "ready:bf:32:free:lanes={microbatches}",
         "RRFP+BFW": "ready:bfw:32:free:lanes={microbatches}"}
"""The paper's systems in our terms. Its ZeroBubble communicates as its 1F1B does, ours does not: only 1F1B's rendezvous is modelled.
Its RRFP takes messages in any order, so lanes never hold one back, and it keeps at most 32 in flight on every stage."""
CONTROL = "strict:1f1b:1f1b"
LADDER = [
    ("transport", CONTROL),
    ("memory", "strict:1f1b:eager"),
    ("readiness", "ready:bf:eager"),
    ("flat 32", "ready:bf:32"),
    ("split", "ready:bfw:32"),
    ("lanes, free order", PAPER["RRFP+BFW"]),
]
"""From Megatron's 1F1B to the paper's fastest, one cause at a time. A fixed order with 32 in flight on every stage would be absurd: the
last stage would run 32 forwards before its first backward. So fixed order stops at eager 1F1B, and readiness is first measured there."""


def mode_for(mode: str, workload: Workload) -> str:
    """A mode with the workload's sizes in the place of {stages} and {microbatches}."""
    return mode.format(stages=workload.stages, microbatches=workload.microbatches)


def run(costs: Costs, mode: str, *, agreement: float = 0.0) -> Result:
    """One simulated iteration. agreement: seconds that every action chosen by readiness costs on top."""
    if mode == MEGATRON:
        return simulate_megatron_1f1b(costs)
    policy = parse_mode(mode)
    if agreement and policy.mode == "ready":
        durations = {key: seconds + agreement for key, seconds in costs.durations.items()}
        costs = Costs(costs.stages, costs.chunks, costs.microbatches, durations, costs.delays)
    return costs.simulate(policy)


@dataclass(frozen=True)
class Average:
    """Over seeds. seconds: mean; peak: the most in flight on any stage in any of them; all: every seed's seconds."""

    seconds: float
    peak: int
    all: tuple[float, ...]


@cache
def average(workload: Workload, mode: str, last_stage: float, *, seeds: int, variation: Variation = ASSUMED) -> Average:
    results = [run(workload.costs(last_stage, seed, variation=variation), mode_for(mode, workload),
                   agreement=AGREEMENT[workload.tensor]) for seed in range(seeds)]
    return Average(fmean(r.makespan for r in results), max(max(r.peak_in_flight) for r in results),
                   tuple(r.makespan for r in results))


@cache
def calibrate(workload: Workload, mode: str, seconds: float, *, variation: Variation = ASSUMED) -> float:
    """Mean seconds of the last stage's forward with which `mode` takes `seconds` per iteration.

    The paper says nothing of kernel speed or sequence length; this takes one of its numbers for them, so that the others of the row
    are predictions.
    """
    last_stage = seconds / (3 * workload.microbatches)
    for _ in range(5):  # nearly linear, the messages' share apart
        ratio = seconds / average(workload, mode, last_stage, seeds=1, variation=variation).seconds
        last_stage *= ratio
        if abs(ratio - 1) < 0.003:
            break
    return last_stage


def blocking_cost(workload: Workload, last_stage: float, seconds: float, *, variation: Variation = ASSUMED) -> float:
    """Seconds per message on the compute path of both sides with which modelled 1F1B takes `seconds`; 0 if it takes that long anyway."""
    costs = workload.costs(last_stage, 0, variation=variation)

    def excess(cost: float) -> float:
        return simulate_megatron_1f1b(costs, message_cost=cost).makespan - seconds

    if excess(0.0) >= 0:
        return 0.0
    low, high = 0.0, seconds / workload.microbatches
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return high


def ladder(workload: Workload, last_stage: float, *, seeds: int, variation: Variation = ASSUMED,
           steps: Sequence[tuple[str, str]] = LADDER) -> list[tuple[str, str, float, int]]:
    """(cause, mode, factor over the step before, peak in flight), beginning from Megatron's 1F1B. The product is the total."""
    before = average(workload, MEGATRON, last_stage, seeds=seeds, variation=variation)
    rows = []
    for cause, mode in steps:
        now = average(workload, mode, last_stage, seeds=seeds, variation=variation)
        rows.append((cause, mode_for(mode, workload), before.seconds / now.seconds, now.peak))
        before = now
    return rows
