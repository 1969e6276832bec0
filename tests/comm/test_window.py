"""Who has entered which call, in every order in which a rank and its neighbours can."""

import random

import pytest

from rrfp.comm.transport import Failure
from rrfp.comm.window import Roll

OWN, PEERS, AHEAD = 2, (1, 3, 7), 4


def entering(draw: random.Random, calls: int, roll: Roll, different: tuple[int, int] | None = None) -> Failure | str | None:
    """All enter `calls` calls, in a random order, at most AHEAD + 1 apart; the rank `different[0]` means something else by one."""
    at = dict.fromkeys((OWN, *PEERS), -1)
    while any(call < calls - 1 for call in at.values()):
        # Often long runs of one rank: all neighbours enter several calls before this rank does, or the other way round.
        rank = draw.choice((OWN, *PEERS))
        for _ in range(draw.choice((1, 1, 2, 5))):
            if at[rank] == calls - 1 or rank != OWN and at[rank] > at[OWN] + AHEAD:
                break
            at[rank] += 1
            facts = {"microbatches": "9" if (rank, at[rank]) == different else "8"}
            found = roll.enter(at[rank], facts) if rank == OWN else roll.hear(rank, at[rank], facts)
            if found is not None:
                return found
    return None


@pytest.mark.parametrize("case", range(50))
def test_neighbours_that_agree_are_never_refused_and_never_kept(case, seed):
    roll = Roll(OWN, PEERS, ahead=AHEAD)
    assert entering(random.Random(f"{seed}/{case}"), 40, roll) is None
    assert roll.last == dict.fromkeys(PEERS, 39)
    assert roll.kept == 0


@pytest.mark.parametrize("case", range(50))
def test_one_that_means_something_else_is_found(case, seed):
    draw = random.Random(f"{seed}/{case}")
    odd, call = draw.choice((OWN, *PEERS)), draw.randrange(40)
    found = entering(draw, 40, Roll(OWN, PEERS, ahead=AHEAD), (odd, call))
    assert isinstance(found, Failure) and f"disagree on what call {call} is: microbatches" in found.text


def test_a_rank_that_comes_last_into_every_call_is_no_mistake():
    """Its neighbours are there already, all of them: each is compared, and none of their calls is kept."""
    roll = Roll(OWN, PEERS, ahead=AHEAD)
    for call in range(3 * AHEAD):
        for peer in PEERS:
            assert roll.hear(peer, call, {}) is None
        assert roll.enter(call, {}) is None and roll.kept == 0


def test_a_neighbour_too_far_ahead_is_refused():
    roll = Roll(OWN, PEERS, ahead=AHEAD)
    assert [roll.hear(1, call, {}) for call in range(AHEAD + 1)] == [None] * (AHEAD + 1)
    assert roll.hear(1, AHEAD + 1, {}) == "call 5 is entered, 5 calls before this rank"
