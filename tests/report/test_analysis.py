"""`analyse`: plain data that adds up, for every kind of call, and one clear line where nothing can be said."""

import dataclasses
import json

import pytest
from simulated import UNIT, scenario, straggler

from rrfp.errors import ConfigurationError
from rrfp.report.analysis import CAUSES, Analysis, analyse
from rrfp.trace.clocks import Clock
from rrfp.trace.files import Timeline, read


def check(analysis: Analysis) -> dict:
    """What holds of every analysis; returns it as JSON gives it back."""
    for rank, parts in analysis.bubbles.items():
        assert set(CAUSES) <= set(parts) and min(parts.values()) >= 0.0
        assert analysis.utilisation[rank]["compute"] + sum(parts.values()) == pytest.approx(analysis.seconds, abs=1e-9)
        assert sum(analysis.utilisation[rank].values()) == pytest.approx(analysis.seconds, abs=1e-9)
    assert sum(analysis.critical_totals.values()) == pytest.approx(analysis.seconds, abs=1e-9)
    assert analysis.findings and all(each.text.endswith(".") and "\n" not in each.text for each in analysis.findings)
    return json.loads(json.dumps(dataclasses.asdict(analysis), allow_nan=False))


def test_an_analysis_is_json(timeline):
    data = check(analyse(timeline(straggler(2, stages=4, microbatches=8), "ready:announced:1f1b")))
    assert (data["call"], data["stages"], data["ranks"], data["microbatches"], data["mode"]) == (0, 4, 4, 8, "ready:announced:1f1b")
    assert len(data["actions"]) == 2 * 4 * 8
    first = data["actions"][0]
    assert (first["name"], first["start"], first["reason"], first["critical"]) == ("0F0", pytest.approx(1e-4), "the call began", True)
    assert {each["where"] for each in data["durations"]} == {f"{stage}{kind}" for stage in range(4) for kind in "FB"}
    assert {each["where"] for each in data["latencies"]} == {"0>1", "1>2", "2>3", "1>0", "2>1", "3>2"}
    assert data["peak_in_flight"] == {"0": 4, "1": 3, "2": 2, "3": 1}


def test_activations_in_flight_rise_and_fall(timeline):
    for mode, last in (("strict:1f1b:1f1b", "B"), ("ready:fill-r:2p-1", "W")):
        made = timeline(scenario("uniform", stages=4, microbatches=8), mode)
        analysis = analyse(made)
        for stage, steps in analysis.in_flight.items():
            assert max(held for _, held in steps) == analysis.peak_in_flight[stage]
            assert steps[0][1] == steps[-1][1] == 0 and min(held for _, held in steps) == 0
            ends = max(action.end for action in analysis.actions if str(action.stage) == stage and action.kind == last)
            assert steps[-1][0] == ends


def test_variability_is_the_papers(timeline):
    spreads = {each.where: each for each in analyse(timeline(scenario("jitter-0.3", stages=3, microbatches=40))).durations}
    even = {each.where: each for each in analyse(timeline(scenario("uniform", stages=3, microbatches=40))).durations}
    forward = spreads["1F"]
    assert forward.n == 40 and forward.p5 < forward.p50 < forward.p95
    assert forward.variability == pytest.approx((forward.p95 - forward.p5) / forward.p50) and 0.5 < forward.variability < 1.7
    assert even["1F"].variability == pytest.approx(0.0, abs=1e-6) and even["1F"].p50 == pytest.approx(UNIT)


@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b", "ready:fill-r:2p-1", "ready:alt:2p:free:lanes=4", "ready:alt:1"])
@pytest.mark.parametrize("shape", [{"stages": 4, "microbatches": 8}, {"stages": 1, "microbatches": 2}, {"stages": 3, "microbatches": 1}])
def test_every_way_of_running(timeline, mode, shape):
    check(analyse(timeline(scenario("paper-multimodal", **shape), mode)))


@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b", "ready:alt:2p"])
def test_several_chunks_per_rank(timeline, mode):
    analysis = analyse(timeline(scenario("jitter-0.3", stages=8, microbatches=8, chunks=2), mode))
    check(analysis)
    assert (analysis.stages, analysis.ranks, analysis.rank_of["5"]) == (8, 4, 1)


