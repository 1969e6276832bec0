"""Which communication lies under which computation, read from traces of real processes.

`python -m benchmarks.overlap --out DIR [--ranks 2] [--microbatches 6] [--unit 0.03]`, then `rrfp trace DIR/own/pipeline0 DIR/shared/pipeline0 ...`
draws them.

Two replicas with experts. Durations are emulated (the virtual clock's: a segment's forward 1, its backward 2, an all-to-all 0.5 units, a
bucket's all-reduce 3 units in the second part); engine, processes, agreement, streams and gloo's collectives are real. First DualPipeV:
the share of the all-to-alls' time that lies under computation of the sub-DAG that they are paired with, with pairs and in the same order
without. Then the three places where data parallelism's reductions can go beside all-to-alls.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import distributed as dist

import rrfp.program
from benchmarks.program_job import Experts, make, run
from rrfp.program.builders import dualpipev
from rrfp.program.clock import Span, nominal, overlap, paired
from rrfp.program.dag import ALL_REDUCE, ALL_TO_ALL, DAG, Node
from rrfp.program.directives import Place, Replicate, Shard, Split, apply
from rrfp.program.execute.compiled import Emulation
from rrfp.program.lower import lower
from rrfp.program.plan import Lowered
from rrfp.program.traces import spans
from rrfp.program.training import training_dag
from rrfp.trace.files import read

HIDDEN, REPLICAS = 8, 2
PLACEMENTS = {
    "own": {"reduce_stream": "dp"},
    "shared": {"reduce_stream": "ep"},
    "slotted": {"reduce_stream": "ep", "slotted": True, "bucket_size": 1e-4},
}
"""Data parallelism's reductions: on their own stream, on the experts' stream, or there in parts, one between two all-to-alls."""


@dataclass(frozen=True)
class Durations:
    """Seconds of a node: the virtual clock's. reductions: of a bucket (or a part of one), in units, where given."""

    unit: float
    reductions: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, node: Node) -> float:
        return self.unit * self.reductions.get(node.what, nominal(node))


@functools.cache
def model(layers: int):
    return make(layers, HIDDEN, Experts)


def job(layers: int, directives: list, pieces: int, mode: str, trace: str, seconds: Durations) -> int:
    """Two steps on one rank; the second is warm. Returns the most activations held."""
    batch = {"x": torch.randn(2 * pieces, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))}
    with rrfp.program.compile(model(layers), directives, mode=mode, optimizer=torch.optim.SGD, trace=trace, emulation=Emulation(seconds)) as program:
        for _ in range(2):
            program.step(batch)
        return program.peak.activations


def program_of(layers: int, directives: list) -> Lowered:
    return lower(apply(training_dag(model(layers).traced), directives))


def traced(start: Callable, layers: int, directives: list, pieces: int, mode: str, trace: Path, seconds: Durations) -> list[Mapping[str, Span]]:
    """Runs it and reads the second step's trace of each replica. start: start(job, *arguments) runs it on every rank."""
    start(job, layers, directives, pieces, mode, str(trace), seconds)
    return [spans(program_of(layers, directives), read(trace / f"pipeline{k}"), 1) for k in range(REPLICAS)]


# ---------------------------------------------------------------------- pairs
@dataclass(frozen=True)
class Shares:
    """Of one replica: shares of all-to-alls' time. pairs: of the paired ones, under the sub-DAG that they are paired with. all: of all,
    under any computation. seconds: of the step."""

    pairs: float
    all: float
    seconds: float


def pairs(start: Callable, ranks: int, microbatches: int, unit: float, out: Path) -> Mapping[str, list[Shares]]:
    """DualPipeV with pairs, by readiness, and without pairs: each replica's shares."""
    together = dualpipev(ranks, microbatches, replicas=REPLICAS, experts=True)
    apart = dualpipev(ranks, microbatches, replicas=REPLICAS, experts=True, overlap=False)
    under, found = paired(program_of(2 * ranks, together).dag), {}  # of the same nodes, in the order without pairs too
    for name, directives, mode in (("pairs", together, "strict"), ("pairs-ready", together, "ready"), ("apart", apart, "strict")):
        dag = program_of(2 * ranks, directives).dag
        replicas = traced(start, 2 * ranks, directives, microbatches, mode, out / name, Durations(unit))
        found[name] = [Shares(overlap(dag, each, under), overlap(dag, each), _makespan(each)) for each in replicas]
    return found


def _makespan(found: Mapping[str, Span]) -> float:
    return max(span.end for span in found.values()) - min(span.start for span in found.values())


# ---------------------------------------------------------------------- placements
@dataclass(frozen=True)
class Placed:
    """One placement, of one replica.

    streams: stream -> kinds of what ran there, in order of start. beside: seconds for which a reduction and an all-to-all ran at once.
    late: by how many seconds all-to-alls started after their tokens were there, in all. seconds: of the step.
    """

    streams: Mapping[str, list[str]]
    beside: float
    late: float
    seconds: float


def placements(start: Callable, layers: int, unit: float, out: Path) -> Mapping[str, Placed]:
    """Layers with experts on one pair of devices, two microbatches: reductions become ready while all-to-alls still come."""
    found = {}
    for name, options in PLACEMENTS.items():
        directives = [Split({}, "MB", 2), Place({}, (0, 1)), Shard({"EP": "*"}, (0, 1), stream="ep"), Replicate({"EP": "-"}, (0, 1), **options)]
        dag = program_of(layers, directives).dag
        seconds = Durations(unit, {title: 3.0 / bucket.parts for title, bucket in dag.buckets.items()})
        found[name] = _placed(dag, traced(start, layers, directives, 2, "strict", out / name, seconds)[0])
    return found


def _placed(dag: DAG, found: Mapping[str, Span]) -> Placed:
    streams: dict[str, list[str]] = {}
    reductions = [found[node.name] for node in dag.of(ALL_REDUCE)]
    beside = late = 0.0
    for name, span in found.items():
        node = dag.nodes[name]
        if node.kind in (ALL_REDUCE, ALL_TO_ALL):
            streams.setdefault(node.stream, []).append(node.kind)
        if node.kind == ALL_TO_ALL:
            beside += sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in reductions)
            late += span.start - max(found[before.name].end for before in dag.before(name))
    return Placed(streams, beside, late, _makespan(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where traces go")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--unit", type=float, default=0.03, help="seconds of a segment's forward")
    options = parser.parse_args()
    model(2 * options.ranks), model(4)  # before processes are forked
    shares = pairs(functools.partial(run, options.ranks * REPLICAS), options.ranks, options.microbatches, options.unit, options.out)
    print("| DualPipeV | pairs' all-to-alls under the paired sub-DAG | all all-to-alls under computation | s/step |\n" + "| --- " * 4 + "|")
    for name, replicas in shares.items():
        print(f"| {name} | {100 * min(each.pairs for each in replicas):.0f}% | {100 * min(each.all for each in replicas):.0f}% |"
              f" {max(each.seconds for each in replicas):.2f} |")
    found = placements(functools.partial(run, REPLICAS), 4, options.unit, options.out)
    print("\n| reductions | ms beside all-to-alls | ms by which all-to-alls are late | s/step |\n" + "| --- " * 4 + "|")
    for name, each in found.items():
        print(f"| {name} | {1e3 * each.beside:.0f} | {1e3 * each.late:.0f} | {each.seconds:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
