"""What each rule does, on one stage whose inputs come by script."""

import importlib.util
from pathlib import Path

import pytest

from rrfp.action import Edge, parse_action
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler import Dependencies, Scheduler, Task, chain
from rrfp.scheduler.hints import Announced, Ranked, Rounds
from rrfp.scheduler.lists import as_row

spec = importlib.util.spec_from_file_location("scheduler_helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
middle, play = helpers.middle, helpers.play

LATE_GRADIENTS = "f0 f1 f2 f3 . . b0 b1 b2 b3 *"


@pytest.mark.parametrize("hint, ran", [
    ("f-first", "F0 F1 F2 F3 B0 B1 B2 B3"),
    ("b-first", "F0 F1 B0 B1 F2 B2 F3 B3"),
    ("bf", "F0 F1 B0 F2 B1 F3 B2 B3"),
    ("fb", "F0 F1 B0 F2 B1 F3 B2 B3"),
    ("alt", "F0 F1 B0 F2 B1 F3 B2 B3"),
    # Stage 1 of 3: fewer than P - s = 2 out means F first, so it fills up again after every B.
    ("fill", "F0 F1 B0 F2 B1 F3 B2 B3"),
    # ... and 2(P - s) - 1 = 3 here.
    ("fill-alt", "F0 F1 F2 B0 F3 B1 B2 B3"),
])
def test_order_when_everything_is_there(hint, ran):
    assert play(middle(4, hint=hint), LATE_GRADIENTS) == ran


def test_bf_probes_b_first_again_after_an_idle_round_and_fb_f():
    news = "f0 . . f1 b0 *"
    assert play(middle(2, hint="bf"), news + " b1 *") == "F0 - B0 F1 B1"
    assert play(middle(2, hint="fb"), news + " b1 *") == "F0 - F1 B0 B1"


def test_bf_begins_a_new_round_where_alt_remembers_the_last_kind():
    news = "f0 f1 . . b0 . . f2 b1 * b2 *"
    assert play(middle(3, hint="bf"), news) == "F0 F1 B0 - B1 F2 B2"
    assert play(middle(3, hint="alt"), news) == "F0 F1 B0 - F2 B1 B2"


def test_rounds_take_at_most_one_backward_while_a_forward_waits():
    # Strict B-first would run both backwards before F2: it is another rule.
    assert play(middle(4, hint="bf"), "f0 f1 . . b0 b1 f2 . . .") == "F0 F1 B0 F2 B1"
    assert play(middle(4, hint="b-first"), "f0 f1 . . b0 b1 f2 . . .") == "F0 F1 B0 B1 F2"


def test_bfw_runs_one_w_only_when_neither_is_ready():
    assert play(middle(3, hint="bfw", split=True), "f0 f1 . . b0 b1 f2 . . . . . b2 *") == "F0 F1 I0 F2 I1 W0 W1 I2 W2"


def test_a_round_begins_again_after_w():
    assert play(middle(3, hint="bfw", split=True), "f0 f1 . . b0 . . f2 b1 . .") == "F0 F1 I0 W0 I1 F2"
    assert play(middle(3, hint="alt", split=True), "f0 f1 . . b0 . . f2 b1 . .") == "F0 F1 I0 W0 F2 I1"


def test_fill_runs_w_in_gaps():
    # Stage 1 of 3: F first while fewer than 2 are out.
    assert play(middle(4, hint="fill", split=True), "f0 f1 f2 f3 . . . b0 b1 b2 . . .") == "F0 F1 F2 I0 I1 F3"


def test_fill_r_releases_memory_before_another_i():
    # Limit 2: F2 is wanted (1 out after I0) but memory is full, so W0 goes before I1.
    assert play(middle(3, hint="fill-r", split=True, limit="2"), "f0 f1 f2 . . b0 b1 . . .") == "F0 F1 I0 W0 F2"
    assert play(middle(3, hint="bfw", split=True, limit="2"), "f0 f1 f2 . . b0 b1 . . .") == "F0 F1 I0 I1 W0"


def test_a_list_ranks_what_is_ready_and_never_blocks():
    deps = chain(Placement.looped(3), 1, 3)
    gpipe = as_row("1F0 1F1 1F2 1B0 1B1 1B2".split())
    assert play(Scheduler(deps, Ranked(gpipe), limit=3), "f0 . b0 f1 * f2 b1 b2 *") == "F0 F1 B0 F2 B1 B2"


def test_a_tie_goes_to_whichever_is_ready_in_strict_mode(tmp_path):
    file = tmp_path / "tie.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n2F0,2B0,2F1,2B1\n")
    def strict():
        return middle(2, hint=str(file), mode="strict")
    assert play(strict(), "f0 . b0 . f1 . b1 .") == "F0 B0 F1 B1"
    assert play(strict(), "f0 . f1 . b0 . b1 .") == "F0 F1 B0 B1"


