"""`rrfp program`: what it writes and prints is read back; what it cannot do is one line."""

import pytest

from rrfp.cli import main
from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.placement import Placement
from rrfp.policy import Policy


def run(capsys, *words):
    status = main(["program", *map(str, words)])
    out, error = capsys.readouterr()
    return status, out, error


def test_build_show_and_show_again(tmp_path, capsys):
    file, text, csv = tmp_path / "p.json", tmp_path / "p.txt", tmp_path / "p.csv"
    assert run(capsys, "build", "dualpipev", file, "--ranks", 2, "--microbatches", 4, "--replicas", 2, "--experts")[0] == 0
    status, out, _ = run(capsys, "show", file, "--hint", csv)
    assert status == 0 and out.startswith("program 1\ndim MB 4\n")
    assert "% of the time of all-to-alls lies under computation" in out and "# rank 1 on 2,3: " in out
    text.write_text(out)
    assert run(capsys, "show", text)[1] == out
    assert [line.split(",")[0] for line in csv.read_text().splitlines()] == ["0F0", "1F0"] and "OVERLAP_F_B" in csv.read_text()


def test_a_picture_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.json"
    run(capsys, "build", "1f1b", file, "--ranks", 2, "--microbatches", 2, "--replicas", 2, "--zero", 3)
    status, out, _ = run(capsys, "show", file, "--summary", "--picture", tmp_path / "p.png")
    assert status == 0 and out.startswith("# ") and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_program_is_a_hint(tmp_path, capsys):
    """Where a hint file may stand, a program may: as it is, or its order written as one."""
    file, csv = tmp_path / "p.json", tmp_path / "p.csv"
    run(capsys, "build", "interleaved", file, "--ranks", 2, "--microbatches", 4)
    run(capsys, "show", file, "--summary", "--hint", csv)
    modes = [f"strict:{csv}", f"ready:{file}", "strict:1f1b"]
    assert main(["simulate", "--stages", "2", "--chunks", "2", "--microbatches", "4", "--seeds", "1", "--modes", *modes]) == 0
    out = capsys.readouterr().out
    assert str(csv) in out and str(file) in out
    rows = [Policy(hint=str(hint), mode="strict").list_for(Placement.looped(2, 2), 4) for hint in (csv, file, "1f1b")]
    assert rows[0] == rows[1] == rows[2]


def test_a_programs_split_backward_is_seen(tmp_path, capsys):
    file = tmp_path / "p.json"
    run(capsys, "build", "zb-1", file, "--ranks", 2, "--microbatches", 4)
    assert parse_mode(f"strict:{file}:2p").split
    with pytest.raises(ConfigurationError, match="p.json"):
        Policy(hint=str(file), mode="strict", split=True, limit="9").list_for(Placement.looped(2), 5)


@pytest.mark.parametrize("words, message", [
    (("build", "1f1b", "p.json", "--zero", 2), "--zero 2: shards over replicas; give --replicas 2 or more"),
    (("build", "1f1b", "p.json", "--experts"), "--experts: lie in pieces on the replicas"),
    (("build", "1f1b", "p.json", "--chunks", 2), "--chunks 2: 1f1b has a fixed number of stages per rank; leave it out"),
    (("build", "1f1b", "no/p.json"), "FILE no/p.json: there is no directory no"),
    (("show", "no.json"), "no.json: cannot be read"),
])  # fmt: skip
def test_what_is_refused_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = run(capsys, *words)
    assert status == 2 and error.startswith(f"rrfp program: {message}") and error.count("\n") == 1


@pytest.mark.parametrize("name, chunks, placement, limit", [
    ("1f1b", 1, "looped", "1f1b"), ("interleaved", 2, "looped", "1f1b"), ("zb-v", 2, "v", "4"), ("dualpipev", 2, "v", "5"),
])  # fmt: skip
def test_simulate_and_compare_take_a_program(tmp_path, capsys, name, chunks, placement, limit):
    """As a hint of either mode, a V among them where the run has that placement."""
    file = tmp_path / "p.json"
    run(capsys, "build", name, file, "--ranks", 2, "--microbatches", 4)
    shape = ["--stages", "2", "--microbatches", "4", "--seeds", "1", *(["--placement", "v"] if placement == "v" else ["--chunks", str(chunks)])]
    modes = ["--modes", f"strict:{file}:{limit}", f"ready:{file}:{limit}"]
    assert main(["simulate", *shape, *modes]) == 0 and capsys.readouterr().out.count(f":{file}:") == 2
    assert main(["compare", "--simulated", "--scenario", "uniform", *shape, *modes]) == 0
    assert capsys.readouterr().out.count(f"\nstrict:{file}:") == 1


def test_a_program_for_another_run_is_refused_with_the_way_out(tmp_path, capsys):
    file = tmp_path / "p.json"
    run(capsys, "build", "zb-v", file, "--ranks", 2, "--microbatches", 4)
    shape = ["--stages", "2", "--chunks", "2", "--seeds", "1", "--modes", f"strict:{file}:4"]
    for microbatches, line in ((4, "is a list with a V placement (as of ZB-V, DualPipeV): stage 2 on rank 1"), (8, "is for 4 microbatches")):
        with pytest.raises(ConfigurationError) as refused:
            parse_mode(f"strict:{file}:4").list_for(Placement.looped(2, 2), microbatches)
        assert line in str(refused.value)
    assert "build the program for as many, or use a hint that exists for any" in str(refused.value)
    assert main(["simulate", "--microbatches", "4", *shape]) == 2
    assert "use a list for this run's placement" in capsys.readouterr().err
