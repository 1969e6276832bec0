"""Organ-pipe order: what it is, that the feed keeps every microbatch, and that it is worth it."""

from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import ConfigurationError
from rrfp.policy import Policy
from rrfp.scheduler.sizes import feed_by_size, organ_pipe
from rrfp.simulate.costs import from_scenario
from rrfp.simulate.scenarios import data_sizes


@pytest.mark.parametrize("sizes, order", [
    ([], []), ([7], [0]), ([5, 5, 5, 5], [0, 1, 2, 3]),
    ([1, 2, 3, 4, 5, 6], [1, 3, 5, 4, 2, 0]), ([6, 5, 4, 3, 2, 1], [4, 2, 0, 1, 3, 5]), ([2, 9, 2], [2, 1, 0]),
])
def test_organ_pipe(sizes, order):
    assert organ_pipe(sizes, 4) == order


def test_a_long_call_is_cut_into_stretches():
    sizes = [5, 1, 2, 3, 9, 7, 8, 6]
    assert organ_pipe(sizes, 1) == [2, 0, 3, 1, 5, 4, 6, 7]
    assert organ_pipe(sizes[:7], 1) == organ_pipe(sizes[:7], 9) == [2, 0, 6, 4, 5, 3, 1], "fewer than 8 per rank: one stretch"
    assert sorted(organ_pipe(list(range(27)), 3)) == list(range(27))


@given(st.lists(st.floats(0, 1e6), max_size=40))
def test_it_is_a_permutation_that_rises_and_then_falls(sizes):
    order = organ_pipe(sizes, 8)
    assert sorted(order) == list(range(len(sizes)))
    fed = [sizes[index] for index in order]
    top = fed.index(max(fed)) if fed else 0
    assert fed[:top] == sorted(fed[:top]) and fed[top:] == sorted(fed[top:], reverse=True)


def test_the_feed_orders_call_by_call_and_loses_nothing():
    batches = [3, 1, 2, 9, 9, 8, 5, 4]
    assert list(feed_by_size(iter(batches), float, microbatches=3, ranks=2)) == [2, 3, 1, 9, 9, 8, 5, 4]
    assert list(feed_by_size(iter([]), float, microbatches=3, ranks=2)) == []
    # An endless loader is read one call ahead, no further.
    endless = count()
    assert list(islice(feed_by_size(endless, float, microbatches=4, ranks=2), 4)) == [1, 3, 2, 0] and next(endless) == 4


@pytest.mark.parametrize("name", ["images-tokens", "paper-language"])
def test_equal_work_and_memory_and_a_shorter_call(name):
    policies = [Policy(hint="fill-alt", limit="2p"), Policy(hint="fill-r", limit="2p-1", split=True)]
    for seed in range(3):
        drawn, fed = (from_scenario(each, stages=8, microbatches=32, unit=1.0, seed=seed) for each in (name, f"organ-pipe:{name}"))
        assert sorted(drawn.durations.values()) == sorted(fed.durations.values())
        for policy in policies:
            assert fed.simulate(policy).makespan < drawn.simulate(policy).makespan, f"seed {seed}"


def test_where_the_data_do_not_vary_the_feed_changes_nothing():
    names = ("spikes", "organ-pipe:spikes")
    drawn, fed = (from_scenario(name, stages=4, microbatches=8, unit=1.0, seed=1) for name in names)
    assert (drawn.durations, drawn.delays) == (fed.durations, fed.delays)
    with pytest.raises(ConfigurationError, match="scenario organ-pipe:J1: there is no such scenario"):
        from_scenario("organ-pipe:J1", stages=4, microbatches=8, unit=1.0, seed=1)


def test_sizes_are_those_of_the_draws():
    costs = from_scenario("lengths", stages=8, microbatches=32, unit=1.0, seed=3)
    sizes = data_sizes("lengths", 32, 3)
    took = [sum(costs.durations["F", s, m] for s in range(8)) / 8 for m in range(32)]
    assert all(abs(a / b - 1) < 0.2 for a, b in zip(took, sizes, strict=True))
    assert set(data_sizes("spikes", 32, 3)) == {1.0}
