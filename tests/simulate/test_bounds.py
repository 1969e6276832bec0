"""No simulated policy beats a bound, whatever the durations and delays; and the bounds are worth having."""

import pytest
from frozen_costs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp.mode import parse_mode
from rrfp.simulate.bounds import lower_bound, tight_bound
from rrfp.simulate.costs import Costs, from_scenario

MODES = ("strict:1f1b:1f1b", "strict:1f1b:eager", "ready:alt:1f1b", "ready:alt:2p", "ready:announced:1f1b", "ready:fill-alt:2p",
         "ready:gpipe:1", "ready:b-first:3", "ready:f-first:2", "ready:bf:paper:2",
         "strict:zb-h1:2p", "ready:zb-h2:2p-1", "ready:bfw:2p-1", "ready:fill-r:2p-1", "ready:fill:1f1b:split",
         "ready:announced:2p-1:split")
WAYS = ("", ":lanes=2", ":free", ":free:lanes=3", ":free:lanes=4")


@st.composite
def calls(draw):
    """A small call with arbitrary costs; several chunks, frozen stages and stages without a W included."""
    chunks, ranks, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 7))
    stages = ranks * chunks
    # Halves add up exactly: a bound above the makespan by one rounding would not be a counterexample.
    number = st.integers(0, 12).map(lambda n: n / 2)
    durations, delays = {}, {}
    for s in range(stages):
        for m in range(microbatches):
            for kind in "FIW":
                durations[kind, s, m] = draw(number)
            durations["B", s, m] = durations["I", s, m] + durations["W", s, m]
            for kind in "FB":
                delays[kind, s, m] = draw(st.one_of(st.just(0.0), number))
    first = draw(st.sampled_from([0, 0, *range(stages)]))
    weightless = draw(st.sampled_from([[], [], [stages - 1], range(first, stages)]))
    return frozen(Costs(stages, chunks, microbatches, durations, delays), first, weightless=weightless)


@pytest.fixture
def rounds(full):
    return 3000 if full else 120


def test_no_policy_beats_a_bound(rounds):
    @settings(max_examples=rounds, deadline=None)
    @given(calls(), st.sampled_from(MODES), st.sampled_from(WAYS))
    def check(costs, mode, way):
        policy = parse_mode(mode + way)
        if costs.chunks > 1 and (policy.hint.startswith("zb") or min(policy.limits(costs.placement, costs.microbatches)) < 2):
            return
        if costs.chunks > 1 and policy.limit.startswith("paper:") and policy.order == "free":
            return  # refused
        took = costs.simulate(policy).makespan
        lower = lower_bound(costs, split=policy.split).seconds
        tight = tight_bound(costs, split=policy.split, limits=policy.limits(costs.placement, costs.microbatches), order=policy.order)
        assert lower <= tight <= took + 1e-9

    check()


def test_no_policy_beats_a_bound_where_more_runs():
    """Long calls, many thresholds: a draw's times are no halves, hence the relative tolerance."""
    for name in ("mixed", "spikes"):
        costs = from_scenario(name, stages=4, microbatches=80, unit=1.0, seed=7)
        for mode in ("ready:fill-alt:2p", "ready:fill-r:2p-1"):
            policy = parse_mode(mode)
            limits = policy.limits(costs.placement, 80)
            assert tight_bound(costs, split=policy.split, limits=limits) <= costs.simulate(policy).makespan * (1 + 1e-9)


def even(stages, microbatches):
    return from_scenario("uniform", stages=stages, microbatches=microbatches, unit=1.0, seed=0)


def test_even_stages_meet_the_closed_forms():
    assert lower_bound(even(8, 32), split=False).seconds == 117
    assert lower_bound(even(8, 32), split=True).seconds == 103
    assert tight_bound(even(8, 32), split=True, limits=[8] * 8) == 103
    interleaved = from_scenario("uniform", stages=16, microbatches=32, unit=0.5, seed=0, chunks=2)
    assert lower_bound(interleaved, split=False).seconds == 106.5


def test_parts_of_the_bound_by_hand():
    durations = {(kind, s, m): 1.0 for kind in "FIW" for s in range(2) for m in range(2)}
    durations |= {("B", s, m): 2.0 for s in range(2) for m in range(2)}
    delays = {(kind, s, m): 0.0 for kind in "FB" for s in range(2) for m in range(2)}
    delays["F", 1, 1] = 10.0
    bound = lower_bound(Costs(2, 1, 2, durations, delays), split=False)
    assert bound.stage == 1 + 6 + 2, "the earliest microbatch reaches stage 1 at 1, and its last B is followed by a B at stage 0"
    assert bound.chain == 1 + 10 + 1 + 2 + 2
    whole, split = Costs(2, 1, 2, durations, dict.fromkeys(delays, 0.0)), lower_bound(Costs(2, 1, 2, durations, delays), split=True)
    assert (split.stage, split.chain) == (1 + 6, 1 + 10 + 1 + 1 + 1 + 1)
    assert tight_bound(whole, split=False, limits=[1, 1]) == 12, "one in flight: one microbatch after the other"
    assert tight_bound(whole, split=False, limits=[2, 2]) == 9


def test_memory_and_order_explain_most_of_the_distance():
    """The control: what the tight bound knows beyond the plain one is what the policies pay for."""
    for name in ("spikes", "lengths"):
        costs = from_scenario(name, stages=8, microbatches=32, unit=1.0, seed=0)
        policy = parse_mode("ready:announced:1f1b")
        took = costs.simulate(policy).makespan
        tight = tight_bound(costs, split=False, limits=policy.limits(costs.placement, 32))
        assert took / lower_bound(costs, split=False).seconds > 1.5 and took / tight < 1.06
