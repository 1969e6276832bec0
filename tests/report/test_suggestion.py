"""Suggestions: backed by the simulator on both sides, and silent where there is little to gain."""

import pytest
from simulated import change, late_edge, scenario, small_limit

from rrfp.mode import parse_mode
from rrfp.report.suggestion import suggest
from rrfp.report.whatif import larger_limits
from rrfp.simulate.costs import Costs


def whole(costs: Costs) -> Costs:
    """Costs as a trace of a whole backward gives them: no I and W."""
    kept = {key: taken for key, taken in costs.durations.items() if key[0] in "FB"}
    return Costs(costs.stages, costs.chunks, costs.microbatches, kept, costs.delays)


@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b"])
def test_what_is_promised_is_what_the_simulator_says(mode):
    costs = whole(small_limit(stages=6, microbatches=18))
    found = suggest(costs, parse_mode(mode))
    now, then = (costs.simulate(parse_mode(each)).makespan for each in (mode, found.mode))
    assert found.predicted_speedup == pytest.approx(now / then) and found.seconds == pytest.approx(then)
    assert f"{found.predicted_speedup:.2f}x" in found.text


def test_a_limit_is_named_beside_the_one_it_replaces():
    found = suggest(whole(late_edge("2>3")), parse_mode("ready:announced:1f1b"))
    assert found.text.startswith("limit eager instead of 1f1b: predicted 1.2") and found.mode == "ready:announced:eager"
    assert found.text.endswith("for at most 11 activations on a rank instead of 6")


def test_nothing_is_suggested_for_less_than_two_percent():
    assert suggest(whole(scenario("uniform")), parse_mode("ready:announced:1f1b")) is None
    assert suggest(whole(scenario("jitter-0.1")), parse_mode("ready:announced:eager")) is None


def test_a_split_backward_is_only_suggested_where_its_parts_were_measured():
    mode = parse_mode("ready:announced:2p-1:split")
    uneven = change(scenario("images-tokens", stages=6, microbatches=18), delays=lambda k, s, m: 0.002)
    split = suggest(uneven, mode)
    assert split is None or parse_mode(split.mode).split
    found = suggest(whole(uneven), parse_mode("strict:1f1b:1f1b"))
    assert not parse_mode(found.mode).split


def test_out_of_order_must_promise_more(monkeypatch):
    costs = whole(scenario("spikes"))
    found = suggest(costs, parse_mode("ready:alt:2p"))
    assert parse_mode(found.mode).order == "free" and "round otherwise" in found.text
    monkeypatch.setattr("rrfp.report.suggestion.FREE", 2.0)
    found = suggest(costs, parse_mode("ready:alt:2p"))
    assert found is None or parse_mode(found.mode).order == "microbatch"


def test_megatrons_own_schedule_can_be_left(full):
    found = suggest(whole(small_limit()), parse_mode("strict:1f1b:1f1b"), mode="megatron-1f1b")
    assert "instead of Megatron's own 1F1B" in found.text and found.predicted_speedup > 1.3


def test_larger_limits_give_every_rank_at_least_as_much():
    costs = scenario("uniform")
    shapes = [each.limit for each in larger_limits(parse_mode("ready:alt:1f1b"), costs.placement, 20)]
    assert shapes == ["eager", "2p-1", "2p"]
    assert [each.limit for each in larger_limits(parse_mode("ready:alt:6"), costs.placement, 20)] == ["2p-1", "2p"]
    assert larger_limits(parse_mode("ready:alt:2p"), costs.placement, 20) == []
    # Six microbatches are all that can be held.
    assert [each.limit for each in larger_limits(parse_mode("ready:alt:1f1b"), costs.placement, 6)] == ["eager", "2p-1"]
