"""The paper's figures as tables: variability of one repeated job, limits, and which stage is the bottleneck."""

import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import quantiles

from benchmarks.paper import published
from benchmarks.paper.repro import CONTROL, MEGATRON, PAPER, average, calibrate, run
from benchmarks.paper.table import render, times
from benchmarks.paper.workloads import Workload
from rrfp.action import Action
from rrfp.simulate.costs import Costs

LIMITS = (4, 8, 16, 32, 48)
FIGURE6 = {"language": Workload("GPT3-Large", 8, 64), "multimodal": Workload("Qwen3-4B+ViT-Big", 8, 192)}


def figure5(seeds: int) -> None:
    """Buffer limits: Qwen3-4B+ViT-Big, PP 8, batch 192, BF."""
    row = next(row for row in published.TABLE1 if row.workload == FIGURE6["multimodal"])
    last_stage = calibrate(row.workload, PAPER["RRFP"], published.FIGURE5[32])
    rows = []
    for limit in LIMITS:
        cells = [average(row.workload, mode, last_stage, seeds=seeds).seconds
                 for mode in (f"ready:bf:{limit}:free:lanes=192", f"ready:bf:{limit}", f"ready:fill-r:{limit}")]
        rows.append([limit, f"{published.FIGURE5[limit]:.2f}", *(f"{cell:.2f}" for cell in cells)])
    print(f"Seconds per iteration by limit, simulated, mean of {seeds} draws, calibrated on the paper's limit 32 (bf, any order).\n")
    print(render(["limit = peak", "paper (read off)", "bf, any order", "bf, one lane", "fill-r (split), one lane"], rows))
    beside = {"Megatron's 1F1B": MEGATRON, "strict 1f1b": CONTROL, "strict eager": "strict:1f1b:eager",
              "ready fill-alt eager": "ready:fill-alt:eager", "ready fill-alt 2p": "ready:fill-alt:2p"}
    got = {label: average(row.workload, mode, last_stage, seeds=seeds) for label, mode in beside.items()}
    print(f"\nBeside it (paper's 1F1B: {row.times[0]:.2f} s): "
          + ", ".join(f"{label} {one.seconds:.2f} s (peak {one.peak})" for label, one in got.items()) + ".")


def figure6(iterations: int) -> None:
    """How often the last stage is the forward bottleneck, and the theorem's bound, over 8 stages."""
    shares, ratios, bounds = [], [], []
    for label, workload in FIGURE6.items():
        slowest, over = [0] * workload.stages, defaultdict(list)
        for seed in range(iterations):
            durations = workload.costs(1.0, seed).durations
            for m in range(workload.microbatches):
                forwards = [durations["F", s, m] for s in range(workload.stages)]
                slowest[forwards.index(max(forwards))] += 1
                for s, value in enumerate(forwards[:-1]):
                    over[s].append(value / forwards[-1])
        total = sum(slowest)
        last, p95 = published.FIGURE6[label]
        shares.append([label, f"{100 * last:.1f}%", *(f"{100 * count / total:.1f}%" for count in slowest)])
        ratios.append([label, times(p95), *(times(quantiles(over[s], n=20)[18]) for s in range(workload.stages - 1))])
        held = [_theorem(workload.costs(1.0, seed)) for seed in range(min(iterations, 10))]
        bounds.append([label, f"{sum(real <= bound * (1 + 1e-9) for real, bound, _ in held)} of {len(held)}",
                       times(sum(real / bound for real, bound, _ in held) / len(held)),
                       times(sum(bound / ideal for _, bound, ideal in held) / len(held)),
                       times(sum(real / ideal for real, _, ideal in held) / len(held))])
    stages = range(8)
    print(f"How often each stage is a microbatch's slowest forward, {iterations} iterations.\n")
    print(render(["", "paper: last", *(f"stage {s}" for s in stages)], shares))
    print("\nF of a stage / F of the last, 95th percentile over microbatches (paper: the largest).\n")
    print(render(["", "paper", *(f"stage {s}" for s in stages[:-1])], ratios))
    print("\nThe theorem: BF without limit or messages takes at most F + B + what other stages' slower actions add (a bound on T/ideal).\n")
    print(render(["", "held", "T / bound", "bound / ideal", "T / ideal"], bounds))