def test_the_typical_call_is_the_last_whole_one(timeline):
    made = timeline(scenario("jitter-0.1", stages=3, microbatches=4), calls=3, lost=1)
    assert analyse(made).call == 1
    broken = analyse(made, call=2)
    check(broken)
    assert "lost" in broken.bubbles["1"] and "lost" not in broken.bubbles["0"]
    assert any("rank 1 did not finish call 2" in note for note in broken.notes)


def test_where_no_call_is_whole_the_last_one_is_explained(timeline):
    analysis = analyse(timeline(scenario("jitter-0.1", stages=3, microbatches=4), lost=0))
    check(analysis)
    assert analysis.suggestion is None


def test_a_missing_rank_is_named(timeline, tmp_path):
    timeline(scenario("jitter-0.1", stages=4, microbatches=4))
    (tmp_path / "trace1" / "rank2.jsonl").unlink()
    analysis = analyse(read(tmp_path / "trace1"))
    check(analysis)
    assert analysis.notes == ["rank 2 is missing: it wrote no trace"]


def test_the_clocks_of_several_hosts_come_with_their_errors(timeline):
    made = timeline(scenario("uniform", stages=2, microbatches=2))
    made.clocks = {"a": Clock(0.0, 0.0), "b": Clock(0.3, 2e-5), "c": Clock(0.0, None)}
    assert analyse(made).clocks == {"b": 2e-5}


def forward_only(made: Timeline) -> Timeline:
    """An evaluation: what the same ranks would have written without backwards."""
    for trace in made.ranks.values():
        for call in trace.calls.values():
            call.forward_only = True
            call.actions = [ran._replace(in_flight=0) for ran in call.actions if ran.action.kind == "F"]
            call.waits = [wait for wait in call.waits if wait.cause == "F"]
            call.sent, call.arrivals = ([each for each in messages if each.edge.source < each.edge.destination]
                                        for messages in (call.sent, call.arrivals))
    return made


def test_an_evaluation_is_explained_without_simulation(timeline):
    analysis = analyse(forward_only(timeline(straggler(2, factor=2.0, stages=4, microbatches=8), "ready:f-first:2p")))
    check(analysis)
    assert analysis.forward_only and analysis.suggestion is None
    assert all(steps == [(0.0, 0)] for steps in analysis.in_flight.values())


def test_frozen_stages_hold_nothing(timeline):
    costs = scenario("spikes", stages=4, microbatches=12)
    costs = dataclasses.replace(costs, durations={key: taken for key, taken in costs.durations.items() if key[0] == "F" or key[1] >= 2})
    analysis = analyse(timeline(costs, "ready:announced:1f1b"))
    check(analysis)
    assert analysis.in_flight["0"] == analysis.in_flight["1"] == [(0.0, 0)] and analysis.suggestion is not None


def test_backwards_that_a_trace_lacks_are_not_made_up(timeline):
    made = timeline(scenario("uniform", stages=3, microbatches=4))
    call = made.ranks[0].calls[0]
    call.actions = [ran for ran in call.actions if ran.action.kind == "F"]
    analysis = analyse(made)
    check(analysis)
    assert analysis.in_flight["0"] == [(0.0, 0)] and analysis.suggestion is None


def test_kinds_that_no_chain_knows_are_shown(timeline):
    made = timeline(scenario("uniform", stages=2, microbatches=2))
    call = made.ranks[0].calls[0]
    first = call.actions[0]
    call.actions.insert(0, first._replace(action=first.action._replace(kind="UNSHARD", microbatch=None), start=call.begin, end=first.start))
    analysis = analyse(made)
    check(analysis)
    assert analysis.actions[0].name == "0UNSHARD" and analysis.actions[0].microbatch is None


def test_refusals_are_one_line(timeline, tmp_path):
    made = timeline(scenario("uniform", stages=2, microbatches=2))
    with pytest.raises(ConfigurationError, match=r"call 9 is not in the trace: it holds calls 0\.\.0"):
        analyse(made, call=9)
    for trace in made.ranks.values():
        trace.calls[0].actions.clear()
    with pytest.raises(ConfigurationError, match="no rank ran an action in it"):
        analyse(made)
    with pytest.raises(ConfigurationError, match="holds no call"):
        analyse(Timeline({}))
