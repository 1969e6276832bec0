"""The merged report on made-up views, its files, and what `rrfp report` shows of it."""

import json
import multiprocessing
import os
import re

import pytest
from simulated import record, straggler
from views import ACTIVATION, GRADIENT, HELD, LOST, edges, view, waiting

from rrfp.report import failures
from rrfp.report.command import main
from rrfp.report.hang import CAUSES, merge

OWES = "stage 0 (rank 0) waits for the gradient 1>0 microbatch 2, which stage 1 (rank 1) owes: stage 1 (rank 1) "


@pytest.mark.parametrize("cause, text, views", [
    ("running", "runs 1F4 for 9.5 s", [waiting(), view(1, running="1F4", running_for=9.5)]),
    ("elsewhere", "has not entered call 7; its last was call 6, 9 s ago", [waiting(), view(1, call=6, in_call=False)]),
    ("elsewhere", "has not entered call 7; its last was call 6; it wrote no view", [waiting(calls={"1": 6})]),
    ("silent", "gives no sign of life for 9 s (stopped, or its machine hangs) and wrote no view", [waiting(peers={"1": 9.2})]),
    ("unknown", "wrote no view (last sign of life 0.5 s ago)", [waiting()]),
    ("failed", None, [waiting(departed=[1])]),
    ("lost message", "has sent it, as message 3 of 1>0, and it did not arrive: lost on the way (2 of 4 came)",
     [waiting(edges=edges(0, received=(6, 2))), view(1, edges=edges(1, sent=(6, 4), handed=[0, 1, 2, 3]))]),
    ("not taken", "has sent it, as message 3 of 1>0, and it arrived, but the loop of stage 0 (rank 0) has not taken it",
     [waiting(), view(1, edges=edges(1, handed=[0, 1, 2]))]),
    ("lost message", "has sent it, as message 3 of 1>0, and it did not arrive: lost on the way (2 of 3 came)",  # it is a call ahead
     [waiting(edges=edges(0, received=(6, 2))), view(1, call=8)]),
    ("sender", "has handed it to its transport, which keeps it though 2 credits are there",
     [waiting(), view(1, edges=edges(1, waiting=1, credits=2, handed=[0, 1, 2]))]),
    ("lost credit", "waits for a credit, of which stage 0 (rank 0) has granted 4: lost on the way",
     [waiting(edges=edges(0, received=(6, 2))), view(1, edges=edges(1, sent=(6, 2), waiting=1, credits=0, handed=[0, 1, 2]))]),
    ("held", "1F5 is held by the limit 4 (in flight 4)", [waiting(), view(1, next=[HELD | {"action": "1F5"}])]),
    ("held", "has nothing that it waits for, and launches nothing: an agreement or an announced wait", [waiting(), view(1)]),
    ("unknown", "has ended call 7", [waiting(), view(1, in_call=False)]),
], ids=lambda value: value if isinstance(value, str) and value in CAUSES else "")
def test_who_owes_the_missing_message(cause, text, views):
    found = merge(views)
    wanted = OWES + text if text else "stage 1 (rank 1) has left in good order; stage 0 (rank 0) waits for the gradient 1>0 microbatch 2, which it owes"
    assert (found.cause, found.verdict, found.culprit) == (cause, wanted, 1)
    assert found.text().splitlines()[0] == f"Verdict: {found.verdict}"
    assert found.data()["missing"] == {"waiter": 0, "owner": 1, "edge": "1>0", "microbatch": 2, "what": "gradient", "action": "0B2"}
    json.dumps(found.data())


def test_the_wait_of_a_rank_that_waits_itself_is_followed():
    """Rank 0 waits for rank 1, which waits for rank 2, which is silent: named is the last step."""
    chain = (0, 1, 2)
    ends = edges(1) | {"2>1": {"direction": "in", "peer": 2, "credits": 4, "received": 3, "waiting": 0, "here": []}}
    views = [waiting(pipeline=chain, world=3), view(1, pipeline=chain, world=3, edges=ends, peers={"0": 0.1, "2": 9.0},
                                                    next=[GRADIENT | {"action": "1B2", "lacks": ["2>1"]}])]
    found = merge(views)
    assert found.verdict == "stage 1 (rank 1) waits for the gradient 2>1 microbatch 2, which stage 2 (rank 2) owes: stage 2 (rank 2) gives no " \
                            "sign of life for 9 s (stopped, or its machine hangs) and wrote no view"
    assert found.states == {0: "waits for gradient 1>0 microbatch 2", 1: "waits for gradient 2>1 microbatch 2",
                            2: "gives no sign of life for 9 s (stopped, or its machine hangs) and wrote no view"}


