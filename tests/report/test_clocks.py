"""Clocks of several hosts: set by their messages, wrong by at most what is said."""

import random
from dataclasses import replace

import pytest
from simulated import scenario

from rrfp.report.analysis import analyse
from rrfp.report.clocks import _shift, align
from rrfp.trace.files import Timeline


def on_hosts(timeline: Timeline, hosts: list[str], ahead: dict[str, float]) -> Timeline:
    """The ranks on these hosts, whose clocks are so many seconds ahead."""
    ranks = {}
    for rank, trace in timeline.ranks.items():
        shifted = _shift(trace, -ahead.get(hosts[rank], 0.0))
        ranks[rank] = replace(shifted, host=hosts[rank], boot=f"boot of {hosts[rank]}")
    return replace(timeline, ranks=ranks)


def test_ranks_of_one_host_are_left_alone(timeline):
    made = timeline(scenario("links", stages=3, microbatches=4))
    aligned, errors = align(made)
    assert aligned is made and errors == {}


def test_the_error_is_a_bound(timeline, seed):
    rng = random.Random(seed)
    made = timeline(scenario("links", stages=6, microbatches=12, seed=rng.randrange(1000)))
    hosts = ["a", "a", "b", "b", "c", "c"]
    ahead = {"b": rng.uniform(-3, 3), "c": rng.uniform(-3, 3)}
    aligned, errors = align(on_hosts(made, hosts, ahead))
    assert set(errors) == {"b", "c"}
    for rank, host in enumerate(hosts):
        off = abs(aligned.ranks[rank].calls[0].begin - made.ranks[rank].calls[0].begin)
        assert off <= errors.get(host, 0.0) + 1e-9
    # A few messages a millisecond apart tell the time to a fraction of what it was wrong by.
    assert max(errors.values()) < 0.02


def test_an_analysis_of_two_hosts_is_that_of_one(timeline):
    made = timeline(scenario("uniform", stages=4, microbatches=8))
    apart = analyse(on_hosts(made, ["a", "a", "b", "b"], {"b": 7.5}))
    assert apart.clocks == {"b": pytest.approx(0.0, abs=1e-6)}
    together = analyse(made)
    assert apart.seconds == pytest.approx(together.seconds)
    assert apart.critical_totals == pytest.approx(together.critical_totals, abs=1e-5)


def test_a_host_without_messages_both_ways_keeps_the_time_of_day(timeline):
    made = on_hosts(timeline(scenario("uniform", stages=2, microbatches=2)), ["a", "b"], {})
    made.ranks[0].calls[0].arrivals.clear()
    aligned, errors = align(made)
    assert errors == {"b": None} and aligned.ranks[1].calls[0].begin == made.ranks[1].calls[0].begin
    analysis = analyse(made)
    assert analysis.clocks == {} and any("time of day" in note for note in analysis.notes)


def test_two_hosts_of_one_name_are_told_apart(timeline):
    made = timeline(scenario("uniform", stages=3, microbatches=3))
    ranks = {rank: replace(trace, host="node", boot=f"{rank}boot-id") for rank, trace in made.ranks.items()}
    assert set(align(replace(made, ranks=ranks))[1]) == {"node (1boot-id)", "node (2boot-id)"}
