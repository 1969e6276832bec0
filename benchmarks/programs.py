"""DualPipeV, interleaved 1F1B and 1F1B side by side, with experts, in one run of real processes.

`python -m benchmarks.programs [--ranks 4] [--microbatches 8] [--unit 0.02] [--jitter 0 0.3] [--steps 2]`

Equal work: each rank holds two layers, as one stage (1F1B) or as two. Durations are emulated, the virtual clock's (a segment's forward 1,
its backward 2, an all-to-all 0.5 units), and with jitter each is drawn, log-normal, by device, step and node, equal for all strategies.
Everything else is real: engine, transport, agreement of the two replicas, gloo's all-to-alls and all-reduces on their streams. After one
step to warm up, strategies take turns step by step. A time is the median over steps of the slowest rank's; a ratio the median of the
steps' ratios. Beside it stands what the virtual clock says without jitter.
"""

import argparse
import random
import sys
import time
from math import exp
from statistics import median

import torch
from torch import distributed as dist

import rrfp.program
from benchmarks.program_job import Experts, in_stages, make, run
from rrfp.program.builders import BUILDERS
from rrfp.program.clock import nominal, overlap
from rrfp.program.clock import run as simulate
from rrfp.program.dag import Node
from rrfp.program.execute.compiled import Emulation

NAMES = ("1f1b", "interleaved", "dualpipev")
MODES = ("strict", "ready")
REPLICAS, HIDDEN = 2, 8
BASE = ("1f1b", "strict")


class Durations:
    """Seconds of a node on this device, in the step that is set."""

    def __init__(self, unit: float, jitter: float):
        self._unit, self._jitter = unit, jitter
        self.step = 0

    def __call__(self, node: Node) -> float:
        if not self._jitter:
            return self._unit * nominal(node)
        rng = random.Random(f"{self.step} {dist.get_rank()} {node.name}")
        return self._unit * nominal(node) * exp(rng.gauss(-self._jitter**2 / 2, self._jitter))


def directives(name: str, ranks: int, microbatches: int):
    return BUILDERS[name](ranks, microbatches, replicas=REPLICAS, experts=True)


def stages(name: str, ranks: int) -> int:
    return ranks if name == "1f1b" else 2 * ranks


def job(captured, ranks: int, microbatches: int, unit: float, jitter: float, steps: int):
    """On one rank: seconds by (strategy, mode) and step, peaks, and what the clock says of each strategy."""
    durations, opened, seconds, peaks = Durations(unit, jitter), {}, {}, {}
    try:
        for name in NAMES:
            for mode in MODES:
                opened[name, mode] = rrfp.program.compile(in_stages(captured, stages(name, ranks)), directives(name, ranks, microbatches), mode=mode,
                                                          optimizer=torch.optim.SGD, emulation=Emulation(durations))
        for step in range(-1, steps):
            durations.step = step
            batch = {"x": torch.randn(2 * microbatches, HIDDEN, generator=torch.Generator().manual_seed(step + 1))}
            for key, program in opened.items():
                dist.barrier()
                start = time.monotonic()
                program.step(batch)
                if step >= 0:
                    seconds.setdefault(key, []).append(time.monotonic() - start)
        peaks = {key: program.peak.activations for key, program in opened.items()}
        clock = {}
        for name in NAMES:
            dag = opened[name, "strict"].program.dag
            spans = simulate(dag)
            clock[name] = spans.makespan * unit, overlap(dag, spans.spans)
        return seconds, peaks, clock
    finally:
        for program in opened.values():
            program.close()


def table(found: list, jitter: float) -> list[str]:
    """Markdown: a row per strategy and mode."""
    clock = found[0][2]
    slowest = {key: [max(times) for times in zip(*(seconds[key] for seconds, _, _ in found), strict=True)] for key in found[0][0]}
    lines = [f"| jitter {jitter:g} | mode | s/step | times 1F1B strict | in the clock | most segments in flight |", "| --- " * 6 + "|"]
    for (name, mode), times in slowest.items():
        ratio = median(base / own for base, own in zip(slowest[BASE], times, strict=True))
        simulated = f"{clock[BASE[0]][0] / clock[name][0]:.2f}" if mode == "strict" and not jitter else "-"
        peak = max(peaks[name, mode] for _, peaks, _ in found)
        lines.append(f"| {name} | {mode} | {median(times):.2f} | {ratio:.2f} | {simulated} | {peak} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a segment's forward")
    parser.add_argument("--jitter", type=float, nargs="+", default=[0.0, 0.3])
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    captured = make(2 * options.ranks, HIDDEN, Experts)
    for jitter in options.jitter:
        found = run(options.ranks * REPLICAS, job, captured, options.ranks, options.microbatches, options.unit, jitter, options.steps)
        print("\n".join([*table(found, jitter), ""]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