def _theorem(costs: Costs) -> tuple[float, float, float]:
    """(BF's time without messages and without a limit, the theorem's bound, the last stage's own fill, work and drain).

    C <= F + B + sum over j >= 1 of (Fmax_j - Flast_j) + sum over j < M - 1 of (Bmax_j - Blast_j). F is read as the first microbatch's
    way up and the last stage's other forwards, B as the last stage's backwards and the last microbatch's way down.
    """
    stages, microbatches, d = range(costs.stages), range(costs.microbatches), costs.durations
    calm = Costs(costs.stages, 1, costs.microbatches, d, dict.fromkeys(costs.delays, 0.0))
    real = run(calm, f"ready:bf:{costs.microbatches}").makespan
    last = costs.stages - 1
    ideal = (sum(d["F", s, 0] for s in stages) + sum(d["F", last, m] for m in microbatches[1:])
             + sum(d["B", last, m] for m in microbatches[:-1]) + sum(d["B", s, microbatches[-1]] for s in stages))
    extra = (sum(max(d["F", s, m] for s in stages) - d["F", last, m] for m in microbatches[1:])
             + sum(max(d["B", s, m] for s in stages) - d["B", last, m] for m in microbatches[:-1]))
    return real, ideal + extra, ideal


def figure2(repeats: int, *, stages: int = 8, microbatches: int = 16, forward: float = 0.005) -> None:
    """One job, repeated on real processes: how much the same action and the same message vary from repeat to repeat."""
    from rrfp.compare.group import Group, Job, Stage
    from rrfp.compare.work import Multiply, Sleep
    from rrfp.mode import parse_mode

    rows = []
    for label, work, ranks in (("sleeping stages", Sleep(), stages), ("computing stages", Multiply.calibrated(), 2)):
        with tempfile.TemporaryDirectory() as out:
            job = Job(parse_mode(CONTROL), microbatches, {"F": forward, "B": 2 * forward}, trace=Path(out))
            with Group(ranks, stage=partial(Stage, work=work)) as group:
                for repeat in range(repeats + 1):  # the first warms up
                    group.run(job)
                    if repeat % 50 == 0:
                        print(f"{label}: {repeat} of {repeats}", file=sys.stderr, flush=True)
            compute, messages = variability(Path(out))
        for what, (worst, middle) in (("compute", compute), ("communication", messages)):
            theirs = published.FIGURE2[what]
            rows.append([f"{label}, {ranks} processes", what, *map(times, theirs), *map(times, worst), times(middle)])
    print(f"One job {repeats} times (strict 1f1b, {microbatches} microbatches, F {1e3 * forward:g} ms, real processes, engine and transport):")
    print("spread of one action or message over repeats, the worst of all and the median of all.\n")
    print(render(["", "", "paper: worst (p95-p5)/p50", "(p75-p25)/p50", "ours: worst (p95-p5)/p50", "(p75-p25)/p50", "median (p95-p5)/p50"],
                 rows))


def variability(directory: Path) -> tuple[tuple[tuple[float, float], float], tuple[tuple[float, float], float]]:
    """Of actions and of messages, over the calls of a trace but the first: the worst (p95 - p5) / p50 and (p75 - p25) / p50 of one
    action, and the median over actions of (p95 - p5) / p50. A message lasts from the end of its action to its arrival."""
    from rrfp.trace.files import read

    actions, messages = defaultdict(list), defaultdict(list)
    timeline = read(directory)
    numbers = sorted(set.intersection(*(set(trace.calls) for trace in timeline.ranks.values())))[1:]
    for number in numbers:
        ends = {}
        for trace in timeline.ranks.values():
            for ran in trace.calls[number].actions:
                actions[ran.action].append(ran.end - ran.start)
                ends[ran.action] = ran.end
        for trace in timeline.ranks.values():
            for message in trace.calls[number].arrivals:
                kind = "F" if message.edge.source < message.edge.destination else "B"
                sent = ends[Action(kind, message.edge.source, message.microbatch)]
                messages[message.edge, message.microbatch].append(message.time - sent)
    return _spread(actions.values()), _spread(messages.values())


def _spread(samples) -> tuple[tuple[float, float], float]:
    wide, narrow = [], []
    for values in samples:
        cuts = quantiles(values, n=20, method="inclusive")
        middle = max(cuts[9], 1e-9)
        wide.append((cuts[18] - cuts[0]) / middle)
        narrow.append((cuts[14] - cuts[4]) / middle)
    return (max(wide), max(narrow)), sorted(wide)[len(wide) // 2]