def test_a_cycle_is_a_deadlock():
    found = merge([waiting(next=[GRADIENT]), view(1, next=[ACTIVATION], explained=["1F5 lacks 0>1 microbatch 5"])])
    assert (found.cause, found.culprit) == ("deadlock", None)
    assert found.verdict == "a deadlock: stage 0 (rank 0) -> stage 1 (rank 1) -> stage 0 (rank 0), each waits for the next and none has a " \
                            "reason of its own"
    assert found.further[0] == "stage 0 (rank 0) waits for the gradient 1>0 microbatch 2, which stage 1 (rank 1) owes: 1F5 lacks 0>1 microbatch 5"


def test_a_cycle_through_a_credit():
    """Rank 0 holds messages 0 and 1 untaken and so gives no credit back; what would let it go on lies behind them."""
    held = edges(0, received=(6, 2), granted=0)
    held["1>0"]["here"] = [0, 1]
    found = merge([waiting(next=[GRADIENT], edges=held), view(1, edges=edges(1, sent=(6, 2), waiting=1, credits=0, handed=[0, 1, 2]),
                                                              next=[ACTIVATION], explained=["1F5 lacks 0>1 microbatch 5"])])
    assert found.cause == "deadlock"
    assert found.further[0] == "stage 0 (rank 0) waits for the gradient 1>0 microbatch 2, which waits at stage 1 (rank 1) for a credit from " \
                               "stage 0 (rank 0), which holds microbatches 0, 1 untaken"


def test_a_known_failure_needs_no_search():
    found = merge([waiting(failure=LOST, stuck=False)])
    assert found.verdict == "stage 1 (rank 1) was lost (heartbeat): no sign of life for 9 s: stopped, or its machine hangs; stage 0 (rank 0) " \
                            "waits for the gradient 1>0 microbatch 2, which it owes"
    assert found.absent == (1,) and "No view of rank 1\n" in found.text() and "1 of 2 ranks wrote their view" in found.text()
    outside = merge([view(0, failure=LOST, in_call=False)])  # nobody waits for a message
    assert outside.verdict == "stage 1 (rank 1) was lost (heartbeat): no sign of life for 9 s: stopped, or its machine hangs"
    assert outside.states[0] == "outside the schedule, its last was call 7, 9 s ago"


def test_several_pipelines_make_one_report():
    hearsay = {"rank": 0, "where": "another pipeline", "text": "stage 1 (rank 2) was lost (heartbeat): no sign of life for 9 s", "traceback": "", "lost": False}
    others = [view(rank, pipeline=(1, 3), world=6, failure=hearsay, in_call=False, wall=1.0) for rank in (0, 1)]
    found = merge([*others, waiting(pipeline=(0, 2), world=6, failure=LOST, stuck=False)])
    assert found.verdict.startswith("stage 1 (rank 2) was lost (heartbeat)") and found.culprit == 2 and found.absent == (2, 4, 5)
    assert found.states[5] == "no view, nor is there one of its pipeline" and found.states[2].startswith("was lost")
    assert merge(others).verdict == "in another pipeline, stage 1 (rank 2) was lost (heartbeat): no sign of life for 9 s"


def test_nothing_is_wrong():
    assert merge([view(0), view(1)]).verdict == "no rank waits for another"
    with pytest.raises(ValueError, match="no view"):
        merge([])


# ---------------------------------------------------------------------- files
def write(rank, directory, pipeline):
    place = {"global_rank": rank, "rank": rank} | ({"edges": {}, "peers": {}} if rank > 1 else {})
    failures.write(view(min(rank, 1), pipeline=pipeline, world=len(pipeline), failure=LOST) | place, f"text of {rank}", directory=directory)


