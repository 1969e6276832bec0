"""Any policy, pipeline, delays, durations, lanes, credits, capacity: the properties of `Cluster.check` hold, and calls end."""

import random

import hypothesis
from hypothesis import strategies as st

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import RULES, SPLIT_ONLY, Policy
from rrfp.scheduler.lists import LISTS

PLACEMENTS = [Placement.looped(2), Placement.looped(3), Placement.looped(5), Placement.looped(2, 2), Placement.v(2),
              Placement.v(3), Placement.of((0, 1, 1, 0, 2))]


@st.composite
def cases(draw):
    hint = draw(st.sampled_from((*RULES, *LISTS)))
    split = hint in SPLIT_ONLY or draw(st.booleans())
    order = draw(st.sampled_from(("microbatch", "microbatch", "megatron", "free")))
    try:
        policy = Policy(hint=hint, mode=draw(st.sampled_from(("ready", "ready", "strict"))), split=split, order=order,
                        limit=draw(st.sampled_from(("1f1b", "eager", "2p-1", "2p", "3", "paper:2"))),
                        lanes=draw(st.integers(1, 3)) if order == "free" else 1,
                        max_pending_w=draw(st.sampled_from((None, 1, 3))) if split else None)
    except ConfigurationError:
        hypothesis.reject()
    return {
        "policy": policy,
        "placement": draw(st.sampled_from(PLACEMENTS)),
        "calls": draw(st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=3)),
        "members": draw(st.sampled_from((1, 1, 2))),
        "capacity": draw(st.integers(1, 3)),
        "credits": draw(st.integers(1, 4)),
        "control_delay": draw(st.sampled_from((0.0, 0.3))),
        "draws": draw(st.integers(0, 2**20)),
    }


def run(virtual, case):
    policy, placement, rng = case["policy"], case["placement"], random.Random(case["draws"])
    memo: dict = {}

    def draw(spread, *key):
        return memo.setdefault(key, rng.choice([0.0, spread, spread * rng.random(), 10 * spread]))

    calls = [virtual.Call.chain(placement, m, policy, forward_only=forward_only) for m, forward_only in case["calls"]]
    try:
        for call in calls:
            call.schedulers(0)
    except ConfigurationError:
        hypothesis.reject()
    cluster = virtual.Cluster.of(
        placement, members=case["members"], capacity=case["capacity"], credits=case["credits"], lanes=policy.lanes,
        control_delay=case["control_delay"], news=lambda member: 0.2 * member,
        delay=lambda edge, m, member: draw(0.5, "delay", edge, m, member),
        duration=lambda action, member: 0.1 + draw(1.0, "duration", action, member))
    cluster.run(*calls).check()
    return cluster


def test_every_schedule_ends_and_keeps_its_promises(virtual, full, seed):
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=2000 if full else 150, deadline=None, database=None,
                         suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much])
    @hypothesis.given(cases())
    def property(case):
        run(virtual, case)

    property()
