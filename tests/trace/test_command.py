"""`rrfp trace`: what it writes, prints and returns."""

import json
import sys

import pytest

from rrfp.trace.command import main


def test_one_run(make, capsys):
    run = make(stages=3, microbatches=4)
    assert main([str(run.directory)]) == 0
    out = capsys.readouterr().out
    assert json.loads((run.directory / "trace.json").read_text())["traceEvents"]
    assert (run.directory / "timeline.png").stat().st_size > 1000
    assert "wait F" in out and "mean" in out and "peak in flight" in out and "perfetto" in out


def test_two_runs_and_options(make, tmp_path, capsys):
    a, b = make("a", stages=3, microbatches=4), make("b", stages=3, microbatches=4, ready=True)
    out = tmp_path / "made" / "here"
    assert main([str(a.directory), str(b.directory), "--call", "1", "--out", str(out), "--title", "Megatron"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["timeline.png", "trace.json", "trace2.json"]
    lines = capsys.readouterr().out.splitlines()
    assert "Megatron" in lines and "b" in lines
    calls = {e["name"] for e in json.loads((out / "trace.json").read_text())["traceEvents"] if e.get("cat") == "call"}
    assert calls == {"call 1"}


def test_missing_and_cut_off_ranks_are_reported(make, capsys):
    run = make(stages=3, microbatches=4)
    (run.directory / "rank2.jsonl").unlink()
    path = run.directory / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert main([str(run.directory)]) == 0
    out = capsys.readouterr().out
    assert "rank 2 is missing: it wrote no trace" in out
    assert "rank 1 was killed while writing" in out


def test_without_matplotlib_the_rest_is_written(make, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    run = make(stages=2, microbatches=2)
    assert main([str(run.directory)]) == 1
    captured = capsys.readouterr()
    assert (run.directory / "trace.json").exists() and not (run.directory / "timeline.png").exists()
    assert captured.err == "rrfp trace: no picture: matplotlib is not installed (pip install matplotlib)\n"
    assert "mean" in captured.out


def test_refusals_are_one_line(make, tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    run = make(stages=2, microbatches=2)
    assert main([str(run.directory), "--call", "9"]) == 2
    assert capsys.readouterr().err == "rrfp trace: call 9 is not in the trace: it holds calls 1..2\n"
    with pytest.raises(SystemExit):
        main([str(run.directory), "--title", "a", "--title", "b"])
