"""Real training through everything that a GPU adds, on a fake one: bitwise Megatron's, nothing waits for the whole device, times, failures."""

import pytest
from group import Group


@pytest.fixture(scope="module")
def group():
    with Group(2) as group:
        yield group


@pytest.mark.timeout(900)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_bitwise_equal_through_a_device(group, run_ahead, full):
    for hint in ["announced", "bf", "alt"] if full else ["announced"]:
        where = group.run("same_on_a_device", microbatches=5, seeds=list(range(10 if full else 1)),
                          options={"hint": hint, "limit": "2p", "transport": "host", "run_ahead": run_ahead}, deadline=300)
        assert where == [None, None]


def test_evaluation_and_training_in_turn_with_other_sizes(group):
    assert group.run("on_a_device", run="modes_in_turn", options={"hint": "announced"}) == [None, None]


def test_free_order_pairs_labels_with_tokens(group, full):
    assert max(group.run("on_a_device", run="free_order", microbatches=6, iterations=100 if full else 4, lanes=3, deadline=300)) < 1e-6


def test_a_split_backward_is_bitwise_the_whole_one(full):
    with Group(2, script="split_jobs.py") as group:
        where = group.run("on_a_device", run="same", microbatches=5, seeds=list(range(10 if full else 1)), options={"hint": "fill-r", "limit": "2p"},
                          deadline=300)
        assert where == [None, None]


def test_nothing_waits_for_the_whole_device(group):
    for counts, waits in group.run("waits_on_a_device", microbatches=4):
        assert counts == {"synchronize": 0, "item": 0, "empty_cache": 0}
        assert waits > 8  # events: of every action, and of every copy
    for counts, _ in group.run("waits_on_a_device", microbatches=4, hasty=True):
        assert counts["synchronize"] > 0 and counts["empty_cache"] > 0


def test_what_lengthens_an_action_is_on_the_device_and_in_the_trace(group, tmp_path):
    for compute, padded, total in group.run("traced_on_a_device", microbatches=3, folder=str(tmp_path), seconds=0.25):
        assert 0 < padded <= compute <= total


def test_a_device_that_breaks_is_named_on_every_rank():
    group = Group(2)
    try:
        for text in group.run("breaks_on_a_device", microbatches=5):
            assert "stage 0 (rank 0) failed" in text and "illegal memory access" in text
    finally:
        group.kill()


def test_what_is_sent_before_it_has_been_computed_is_seen():
    """The negative control of the comparison."""
    group = Group(2)
    try:
        assert any(where is not None for where in group.run("hasty_on_a_device", microbatches=4))
    finally:
        group.kill()
