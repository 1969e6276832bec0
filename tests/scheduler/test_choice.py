"""What `auto` settles on, case by case, and the lists that `announced` waits over."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name, parse_mode
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.choice import Case, announced_over
from rrfp.scheduler.dependencies import chain
from rrfp.scheduler.lists import actions_of
from rrfp.scheduler.validate import replay

ONE, TWO = Placement.looped(8), Placement.looped(4, 2)


@pytest.mark.parametrize("placement, microbatches, options, settled", [
    # One chunk, a whole backward: announced where its list uses what there is, up to a quarter more than 1F1B on the first rank.
    (ONE, 32, {}, "announced over 1f1b"),
    (ONE, 32, {"limit": "eager"}, "announced over 1f1b"),
    (ONE, 32, {"limit": "12-1"}, "announced over 1f1b"),
    (ONE, 32, {"limit": "8"}, "announced over 1f1b"),
    (ONE, 32, {"limit": "10"}, "announced over 1f1b"),
    (ONE, 32, {"limit": "11"}, "fill-alt"),
    (ONE, 32, {"limit": "2p-1"}, "fill-alt"),
    (ONE, 32, {"limit": "2p"}, "fill-alt"),
    (ONE, 32, {"limit": "23-9"}, "fill-alt"),
    (ONE, 32, {"limit": "paper:32"}, "fill-alt"),
    (ONE, 32, {"limit": "7"}, "fill-alt"),  # less than 1F1B
    (ONE, 8, {"limit": "2p"}, "announced over 1f1b"),  # as far as a call of 8 can fill it
    (ONE, 4, {}, "announced over 1f1b"),
    (ONE, 32, {"order": "free", "lanes": 4}, "announced over 1f1b"),
    (ONE, 32, {"order": "free", "lanes": 4, "limit": "2p"}, "fill-alt"),
    # Split.
    (ONE, 32, {"split": True}, "announced over the list that fill-r yields"),
    (ONE, 32, {"split": True, "limit": "8"}, "announced over zb-h1"),
    (ONE, 32, {"split": True, "limit": "2p-1"}, "announced over zb-h2"),
    (ONE, 32, {"split": True, "limit": "2p"}, "fill-r"),
    (ONE, 32, {"split": True, "limit": "19-11"}, "fill-r"),
    (ONE, 32, {"split": True, "limit": "10"}, "fill-r"),
    (ONE, 32, {"split": True, "limit": "6"}, "fill-r"),
    (ONE, 32, {"split": True, "limit": "eager"}, "fill-r"),
    (ONE, 12, {"split": True, "limit": "2p-1"}, "fill-r"),  # too few microbatches for ZB-H2
    (ONE, 6, {"split": True, "limit": "2p-1"}, "announced over zb-h1"),
    # Several chunks: forwards in the order of interleaved 1F1B wherever it fits.
    (TWO, 16, {}, "announced over 1f1b"),
    (TWO, 16, {"limit": "14"}, "fill-alt, order megatron"),
    (TWO, 16, {"limit": "2p"}, "announced over 1f1b"),  # 8 activations where interleaved 1F1B holds 11
    (TWO, 16, {"split": True}, "alt, order megatron"),
    (TWO, 16, {"split": True, "limit": "14"}, "alt, order megatron"),
    (TWO, 16, {"split": True, "limit": "2p"}, "1f1b"),
    (TWO, 16, {"limit": "14", "order": "free"}, "1f1b"),
    (TWO, 16, {"order": "free"}, "announced over 1f1b"),
    (TWO, 16, {"order": "free", "split": True}, "1f1b"),
    (TWO, 16, {"order": "megatron", "limit": "14"}, "fill-alt"),
    (TWO, 16, {"limit": "paper:16"}, "announced over 1f1b"),
    (Placement.v(4), 16, {"limit": "14"}, "announced over 1f1b"),  # no interleaved 1F1B there
    (Placement.looped(1), 4, {}, "announced over 1f1b"),
])
def test_what_auto_settles_on(placement, microbatches, options, settled):
    policy = Policy(**options)
    assert policy.hint == "auto" and policy.describe(placement, microbatches) == f"auto: {settled}"
    hint = policy.settled(placement, microbatches)
    assert hint.settled(placement, microbatches) == hint, "there is nothing left to settle"
    assert (hint.mode, hint.limit, hint.lanes, hint.split) == (policy.mode, policy.limit, policy.lanes, policy.split)
    own, its = ([p.scheduler(placement, rank, microbatches) for rank in {0, placement.ranks - 1}] for p in (policy, hint))
    assert {s.digest for s in own} == {s.digest for s in its} and len({s.digest for s in own}) == 1, "alike on every rank"
    assert all(s.announces == (hint.hint == "announced") for s in own)


def test_a_hint_that_is_named_is_not_replaced():
    for hint in ("announced", "bf", "fill", "1f1b"):
        policy = Policy(hint=hint, limit="2p")
        assert policy.settled(ONE, 32) is policy
    assert Policy(hint="bf").describe(ONE, 32) == "bf"
    assert Policy(hint="announced").describe(ONE, 32) == "announced over 1f1b"


def test_ranks_that_settle_differently_would_be_noticed():
    """Control: the digest tells two settled hints apart."""
    digests = {Policy(hint=hint, limit="2p").scheduler(ONE, 0, 32).digest for hint in ("auto", "announced", "alt")}
    assert len(digests) == 3
    assert Policy(limit="2p").scheduler(ONE, 0, 32).digest == Policy(hint="fill-alt", limit="2p").scheduler(ONE, 0, 32).digest


def test_strict_obeys_the_list_of_what_auto_settles_on():
    one = Placement.looped(4)
    assert Policy(mode="strict").list_for(one, 6) == Policy(hint="1f1b", mode="strict").list_for(one, 6)
    auto, named = (Policy(hint=hint, mode="strict", limit="4", split=True) for hint in ("auto", "zb-h1"))
    assert auto.list_for(one, 6) == named.list_for(one, 6)


def test_auto_in_the_notation_of_modes():
    policy = parse_mode("ready:auto:2p-1:split")
    assert policy == Policy(limit="2p-1", split=True) and mode_name(policy) == "ready:auto:2p-1:split"
    assert mode_name(policy.settled(ONE, 32)) == "ready:announced:2p-1:split"


# -- lists to wait over --------------------------------------------------------------------------------------------------


def over(placement, microbatches, limit, split=False):
    limits = Policy(limit=limit, split=split).limits(placement, microbatches)
    return announced_over(Case(placement, microbatches, tuple(limits), split))


@pytest.mark.parametrize("limit, microbatches, made_for", [
    ("1f1b", 32, (8, 7, 6, 5, 4, 3, 2, 1)),
    ("1f1b", 3, (3, 3, 3, 3, 3, 3, 2, 1)),
    ("eager", 32, (15, 13, 11, 9, 7, 5, 3, 1)),
    ("2p", 32, (15, 13, 11, 9, 7, 5, 3, 1)),
    ("8", 32, (8, 7, 6, 5, 4, 3, 2, 1)),
    ("10", 32, (10, 9, 7, 6, 5, 4, 2, 1)),
    ("6", 32, (6, 5, 5, 4, 3, 2, 2, 1)),
])
def test_the_warm_up_shrinks_from_rank_to_rank(limit, microbatches, made_for):
    """A flat limit as warm-up would have rank s wait for more forwards than the ranks before it may start: .64 of 1F1B's speed."""
    found = over(ONE, microbatches, limit)
    assert (found.name, found.limits) == ("1f1b", made_for)


