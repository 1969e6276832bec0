"""What traces of real processes show: which communication lies under which computation.

Stage times and collectives are emulated (slept): on a CPU their own would say nothing. Everything else is real.
"""

from dataclasses import dataclass

import pytest

from rrfp.program.builders import BUILDERS
from rrfp.program.clock import nominal, overlap, paired
from rrfp.program.clock import run as simulate
from rrfp.program.dag import ALL_REDUCE, ALL_TO_ALL, COMPUTE, Node
from rrfp.program.directives import Place, Replicate, Shard, Split, apply
from rrfp.program.execute.compiled import Emulation
from rrfp.program.lower import lower
from rrfp.program.traces import spans
from rrfp.program.training import training_dag
from rrfp.trace.files import read
from tests.program.execute import jobs

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Nominal:
    """The virtual clock's durations, in seconds. reduction: of a whole bucket, in units."""

    unit: float
    reduction: float = 0.5
    parts: int = 1

    def __call__(self, node: Node) -> float:
        if node.kind == ALL_REDUCE:
            return self.unit * self.reduction / self.parts
        return self.unit * nominal(node)


def traced(group, which, directives, tmp_path, seconds, *, mode="strict", replicas=2, pieces):
    """(program, its nodes' spans in the second step, by replica)."""
    group.run("train", which=which, directives=directives, replicas=replicas, rows=2 * pieces, optimizer="sgd", modes=[mode] * 2,
              trace=str(tmp_path), emulation=Emulation(seconds))
    program = lower(apply(training_dag(jobs.subject(which).captured.traced), directives))
    return program, [spans(program, read(tmp_path / f"pipeline{k}"), 1) for k in range(replicas)]


def test_a_pairs_exchanges_lie_under_the_paired_computation(groups, tmp_path, full):
    """DualPipeV's pairs hide at least 80% of their all-to-alls' time under the other sub-DAG; the same order without pairs under 10%."""
    microbatches, which, seconds = 10 if full else 6, ("chain", 4, 8, {"experts": True}), Nominal(0.01)
    shares, took = {}, {}
    for name, mode, options in (("pairs", "strict", {}), ("pairs, ready", "ready", {}), ("apart", "strict", {"overlap": False})):
        directives = BUILDERS["dualpipev"](2, microbatches, replicas=2, experts=True, **options)
        program, found = traced(groups(4), which, directives, tmp_path / name, seconds, mode=mode, pieces=2 * microbatches)
        pairs = pairs if options else paired(program.dag)  # the same nodes, in the order without pairs
        shares[name] = [round(overlap(program.dag, each, pairs), 3) for each in found]
        took[name] = round(max(span.end for span in found[0].values()) - min(span.start for span in found[0].values()), 3)
        for node in program.dag.of(COMPUTE, ALL_TO_ALL):
            assert all(node.name in each for each in found), f"{node.name} is not in the trace"
    print(shares, took)
    assert len(pairs) > 0.4 * len(program.dag.of(ALL_TO_ALL))
    assert min(shares["pairs"]) >= 0.8 and min(shares["pairs, ready"]) >= 0.8 and max(shares["apart"]) < 0.1, shares
    assert took["pairs"] < took["apart"]
