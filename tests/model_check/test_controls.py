"""The known deadlocks, each found when its guard is taken away, with its shortest trace; and broken parts that are noticed."""

import dataclasses

import pytest
from cells import ANY, Cell, connect, forget
from components import Rank, Violation
from explorer import Automaton, System
from links import Link

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler import Dependencies, Scheduler, chain
from rrfp.scheduler.hints import Announced, Prefer
from rrfp.scheduler.lists import as_row, one_f_one_b
from rrfp.tp_coord.scripted_agreement import ScriptedAgreement


def pipeline(placement: Placement, microbatches: int) -> list[Dependencies]:
    return [chain(placement, rank, microbatches) for rank in range(placement.ranks)]


def build(parts, limits, *, hint=lambda rank: Prefer("BF"), credits=4, lanes=1, share=False, any_choice=True, **options) -> System:
    """A system from schedulers that no policy would make."""
    blocking = options.pop("blocking", False)
    schedulers = [[Scheduler(d, hint(rank), limit=limit, **options)]
                  for rank, (d, limit) in enumerate(zip(parts, limits, strict=True))]
    ranks = [Automaton(Rank([members], any_choice=any_choice, announces=not any_choice, blocking=blocking)) for members in schedulers]
    return connect(ranks, schedulers, limits, credits=credits, lanes=lanes, share=share)


def deadlock(system: System, name: str) -> str:
    """The shortest trace to a deadlock, printed; what holds every rank there."""
    report = system.explore(shortest=True)
    assert report.deadlock is not None, f"{name}: no deadlock in {report.states} states"
    print(f"{name}, after {report.states} states:\n  {'; '.join(report.deadlock)}\n  then {system.explain_end(report)}")
    return system.explain_end(report)


def safe(system: System) -> bool:
    report = system.explore()
    return report.deadlock is None and len(report.ends) == 1


def backwards_in_order(microbatches: int) -> list[Dependencies]:
    """B (and what stage 0 starts) in microbatch order, the other forwards free."""
    parts = []
    for dependencies in pipeline(Placement.looped(2), microbatches):
        tasks = dict(dependencies.tasks)
        for action, task in dependencies.tasks.items():
            if action.microbatch and (action.kind == "B" or action.stage == 0):
                tasks[action] = dataclasses.replace(
                    task, after=(*task.after, Action(action.kind, action.stage, action.microbatch - 1)))
        parts.append(Dependencies(dependencies.rank, dependencies.stages, tasks))
    return parts


def test_backwards_in_order_with_free_forwards_deadlock_at_sloping_limits():
    held = deadlock(build(backwards_in_order(3), [2, 1], order="free", admission="plain"), "B in order, F free, limits 2, 1")
    assert "1F0 is held by the limit 1" in held
    assert safe(build(backwards_in_order(3), [2, 2], order="free", admission="plain"))
    assert safe(build(pipeline(Placement.looped(2), 3), [2, 1], order="free", admission="plain"))


@pytest.mark.parametrize("limit", [2, 3])
def test_chunks_that_share_a_limit_without_reserved_slots_deadlock(limit):
    parts = pipeline(Placement.looped(2, 2), limit + 1)
    assert "held by the limit" in deadlock(build(parts, [limit] * 2, admission="plain"), f"two chunks, no reserved slot, limit {limit}")
    assert safe(build(parts, [limit] * 2))


def test_a_limit_of_one_less_than_the_chunks_deadlocks():
    parts = pipeline(Placement.looped(2, 2), 2)
    assert "0F0 is held by the limit 1" in deadlock(build(parts, [1, 1]), "two chunks, a reserved slot, limit 1")
    assert "2F0 is held by the limit 1 (in flight 1)" in deadlock(build(parts, [1, 1], admission="plain"), "two chunks, limit 1")
    with pytest.raises(ConfigurationError, match="which deadlocks; use at least 2"):
        Cell((2, 2, 2, 1), ANY, limit="1").schedulers()


def test_one_channel_for_all_kinds_and_chunks_deadlocks_with_credits():
    parts = pipeline(Placement.looped(2, 2), 3)
    for limits, credits in (([3, 2], 1), ([4, 4], 2)):
        name = f"two chunks, one channel for all kinds and chunks, credits {credits}, limits {limits}"
        deadlock(build(parts, limits, credits=credits, share=True), name)
        assert safe(build(parts, limits, credits=credits))


