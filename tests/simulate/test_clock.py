"""The virtual clock: closed forms, FIFO lanes, delays, announcements, and that it tells a deadlock."""

import pytest

from rrfp.action import Action
from rrfp.placement import Placement
from rrfp.policy import UNIT_DURATIONS, Policy
from rrfp.scheduler import Scheduler, chain
from rrfp.scheduler.hints import Prefer, Strict
from rrfp.scheduler.lists import as_row
from rrfp.simulate import Deadlock, Span, drive, simulate


class Unit(dict):
    """F=1, B=2, I=W=1, over the number of chunks."""

    def __init__(self, chunks=1):
        self.chunks = chunks

    def __missing__(self, key):
        return UNIT_DURATIONS[key[0]] / self.chunks


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (8, 32), (8, 15)])
@pytest.mark.parametrize("hint, limit, split", [
    ("1f1b", "1f1b", False), ("1f1b", "eager", False), ("gpipe", "32", False), ("zb-h1", "P", True), ("zb-h2", "2p-1", True),
])
def test_closed_forms(hint, limit, split, ranks, microbatches):
    policy = Policy(hint=hint, limit=str(ranks) if limit == "P" else limit, split=split, mode="strict")
    expected = 3 * microbatches + ranks - 1 if split else 3 * (microbatches + ranks - 1)
    assert simulate(policy, Placement.looped(ranks), microbatches, Unit()).makespan == expected


@pytest.mark.parametrize("mode", ["strict", "ready"])
@pytest.mark.parametrize("hint", ["1f1b", "announced"])
def test_interleaved_closed_form(hint, mode):
    # 3M + 3(P - 1)/2 with two chunks.
    assert simulate(Policy(hint=hint, mode=mode), Placement.looped(8, 2), 32, Unit(2)).makespan == 106.5


@pytest.mark.parametrize("hint, limit, split, expected", [
    ("bf", "1f1b", False, 117), ("announced", "1f1b", False, 117), ("announced", "eager", False, 117),
    ("fill-alt", "2p", False, 117),
    ("announced", "8", True, 103), ("announced", "2p-1", True, 103), ("fill-r", "2p-1", True, 103), ("bfw", "2p-1", True, 103),
])
def test_rules_lose_nothing_when_nothing_varies(hint, limit, split, expected):
    assert simulate(Policy(hint=hint, limit=limit, split=split), Placement.looped(8), 32, Unit()).makespan == expected


def test_spans_of_a_tiny_pipeline():
    result = simulate(Policy(hint="1f1b", mode="strict"), Placement.looped(2), 1, Unit(), {
        ("F", 1, 0): 0.5, ("B", 0, 0): 0.25, ("F", 0, 0): 9.0, ("B", 1, 0): 9.0})
    assert result.spans == {Action("F", 0, 0): Span(0, 1), Action("F", 1, 0): Span(1.5, 2.5), Action("B", 1, 0): Span(2.5, 4.5),
                            Action("B", 0, 0): Span(4.75, 6.75)}
    assert result.makespan == 6.75 and result.peak_in_flight == [1, 1]


def starts(lanes, order):
    """When stage 1 starts its forwards if the second of three messages is late."""
    delays = {(kind, s, m): 0.0 for kind in "FB" for s in range(2) for m in range(3)} | {("F", 1, 1): 10.0}
    result = simulate(Policy(hint="f-first", limit="3", order=order, lanes=lanes), Placement.looped(2), 3, Unit(), delays)
    return {m: result.spans[Action("F", 1, m)].start for m in range(3)}


def test_a_late_message_holds_back_its_lane_and_only_that():
    assert starts(1, "free") == {0: 1.0, 1: 12.0, 2: 13.0}
    assert starts(2, "free")[2] == 4.0, "the third message took the other lane, and found 1B0 running"
    assert starts(2, "microbatch") == {0: 1.0, 1: 12.0, 2: 13.0}, "microbatch order waits all the same"


def test_lanes_are_dealt_by_microbatch_as_the_transport_does():
    placement, order = Placement.looped(2), ["0F0", "0F2", "0F1", "0B1", "0B0", "0B2"]
    ranks = [Scheduler(chain(placement, 0, 3), Strict(as_row(order)), limit=3, order="free"),
             Scheduler(chain(placement, 1, 3), Prefer("FB"), limit=3, order="free")]
    result = drive(ranks, lambda action: 1.0, lambda edge, action: 10.0 if (edge.destination, action.microbatch) == (1, 0) else 0.0, lanes=2)
    begun = {m: result.spans[Action("F", 1, m)].start for m in range(3)}
    assert begun == {0: 11.0, 1: 3.0, 2: 12.0}, "microbatch 2 follows 0 on lane 0, though it is the second message of the edge"


def test_announcements_may_be_late():
    durations = {(kind, s, m): 1.0 if s else 5.0 for kind in "FB" for s in range(3) for m in range(6)}
    prompt, never = (simulate(Policy(), Placement.looped(3), 6, durations, announce_delay=d) for d in (0.0, 1e6))
    assert prompt.rows != never.rows, "without announcements nothing is worth waiting for"


def test_a_deadlock_is_told_with_what_each_rank_lacks():
    placement = Placement.looped(2, 2)
    ranks = [Scheduler(chain(placement, r, 4), Prefer("FB"), limit=2, admission="plain") for r in range(2)]
    with pytest.raises(Deadlock, match=r"rank 0: .*2F0 is held by the limit 2 \(in flight 2\)"):
        drive(ranks, lambda action: 1.0)


def test_announced_takes_the_list_that_fits_few_microbatches():
    assert simulate(Policy(limit="2p-1", split=True), Placement.looped(8), 8, Unit()).makespan == 3 * 8 + 8 - 1
    assert simulate(Policy(hint="zb-h2", limit="2p-1", split=True, mode="strict"), Placement.looped(8), 8, Unit()).makespan == 34


def test_many_stages_are_quick():
    assert simulate(Policy(hint="bf"), Placement.looped(64), 16, Unit()).makespan == 3 * (16 + 63)
