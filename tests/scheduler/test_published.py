"""The lists that PyTorch publishes: golden orders, every size, both modes, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch_side import torch_schedule, torch_single

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy, register_hint
from rrfp.schedule import published
from rrfp.schedule.plan import plan_of
from rrfp.schedule.published import published_steps
from rrfp.scheduler import chain, lists
from rrfp.scheduler.validate import check_microbatch_order, check_rows, replay
from rrfp.simulate.clock import drive

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def fresh():
    """What torch gives is asked for anew, before and after."""
    published_steps.cache_clear()
    yield
    published_steps.cache_clear()


def placement_of(name, ranks, chunks=2):
    return lists.PUBLISHED[name].placement(ranks, chunks)


def policy_of(name, placement, microbatches, mode, **options):
    """A policy that may hold all activations."""
    return Policy(hint=name, mode=mode, limit=str(placement.stages * microbatches), split=lists.PUBLISHED[name].split, **options)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.csv")), ids=lambda file: file.stem)
def test_golden_orders(file):
    name, ranks, microbatches = file.stem.rsplit("-", 2)
    steps = published_steps(name, placement_of(name, int(ranks)), int(microbatches))
    assert lists.text_of(steps) == file.read_text(), "torch makes another list than 2.13"
    assert steps == [tuple(row) for row in lists.read_file(file).steps]


def test_every_published_list_has_a_golden_order():
    assert {file.stem.rsplit("-", 2)[0] for file in GOLDEN.glob("*.csv")} == set(lists.PUBLISHED)


@pytest.mark.parametrize("microbatches", [4, 7])
def test_our_gpipe_and_torchs_are_one_list(microbatches):
    """Our 1F1B has no such test: torch 2.13 writes its own down wrongly (the last rank's forwards begin with 1), and runs another."""
    rows = plan_of("gpipe", ranks=4, microbatches=microbatches).rows
    assert {rank: list(map(str, lists.actions_of(row))) for rank, row in enumerate(rows)} == torch_single("ScheduleGPipe", 4, microbatches)


@pytest.mark.parametrize("name, makespan, peak", [
    ("zb-v", 99.5, 8), ("interleaved-zero-bubble", 99.5, 8), ("dualpipe-v", 99.5, 8.5), ("interleaved-1f1b", 106.5, 11.5), ("looped-bfs", 106.5, 32)])
def test_known_makespans(name, makespan, peak):
    """P = 8, M = 32, F = I = W = 1: two chunks cost half of each."""
    plan = plan_of(name, ranks=8, microbatches=32)
    assert (plan.result.makespan / 2, max(plan.peaks[0]) / 2) == (makespan, peak)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", lists.PUBLISHED)
def test_any_size_runs_or_is_refused_by_a_line(name, ranks, full):
    ran = 0
    for chunks in (2,) if lists.PUBLISHED[name].v else (1, 2, 3):
        placement = placement_of(name, ranks, chunks)
        for microbatches in range(1, 25) if full else (1, 2, 2 * ranks, 3 * ranks):
            try:
                published_steps(name, placement, microbatches)
            except ConfigurationError as error:
                assert f"--rrfp-hint {name}: does not exist for M = {microbatches} on {ranks} ranks of {chunks} chunks" in str(error)
                continue
            ran += 1
            for mode, order in (("strict", "microbatch"), ("ready", "microbatch"), ("strict", "free"), ("ready", "free")):
                policy = policy_of(name, placement, microbatches, mode, order=order)
                made = drive([policy.scheduler(placement, rank, microbatches) for rank in range(ranks)], lambda action: 1.0)
                if mode == "strict":
                    listed = policy.list_for(placement, microbatches)
                    assert [sorted(row) for row in made.rows] == [sorted(lists.actions_of(row)) for row in listed]
                    if order == "microbatch":
                        check_microbatch_order(listed, source=name)
    assert ran >= 2


@pytest.mark.parametrize("name", lists.PUBLISHED)
def test_ready_mode_keeps_to_a_limit_that_the_list_would_break(name):
    """A limit below the list's own need: it ranks, nothing stands still, and strict mode refuses it by number."""
    placement = placement_of(name, 4)
    policy = Policy(hint=name, limit="3", split=lists.PUBLISHED[name].split)
    made = drive([policy.scheduler(placement, rank, 8) for rank in range(4)], lambda action: 1.0 + action.stage / 7)
    assert max(made.peak_in_flight) == 3
    with pytest.raises(ConfigurationError, match=rf"--rrfp-hint {name}: its list holds \d+ activations at stage 0, but --rrfp-limit 3 allows 3"):
        Policy(hint=name, mode="strict", limit="3", split=lists.PUBLISHED[name].split).scheduler(placement, 0, 8)


def test_looped_bfs_goes_back_through_the_microbatches_unless_they_stay_in_order():
    placement = Placement.looped(2, 2)

    def backwards(order):
        row = policy_of("looped-bfs", placement, 4, "strict", order=order).list_for(placement, 4)[1]
        return " ".join(str(action) for action in lists.actions_of(row) if action.kind == "B")

    assert backwards("free") == "3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0"
    assert backwards("microbatch") == "3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3"


def test_numbering_anew_keeps_w_with_its_i():
    row = lists.as_row("0F1 0F0 0I1 0I0 0W1 0W0".split())
    assert " ".join(map(str, lists.actions_of(lists.in_microbatch_order([row])[0]))) == "0F0 0F1 0I0 0I1 0W0 0W1"


# ---------------------------------------------------------------------- some backwards whole, others split
def test_dualpipe_v_runs_each_backward_as_its_list_has_it():
    placement = Placement.v(4)
    policy = policy_of("dualpipe-v", placement, 10, "ready")
    schedulers = [policy.scheduler(placement, rank, 10) for rank in range(4)]
    made = drive(schedulers, lambda action: 1.0)
    for rank, row in enumerate(published_steps("dualpipe-v", placement, 10)):
        assert sorted(made.rows[rank]) == sorted(lists.actions_of(row))
        assert {action.kind for action in made.rows[rank]} == {"F", "B", "I", "W"}
    assert [(s.in_flight, s.pending_w) for s in schedulers] == [(0, 0)] * 4


def test_a_whole_backward_above_a_split_one():
    """Stage 1 sends from B where it has one and from I elsewhere; stage 0 takes either, and gives its slot back after B or W."""
    above, below = (chain(Placement.looped(2), rank, 2, split=True, whole={(1, 0), (0, 1)}).tasks for rank in (1, 0))
    assert [str(action) for action in above] == ["1F0", "1B0", "1F1", "1I1", "1W1"]
    assert [str(action) for action in below] == ["0F0", "0I0", "0W0", "0F1", "0B1"]
    assert [above[a].in_flight for a in above] == [1, -1, 1, 0, -1]
    assert above[Action("B", 1, 0)].sends == above[Action("I", 1, 1)].sends != ()
    turn = chain(Placement.v(2), 1, 1, split=True, whole={(2, 0)}).tasks  # stages 1 and 2 on one rank
    assert turn[Action("I", 1, 0)].after == (Action("F", 1, 0), Action("B", 2, 0))


def test_both_kinds_of_one_backward_are_refused():
    rows = [lists.as_row("0F0 0B0 0I0 0W0".split())]
    with pytest.raises(ConfigurationError, match="position 2: 0I0 is half of the backward that 0B0 in this row is the whole of"):
        check_rows(rows, [chain(Placement.looped(1), 0, 1, split=True, whole=lists.whole_backwards(rows))], source="list")


@pytest.mark.parametrize("mode", ["ready", "strict"])
def test_whole_and_split_backwards_of_a_stage_stay_in_microbatch_order(mode, tmp_path):
    """I and B are two queues, so microbatch order alone would not keep 0B0 before 0I1: the list has to."""
    file = tmp_path / "mixed.csv"
    file.write_text("0F0,0F1,0I1,0B0,0W1\n")
    with pytest.raises(ConfigurationError, match="rank 0, position 3: 0B0 after 0I1.*use --rrfp-order free$"):
        Policy(hint=str(file), split=True, mode=mode, limit="2").scheduler(Placement.looped(1), 0, 2)
    Policy(hint=str(file), split=True, mode=mode, limit="2", order="free").scheduler(Placement.looped(1), 0, 2)
    file = tmp_path / "ordered.csv"
    file.write_text("0F0,0F1,0B0,0I1,0W1\n")
    Policy(hint=str(file), split=True, mode=mode, limit="2").scheduler(Placement.looped(1), 0, 2)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name, placement, message", [
    ("zb-v", Placement.looped(2, 2), "is a list with a V placement .*this run's is looped: 2 chunks on each of 2 ranks; use .* --rrfp-hint 1f1b"),
    ("dualpipe-v", Placement.looped(4), "is a list with a V placement .*this run's is looped: 1 chunk on each of 4 ranks"),
    ("zb-v", Placement.v(2, 3), "is a list with a V placement .*this run's is a V of 3 chunks"),
    ("looped-bfs", Placement.v(2), "is a list for looped chunks .*this run's placement is a V of 2 chunks on each of 2 ranks; use 1f1b"),
    ("interleaved-1f1b", Placement.of((0, 1, 0, 0, 1, 1)), ".*this run's placement is stages on ranks 0, 1, 0, 0, 1, 1"),
])
def test_another_placement_is_refused_by_name(name, placement, message):
    with pytest.raises(ConfigurationError, match=f"^--rrfp-hint {name}: {message}"):
        policy_of(name, placement, 8, "ready").scheduler(placement, 0, 8)


