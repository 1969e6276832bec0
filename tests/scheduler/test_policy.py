"""The user's choice: limits, refusals, strict lists, hint files and registered hints."""

from unittest import mock

import pytest

from rrfp import hint_names
from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy, register_hint
from rrfp.scheduler.lists import actions_of, write
from rrfp.simulate import drive

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def run(policy, placement, microbatches, **options):
    ranks = [policy.scheduler(placement, r, microbatches, **options) for r in range(placement.ranks)]
    return drive(ranks, lambda action: UNIT[action.kind])


@pytest.fixture
def registered():
    with mock.patch.dict(hint_names.registered, clear=True):
        yield register_hint


@pytest.mark.parametrize("limit, expected", [
    ("1f1b", [4, 3, 2, 1]), ("eager", [7, 5, 3, 1]), ("2p-1", [7] * 4), ("2p", [8] * 4), ("3", [3] * 4),
    ("99", [9] * 4), ("paper:5", [5] * 4), ("7-1", [7, 5, 3, 1]), ("9-4", [9, 7, 6, 4]), ("5-5", [5] * 4), ("99-2", [9, 9, 9, 2]),
])
def test_limits(limit, expected):
    assert Policy(limit=limit).limits(Placement.looped(4), 9) == expected


def test_limits_of_chunks():
    placement = Placement.looped(4, 2)
    # Megatron's interleaved warm-up 2(P - r - 1) + (C - 1)P, plus one.
    assert Policy(limit="1f1b").limits(placement, 16) == [11, 9, 7, 5] == Policy(limit="eager").limits(placement, 16)
    assert Policy(limit="paper:6").limits(placement, 16) == [8] * 4
    assert Policy(limit="1f1b").limits(placement, 2) == [4, 4, 4, 4]


def test_a_slope_goes_straight_from_the_first_rank_to_the_last():
    assert Policy(limit="23-9").limits(Placement.looped(8), 32) == [23, 21, 19, 17, 15, 13, 11, 9]
    assert Policy(limit="19-11").limits(Placement.looped(8), 32) == [19, 18, 17, 16, 14, 13, 12, 11]
    assert Policy(limit="6-2").limits(Placement.looped(1), 32) == [6]
    with pytest.raises(ConfigurationError, match="--rrfp-limit 6-1: rank 3 holds 2 chunks and 1 activations, which deadlocks"):
        Policy(limit="6-1").scheduler(Placement.looped(4, 2), 0, 8)


def test_no_limit_exceeds_what_can_ever_be_in_flight():
    assert Policy(limit="1f1b").limits(Placement.looped(4), 2) == [2, 2, 2, 1]


@pytest.mark.parametrize("options, message", [
    ({"hint": "nonsense"}, "--rrfp-hint nonsense: is neither a hint nor a file; use one of auto, announced, bf,"),
    ({"mode": "lazy"}, "--rrfp-mode lazy: must be one of ready, strict"),
    ({"order": "reverse"}, "--rrfp-order reverse: must be one of microbatch, megatron, free"),
    ({"limit": "0"}, "--rrfp-limit 0: must be one of auto, 1f1b, eager, 2p-1, 2p, a number of at least 1, a slope like 23-9, a list like 7,5,3,1, "
     "memory:<GiB>, or paper:"),
    ({"limit": "4-"}, "--rrfp-limit 4-: must be one of"),
    ({"limit": "9-23"}, "--rrfp-limit 9-23: the first rank's limit must be at least the last one's, .* write 23-9, not 9-23"),
    ({"limit": "5-0"}, "--rrfp-limit 5-0: the first rank's limit must be at least the last one's, and that at least 1"),
    ({"limit": "paper:"}, "--rrfp-limit paper:: must be"),
    ({"limit": "-3"}, "--rrfp-limit -3: must be"),
    ({"lanes": 0}, "--rrfp-lanes 0: must be at least 1"),
    ({"hint": "bfw"}, "--rrfp-hint bfw: needs a backward split into I and W"),
    ({"hint": "zb-h1"}, "--rrfp-hint zb-h1: needs a backward split"),
    ({"split": True, "max_pending_w": 0}, "--rrfp-max-pending-w 0: must be at least 1"),
    ({"max_pending_w": 2}, "--rrfp-max-pending-w 2: .* with a split backward"),
])
def test_values_that_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Policy(**options)