def test_strict_waits_for_its_next_entry():
    assert play(middle(3, hint="1f1b", limit="1f1b", mode="strict"), "f0 . b0 . f1 . . .") == "F0 - F1 B0 -"


class TestAnnounced:
    """Stage 1 of 3, list 1f1b: F0 F1 B0 F2 B1 ... An early backward is the temptation."""

    def scheduler(self, *, skips=1, slack=3.0, split=False, microbatches=4):
        deps = chain(Placement.looped(3), 1, microbatches, split=split)
        rows = Policy(hint="zb-h1", limit="3", split=True, mode="strict") if split else Policy(hint="1f1b", mode="strict")
        row = rows.list_for(Placement.looped(3), microbatches)[1]
        return Scheduler(deps, Announced(row, skips=skips, slack=slack), limit=3, durations={"F": 1.0, "B": 2.0, "I": 1.0})

    def test_runs_its_head(self):
        assert play(self.scheduler(), "f0 f1 . . b0 f2 . .") == "F0 F1 B0 F2"

    def test_waits_for_announced_work_until_it_is_overdue(self):
        s = self.scheduler()
        play(s, "f0 f1 . . b0 . b1")  # the head is F2, missing; B1 is ready
        s.announced(Edge(0, 1), 2, 10.0, 1.0)
        held = s.choose(10.5)
        assert held.action is None and held.wake_at == pytest.approx(10.0 + 1.0 + 3 * s.duration_of("F"))
        assert s.choose(held.wake_at).action == parse_action("1B1")
        s.arrived(Edge(0, 1), 2)
        assert s.choose(10.6).action == parse_action("1F2")

    def test_leaves_the_list_for_work_nobody_has_started(self):
        s = self.scheduler()
        assert play(s, "f0 f1 . . b0 . b1 .") == "F0 F1 B0 B1"

    def test_the_hold_is_timed_from_the_head(self):
        s = self.scheduler()
        play(s, "f0 f1 . . b0 . b1")
        s.announced(Edge(0, 1), 2, 10.0, 1.0)
        s.announced(Edge(0, 1), 3, 12.0, 1.0)
        assert s.choose(12.5).wake_at == pytest.approx(10.0 + 1.0 + 3 * s.duration_of("F"))

    def test_skips_no_more_than_k_missing_entries(self):
        # F0 F1 | then B0, F2, B1, F3, B2: running B2 before F2 and F3 would skip two.
        s = self.scheduler(skips=1)
        assert play(s, "f0 f1 . . b0 b1 . .") == "F0 F1 B0 B1"
        s = self.scheduler(skips=0)
        assert play(s, "f0 f1 . . b0 b1 . .") == "F0 F1 B0 -"

    def test_holds_even_w(self):
        s = self.scheduler(split=True, skips=None)
        play(s, "f0 f1 . . b0 .")
        assert str(s.choose(5.0).action) == "1W0"
        s.announced(Edge(0, 1), 2, 5.0, 1.0)
        assert s.choose(5.0).action is None
        assert s.choose(9.5).action is not None

    def test_memory_holding_a_ready_head_is_no_reason_to_wait(self):
        deps = chain(Placement.looped(3), 1, 3)
        row = as_row("1F0 1F1 1F2 1B0 1B1 1B2".split())  # wants three in flight, may hold one
        s = Scheduler(deps, Announced(row, skips=0, slack=3.0), limit=1)
        assert play(s, "f0 f1 f2 . b0 * b1 b2 *") == "F0 B0 F1 B1 F2 B2"


def test_f_takes_the_smallest_chunk_and_b_the_largest():
    placement = Placement.looped(1, 2)
    s = Scheduler(chain(placement, 0, 2), Rounds("BF"), limit=4)
    ran = []
    while (action := s.choose(0.0).action) is not None:
        s.launched(action, 0.0)
        s.completed(action, 1.0)
        ran.append(str(action))
    # Round by round: after 0F1 the deeper forward is the only one left, and then the deepest backward goes first.
    assert ran == ["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"]
    assert s.finished and s.peak_in_flight == 3


def test_other_kinds_go_first_under_a_rule():
    a = parse_action
    tasks = [Task(a("0F0"), in_flight=1), Task(a("0UNSHARD")), Task(a("0B0"), after=(a("0F0"),), in_flight=-1)]
    s = Scheduler(Dependencies(0, (0,), {t.action: t for t in tasks}), Rounds("BF"), limit=1)
    assert str(s.choose(0.0).action) == "0UNSHARD"
