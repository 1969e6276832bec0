"""The three causes on real processes: the engine, its transport, and traces as a training writes them."""

import pytest
from simulated import late_edge, small_limit, straggler

from rrfp.compare.group import Group, Job
from rrfp.mode import parse_mode
from rrfp.report.analysis import analyse
from rrfp.trace.files import read

STAGES, MICROBATCHES = 4, 10


@pytest.fixture(scope="module")
def group():
    with Group(STAGES) as started:
        yield started


@pytest.mark.parametrize("make, cause, where", [
    (lambda **shape: straggler(2, factor=2.0, **shape), "straggler", "stage 2"),
    (lambda **shape: late_edge("1>2", units=3.0, **shape), "late edge", "edge 1>2"),
    (small_limit, "limit", "limit 1f1b"),
], ids=["straggler", "late edge", "limit"])
def test_the_first_finding_names_the_cause_and_the_place(group, tmp_path, make, cause, where):
    costs = make(stages=STAGES, microbatches=MICROBATCHES)
    job = Job(parse_mode("ready:announced:1f1b"), MICROBATCHES, durations=costs.durations, delays=costs.delays, trace=tmp_path / "trace")
    for _ in range(2):  # the first call connects
        outcome = group.run(job)
    analysis = analyse(read(tmp_path / "trace"))
    assert analysis.mode == "ready:announced:1f1b"
    assert analysis.seconds == pytest.approx(outcome.seconds, abs=0.05)
    for rank, parts in analysis.bubbles.items():
        assert analysis.utilisation[rank]["compute"] + sum(parts.values()) == pytest.approx(analysis.seconds, abs=1e-9)
        assert "lost" not in parts
    assert (analysis.findings[0].cause, analysis.findings[0].where) == (cause, where)
