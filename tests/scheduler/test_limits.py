"""Limits by name: lists of one number per rank, and those that are only known once memory was measured."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name, parse_mode
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.limits import descending, gibibytes, is_measured, listed


@pytest.mark.parametrize("limits", [[7, 5, 3, 1], [4, 4, 4, 4], [9, 2, 2, 1]])
def test_a_list_gives_each_rank_its_own(limits):
    assert Policy(limit=listed(limits)).limits(Placement.looped(4), 9) == limits
    assert Policy(limit=listed(limits)).limits(Placement.looped(4), 3) == [min(3, limit) for limit in limits]


def test_a_list_for_one_rank_is_a_number():
    assert listed([5]) == "5" and Policy(limit="5").limits(Placement.looped(1), 9) == [5]


@pytest.mark.parametrize("text, message", [
    ("3,5,1", "no rank can use more than the one before it, .* numbers that do not grow, like 7,5,3,1"),
    ("3,2,0", "each needs at least 1"),
    ("3,2,", "must be one of auto, .* a list like 7,5,3,1"),
    ("memory:0", "memory:<GiB>"), ("memory:", "memory:<GiB>"), ("memory:2x", "memory:<GiB>"), ("memory:-1", "memory:<GiB>"),
    ("auto:2", "must be one of auto"),
])
def test_refused(text, message):
    with pytest.raises(ConfigurationError, match=f"--rrfp-limit {text}: .*{message}"):
        Policy(limit=text)


def test_a_list_of_another_length_than_the_pipeline_is_refused():
    for use in (Policy(limit="3,2,1").scheduler, lambda placement, rank, microbatches: Policy(limit="3,2,1").limits(placement, microbatches)):
        with pytest.raises(ConfigurationError, match="--rrfp-limit 3,2,1: names 3 ranks, but the pipeline has 4; give one number per rank"):
            use(Placement.looped(4), 0, 8)


def test_a_list_that_could_deadlock_is_refused_with_the_least_that_does_not():
    with pytest.raises(ConfigurationError, match="--rrfp-limit 6,1: rank 1 holds 2 chunks and 1 activations, which deadlocks; use at least 2"):
        Policy(limit="6,1").scheduler(Placement.looped(2, 2), 0, 8)
    with pytest.raises(ConfigurationError, match="--rrfp-limit 4,4: rank 0 may hold 4, but --rrfp-order megatron needs 5; use --rrfp-limit 1f1b"):
        Policy(limit="4,4", order="megatron").scheduler(Placement.looped(2, 2), 0, 8)


@pytest.mark.parametrize("text", ["auto", "memory:2", "memory:.5"])
def test_what_is_not_measured_yet_is_1f1b(text):
    assert is_measured(text)
    for placement in (Placement.looped(4), Placement.looped(4, 2)):
        assert Policy(limit=text).limits(placement, 8) == Policy(limit="1f1b").limits(placement, 8)


def test_gibibytes():
    assert [gibibytes(text) for text in ("memory:2", "memory:.5", "memory:1.25", "memory:0", "auto", "memory:")] == [2, 0.5, 1.25, None, None, None]


def test_descending():
    assert descending([5, 7, 3, 4]) == [5, 5, 3, 3]


def test_modes_name_lists_but_nothing_that_is_measured():
    policy = Policy(limit="7,5,3,1")
    assert mode_name(policy) == "ready:auto:7,5,3,1" and parse_mode(mode_name(policy)) == policy
    for text in ("ready:announced:auto", "ready:alt:memory:2"):
        with pytest.raises(ConfigurationError, match=f"--modes {text}: .* is measured in training; name the limit itself"):
            parse_mode(text)
