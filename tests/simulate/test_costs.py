"""Costs of a call: what a scenario becomes, and what can be simulated on it."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.placement import Placement
from rrfp.simulate import simulate
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.simulate.scenarios import draw


def test_from_a_scenario():
    costs = from_scenario("mixed", stages=8, microbatches=4, unit=0.02, seed=3, chunks=2)
    assert (costs.durations, costs.delays) == draw("mixed", 8, 4, 0.02, 3)
    assert costs.placement == Placement.looped(4, 2) and costs.splits and costs.seconds is costs.mode is None


def test_what_is_refused():
    with pytest.raises(ConfigurationError, match="scenario sunny: there is no such scenario"):
        from_scenario("sunny", stages=2, microbatches=2, unit=1.0, seed=0)
    with pytest.raises(ConfigurationError, match="3 stages, 2 chunks"):
        from_scenario("mixed", stages=3, microbatches=2, unit=1.0, seed=0, chunks=2)


def test_simulate_is_the_clock_with_these_costs():
    costs = from_scenario("spikes", stages=4, microbatches=12, unit=1.0, seed=1)
    policy = parse_mode("ready:alt:2p:free:lanes=3")
    found = costs.simulate(policy)
    assert found == simulate(policy, Placement.looped(4), 12, costs.durations, costs.delays, lanes=3)
    assert costs.simulate(policy, lanes=1).makespan > found.makespan


def test_a_split_backward_needs_the_costs_of_its_parts():
    whole = from_scenario("uniform", stages=2, microbatches=3, unit=1.0, seed=0)
    unsplit = Costs(2, 1, 3, {key: value for key, value in whole.durations.items() if key[0] in "FB"}, whole.delays)
    assert not unsplit.splits and unsplit.simulate(parse_mode("ready:alt")).makespan == 12
    with pytest.raises(ConfigurationError, match="hint fill-r: splits the backward, but these costs know only"):
        unsplit.simulate(parse_mode("ready:fill-r:2p-1"))
