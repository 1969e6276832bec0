"""Our own generators: golden lists, and counts that hold for any P and M."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.policy_rows import rows_of
from rrfp.scheduler import chain
from rrfp.scheduler.lists import actions_of, generate, interleaved_forwards
from rrfp.scheduler.validate import check_microbatch_order, check_rows, replay


def text(row):
    return " ".join(map(str, actions_of(row)))


def test_1f1b():
    assert list(map(text, generate("1f1b", Placement.looped(3), 4, [3, 2, 1], split=False))) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_at_limit_n_warms_up_n_minus_1():
    assert text(generate("1f1b", Placement.looped(2), 4, [3, 1], split=False)[0]) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


def test_gpipe():
    assert text(generate("gpipe", Placement.looped(2), 3, [3, 3], split=False)[1]) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_zb_h1_delays_w_by_the_stage():
    rows = list(map(text, generate("zb-h1", Placement.looped(3), 4, [3] * 3, split=True)))
    assert rows[0] == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert rows[2] == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


def test_zb_h2_warms_up_twice_as_deep():
    rows = list(map(text, generate("zb-h2", Placement.looped(2), 4, [3, 3], split=True)))
    assert rows == ["0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"]


def test_interleaved_1f1b_is_megatrons():
    # P=2, two chunks, M=4: Megatron's table of forwards is chunk 0 0 1 1 0 0 1 1, warm-up 2(P - r - 1) + P.
    assert " ".join(map(str, interleaved_forwards((0, 2), 4, 2))) == "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"
    rows = list(map(text, generate("1f1b", Placement.looped(2, 2), 4, [5, 3], split=False)))
    assert rows[0] == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert rows[1] == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("hint, limit, split", [
    ("1f1b", "1f1b", False), ("1f1b", "eager", False), ("1f1b", "2p", False), ("1f1b", "1", False), ("1f1b", "1f1b", True),
    ("gpipe", "9", False), ("gpipe", "9", True), ("zb-h1", "2p-1", True), ("zb-h2", "2p-1", True),
])
def test_every_list_runs_for_any_number_of_microbatches(hint, limit, split, ranks, microbatches):
    """Warm-up counts that assume M >= P hang elsewhere: here M is 1 to P + 1 and more."""
    placement = Placement.looped(ranks)
    rows = Policy(hint=hint, limit=limit, split=split, mode="strict").list_for(placement, microbatches)
    pipeline = [chain(placement, rank, microbatches, split=split) for rank in range(ranks)]
    check_rows(rows, pipeline, source="list")
    check_microbatch_order(rows, source="list")


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("placement", [
    Placement.looped(2, 3), Placement.looped(4, 2), Placement.v(3), Placement.of([0, 1, 1, 0, 0, 1])], ids=str)
def test_interleaved_1f1b_runs_on_any_placement_and_number(placement, microbatches):
    rows = rows_of(Policy(hint="1f1b", mode="ready"), placement, microbatches, {})
    check_rows(rows, [chain(placement, rank, microbatches) for rank in range(placement.ranks)], source="list")


def test_peaks_of_the_lists():
    placement = Placement.looped(4)
    def peak(name, limits, split):
        rows = generate(name, placement, 12, limits, split=split)
        return replay(rows, [chain(placement, r, 12, split=split) for r in range(4)]).peak
    assert peak("1f1b", [4, 3, 2, 1], False) == [4, 3, 2, 1]
    assert peak("1f1b", [7, 5, 3, 1], False) == [7, 5, 3, 1]
    assert peak("gpipe", [12] * 4, False) == [12] * 4
    assert peak("zb-h1", [4] * 4, True) == [4] * 4
    assert peak("zb-h2", [7] * 4, True) == [7] * 4


def test_zero_bubble_lists_refuse_chunks():
    with pytest.raises(ConfigurationError, match="zb-h1: is a list for one chunk per rank, rank 0 has 2"):
        Policy(hint="zb-h1", split=True).scheduler(Placement.looped(2, 2), 0, 4)
