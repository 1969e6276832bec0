"""A leader that decides before it runs: the same rules, and a decision that nobody waits for."""

import pytest

from rrfp.placement import Placement
from rrfp.policy import Policy

PAIR = Placement.looped(2)
NEWS = 0.5
"""Seconds that news takes between the two members."""


def run(virtual, policy, **options):
    return virtual.Cluster.of(
        PAIR, members=2, news=lambda member: NEWS * member, duration=lambda action, member: 2.0 if action.kind == "B" else 1.0,
        **options).run(virtual.Call.chain(PAIR, 8, policy)).check()


@pytest.mark.parametrize("policy", [Policy(), Policy(hint="bf", limit="2p"), Policy(hint="fb", limit="2p", order="free", lanes=2)])
def test_every_member_runs_one_sequence(virtual, policy):
    cluster = run(virtual, policy, decide_ahead=True)
    for rank in (0, 1):
        first, second = (member.order for member in cluster.members if member.rank == rank)
        assert first == second and len(first) == 16


def lag(virtual, policy, decide_ahead) -> float:
    """Seconds by which the first stage's follower starts its second action after the leader, if both have ended the first at once."""
    def duration(action, member) -> float:
        return 1.0 - (NEWS if member and str(action) == "0F0" else 0.0)

    cluster = virtual.Cluster.of(PAIR, members=2, news=lambda member: NEWS * member, duration=duration, decide_ahead=decide_ahead)
    leader, follower = (member.executor.log for member in cluster.run(virtual.Call.chain(PAIR, 8, policy)).check().members[:2])
    assert leader[1][0] == follower[1][0]
    return follower[1][1] - leader[1][1]


@pytest.mark.parametrize("policy", [Policy(hint="fb", limit="8"), Policy(hint="gpipe", limit="8")])
def test_nobody_waits_for_a_decision_made_ahead(virtual, policy):
    assert lag(virtual, policy, True) == 0
    assert lag(virtual, policy, False) == NEWS


def test_a_fixed_list_is_always_decided_ahead(virtual):
    assert lag(virtual, Policy(hint="gpipe", mode="strict", limit="8"), False) == 0


def test_what_becomes_ready_meanwhile_is_not_looked_at(virtual):
    """The price: a backward that is ready when the last stage's forward ends comes one forward later."""
    policy = Policy(hint="bf", limit="8", order="free")
    late, ahead = ([str(action) for action in next(m for m in run(virtual, policy, decide_ahead=choice).members if m.rank == 1).order]
                   for choice in (False, True))
    assert late[:6] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert ahead[:6] == ["1F0", "1B0", "1F1", "1F2", "1B1", "1F3"]


def test_a_rank_alone_has_nobody_to_decide_for(virtual):
    placement = Placement.looped(2)
    orders = [virtual.Cluster.of(placement, decide_ahead=choice).run(virtual.Call.chain(placement, 8)).check()[1].order
              for choice in (False, True)]
    assert orders[0] == orders[1]
