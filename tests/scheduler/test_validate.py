"""Lists that cannot be run are refused, naming rank, position and token."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler import chain
from rrfp.scheduler.lists import as_row
from rrfp.scheduler.validate import check_microbatch_order, check_rows, replay

GOOD = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def check(texts, placement=None, split=False, microbatches=2):
    placement = placement or Placement.looped(2)
    rows = [as_row(text.split()) for text in texts]
    check_rows(rows, [chain(placement, r, microbatches, split=split) for r in range(placement.ranks)], source="list")


def test_a_good_list_passes():
    check(GOOD)
    check(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W1 1W0"], split=True)


@pytest.mark.parametrize("texts, message", [
    ([GOOD[0]], "has 1 rows for 2 ranks"),
    ([GOOD[0], "1F0 1B0 1F1"], "rank 1, position 3: the row ends without 1B1 \\(1 missing\\)"),
    ([GOOD[0], "1F0 1B0 1F1 1B1 1B1"], "rank 1, position 4: 1B1 stands at position 3 already"),
    ([GOOD[0], "1F0 1B0 1F1 1B1 1B2"], "rank 1, position 4: 1B2 is no action of this call"),
    ([GOOD[0], "1F0 1B0 0F1 1B1"], "rank 1, position 2: 0F1 belongs to rank 0"),
    ([GOOD[0], "1B0 1F0 1F1 1B1"], "rank 1, position 0: 1B0 stands before 1F0"),
    ([GOOD[0], "1F0 1I0 1F1 1B1"], "rank 1, position 1: 1I0 is half of a split backward, and this run's is whole; split it, or write 1B0"),
])
def test_what_is_refused(texts, message):
    with pytest.raises(ConfigurationError, match=message):
        check(texts)


def test_w_before_i_is_refused():
    with pytest.raises(ConfigurationError, match="rank 1, position 1: 1W0 stands before 1I0"):
        check(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1W0 1I0 1F1 1I1 1W1"], split=True)


def test_a_deadlock_across_ranks_names_every_stuck_token():
    # Rank 0 wants a gradient before it sends what rank 1 needs first.
    with pytest.raises(ConfigurationError, match="deadlocks: 0B0 at rank 0, position 1 and 1F1 at rank 1, position 1 wait for"):
        check(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])


def test_microbatch_order():
    rows = [as_row("0F0 0F1 0B1 0B0".split())]
    with pytest.raises(ConfigurationError, match="position 3: 0B0 after 0B1 leaves microbatch order; use --rrfp-order free"):
        check_microbatch_order(rows, source="list")


def test_replay_counts_what_is_held():
    placement = Placement.looped(2)
    pipeline = [chain(placement, r, 2, split=True) for r in range(2)]
    outcome = replay([as_row("0F0 0F1 0I0 0I1 0W0 0W1".split()), as_row("1F0 1I0 1W0 1F1 1I1 1W1".split())], pipeline)
    assert (outcome.stuck, outcome.peak, outcome.peak_pending) == ([], [2, 1], [2, 1])