@pytest.mark.parametrize("options, message", [
    ({"hint": "gpipe"}, "--rrfp-hint gpipe: its list holds 8 activations at stage 0, but --rrfp-limit 1f1b allows 4;"),
    ({"hint": "zb-h1", "split": True}, "zb-h1: its list holds 4 activations at stage 1, but --rrfp-limit 1f1b allows 3"),
    ({"hint": "zb-h1", "split": True, "limit": "4", "max_pending_w": 2},
     "zb-h1: its list leaves 3 weight gradients pending at stage 2"),
])
def test_strict_refuses_a_list_that_does_not_fit(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Policy(mode="strict", **options).scheduler(Placement.looped(4), 0, 8)


def test_the_same_lists_may_rank_in_ready_mode():
    for options in ({"hint": "gpipe"}, {"hint": "zb-h1", "split": True}):
        policy = Policy(**options)
        assert run(policy, Placement.looped(4), 8).peak_in_flight <= policy.limits(Placement.looped(4), 8)


@pytest.mark.parametrize("hint", ["bf", "fb", "b-first", "alt", "fill", "fill-alt", "announced", "1f1b"])
def test_strict_obeys_what_the_rule_does_at_unit_durations(hint):
    placement = Placement.looped(3)
    ready, strict = run(Policy(hint=hint), placement, 5), run(Policy(hint=hint, mode="strict"), placement, 5)
    assert strict.rows == ready.rows and strict.makespan == ready.makespan
    assert strict.rows == [actions_of(row) for row in Policy(hint=hint, mode="strict").list_for(placement, 5)]


def test_strict_is_1f1b_whatever_the_durations():
    ranks = [Policy(hint="1f1b", mode="strict").scheduler(Placement.looped(2), r, 3) for r in range(2)]
    result = drive(ranks, lambda action: 1.0 if action.stage else 7.0, lambda edge, action: 5.0)
    assert " ".join(map(str, result.rows[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"


@pytest.mark.parametrize("mode", ["ready", "strict"])
@pytest.mark.parametrize("hint", ["announced", "bf", "1f1b", "gpipe"])
def test_forward_only_runs_the_forwards_of_any_list(hint, mode):
    result = run(Policy(hint=hint, limit="9", mode=mode), Placement.looped(3), 4, forward_only=True)
    assert [" ".join(map(str, row)) for row in result.rows] == [" ".join(f"{s}F{m}" for m in range(4)) for s in range(3)]
    assert result.peak_in_flight == [0, 0, 0]


def test_frozen_stages_run_forwards_only():
    result = run(Policy(hint="1f1b", mode="strict"), Placement.looped(3), 3, first_trainable=1)
    assert " ".join(map(str, result.rows[0])) == "0F0 0F1 0F2" and len(result.rows[1]) == 6


def test_a_hint_file_ranks_and_can_be_obeyed(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n")
    placement = Placement.looped(2)
    obeyed = run(Policy(hint=str(file), limit="3", mode="strict"), placement, 3)
    assert " ".join(map(str, obeyed.rows[1])) == "1F0 1F1 1B0 1F2 1B1 1B2"
    assert run(Policy(hint=str(file), limit="3"), placement, 3).peak_in_flight[0] == 3
    with pytest.raises(ConfigurationError, match="is for 3 microbatches, and this run has calls of 2; let a first line"):
        Policy(hint=str(file)).scheduler(placement, 0, 2)
    with pytest.raises(ConfigurationError, match="has 2 rows for 3 ranks"):
        Policy(hint=str(file)).scheduler(Placement.looped(3), 0, 3)


def test_a_hint_file_is_read_once(tmp_path, monkeypatch):
    """What the ranks agreed on cannot change under a run: not by an edit, nor by a change of directory."""
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    monkeypatch.chdir(tmp_path)
    policy = Policy(hint="mine.csv")
    digest = policy.scheduler(Placement.looped(2), 0, 1).digest
    monkeypatch.chdir("/")
    file.write_text("0F0,0B0\n1F0,1B0,1B0\n")
    assert policy.scheduler(Placement.looped(2), 0, 1).digest == digest
    file.unlink()
    assert policy.scheduler(Placement.looped(2), 0, 1).digest == digest


def test_a_list_out_of_microbatch_order_is_refused_only_in_strict_mode_with_that_order(tmp_path):
    file = tmp_path / "odd.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    placement = Placement.looped(2)
    with pytest.raises(ConfigurationError, match="rank 0, position 3: 0B0 after 0B1 leaves microbatch order"):
        Policy(hint=str(file), limit="2", mode="strict").scheduler(placement, 0, 2)
    rows = run(Policy(hint=str(file), limit="2", mode="strict", order="free"), placement, 2).rows
    assert " ".join(map(str, rows[1])) == "1F0 1F1 1B1 1B0"
    assert " ".join(map(str, run(Policy(hint=str(file), limit="2"), placement, 2).rows[1])) == "1F0 1F1 1B0 1B1"


def test_megatron_order_keeps_the_order_of_forwards_across_chunks():
    placement = Placement.looped(2, 2)
    rows = run(Policy(hint="bf", order="megatron"), placement, 4).rows
    assert " ".join(str(a) for a in rows[0] if a.kind == "F") == "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"
    with pytest.raises(ConfigurationError, match="paper:9: finishes microbatches one by one, against --rrfp-order megatron"):
        Policy(hint="bf", order="megatron", limit="paper:9").scheduler(placement, 0, 4)
    with pytest.raises(ConfigurationError, match="gpipe: rank 0, forward 2: 0F2 where --rrfp-order megatron needs 2F0"):
        Policy(hint="gpipe", order="megatron", limit="8", mode="strict").scheduler(placement, 0, 4)


def test_a_registered_hint_sees_its_context_and_may_change(registered):
    contexts = []

    def by_measurement(context):
        contexts.append(context)
        gpipe = context.measured.get(("F", 0), 0.0) > 1.0
        orders = ("F0 F1 B0 B1", "F0 F1 B0 B1") if gpipe else ("F0 F1 B0 B1", "F0 B0 F1 B1")
        return [[f"{stage}{token}" for token in order.split()] for stage, order in enumerate(orders)]

    registered("mine", by_measurement)
    policy, placement = Policy(hint="mine", limit="2", mode="strict"), Placement.looped(2)
    assert policy.adapts
    before = policy.scheduler(placement, 1, 2)
    assert not before.announces
    after = policy.scheduler(placement, 1, 2, measured={("F", 0): 2.0})
    assert before.digest != after.digest
    assert before.digest == policy.scheduler(placement, 0, 2).digest, "equal on every rank"
    assert (contexts[0].microbatches, contexts[0].limits, contexts[0].split) == (2, (2, 2), False)
    assert contexts[1].measured == {("F", 0): 2.0}


def test_a_registered_hint_is_validated(registered):
    registered("short", lambda context: [["0F0"], ["1F0", "1B0"]])
    with pytest.raises(ConfigurationError, match="--rrfp-hint short: rank 0, position 1: the row ends without 0B0"):
        Policy(hint="short").scheduler(Placement.looped(2), 0, 1)
    registered("garbage", lambda context: [["0F0", "0B0"], [7]])
    with pytest.raises(ConfigurationError, match="--rrfp-hint garbage: its function's row 1 is no list of actions"):
        Policy(hint="garbage").scheduler(Placement.looped(2), 0, 1)
    with pytest.raises(ConfigurationError, match="register_hint bf: is a built-in hint"):
        register_hint("bf", lambda context: [])


def test_a_printed_list_can_be_read_back_as_a_hint(tmp_path):
    placement, file = Placement.looped(3), tmp_path / "list.csv"
    rows = Policy(hint="alt", mode="strict").list_for(placement, 4)
    write(rows, file)
    assert Policy(hint=str(file), mode="strict").list_for(placement, 4) == rows


def test_free_order_starts_every_stage_with_microbatch_0(tmp_path):
    placement = Placement.looped(2)
    rows = [["0F1", "0F0", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]
    path = tmp_path / "list.csv"
    path.write_text("\n".join(map(",".join, rows)))
    with pytest.raises(ConfigurationError, match="rank 0, position 0: 0F1 is the first forward of its stage; start with 0F0"):
        Policy(hint=str(path), mode="strict", order="free", limit="2").scheduler(placement, 0, 2)
    # In ready mode a list only ranks: microbatch 1 may be here first, and still waits for microbatch 0.
    scheduler = Policy(hint=str(path), order="free", limit="2", lanes=2).scheduler(placement, 1, 2)
    scheduler.arrived(Edge(0, 1), 1)
    assert scheduler.choose(0.0).action is None
    scheduler.arrived(Edge(0, 1), 0)
    assert scheduler.choose(0.0).action == Action("F", 1, 0)


def strict_free(tmp_path, *rows) -> Policy:
    path = tmp_path / "list.csv"
    path.write_text("\n".join(rows))
    return Policy(hint=str(path), mode="strict", order="free", limit="3")


def test_a_strict_list_that_leaves_messages_lying_is_refused_in_free_order(tmp_path):
    """With one credit the message of 0B0 holds it until 0B0 runs, which the list wants after 0B1."""
    policy = strict_free(tmp_path, "0F0,0F1,0B1,0B0", "1F0,1F1,1B0,1B1")
    with pytest.raises(ConfigurationError, match="rank 0, position 2: 0B1 waits for a message that stands behind others which"):
        policy.scheduler(Placement.looped(2), 0, 2)


def test_a_strict_list_that_takes_messages_as_they_are_sent_runs_in_free_order(tmp_path):
    rows = run(strict_free(tmp_path, "0F0,0F1,0B1,0B0", "1F0,1F1,1B1,1B0"), Placement.looped(2), 2).rows
    assert " ".join(map(str, rows[0])) == "0F0 0F1 0B1 0B0"


def test_the_papers_limit_with_chunks_in_free_order_is_refused():
    with pytest.raises(ConfigurationError, match="paper:3: finishes microbatches one by one, which deadlocks with several chunks"):
        Policy(hint="bf", limit="paper:3", order="free").scheduler(Placement.looped(2, 2), 0, 4)
    Policy(hint="bf", limit="paper:3", order="free").scheduler(Placement.looped(2), 0, 4)


def test_a_tie_of_one_kind_keeps_microbatch_order(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text("0F0,0F1,0B0,0B1\n(1F0;1F1)OVERLAP_F_B,1B0,1B1")
    scheduler = Policy(hint=str(path), mode="strict", limit="2", lanes=2).scheduler(Placement.looped(2), 1, 2)
    scheduler.arrived(Edge(0, 1), 1)
    assert scheduler.choose(0.0).action is None
    scheduler.arrived(Edge(0, 1), 0)
    assert scheduler.choose(0.0).action == Action("F", 1, 0)