@pytest.mark.parametrize("slots", [1, 2])
def test_blocking_sends_deadlock_head_to_head(slots):
    """Into buffers of Q slots: at 2Q + 2 activations in flight, not at one fewer."""
    count = 2 * slots + 2
    parts = pipeline(Placement.looped(2), count)
    deadlock(build(parts, [count] * 2, credits=slots, blocking=True), f"blocking sends, {slots} slots, limit {count}")
    assert safe(build(parts, [count - 1] * 2, credits=slots, blocking=True))
    assert safe(build(parts, [count] * 2, credits=slots))


def growing(limits: list[int], microbatches: int) -> System:
    ranks = len(limits)
    rows = [as_row(one_f_one_b(r, microbatches, warm_up=min(limit, 2 * (ranks - r) - 1) - 1)) for r, limit in enumerate(limits)]
    return build(pipeline(Placement.looped(ranks), microbatches), limits, hint=lambda r: Announced(rows[r], skips=1, slack=3.0),
                 any_choice=False)


def test_limits_that_grow_along_the_pipeline_deadlock_under_announced():
    assert "held by the limit 1" in deadlock(growing([1, 2, 3, 4], 4), "announced, limits 1, 2, 3, 4")
    assert safe(growing([4, 3, 2, 1], 4))
    with pytest.raises(ConfigurationError, match="write 23-9"):
        Policy(limit="1-4")


# -- parts broken on purpose --------------------------------------------------------------------------------------------


def small(**options) -> System:
    """A system of its own: nothing is shared with other tests."""
    return build(pipeline(Placement.looped(2), 2), [2, 1], admission="plain", **options)


@pytest.fixture
def fresh():
    """Links unfolded before do not hide what is broken here."""
    forget()
    yield
    forget()


@pytest.mark.parametrize(("owner", "name", "broken", "message"), [
    (Scheduler, "admits", lambda self, queue, action: True, "rank 1 holds 2 activations, its limit is 1"),
    (Link, "_credit", lambda self: (str(self.back.popleft()), []), "edge .* has 3 of 4 credits"),
    (Link, "_release", lambda self, *arguments: ("", []), "edge .* keeps 2 buffers, its rank may hold 1"),
], ids=["limit", "credit", "buffer"])
def test_a_broken_part_is_noticed(monkeypatch, fresh, owner, name, broken, message):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Violation, match=message):
        small().explore(level=1)


def test_an_action_that_runs_twice_is_noticed(monkeypatch, fresh):
    again = Scheduler.completed

    def completed(self, action, now):
        again(self, action, now)
        if action.kind == "F":
            self._lacking[action] = 0
            self._queues[action.stage, "F"].position = 0

    monkeypatch.setattr(Scheduler, "completed", completed)
    with pytest.raises((Violation, ValueError, KeyError)):
        small().explore(level=1)


def test_a_lost_credit_deadlocks(monkeypatch, fresh):
    monkeypatch.setattr(Link, "check", lambda self: None)
    monkeypatch.setattr(Link, "_consume", lambda self, edge, call, microbatch: ("", []))
    report = small(credits=1).explore()
    assert report.deadlock is not None and "1F1 lacks 0>1 microbatch 1" in report.deadlock[0]


def test_a_member_that_chooses_for_itself_is_noticed(monkeypatch, fresh):
    """The agreement is what keeps one sequence: without it the members part."""
    def common(self):
        self._new, new = [], self._new
        return new

    monkeypatch.setattr(ScriptedAgreement, "decide", lambda self, choice: choice)
    monkeypatch.setattr(ScriptedAgreement, "common", common)
    with pytest.raises(Violation, match="where its leader ran"):
        Cell((2, 2, 1, 2), "bf", limit="2p").system().explore()


def test_the_explorer_says_when_it_gave_up():
    report = Cell((2, 2, 1, 1), ANY).system().explore(level=1, most=10)
    assert not report.complete and report.states > 10


@pytest.mark.parametrize("options", [
    {"parts": backwards_in_order(3), "limits": [2, 1], "order": "free", "admission": "plain"},
    {"parts": pipeline(Placement.looped(2, 2), 2), "limits": [1, 1], "admission": "plain"},
    {"parts": pipeline(Placement.looped(2), 4), "limits": [4, 4], "credits": 1, "blocking": True},
], ids=["order", "chunks", "blocking"])
def test_the_reduction_keeps_every_deadlock(options):
    system = build(**options)
    reduced, everything = system.explore(), system.explore(level=0)
    assert reduced.ends == everything.ends and reduced.deadlock is not None and reduced.states < everything.states


def test_a_trace_holds_only_what_leads_to_the_deadlock():
    report = build(pipeline(Placement.looped(2, 2), 2), [1, 1], admission="plain").explore(shortest=True)
    assert report.deadlock == ["start 0F0", "0>1 brings microbatch 0", "start 1F0", "1>2 brings microbatch 0"]
