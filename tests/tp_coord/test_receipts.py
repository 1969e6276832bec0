"""The leader's intersection, from counters alone, against sets."""

import random

import pytest

from rrfp.action import Edge
from rrfp.errors import PipelineError
from rrfp.tp_coord.receipts import Receipts
from rrfp.tp_coord.record import Receipt

EDGES = (Edge(0, 1), Edge(2, 1))


def make(count, lanes=3):
    return [Receipts(EDGES, lanes) for _ in range(count)]


def words(followers):
    return lambda index: [(rank, follower.word(index)) for rank, follower in enumerate(followers, start=1)]


def test_counters_give_exactly_the_intersection(seed):
    """Random prefixes of random lanes, members in different calls: the same as intersecting sets, each message once."""
    rng = random.Random(seed)
    for _ in range(50):
        members = make(rng.randint(2, 4))
        for call in range(3):
            for member in members:
                member.begin(call)
            lanes = []
            for edge in EDGES:
                for lane in range(3):
                    order = list(range(lane, 12, 3))
                    rng.shuffle(order)
                    lanes.append([(edge, microbatch) for microbatch in order])
            todo = [[list(lane) for lane in lanes] for _ in members]
            here, out = [set() for _ in members], []
            while any(any(left) for left in todo):
                index = rng.randrange(len(members))
                if left := [lane for lane in todo[index] if lane]:
                    message = rng.choice(left).pop(0)
                    members[index].arrived(*message)
                    here[index].add(message)
                out += members[0].common(words(members[1:]))
                assert set(out) == set.intersection(*here) and len(out) == len(set(out))
            assert set(members[1].own()) == here[1] and members[1].own() == []


def test_a_member_in_an_earlier_call_has_nothing_and_one_in_a_later_call_has_all():
    leader, follower = make(2)
    for member in (leader, follower):
        member.begin(0)
    follower.arrived(EDGES[0], 0)
    follower.begin(1)
    leader.arrived(EDGES[0], 0)
    assert leader.common(words([follower])) == [(EDGES[0], 0)]
    leader.begin(1)
    leader.begin(2)
    leader.arrived(EDGES[0], 0)
    assert leader.common(words([follower])) == []


@pytest.mark.parametrize("orders", [((0, 3), (3, 0)), ((0, 3), (0, 6)), ((0,), (3,))], ids=["order", "message", "first"])
def test_a_member_that_received_another_lane_is_named(orders):
    leader, follower = make(2)
    for member, order in zip((leader, follower), orders, strict=True):
        member.begin(0)
        for microbatch in order:
            member.arrived(EDGES[0], microbatch)
    with pytest.raises(PipelineError, match=rf"the first {len(orders[0])} messages of call 0 on edge 0>1 lane 0 .* at rank 1"):
        leader.common(words([follower]))


def test_a_difference_at_the_end_of_a_call_is_seen_in_the_next():
    """The digest of a lane goes on over calls, so a follower that moved on too fast is still compared."""
    leader, follower = make(2)
    for member, microbatch in ((leader, 0), (follower, 3)):
        member.begin(0)
        member.arrived(EDGES[0], microbatch)
    follower.begin(1)
    assert leader.common(words([follower])) == [(EDGES[0], 0)]
    leader.begin(1)
    for member in (leader, follower):
        member.arrived(EDGES[0], 6)
    with pytest.raises(PipelineError, match="diverge"):
        leader.common(words([follower]))


def test_a_lane_that_is_silent_for_many_calls_is_not_taken_for_a_later_one():
    leader, follower = make(2)
    for call in (0, 40_000):
        for member in (leader, follower):
            member.begin(call)
    leader.arrived(EDGES[0], 0)
    assert leader.common(words([follower])) == []
    assert Receipt.of(Receipt(0, 5, 0).word, near=40_000).call > 40_000, "why every call publishes its words at its start"