def test_split_lists_ask_for_the_split():
    for name, each in lists.PUBLISHED.items():
        if each.split:
            with pytest.raises(ConfigurationError, match=f"--rrfp-hint {name}: needs a backward split into I and W"):
                Policy(hint=name)


def test_the_name_is_taken():
    with pytest.raises(ConfigurationError, match="register_hint zb-v: is a built-in hint"):
        register_hint("zb-v", lambda context: [])


def other_order(extra):
    """A torch whose list holds something else."""
    def order(*sizes):
        made = torch_order(*sizes)
        return made | {0: [*made[0], extra]}

    torch_order = published._torch_order
    return order


@pytest.mark.parametrize("change", ["class", "lowering", "constructor", "kind", "token"])
def test_another_torch_is_named(fresh, monkeypatch, change):
    from torch.distributed.pipelining import schedules

    if change == "class":
        monkeypatch.delattr(schedules, "ScheduleZBVZeroBubble")
    elif change == "lowering":
        monkeypatch.setattr(schedules, "ScheduleZBVZeroBubble", object)
    elif change == "constructor":
        monkeypatch.setattr(schedules.ScheduleZBVZeroBubble, "__init__", lambda self, stages, *, microbatches: None)
    else:
        monkeypatch.setattr(published, "_torch_order", other_order({"kind": "0REDUCE_GRAD", "token": "0F"}[change]))
    with pytest.raises(ConfigurationError, match=r"^--rrfp-hint zb-v: torch \S+ makes this list in another way than 2\.13.*rrfp schedule convert"):
        published_steps("zb-v", Placement.v(2), 4)


