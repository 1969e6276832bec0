"""The scheduler itself: readiness, limits, counters, refusals, graphs that are no chain."""

import importlib.util
from pathlib import Path

import pytest

from rrfp.action import Action, Edge, parse_action
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler import Decision, Dependencies, Scheduler, Task, chain
from rrfp.scheduler.hints import Prefer, Ranked, Rounds
from rrfp.scheduler.lists import as_row
from rrfp.simulate import drive

spec = importlib.util.spec_from_file_location("scheduler_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
middle, play = helpers.middle, helpers.play
a = parse_action


def test_nothing_is_ready_before_it_arrives():
    s = middle(1)
    assert s.choose(0.0) == Decision(None, None)
    s.arrived(Edge(0, 1), 0)
    assert s.choose(0.0).action == a("1F0")


def test_microbatch_order_waits_for_the_earlier_microbatch_and_free_order_does_not():
    assert play(middle(3, hint="f-first", limit="3"), "f0 . f2 . f1 . .") == "F0 - F1 F2"
    assert play(middle(3, hint="f-first", limit="3", order="free"), "f0 . f2 . f1 . .") == "F0 F2 F1 -"
    assert play(middle(2, hint="bf", order="free"), "f1 . f0 . .") == "- F0 F1", "microbatch 0 is the first in any order"


def test_free_order_takes_the_hints_order_among_ready_microbatches():
    deps = chain(Placement.looped(3), 1, 3)
    reverse = as_row("1F2 1F1 1F0 1B0 1B1 1B2".split())
    assert play(Scheduler(deps, Ranked(reverse), limit=3, order="free"), "f0 f1 f2 * b0 b1 b2 *") == "F2 F1 F0 B0 B1 B2"


def test_the_limit_holds_forwards_only():
    s = middle(3, hint="f-first", limit="1")
    assert play(s, "f0 f1 f2 . . b0 . .") == "F0 - B0 F1"
    assert s.peak_in_flight == 1


def test_a_slot_is_free_at_completion_not_at_launch():
    s = middle(2, hint="f-first", limit="1")
    play(s, "f0 f1 b0 .")
    s.launched(a("1B0"), 1.0)
    assert s.choose(1.0).action is None
    s.completed(a("1B0"), 2.0)
    assert s.choose(2.0).action == a("1F1")


def test_split_holds_the_slot_until_w():
    assert play(middle(2, hint="f-first", split=True, limit="1"), "f0 f1 . b0 . . .") == "F0 I0 W0 F1"


def test_pending_w_bound_holds_i_and_the_oldest_w_goes_first():
    news = "f0 f1 f2 . . . b0 b1 b2 *"
    s = middle(3, hint="bfw", split=True, max_pending_w=1)
    assert play(s, news) == "F0 F1 F2 I0 W0 I1 W1 I2 W2" and s.peak_pending_w == 1
    s = middle(3, hint="bfw", split=True)
    assert play(s, news) == "F0 F1 F2 I0 I1 I2 W0 W1 W2" and s.peak_pending_w == 3


def test_a_launched_i_counts_towards_the_bound_before_it_completes():
    s = middle(2, hint="bfw", split=True, max_pending_w=1)
    play(s, "f0 f1 . . b0 b1")
    s.launched(a("1I0"), 0.0)
    assert s.choose(0.0).action is None, "1I1 would make two pending"


def test_counters_and_the_end():
    s = middle(1)
    play(s, "f0 .")
    assert (s.started["F"], s.done["F"], s.done["B"], s.launched_count, s.in_flight, s.finished) == (1, 1, 0, 1, 1, False)
    play(s, "b0 .")
    assert s.finished and s.in_flight == 0 and s.peak_in_flight == 1


def test_moving_average_starts_with_the_first_sample_and_survives_calls():
    s = middle(2, hint="f-first")
    assert s.duration_of("F") == 0.0
    for microbatch, (start, end) in enumerate([(0.0, 2.0), (2.0, 5.0)]):
        s.arrived(Edge(0, 1), microbatch)
        s.launched(Action("F", 1, microbatch), start)
        s.completed(Action("F", 1, microbatch), end)
    assert s.duration_of("F") == pytest.approx(2.0 + 0.2 * (3.0 - 2.0))
    again = Policy().scheduler(Placement.looped(3), 1, 2, durations=s.durations)
    assert again.duration_of("F") == s.duration_of("F") and again.duration_of("B") == 0.0


def test_explain_says_what_is_lacking_and_what_holds():
    s = middle(2, hint="f-first", limit="1")
    play(s, "f0 f1 .")
    assert s.explain() == ["1B0 lacks 2>1 microbatch 0", "1F1 is held by the limit 1 (in flight 1)"]
    s.arrived(Edge(2, 1), 0)
    assert s.explain()[0] == "1B0 is ready"
    s.launched(a("1B0"), 0.0)
    assert s.explain()[0] == "1B0 is running"


def test_explain_names_the_bound_of_w():
    s = middle(2, hint="bfw", split=True, max_pending_w=1)
    play(s, "f0 f1 . . b0 b1 .")
    assert "1I1 is held by the bound of 1 pending weight gradients (pending 1)" in s.explain()


def test_lacking_names_the_edges_waited_for():
    s = middle(2)
    assert s.lacking() == [Edge(2, 1), Edge(0, 1)]


@pytest.mark.parametrize("wrong, message", [
    (lambda s: s.launched(a("1F0"), 0.0), "1F0 cannot be launched"),
    (lambda s: s.completed(a("1F0"), 0.0), "1F0 cannot complete"),
    (lambda s: s.arrived(Edge(0, 1), 7), "nothing on rank 1 waits for it"),
    (lambda s: [s.arrived(Edge(0, 1), 0) for _ in range(2)], "arrived twice"),
])
def test_news_that_cannot_be_true_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(middle(1))


def test_launching_twice_is_refused():
    s = middle(1)
    play(s, "f0 .")
    with pytest.raises(ValueError, match="cannot be launched"):
        s.launched(a("1F0"), 0.0)


def test_any_admitted_action_may_be_launched_whatever_the_hint_prefers():
    # In a domain the leader's choice counts.
    s = middle(2, hint="f-first")
    play(s, "f0 . f1 b0")
    assert s.choose(0.0).action == a("1F1")
    s.launched(a("1B0"), 0.0)
    s.completed(a("1B0"), 1.0)
    assert s.choose(1.0).action == a("1F1")


def test_admissible_lists_everything_that_order_and_limit_allow():
    s = middle(3, hint="bf", limit="2")
    play(s, "f0 f1 f2 . b0")
    assert sorted(map(str, s.admissible())) == ["1B0", "1F1"]
    free = middle(3, hint="bf", limit="3", order="free")
    play(free, "f0 . f1 f2")
    assert sorted(map(str, free.admissible())) == ["1F1", "1F2"]


def test_a_deeper_chunk_always_finds_a_slot():
    placement = Placement.looped(2, 2)
    s = Policy(hint="f-first", limit="3").scheduler(placement, 0, 3)
    ran = []
    while (action := s.choose(0.0).action) is not None:
        s.launched(action, 0.0)
        s.completed(action, 1.0)
        ran.append(str(action))
    assert ran == ["0F0", "0F1"], "the third slot is the second chunk's"
    s.arrived(Edge(1, 2), 0)
    assert s.choose(0.0).action == a("2F0")


def test_paper_limit_finishes_one_microbatch_after_the_other():
    s = Policy(hint="f-first", limit="paper:2").scheduler(Placement.looped(2, 2), 0, 3)
    for expected in ("0F0", "0F1"):
        assert str(s.choose(0.0).action) == expected
        s.launched(a(expected), 0.0)
        s.completed(a(expected), 1.0)
    s.arrived(Edge(1, 2), 0)
    # At the limit only the first unfinished microbatch moves, and it may pass the limit by the number of chunks.
    assert s.choose(1.0).action == a("2F0") and s.admissible() == [a("2F0")]
    s.launched(a("2F0"), 1.0)
    s.completed(a("2F0"), 2.0)
    s.arrived(Edge(1, 2), 1)
    assert s.choose(2.0).action is None and s.admissible() == []
    s.arrived(Edge(3, 2), 0)
    assert s.choose(2.0).action == a("2B0")


def two_encoders() -> list[Dependencies]:
    """Stages 0 and 1 encode, each on its own rank; stage 2 needs both and sends a gradient to each."""
    def tasks(*entries):
        return {task.action: task for task in entries}
    ranks = []
    for stage in (0, 1):
        ranks.append(Dependencies(stage, (stage,), tasks(*(
            task for m in range(3) for task in (
                Task(Action("F", stage, m), sends=(Edge(stage, 2),), in_flight=1),
                Task(Action("B", stage, m), after=(Action("F", stage, m),), arrivals=(Edge(2, stage),), in_flight=-1),
            )))))
    ranks.append(Dependencies(2, (2,), tasks(*(
        task for m in range(3) for task in (
            Task(Action("F", 2, m), arrivals=(Edge(0, 2), Edge(1, 2)), in_flight=1),
            Task(Action("B", 2, m), after=(Action("F", 2, m),), sends=(Edge(2, 0), Edge(2, 1)), in_flight=-1),
        )))))
    return ranks


def test_branches_that_join():
    s = Scheduler(two_encoders()[2], Rounds("BF"), limit=2)
    s.arrived(Edge(0, 2), 0)
    assert s.choose(0.0).action is None and s.explain()[1] == "2F0 lacks 1>2 microbatch 0"
    s.arrived(Edge(1, 2), 0)
    assert s.choose(0.0).action == a("2F0")
    # And end to end, the branches at different speeds: the join runs at the pace of the slower.
    ranks = [Scheduler(d, Rounds("BF"), limit=2) for d in two_encoders()]
    result = drive(ranks, lambda action: 3.0 if action.stage == 1 else 1.0)
    assert [result.spans[Action("F", 2, m)].start for m in range(2)] == [3.0, 6.0]
    assert result.peak_in_flight == [2, 2, 1]


def test_a_join_is_held_until_the_last_announced_message_is_overdue():
    s = Scheduler(two_encoders()[2], Rounds("BF"), limit=2, durations={"F": 1.0})
    s.announced(Edge(0, 2), 0, 0.0, 2.0)
    assert s.hold_until(a("2F0"), 3.0) is None, "one of the two is not announced"
    s.announced(Edge(1, 2), 0, 1.0, 4.0)
    assert s.hold_until(a("2F0"), 3.0) == 1.0 + 4.0 + 3.0
    s.arrived(Edge(1, 2), 0)
    assert s.hold_until(a("2F0"), 3.0) == 0.0 + 2.0 + 3.0


def test_a_local_hand_off_needs_no_message():
    s = Scheduler(chain(Placement.v(1), 0, 1), Prefer("BF"), limit=2)
    ran = []
    while (action := s.choose(0.0).action) is not None:
        s.launched(action, 0.0)
        s.completed(action, 1.0)
        ran.append(str(action))
    assert ran == ["0F0", "1F0", "1B0", "0B0"] and s.finished


def test_a_kind_without_microbatch():
    tasks = [Task(Action("REDUCE_GRAD", 0), after=(Action("B", 0, 0),)), Task(Action("F", 0, 0), in_flight=1),
             Task(Action("B", 0, 0), after=(Action("F", 0, 0),), in_flight=-1)]
    s = Scheduler(Dependencies(0, (0,), {t.action: t for t in tasks}), Prefer("BF"), limit=1)
    result = drive([s], lambda action: 1.0)
    assert list(map(str, result.rows[0])) == ["0F0", "0B0", "0REDUCE_GRAD"]
