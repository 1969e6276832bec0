"""The deadlock rules, checked over every order in which ranks could act, and kept honest by configurations that do deadlock.

`explore` tries every admissible action in every reachable state, so no hint can do worse. A message arrives as soon as it is
sent: a later arrival only takes choices away, and an earlier choice stays possible.
"""

import dataclasses
import random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import RULES, SPLIT_ONLY, Policy
from rrfp.scheduler import Dependencies, Scheduler, chain
from rrfp.scheduler.arbiter import MOST_UNSENT
from rrfp.scheduler.hints import Announced, Prefer
from rrfp.scheduler.lists import LISTS, as_row, one_f_one_b
from rrfp.simulate import Deadlock, drive


def explore(pipeline: list[Dependencies], limits: list[int], **options) -> frozenset[Action] | None:
    """A reachable state in which nothing is admissible though something is left: the set of what ran. None if there is none."""
    everything = sum(len(dependencies.tasks) for dependencies in pipeline)
    start: tuple[Action, ...] = ()
    seen, stack = {frozenset(start)}, [start]
    while stack:
        path = stack.pop()
        ranks = [Scheduler(d, Prefer("BF"), limit=limit, **options) for d, limit in zip(pipeline, limits, strict=True)]
        _replay(ranks, path)
        choices = [action for rank in ranks for action in rank.admissible()]
        if not choices and len(path) < everything:
            return frozenset(path)
        for action in choices:
            state = frozenset(path) | {action}
            if state not in seen:
                seen.add(state)
                stack.append((*path, action))
    return None


def _replay(ranks: list[Scheduler], path: tuple[Action, ...]) -> None:
    home = {action: rank for rank in ranks for action in rank.dependencies.tasks}
    listeners = {}
    for rank in ranks:
        for task in rank.dependencies.tasks.values():
            for edge in task.arrivals:
                listeners[edge] = rank
    for action in path:
        home[action].launched(action, 0.0)
        home[action].completed(action, 0.0)
        for edge in home[action].task(action).sends:
            listeners[edge].arrived(edge, action.microbatch)


def build(placement, microbatches, *, split=False):
    return [chain(placement, rank, microbatches, split=split) for rank in range(placement.ranks)]


@pytest.mark.parametrize("order", ["microbatch", "free"])
@pytest.mark.parametrize("limits", [[1, 1], [2, 1], [1, 2]])
def test_one_chunk_is_safe_at_any_limit(limits, order):
    assert explore(build(Placement.looped(2), 3), limits, order=order, admission="plain") is None
    assert explore(build(Placement.looped(2), 2, split=True), limits, order=order, admission="plain", max_pending_w=1) is None


@pytest.mark.parametrize("placement", [Placement.looped(2, 2), Placement.v(2)], ids=["looped", "v"])
@pytest.mark.parametrize("limit", [2, 3])
def test_chunks_are_safe_with_reserved_slots(placement, limit):
    assert explore(build(placement, 3), [limit] * 2) is None


def test_chunks_are_safe_with_reserved_slots_split_and_bounded():
    assert explore(build(Placement.looped(2, 2), 2, split=True), [2, 2], max_pending_w=1) is None


def test_chunks_are_safe_in_free_order(full):
    assert explore(build(Placement.looped(2, 2), 3 if full else 2), [2, 2], order="free") is None


@pytest.mark.parametrize("limit", [1, 2])
def test_the_papers_backpressure_is_safe(limit):
    assert explore(build(Placement.looped(2, 2), 3), [limit] * 2, admission="paper") is None


def test_control_one_slot_fewer_than_chunks_deadlocks():
    assert explore(build(Placement.looped(2, 2), 2), [1, 1]) is not None
    with pytest.raises(ConfigurationError, match="rank 0 holds 2 chunks and 1 activations, which deadlocks; use at least 2"):
        Policy(hint="bf", limit="1").scheduler(Placement.looped(2, 2), 0, 4)


@pytest.mark.parametrize("limit", [2, 3])
def test_control_naive_admission_of_chunks_deadlocks(limit):
    assert explore(build(Placement.looped(2, 2), 4), [limit] * 2, admission="plain") is not None


def test_control_backwards_in_order_with_forwards_free_deadlock_at_sloping_limits():
    """Why no option orders one kind and frees the other."""
    pipeline = []
    for dependencies in build(Placement.looped(2), 3):
        tasks = dict(dependencies.tasks)
        for action, task in dependencies.tasks.items():
            # Stage 0 starts microbatches in index order in any case.
            if action.microbatch and (action.kind == "B" or action.stage == 0):
                before = Action(action.kind, action.stage, action.microbatch - 1)
                tasks[action] = dataclasses.replace(task, after=(*task.after, before))
        pipeline.append(Dependencies(dependencies.rank, dependencies.stages, tasks))
    assert explore(pipeline, [2, 1], order="free", admission="plain") is not None
    # Uniform limits do not, and neither does one order for both kinds.
    assert explore(pipeline, [2, 2], order="free", admission="plain") is None
    assert explore(pipeline, [2, 1], order="microbatch", admission="plain") is None


@pytest.mark.parametrize("limits", [[3, 1], [2, 1], [3, 2]])
def test_falling_limits_are_safe(limits):
    for order in ("microbatch", "free"):
        assert explore(build(Placement.looped(2), 3), limits, order=order, admission="plain") is None
        assert explore(build(Placement.looped(2), 2, split=True), limits, order=order, admission="plain") is None