def test_whoever_comes_last_leaves_the_complete_report(tmp_path):
    ranks = tuple(range(12))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(rank, tmp_path, ranks)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    (folder,) = failures.find(tmp_path)
    assert folder.name == "rrfp-failure-20261130-011530-ab12cd"
    assert "12 of 12 ranks wrote their view" in (folder / "report.txt").read_text()
    assert json.loads((folder / "report.json").read_text())["present"] == list(ranks)
    assert (folder / "rank3.txt").read_text() == "text of 3\n"
    assert not [path.name for path in folder.iterdir() if not re.fullmatch(r"rank\d+\.(txt|json)|report\.(txt|json)|\.lock", path.name)]


def test_without_the_lock_the_report_is_made_all_the_same(tmp_path, monkeypatch):
    """Somebody hangs while it holds the lock."""
    import fcntl

    monkeypatch.setattr(failures, "_LOCK_S", 0.1)
    folder = tmp_path / "rrfp-failure-20261130-011530-ab12cd"
    folder.mkdir()
    with open(folder / ".lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write(0, tmp_path, (0, 1))
    assert "1 of 2 ranks" in (folder / "report.txt").read_text()


def test_a_file_that_cannot_be_read_hides_nothing(tmp_path):
    write(0, tmp_path, (0, 1))
    (folder,) = failures.find(tmp_path)
    (folder / "rank1.json").write_text('{"rrfp_view": 1, "cut')
    (folder / "rank2.json").write_text("[]")
    assert failures.load([folder]).absent == (1,)


# ---------------------------------------------------------------------- the command
def test_the_command_shows_the_newest_failure(tmp_path, capsys):
    write(0, tmp_path, (0, 1))
    os.rename(tmp_path / "rrfp-failure-20261130-011530-ab12cd", tmp_path / "rrfp-failure-20261129-000000-000000")
    write(0, tmp_path, (0, 1))
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1 earlier failure: {tmp_path / 'rrfp-failure-20261129-000000-000000'}"
    assert lines[1].startswith("Verdict: stage 1 (rank 1) was lost (heartbeat)")
    assert main([str(tmp_path / "rrfp-failure-20261130-011530-ab12cd")]) == 0
    assert capsys.readouterr().out.startswith("Verdict: stage 1 (rank 1) was lost (heartbeat)")


def test_folders_of_several_hosts_are_merged(tmp_path, capsys):
    for rank in (0, 1):
        write(rank, tmp_path / f"host{rank}", (0, 1))
    assert main([str(tmp_path / "host0"), str(tmp_path / "host1")]) == 0
    assert "2 of 2 ranks wrote their view" in capsys.readouterr().out
    failures.write(view(0, run="other"), "", directory=tmp_path / "host2")
    assert main([str(tmp_path / "host0"), str(tmp_path / "host2")]) == 2
    assert "of runs 20261130-011530-ab12cd, other; a report is of one run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), str(tmp_path)]) == 2
    assert "a trace is one directory; several are for what a failure left" in capsys.readouterr().err


def test_a_trace_of_a_run_that_failed(tmp_path, capsys):
    record(tmp_path / "run", straggler(stages=4, microbatches=6), calls=2, lost=2)
    assert main([str(tmp_path / "run"), "--quick"]) == 0
    assert "Verdict" not in capsys.readouterr().out and '"failure":null' in (tmp_path / "run/report.html").read_text()
    write(0, tmp_path / "run", (0, 1))
    (tmp_path / "run/rank3.jsonl").unlink()
    assert main([str(tmp_path / "run"), "--quick"]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "run/report.html").read_text()
    assert out.startswith("Verdict: stage 1 (rank 1) was lost") and "\nRank 3 wrote no trace: what follows is of the others alone.\n" in out
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["failure"]["verdict"].startswith("stage 1 (rank 1) was lost") and "No view of rank 1" in data["failure"]["text"]
    assert data["runs"][0]["calls"][0]["missing"] == "Rank 3 wrote no trace: what follows is of the others alone."


def test_a_replicas_trace_finds_the_jobs_failure(tmp_path, capsys):
    record(tmp_path / "pipeline0", straggler(stages=4, microbatches=6), calls=2)
    write(0, tmp_path, (0, 1))
    assert main([str(tmp_path / "pipeline0"), "--quick"]) == 0
    assert capsys.readouterr().out.startswith("Verdict: stage 1 (rank 1) was lost")
