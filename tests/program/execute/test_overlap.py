"""What traces of real processes show: which communication lies under which computation.

Stage times and collectives are emulated (slept): on a CPU their own would say nothing. Everything else is real.
"""

from itertools import pairwise

import pytest

from benchmarks import overlap
from rrfp.errors import ConfigurationError
from rrfp.program.dag import ALL_REDUCE, ALL_TO_ALL
from rrfp.program.traces import spans
from rrfp.trace.files import read

pytestmark = pytest.mark.timeout(240)
UNIT = 0.03
"""Emulated seconds of a segment's forward: long beside what a busy machine adds to a message."""


def start(group):
    return lambda job, *arguments: group.run("benchmark", module="overlap", name=job.__name__, arguments=arguments)


def test_a_pairs_exchanges_lie_under_the_paired_computation(groups, tmp_path, full):
    """DualPipeV's pairs hide at least 80% of their all-to-alls' time under the other sub-DAG; the same order without pairs under 10%."""
    found = overlap.pairs(start(groups(4)), 2, 10 if full else 6, UNIT, tmp_path)
    print(found)
    for name, replicas in found.items():
        for each in replicas:
            if name == "pairs":
                assert each.pairs >= 0.8, (name, each)
            if name == "apart":
                assert each.pairs < 0.1, (name, each)
    assert min(each.all for each in found["pairs-ready"]) > 0.4, "readiness finds other computation, too, to lie over them"
    assert found["pairs"][0].seconds < found["apart"][0].seconds


def test_three_placements_of_reductions_beside_all_to_alls(groups, tmp_path):
    found = overlap.placements(start(groups(2)), 4, UNIT, tmp_path)
    print(found)
    own, shared, slotted = found["own"], found["shared"], found["slotted"]
    assert set(own.streams["dp"]) == {ALL_REDUCE} and set(own.streams["ep"]) == {ALL_TO_ALL} and own.beside > UNIT
    for each in (shared, slotted):
        assert set(each.streams) == {"ep"} and each.beside < 1e-3, "one after the other"
    last = len(slotted.streams["ep"]) - 1 - slotted.streams["ep"][::-1].index(ALL_TO_ALL)
    between = slotted.streams["ep"][:last]
    assert ALL_REDUCE in between and (ALL_REDUCE, ALL_REDUCE) not in set(pairwise(between)), "one between two all-to-alls"
    assert max(own.late, slotted.late) < 0.7 * shared.late
    with pytest.raises(ConfigurationError, match="the trace is not of this program: rank 0 has no action"):
        spans(overlap.program_of(2, []), read(tmp_path / "own/pipeline0"))
