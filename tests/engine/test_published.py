"""Published lists, V-placed ones among them, on emulated stages: the real engine and scheduler, messages late at random."""

import random

import pytest

from rrfp.policy import Policy
from rrfp.scheduler.lists import PUBLISHED, actions_of, as_row

LATE = [0.0, 0.0, 0.5, 4.0]


def cluster_of(virtual, placement, seed, *, credits):
    rng, late = random.Random(seed), {}
    return virtual.Cluster.of(placement, credits=credits, delay=lambda *message: late.setdefault(message, rng.choice(LATE)),
                              duration=lambda action, _: {"B": 2.0}.get(action.kind, 1.0) * (1.5 if action.microbatch % 3 == seed % 3 else 1.0))


@pytest.mark.parametrize("mode", ["ready", "strict"])
@pytest.mark.parametrize("order", ["microbatch", "free"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_lists_run_under_late_messages(virtual, name, order, mode, full):
    """With one credit per edge, too: a message that its receiver wants later would hold up everything behind it."""
    placement, microbatches = PUBLISHED[name].placement(3, 2), 6
    policy = Policy(hint=name, mode=mode, order=order, split=PUBLISHED[name].split, limit="12")
    for seed in range(20 if full else 2):
        cluster = cluster_of(virtual, placement, seed, credits=1).run(
            virtual.Call.chain(placement, microbatches, policy), virtual.Call.chain(placement, 6, policy, forward_only=True)).check()
        if mode == "strict":
            for rank, row in enumerate(policy.list_for(placement, microbatches)):
                assert obeys(cluster[rank].executors[0].order, row)


def obeys(order, row):
    """Group after group; within a group in any order."""
    left = list(order)
    for group in row:
        if sorted(left[:len(group)]) != sorted(group):
            return False
        del left[:len(group)]
    return not left


def test_a_reordered_run_is_seen():
    """Control."""
    row = as_row(["0F0", ("0F1", "0B0"), "0B1"])
    first, second, third, last = actions_of(row)
    assert obeys([first, third, second, last], row)
    assert not obeys([first, second, last, third], row)
    assert not obeys([first, second, third], row)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_readiness_gains_over_the_fixed_list(virtual, name):
    """The same messages late: ready mode leaves the list's order where that helps, and ends no later in the sum over seeds."""
    placement = PUBLISHED[name].placement(3, 2)
    ends, left = {}, 0
    for mode in ("strict", "ready"):
        policy = Policy(hint=name, mode=mode, split=True, limit="7")
        ends[mode] = 0.0
        for seed in range(6):
            cluster = cluster_of(virtual, placement, seed, credits=4).run(virtual.Call.chain(placement, 12, policy)).check()
            ends[mode] += max(end for rank in range(3) for end in cluster[rank].executor.ended.values())
            left += mode == "ready" and not all(obeys(cluster[rank].order, row) for rank, row in enumerate(
                Policy(hint=name, mode="strict", split=True, limit="7").list_for(placement, 12)))
    assert left and ends["ready"] < ends["strict"], ends
