"""Some of the paper's rows on real processes: Megatron's own 1F1B and our modes, stages that sleep, messages that are late.

Real engine, transport and schedules; what is emulated is what stages compute. At most 16 stages, so that two cores can hold them.
"""

import sys
from dataclasses import dataclass

from benchmarks.paper import published
from benchmarks.paper.repro import CONTROL, MEGATRON, PAPER, calibrate
from benchmarks.paper.table import render, times
from benchmarks.paper.workloads import Workload

MODES = (MEGATRON, CONTROL, "strict:1f1b:eager", "strict:zb-h1:{stages}", "ready:bf:32", "ready:bfw:32", "ready:bfw:32:free:lanes=8",
         "ready:fill-alt:2p", "ready:fill-r:2p-1")


@dataclass(frozen=True)
class Case:
    """A row of table 1 with its times, or table 3's workload at table 1's speed."""

    workload: Workload
    repeats: int


CASES = (Case(Workload("GPT3-Large", 8, 64), 3), Case(Workload("GPT3-Large", 16, 64), 3),
         Case(Workload("Qwen3-4B+ViT-Big", 16, 32), 3), Case(Workload("Qwen3-1.7B+ViT-H", 8, 192), 1))


def emulated(repeats: int | None = None, *, cases: tuple[Case, ...] = CASES, modes: tuple[str, ...] = MODES,
             last_stage: float | None = None) -> None:
    """Prints, per case and mode, measured and simulated seconds, and the paper's speed-ups beside them.

    Args:
        repeats: of every mode, each with new draws; default: the case's.
        last_stage: mean seconds of the last stage's forward; default: calibrated as in the simulated tables.
    """
    from rrfp.compare.measure import measure, parse_modes, simulated, splits
    from rrfp.compare.results import Settings, peaks, summarise
    from rrfp.compare.work import Sleep
    from rrfp.simulate.bounds import lower_bound

    for case in cases:
        workload, count = case.workload, repeats or case.repeats
        row = next((row for row in published.TABLE1 if (row.workload.model, row.workload.stages, row.workload.tensor)
                    == (workload.model, workload.stages, workload.tensor)), None)
        speed = last_stage or calibrate(row.workload, PAPER["RRFP+BFW"], row.times[3])
        costs = [workload.costs(speed, seed) for seed in range(count)]
        asked = parse_modes([mode.format(stages=workload.stages) for mode in modes], lanes=1)
        runs = measure(asked, costs, work=Sleep(), progress=lambda line: print(line, file=sys.stderr, flush=True))
        predicted = {name: [simulated(mode, one).makespan for one in costs] for name, mode in asked.items()}
        found = summarise(
            Settings(str(workload), workload.stages, workload.microbatches, speed, tuple(range(count))), runs,
            bounds=[(lower_bound(one, split=False).seconds, lower_bound(one, split=True).seconds) for one in costs],
            split={name: splits(mode) for name, mode in asked.items()}, predicted=predicted)
        print(f"{workload}, batch {workload.batch}: {workload.stages} processes, {count} repeats; stages sleep.")
        if row and row.workload == workload:
            print(f"The paper: 1F1B {row.times[0]:.2f} s; " + ", ".join(
                f"{label} {times(value)} x" for label, value in zip(("ZB", "RRFP", "RRFP+BFW"), row.speedups[1:], strict=True)))
        print()
        print(render(["mode", "seconds", "speed-up", "over its bound", "simulated s", "measured / simulated", "computing", "peak in flight"],
                     [[one.name, f"{one.median:.3f}", times(one.speedup), times(one.over_bound), f"{one.predicted:.3f}",
                       f"{100 * one.error:+.1f}%", f"{one.shares['computing'] / 10:.0f}%", peaks(one.peaks)] for one in found.rows]))
        late, done = (sum(getattr(one, what) for one in found.rows) for what in ("overruns", "actions"))
        print(f"\n{late} of {done} actions took noticeably longer than drawn.\n", flush=True)