@pytest.mark.parametrize("limit", ["1f1b", "eager", "2p-1", "2p", "3", "4", "5", "6", "7-2", "9-4", "paper:5"])
@pytest.mark.parametrize("split", [False, True])
def test_the_list_fits_the_limits(limit, split, full):
    """So it can be obeyed too, as the control of what waiting is worth, and skips can be bounded."""
    for ranks in (1, 2, 4, 5) if full else (4,):
        for microbatches in (1, 3, 7, 12) if full else (3, 12):
            placement, policy = Placement.looped(ranks), Policy(hint="announced", mode="strict", limit=limit, split=split)
            rows = policy.list_for(placement, microbatches)
            peak = replay(rows, [chain(placement, rank, microbatches, split=split) for rank in range(ranks)]).peak
            assert all(need <= most for need, most in zip(peak, policy.limits(placement, microbatches), strict=True))


def test_the_list_at_1f1bs_memory_with_a_split_backward():
    rows = Policy(hint="announced", mode="strict", split=True).list_for(Placement.looped(3), 4)
    assert [" ".join(map(str, actions_of(row))) for row in rows] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1W0 1F2 1I1 1W1 1F3 1I2 1W2 1I3 1W3",
        "2F0 2I0 2W0 2F1 2I1 2W1 2F2 2I2 2W2 2F3 2I3 2W3",
    ]


def test_a_list_that_does_not_fit_is_still_refused_by_its_name():
    with pytest.raises(ConfigurationError, match="--rrfp-hint zb-h1: its list holds 4 activations at stage 1, but --rrfp-limit 1f1b allows 3"):
        Policy(hint="zb-h1", mode="strict", split=True).list_for(Placement.looped(4), 8)
