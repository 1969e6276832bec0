"""A simulated call as a trace: when nothing ran, and what was in flight."""

from rrfp.mode import parse_mode
from rrfp.simulate.costs import from_scenario
from rrfp.simulate.timeline import timeline_of, waits_of
from rrfp.trace.files import Waited


def run(mode, **sizes):
    costs = from_scenario("uniform", unit=1.0, seed=0, **sizes)
    return costs, costs.simulate(parse_mode(mode))


def test_waits():
    _, result = run("strict:1f1b:1f1b", stages=2, microbatches=2)
    # Stage 0: F0 0-1, F1 1-2, B0 4-6, B1 7-9. Stage 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7.
    assert waits_of(result) == [[Waited("B", 2.0, 4.0), Waited("B", 6.0, 7.0)], [Waited("F", 0.0, 1.0)]]


def test_timeline():
    costs, result = run("ready:fill-r:2p-1", stages=3, microbatches=6)
    timeline = timeline_of(result, costs.placement, 6, mode="ready:fill-r:2p-1")
    calls = timeline.of_call(timeline.typical_call())
    assert max(call.end for call in calls.values()) == result.makespan and calls[0].mode == "ready:fill-r:2p-1"
    assert [max(ran.in_flight for ran in call.actions) for call in calls.values()] == result.peak_in_flight
    for one in timeline.breakdowns():
        assert one.overlaps == 0 and one.runtime == 0, "computing and waiting fill every rank's call"


def test_several_chunks_stand_in_rows_of_their_own():
    costs, result = run("strict:1f1b:1f1b", stages=4, microbatches=4, chunks=2)
    timeline = timeline_of(result, costs.placement, 4)
    assert timeline.rank_of == {0: 0, 1: 1, 2: 0, 3: 1}
    per_stage = timeline.breakdowns()[0].peak_in_flight
    assert set(per_stage) == {0, 2} and max(per_stage.values()) <= result.peak_in_flight[0] <= sum(per_stage.values())
