"""Frozen first stages under the virtual clock: forwards only, nothing held, and a run-ahead that the transport bounds as in training."""

import pytest
from frozen_costs import frozen

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.scheduler.arbiter import MOST_UNSENT, Scheduler
from rrfp.simulate.bounds import lower_bound, tight_bound
from rrfp.simulate.clock import CREDITS
from rrfp.simulate.costs import from_scenario
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.simulate.search import search
from rrfp.simulate.timeline import timeline_of


def uniform(first, *, stages=4, microbatches=8, **options):
    return frozen(from_scenario("uniform", stages=stages, microbatches=microbatches, unit=1.0, seed=0, **options), first)


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b", "ready:bf:2p", "ready:zb-h1:4", "strict:zb-h1:4", "ready:fill-r:2p-1"])
def test_the_trained_stages_are_a_pipeline_behind_the_frozen_ones(first, mode):
    """They fill it `first` forwards later; what it takes beyond that is the closed form of so many stages fewer."""
    costs, policy = uniform(first), parse_mode(mode)
    result, behind = costs.simulate(policy), 4 - first
    expected = first + (3 * 8 + behind - 1 if policy.split else 3 * (8 + behind - 1))
    assert result.makespan == expected == lower_bound(costs, split=policy.split).seconds
    assert tight_bound(costs, split=policy.split, limits=costs.limits(policy)) == expected
    for stage in range(4):
        kinds = "F" if stage < first else "FIW" if policy.split else "FB"
        assert sorted(result.rows[stage]) == sorted(Action(kind, stage, m) for kind in kinds for m in range(8))
    limits = costs.limits(policy)
    assert limits[:first] == [0] * first == result.peak_in_flight[:first]
    assert all(0 < peak <= limit for peak, limit in zip(result.peak_in_flight[first:], limits[first:], strict=True))


def test_the_bound_by_hand():
    """Two frozen stages of which the second is slow: its forwards, the first one's before them, and the way back after them."""
    costs = uniform(2)
    slow = frozen(costs, 2)
    slow.durations.update({("F", 1, m): 10.0 for m in range(8)})
    bound = lower_bound(slow, split=False)
    assert bound.stage == 1 + 8 * 10 + (1 + 1 + 2 + 2) and bound.chain == 1 + 10 + 1 + 1 + 2 + 2
    assert slow.simulate(parse_mode("strict:1f1b:1f1b")).makespan == bound.stage


def furthest(costs, *, ahead, behind):
    """By how many forwards a stage was ahead of the next at most."""
    spans = costs.simulate(parse_mode("ready:announced:1f1b")).spans
    begun = {stage: sorted(span.start for action, span in spans.items() if action[:2] == ("F", stage)) for stage in (ahead, behind)}
    return max(number - sum(start <= now for start in begun[behind]) for number, now in enumerate(begun[ahead], start=1))


def test_credits_and_what_may_wait_unsent_bound_how_far_a_frozen_stage_runs_ahead(monkeypatch):
    costs = uniform(2, microbatches=40)
    costs.durations.update({(kind, s, m): taken / 10 for (kind, s, m), taken in costs.durations.items() if s < 2})
    assert furthest(costs, ahead=1, behind=2) == CREDITS + MOST_UNSENT
    assert furthest(costs, ahead=0, behind=1) == CREDITS + MOST_UNSENT
    seconds = costs.simulate(parse_mode("ready:announced:1f1b")).makespan
    monkeypatch.setattr(Scheduler, "bound_unsent", lambda self, most: None)
    assert furthest(costs, ahead=1, behind=2) > 30, "the negative control: without the bound"
    assert costs.simulate(parse_mode("ready:announced:1f1b")).makespan == seconds, "and here nothing is lost by it"


def test_where_stages_vary_the_bound_may_cost_time(monkeypatch):
    """So it has to be simulated: a frozen stage that is slow at the end can't have run ahead as far as it would."""
    costs = uniform(1, stages=2, microbatches=40)
    costs.durations.update({("F", 0, m): 0.1 if m < 25 else 5.0 for m in range(40)})
    bounded = costs.simulate(parse_mode("ready:announced:1f1b")).makespan
    monkeypatch.setattr(Scheduler, "bound_unsent", lambda self, most: None)
    assert bounded > costs.simulate(parse_mode("ready:announced:1f1b")).makespan


def test_a_stage_without_weights_has_no_w():
    costs = frozen(from_scenario("jitter-0.3", stages=4, microbatches=8, unit=1.0, seed=1), 1, weightless=[2])
    assert costs.splits and (costs.first_trainable, costs.weightless) == (1, [2])
    result = costs.simulate(parse_mode("ready:fill-r:2p-1"))
    assert [sorted({action.kind for action in row}) for row in result.rows] == [["F"], ["F", "I", "W"], ["F", "I"], ["F", "I", "W"]]
    timeline = timeline_of(result, costs.placement, 8)
    assert [max(ran.in_flight for ran in call.actions) for call in timeline.of_call(0).values()] == result.peak_in_flight


def test_several_chunks():
    costs = uniform(3, stages=4, chunks=2)
    assert costs.limits(parse_mode("ready:announced:1f1b")) == [0, 3]
    result = costs.simulate(parse_mode("ready:announced:1f1b"))
    assert result.peak_in_flight[0] == 0 < result.peak_in_flight[1]


def test_a_search_counts_what_is_held():
    """A bound of two activations a rank is no obstacle for stages that hold none."""
    costs = frozen(from_scenario("jitter-0.3", stages=4, microbatches=8, unit=1.0, seed=1), 2)
    best = search(costs, memory=2, split=False)[0]
    assert best.limits[:2] == (0, 0) == best.peaks[:2] and max(best.peaks) <= 2
    assert best.seconds <= costs.simulate(parse_mode("ready:announced:1f1b")).makespan


def test_megatrons_own_schedule_is_not_modelled_there():
    with pytest.raises(ConfigurationError, match="megatron-1f1b, frozen stages: .*; use strict:1f1b:1f1b"):
        simulate_megatron_1f1b(uniform(1))
