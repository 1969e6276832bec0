"""The critical path tiles the call and runs through what makes it long."""

import random
from itertools import pairwise

import pytest
from simulated import UNIT, late_edge, record, scenario, straggler

from rrfp.report.critical_path import critical_path, totals
from rrfp.report.steps import graph
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.simulate.scenarios import SCENARIOS


def path_of(timeline):
    return critical_path(graph(timeline, 0))


def test_it_tiles_the_call(timeline, seed, full):
    rng = random.Random(seed)
    for name in SCENARIOS if full else rng.sample(SCENARIOS, 4):
        for mode in ("strict:1f1b:1f1b", "ready:announced:1f1b", "ready:fill-r:2p-1", "ready:alt:2p:free:lanes=4"):
            made = timeline(scenario(name, stages=5, microbatches=11, seed=rng.randrange(1000)), mode)
            path, seconds = path_of(made), graph(made, 0).seconds
            assert path[0].start == 0.0 and path[-1].end == seconds
            assert all(before.end == pytest.approx(after.start, abs=1e-9) for before, after in pairwise(path))
            assert sum(totals(path).values()) == pytest.approx(seconds)


def test_of_an_even_pipeline_without_delays_it_is_all_compute(timeline):
    path = path_of(timeline(scenario("uniform", stages=4, microbatches=8), overhead=0.0))
    assert {segment.what for segment in path} == {"compute"}
    # 3F (M + P - 1)
    assert sum(segment.end - segment.start for segment in path) == pytest.approx(3 * UNIT * (8 + 3))


def test_it_runs_through_a_straggler(timeline):
    slow, even = (totals(path_of(timeline(straggler(2, factor=factor, stages=4, microbatches=16)))) for factor in (1.6, 1.0))
    assert next(iter(slow)) == "compute stage 2" and slow["compute stage 2"] > 0.75 * sum(slow.values())
    assert even["compute stage 2"] < 0.75 * sum(even.values())


def test_it_runs_through_a_late_edge(timeline):
    late = totals(path_of(timeline(late_edge("1>2", stages=4, microbatches=16))))
    assert late["message 1>2"] > 5 * UNIT
    assert all(seconds < UNIT for cause, seconds in late.items() if cause.startswith("message") and cause != "message 1>2")


def test_a_message_that_waits_for_its_receiver_is_not_to_blame(timeline, tmp_path):
    costs = straggler(2, factor=2.0, stages=4, microbatches=16)
    result = simulate_megatron_1f1b(costs, message_cost=1e-4)
    path = path_of(record(tmp_path / "meets", costs, simulated=result, meets=True))
    assert all(before.end == pytest.approx(after.start, abs=1e-9) for before, after in pairwise(path))
    assert sum(seconds for cause, seconds in totals(path).items() if cause.startswith("message")) < UNIT
    # Nor one that waits for a credit: stage 1 is slow to take what stage 0 has long sent.
    slow = totals(path_of(timeline(straggler(1, factor=4.0, stages=2, microbatches=12), "ready:f-first:2p")))
    assert all(seconds < 1e-6 for cause, seconds in slow.items() if cause.startswith("message"))


def test_a_hole_in_the_record_is_bridged(timeline):
    made = timeline(scenario("jitter-0.3", stages=4, microbatches=8), lost=2)
    path = path_of(made)
    assert path[0].start == 0.0 and path[-1].end == graph(made, 0).seconds
    assert all(before.end == pytest.approx(after.start, abs=1e-9) for before, after in pairwise(path))