def test_no_torch_is_named(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", None)
    with pytest.raises(ConfigurationError, match="^--rrfp-hint zb-v: is made by PyTorch's .*which cannot be imported .*; install torch"):
        published_steps("zb-v", Placement.v(2), 4)


def test_torch_is_imported_only_when_rows_are_asked_for():
    code = ("import sys, rrfp.schedule.command as c; from rrfp.policy import Policy; Policy(hint='looped-bfs')\n"
            "c.main(['check', 'zb-h1', '--ranks', '2', '--microbatches', '2']); assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_ranks_with_different_torches_differ_in_their_digest(fresh, monkeypatch):
    placement = Placement.looped(2, 2)
    policy = policy_of("looped-bfs", placement, 4, "ready", order="free")
    digest = policy.scheduler(placement, 0, 4).digest
    plain = published._torch_order

    def reversed_forwards(*sizes):
        return {rank: [*row[3::-1], *row[4:]] if rank == 0 else row for rank, row in plain(*sizes).items()}

    monkeypatch.setattr(published, "_torch_order", reversed_forwards)
    published_steps.cache_clear()
    from rrfp import policy_rows
    policy_rows.ready_rows.cache_clear()
    assert policy.scheduler(placement, 0, 4).digest != digest
    policy_rows.ready_rows.cache_clear()


def test_the_lowering_left_out_changes_nothing():
    """Against torch's whole constructor, which lowers the list for torch's runtime."""
    for name in lists.PUBLISHED:
        order = torch_schedule(name, 2, 2, 6).pipeline_order
        steps = published_steps(name, placement_of(name, 2), 6)
        assert [["" if a is None else str(a) for a in order[rank]] for rank in range(2)] == [list(map(lists.token, row)) for row in steps]


def test_peaks_are_what_strict_mode_holds():
    placement = Placement.v(4)
    policy = policy_of("zb-v", placement, 8, "strict")
    rows = policy.list_for(placement, 8)
    needs = replay(rows, [chain(placement, rank, 8, split=True) for rank in range(4)])
    schedulers = [policy.scheduler(placement, rank, 8) for rank in range(4)]
    assert drive(schedulers, lambda action: 1.0).peak_in_flight == needs.peak == [8] * 4
    assert [s.peak_pending_w for s in schedulers] == needs.peak_pending
