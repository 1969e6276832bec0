"""`rrfp report`: what it writes, prints and returns."""

import json
import re
import subprocess
import sys

import pytest
from simulated import record, scenario, small_limit, straggler

from rrfp.report import command
from rrfp.report.command import calls_to_embed, main
from rrfp.trace.files import Call, RankTrace, Timeline


@pytest.fixture
def run(tmp_path):
    record(tmp_path / "run", straggler(stages=4, microbatches=6), calls=3)
    return tmp_path / "run"


def calls_in(path) -> list[list[int]]:
    data = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])
    return [[call["call"] for call in each["calls"]] for each in data["runs"]]


def test_one_run(run, capsys):
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    calls = calls_in(run / "report.html")
    assert calls[0][0] == 2 and 0 not in calls[0]
    first = json.loads(re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)[1])["runs"][0]["calls"][0]
    assert out.splitlines()[0] == first["findings"][0]["text"] and out.splitlines()[-1].startswith(f"report: {run / 'report.html'} (call")


def test_options(run, tmp_path, capsys):
    record(tmp_path / "other", scenario("uniform", stages=4, microbatches=6), calls=1)
    out = tmp_path / "made" / "here.html"
    assert main([str(run), "--call", "1", "--call", "0", "--out", str(out), "--compare", str(tmp_path / "other")]) == 0
    assert calls_in(out) == [[1, 0], [0]]
    assert "RRFP report: run" in out.read_text() and "RRFP report: other" in out.read_text() and not (run / "report.html").exists()


def test_a_large_call_is_announced_and_quick_asks_no_simulator(tmp_path, capsys, monkeypatch):
    # At 1F1B's limit uneven microbatches make the simulator suggest a larger one.
    record(tmp_path / "run", small_limit(stages=4, microbatches=12), "ready:announced:1f1b")
    monkeypatch.setattr(command, "_PATIENCE", 95)  # the call has 96 actions
    assert main([str(tmp_path / "run"), "--call", "0"]) == 0
    said = capsys.readouterr()
    assert said.err == "rrfp report: 96 actions are many to simulate, this may take minutes; --quick leaves that out\n" and "Try: " in said.out
    assert main([str(tmp_path / "run"), "--call", "0", "--quick"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "Try: " not in said.out and "predicted" not in said.out


def test_a_killed_and_a_missing_rank_are_no_obstacle(tmp_path, capsys):
    record(tmp_path / "run", straggler(stages=4, microbatches=6), calls=1, lost=2)
    assert main([str(tmp_path / "run")]) == 0
    assert calls_in(tmp_path / "run/report.html") == [[0]]
    (tmp_path / "run/rank3.jsonl").unlink()
    assert main([str(tmp_path / "run")]) == 0
    assert "rank 3 is missing" in (tmp_path / "run/report.html").read_text()
    assert "rank 3 is missing: it wrote no trace\n" in capsys.readouterr().out


def test_refusals_are_one_line_and_status_2(run, tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(r"rrfp report: .* holds no trace: .*\n", capsys.readouterr().err)
    assert main([str(run), "--call", "9"]) == 2
    assert capsys.readouterr().err == "rrfp report: call 9 is not in the trace: it holds calls 0..2\n"
    assert main([str(run), "--out", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([str(run), "--compare", str(tmp_path)]) == 2
    assert not (run / "report.html").exists()


def timeline_of(*seconds, incomplete=(), forward_only=()):
    calls = {n: Call(n, 1, n in forward_only, 0.0, each, n not in incomplete) for n, each in enumerate(seconds)}
    return Timeline({0: RankTrace(0, (0,), calls)})


@pytest.mark.parametrize("timeline, calls", [
    (timeline_of(9, 1, 3, 1), [3, 2]),  # the first connects and warms up
    (timeline_of(9, 1, 2, 3), [3]),
    (timeline_of(9), [0]),
    (timeline_of(9, 1, 3, 5, incomplete=[3]), [2]),
    (timeline_of(9, 1, 3, 5, forward_only=[3]), [2]),
    (timeline_of(9, 1, incomplete=[0, 1]), [None]),
])
def test_the_last_call_and_the_slowest_are_embedded(timeline, calls):
    assert calls_to_embed(timeline) == calls


def test_it_needs_neither_torch_nor_megatron():
    code = "import sys, rrfp.report.command; sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_command_line_knows_it(run, capsys):
    from rrfp import cli

    assert cli.main(["report", str(run)]) == 0
    assert "report.html" in capsys.readouterr().out
