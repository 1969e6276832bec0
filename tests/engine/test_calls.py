"""Call after call: ranks are not in step between calls, and every call may have another size."""

import pytest

from rrfp.action import Edge
from rrfp.comm.transport import Arrival
from rrfp.placement import Placement
from rrfp.policy import Policy


POLICIES = [Policy(), Policy(hint="bf", limit="2p"), Policy(hint="1f1b", mode="strict")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.hint)
def test_calls_of_different_sizes(virtual, policy):
    """Batch ramp-up, evaluation in between, fewer microbatches than stages."""
    placement = Placement.looped(4)
    sizes = [(1, False), (2, False), (3, True), (8, False), (1, True), (5, False)]
    calls = [virtual.Call.chain(placement, m, policy, forward_only=forward_only) for m, forward_only in sizes]
    cluster = virtual.Cluster.of(placement, delay=lambda edge, m, _: 0.3 * (m % 3)).run(*calls).check()
    assert all(member.engine.call == 5 and not member.engine.in_call for member in cluster.members)


def test_messages_of_the_next_call_wait_for_it(virtual):
    """Stage 0 is two calls ahead of stage 1, which takes each message in its own call."""
    placement = Placement.looped(2)
    cluster = virtual.Cluster.of(placement, duration=lambda action, _: 1.0 if action.stage == 0 else 30.0)
    sent = []

    def look():
        sent.append((cluster[0].engine.call, cluster[1].engine.call, sum(map(len, cluster[1].arrived.values()))))

    cluster.clock.call_at(5.5, look)
    cluster.run(*[virtual.Call.chain(placement, 2, forward_only=True)] * 4).check()
    # Four credits: two calls have left, the first of them is being worked on.
    assert sent == [(2, 0, 2)]
    assert cluster[1].arrived == {(call, Edge(0, 1), 0): [0, 1] for call in range(4)}


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_evaluation_needs_no_synchronisation(virtual, microbatches):
    """Only credits hold the first stage back, however many calls that takes it ahead."""
    placement = Placement.looped(3)
    for slow in range(3):
        cluster = virtual.Cluster.of(placement, duration=lambda action, _, slow=slow: 10.0 if action.stage == slow else 1.0)
        cluster.run(*[virtual.Call.chain(placement, microbatches, forward_only=True)] * 6).check()
        end = max(member.executor.ended[member.order[-1]] for member in cluster.members)
        assert end == 6 * microbatches * 10.0 + 2.0, "the slow stage never waits for the others"


def test_an_announcement_of_another_call_is_dropped(virtual):
    from rrfp.comm.transport import Announcement

    placement = Placement.looped(2)
    cluster = virtual.Cluster.of(placement)
    for call in (-1, 7):
        cluster[1].engine.post(Announcement(call, Edge(0, 1), 0, 0.0, 1e9))
    cluster.run(virtual.Call.chain(placement, 2, Policy())).check()
    assert cluster[1].schedulers[0].hold_until(cluster[1].order[0], 1.0) is None


def test_averages_are_handed_on(virtual):
    """The moving averages of one call start the next one's, if whoever makes schedulers wants so."""
    placement = Placement.looped(1)
    call = virtual.Call.chain(placement, 3)
    cluster = virtual.Cluster.of(placement).run(call)
    assert cluster[0].schedulers[0].durations == {"F": 1.0, "B": 2.0}


def test_an_arrival_is_an_event_of_its_call(virtual):
    """Posted once each; in flight they stay in the transport."""
    placement = Placement.looped(2)
    cluster = virtual.Cluster.of(placement)
    seen = []
    post = cluster[1].engine.post

    def posted(event):
        if isinstance(event, Arrival):
            seen.append((event.call, cluster[1].engine.call))
        post(event)

    cluster[1].engine.post = posted
    cluster.run(*[virtual.Call.chain(placement, 3, forward_only=True)] * 3).check()
    assert len(seen) == 9 and all(sent == now for sent, now in seen)