def test_control_a_limit_that_grows_along_the_pipeline_deadlocks_the_list_that_announced_waits_over():
    """Why --rrfp-limit 1-4 is refused: rank 0 may not start what rank 1's list wants before it goes back."""
    def stuck(limits):
        ranks = []
        for rank, limit in enumerate(limits):
            row = as_row(one_f_one_b(rank, 6, warm_up=min(limit, 2 * (4 - rank) - 1) - 1))
            ranks.append(Scheduler(chain(Placement.looped(4), rank, 6), Announced(row, skips=1, slack=3.0), limit=limit))
        try:
            drive(ranks, lambda action: 1.0)
        except Deadlock as error:
            return str(error)
        return None
    assert "0F1 is held by the limit 1 (in flight 1)" in stuck([1, 2, 3, 4]) and stuck([4, 3, 2, 1]) is None


def test_control_a_fixed_order_of_forwards_that_does_not_fit_deadlocks():
    placement = Placement.looped(2, 2)
    forwards = [[Action("F", s, m) for s in placement.stages_of(r) for m in range(2)] for r in range(2)]
    def stuck(limit):
        ranks = [Scheduler(chain(placement, r, 2), Prefer("FB"), limit=limit, admission="plain", forwards=forwards[r])
                 for r in range(2)]
        try:
            drive(ranks, lambda action: 1.0)
        except Deadlock as error:
            return str(error)
        return None
    assert "0F1 is held by the limit 1 (in flight 1)" in stuck(1) and stuck(3) is None
    with pytest.raises(ConfigurationError, match="--rrfp-limit 2: rank 0 may hold 2, but --rrfp-order megatron needs 4"):
        Policy(hint="bf", limit="2", order="megatron").scheduler(placement, 0, 2)


@st.composite
def configurations(draw):
    ranks, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    placement = draw(st.sampled_from([Placement.looped(ranks, chunks), Placement.v(ranks, chunks)]))
    split = draw(st.booleans())
    choices = [hint for hint in (*RULES, *LISTS)
               if (split or hint not in SPLIT_ONLY) and not (chunks > 1 and hint.startswith("zb-"))]
    order = draw(st.sampled_from(["microbatch", "free", "megatron"]))
    limits = ["1f1b", "eager", "2p-1", "2p", "1", "2", "3", "7", "2-1", "5-2", "19-11", "paper:1", "paper:2", "paper:5"]
    policy = Policy(
        hint=draw(st.sampled_from(choices)),
        limit=draw(st.sampled_from(limits)),
        order=order,
        lanes=draw(st.sampled_from([1, 1, 3])),
        split=split,
        max_pending_w=draw(st.sampled_from([None, 1, 2])) if split else None,
    )
    return policy, placement, draw(st.integers(1, 9)), draw(st.integers(0, 2**20)), draw(st.booleans())


def run_one(policy, placement, microbatches, seed, forward_only):
    """One call under random durations, delays and announcement delays; returns False if the configuration is refused."""
    rng = random.Random(seed)
    spread = rng.choice([0.0, 0.3, 3.0])
    lateness = rng.choice([0.0, 1.0, 20.0])
    try:
        first = rng.choice([0, 0, placement.stages // 2])
        ranks = [policy.scheduler(placement, r, microbatches, forward_only=forward_only, first_trainable=first)
                 for r in range(placement.ranks)]
    except ConfigurationError:
        return False
    for scheduler in ranks:
        if forward_only or min(scheduler.dependencies.stages) < first:
            scheduler.bound_unsent(rng.choice([1, MOST_UNSENT]))
    # Integers on purpose in some runs: many things at one instant.
    def some(scale):
        return float(rng.randrange(4)) if spread == 0.0 else scale * rng.expovariate(1)
    result = drive(ranks, lambda action: 0.1 + some(spread), lambda edge, action: some(lateness), lanes=policy.lanes,
                   announce_delay=rng.choice([0.0, 0.2, 5.0]))
    bounds = policy.limits(placement, microbatches)
    for rank, scheduler in enumerate(ranks):
        row = result.rows[rank]
        assert sorted(row) == sorted(scheduler.dependencies.tasks), "every action exactly once"
        assert scheduler.peak_in_flight <= bounds[rank], f"rank {rank} held {scheduler.peak_in_flight} of {bounds[rank]}"
        assert scheduler.in_flight == scheduler.pending_w == 0
        if policy.max_pending_w is not None:
            assert scheduler.peak_pending_w <= policy.max_pending_w
        if policy.order != "free":
            for stage in scheduler.dependencies.stages:
                for kind in "FBIW":
                    order = [action.microbatch for action in row if (action.stage, action.kind) == (stage, kind)]
                    assert order == sorted(order), f"{kind} of stage {stage} left microbatch order"
    return True


def test_every_configuration_finishes_within_its_limits(full):
    ran = [0, 0]

    @settings(max_examples=4000 if full else 300, deadline=None, print_blob=True, database=None)
    @given(configurations())
    def check(configuration):
        policy, placement, microbatches, seed, forward_only = configuration
        note(f"seed {seed}: {policy}, owners {placement.owners}, M={microbatches}, forward_only={forward_only}")
        ran[run_one(*configuration)] += 1

    check()
    assert ran[True] > ran[False], "most configurations must be legal, or this test shows nothing"


def test_control_a_rule_that_ignores_the_limit_is_noticed(monkeypatch):
    monkeypatch.setattr(Scheduler, "admits", lambda self, queue, action: True)
    with pytest.raises(AssertionError, match="rank 0 held"):
        run_one(Policy(hint="f-first", limit="1f1b"), Placement.looped(3), 8, 1, False)
