"""What any agreement must keep, on the scripted one: the leader sees the intersection, followers obey, nothing crosses calls."""

from rrfp.action import Action, Edge
from rrfp.comm.clock import VirtualClock
from rrfp.tp_coord.scripted_agreement import ScriptedDomain

EDGE, BACK = Edge(0, 1), Edge(2, 1)
ONE, TWO = Action("F", 1, 0), Action("B", 1, 0)


def domain(members=2, delay=lambda member: 0.0):
    clock = VirtualClock()
    whole = ScriptedDomain(members, clock=clock, delay=delay)
    ends = [whole.agreement(member) for member in range(members)]
    for end in ends:
        end.begin(0)
    return clock, ends


def test_to_the_leader_a_message_counts_when_every_member_has_it():
    clock, (leader, second, third) = domain(3)
    for member in (leader, third):
        member.arrived(EDGE, 0)
    second.arrived(BACK, 0)
    clock.run_until_idle()
    assert list(leader.common()) == []
    second.arrived(EDGE, 0)
    clock.run_until_idle()
    assert list(leader.common()) == [(EDGE, 0)] and list(leader.common()) == []


def test_to_a_follower_its_own_arrivals_count():
    clock, (leader, follower) = domain()
    follower.arrived(EDGE, 3)
    assert list(follower.common()) == [(EDGE, 3)] and list(follower.common()) == []


def test_followers_get_the_sequence_in_order_and_no_choice_of_their_own():
    clock, (leader, follower) = domain(delay=lambda member: 0.5)
    woken = []
    follower.open(lambda: woken.append(clock.now()))
    assert follower.decide(TWO) is None, "nothing is out yet"
    assert (leader.decide(ONE), leader.decide(None), leader.decide(TWO)) == (ONE, None, TWO)
    assert follower.decide(TWO) is None, "the news takes its time"
    clock.advance(1.0)
    assert (follower.decide(None), follower.decide(ONE), follower.decide(ONE)) == (ONE, TWO, None)
    assert woken == [1.0, 1.0]


def test_members_may_be_in_different_calls():
    clock, (leader, follower) = domain()
    leader.begin(1)
    leader.arrived(EDGE, 0)
    leader.decide(ONE)
    clock.run_until_idle()
    assert follower.decide(None) is None, "that was for the next call"
    follower.begin(1)
    assert follower.decide(None) == ONE
    # And the other way: what a follower had before the leader began counts once it begins.
    follower.begin(2)
    follower.arrived(EDGE, 0)
    clock.run_until_idle()
    leader.begin(2)
    assert list(leader.common()) == []
    leader.arrived(EDGE, 0)
    clock.run_until_idle()
    assert list(leader.common()) == [(EDGE, 0)]


def test_later_news_never_overtakes():
    late = iter([5.0, 0.0, 0.0])
    clock, (leader, follower) = domain(delay=lambda member: next(late) if member == 1 else 0.0)
    for action in (ONE, TWO):
        leader.decide(action)
    clock.advance(4.0)
    assert follower.decide(None) is None
    clock.advance(1.0)
    assert (follower.decide(None), follower.decide(None)) == (ONE, TWO)


def test_a_member_may_close_twice():
    for end in domain()[1]:
        end.close()
        end.close()
