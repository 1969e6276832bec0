"""`rrfp simulate`: what it prints and writes, and what it refuses."""

import argparse
import json
import struct
import subprocess
import sys

import pytest

from rrfp.action import Edge, parse_action
from rrfp.simulate.command import main
from rrfp.trace.recorder import Recorder
from rrfp.values import parse_seeds

SMALL = ["--stages", "2", "--microbatches", "4", "--unit", "1", "--seeds", "1"]


def said(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys, *arguments):
    assert main(arguments) == 2
    line, = capsys.readouterr().err.splitlines()
    return line


def test_seeds():
    assert list(parse_seeds("15-17")) == [15, 16, 17] and list(parse_seeds("3")) == [3]
    with pytest.raises(argparse.ArgumentTypeError, match="like 15-44"):
        parse_seeds("4-2")


@pytest.mark.parametrize("modes, split, seconds", [
    (["strict:1f1b:1f1b", "strict:gpipe:32"], False, 117), (["strict:zb-h1:8", "strict:zb-h2:2p-1"], True, 103),
])
def test_closed_forms_at_full_size(capsys, modes, split, seconds):
    lines = said(capsys, "--unit", "1", "--seeds", "0", "--modes", *modes)
    assert lines[1] == f"no schedule can be faster than {seconds}.0000 s with a {'split' if split else 'whole'} backward"
    for mode, line in zip(modes, lines[3:], strict=True):
        assert line.split()[:5] == [mode, f"{seconds}.0000", "1.000", "1.000", "1.000"]


def test_interleaved_closed_form(capsys):
    lines = said(capsys, "--unit", "1", "--seeds", "0", "--chunks", "2", "--hint", "1f1b", "--mode", "strict")
    assert [line.split()[1] for line in lines[3:]] == ["106.5000", "106.5000"]


def test_lists_on_a_v(capsys, tmp_path):
    """ZB-V and DualPipeV take 3M F + (P - 1) F / 2, F being a rank's, of two chunks together."""
    lines = said(capsys, "--placement", "v", "--stages", "4", "--microbatches", "12", "--unit", "1", "--seeds", "0", "--modes",
                 "strict:zb-v:2p", "strict:dualpipe-v:9", "--json", str(tmp_path / "v.json"))
    assert lines[0].startswith("4 ranks of 2 chunks in a V, 12 microbatches")
    assert [line.split()[1] for line in lines[3:]] == ["37.5000", "37.5000"]
    assert json.loads((tmp_path / "v.json").read_text())["placement"] == "v"


def test_the_modes_of_one_scenario(capsys, tmp_path):
    target = tmp_path / "out.json"
    lines = said(capsys, *SMALL, "--modes", "megatron-1f1b", "strict:1f1b:1f1b", "ready:fill-r:2p-1", "--json", str(target))
    assert lines[0] == "2 ranks, 4 microbatches, scenario uniform, forward 1 s on average, seed 1, 1 lane"
    assert lines[2].split()[:3] == ["mode", "seconds", "speed-up"]
    assert lines[3].startswith("megatron-1f1b (modelled)") and lines[5].split()[:3] == ["ready:fill-r:2p-1", "13.0000", "1.154"]
    content = json.loads(target.read_text())
    assert (content["scenario"], content["stages"], content["microbatches"], content["bound_s"], content["split_bound_s"]) == (
        "uniform", 2, 4, 15.0, 13.0)
    modes = content["modes"]
    assert [mode["median_s"] for mode in modes] == [15.0, 15.0, 13.0] and [mode["ratio"] for mode in modes[:2]] == [1.0, 1.0]
    assert modes[1]["peak_in_flight"] == [2, 1]
    assert all(sum(mode["shares"].values()) == pytest.approx(100) and mode["q1_s"] == mode["q3_s"] for mode in modes)
    assert modes[1]["shares"] == pytest.approx({"computing": 80, "blocked_f": 10 / 3, "blocked_b": 10, "ended": 20 / 3})


def test_one_mode_option_by_option(capsys):
    lines = said(capsys, *SMALL, "--hint", "fill-r", "--limit", "2p-1", "--order", "free", "--lanes", "2")
    assert [line.split()[0] for line in lines[3:]] == ["strict:1f1b:1f1b:lanes=2", "ready:fill-r:2p-1:free:lanes=2"]
    assert lines[0].endswith("2 lanes")


def test_lanes_are_for_modes_that_do_not_say(capsys):
    modes = "ready:alt:2p:free", "ready:alt:2p:free:lanes=4"
    lines = said(capsys, "--scenario", "spikes", "--stages", "4", "--seeds", "0", "--lanes", "4", "--modes", *modes)
    assert lines[3].split()[1:] == lines[4].split()[1:]
    one = said(capsys, "--scenario", "spikes", "--stages", "4", "--seeds", "0", "--modes", *modes)
    assert one[3].split()[1] > one[4].split()[1] == lines[4].split()[1]


def test_the_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    said(capsys, *SMALL, "--modes", "strict:1f1b:1f1b", "ready:fill-r:2p-1", "--picture", str(target))
    assert target.read_bytes()[:4] == b"\x89PNG" and struct.unpack(">I", target.read_bytes()[16:20])[0] > 1000


def test_all_scenarios(capsys):
    lines = said(capsys, *SMALL, "--scenario", "all", "--each", "--modes", "strict:1f1b:1f1b", "ready:gpipe:8")
    assert "2 ranks, 4 microbatches, 15 scenarios, 1 seeds, 1 lane; time of strict:1f1b:1f1b" in lines[0]
    assert lines[3].split()[:6] == ["strict:1f1b:1f1b", "2", "1.000", "1.000", "1.000", "1.000"]
    over_bound, over_tight = map(float, lines[3].split()[6:])
    assert over_bound > over_tight >= 1
    assert lines[4].strip() == "uniform          1.000, x bound 1.000, x tight 1.000" and lines[18].split()[0] == "paper-multimodal"


def test_some_scenarios_none_of_them_calm(capsys):
    assert said(capsys, *SMALL, "--scenario", "spikes", "J3")[3].split()[3] == "-"


def test_a_file_is_a_scenario(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"F": 1.0, "B": {"mean": [2.0, 4.0]}}))
    assert said(capsys, *SMALL, "--costs", str(path), "--hint", "1f1b")[3].split()[1] == f"{1 + 4 * 5 + 2:.4f}"
    assert "these costs know only the whole backward" in refused(capsys, *SMALL, "--scenario", str(path), "--hint", "bfw")


@pytest.mark.parametrize("arguments, text", [
    (["--hint", "nope"], "--rrfp-hint nope: is neither a hint nor a file"),
    (["--modes", "alt:2p"], "--modes alt:2p: must begin with ready:HINT or strict:HINT"),
    (["--modes", "ready:alt:2p", "--hint", "alt"], "--hint: says what --modes says already"),
    (["--limit", "2p"], "--limit: belongs to --hint"),
    (["--scenario", "sunny"], "scenario sunny: there is no such scenario; choose one of uniform"),
    (["--scenario", "gone.json"], "scenario gone.json: cannot be read"),
    (["--scenario", "all", "--json", "x"], "--scenario all: --json, --picture and --search are for one scenario"),
    (["--search"], "--search: needs --memory-bound N"),
    (["--memory-bound", "8"], "--memory-bound 8: is what --search keeps to"),
    (["--search", "--memory-bound", "8", "--hint", "alt"], "--hint: is what --search looks for"),
    (["--chunks", "2", "--modes", "megatron-1f1b"], "megatron-1f1b, 2 chunks: only Megatron's schedule for one chunk"),
    (["--search", "--memory-bound", "8", "--json", "x"], "--search: prints a list, and writes neither --json nor --picture"),
    (["--call", "3"], "--call 3: picks a call of a trace"),
    (["--trace", "/nowhere", "--chunks", "2"], "--chunks 2: the trace says"),
    (["--trace", "/nowhere", "--placement", "v"], "--placement v: the trace says"),
    (["--chunks", "2", "--modes", "strict:1f1b", "strict:zb-v:2p"], "--rrfp-hint zb-v: is a list with a V placement"),
    (["--placement", "v", "--modes", "strict:looped-bfs:64"], "--rrfp-hint looped-bfs: is a list for looped chunks"),
    (["--placement", "v", "--modes", "megatron-1f1b"], "megatron-1f1b, 2 chunks: only Megatron's schedule for one chunk"),
    (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no directory /nowhere"),
    (["--picture", "x.what"], "--picture x.what: is a PNG"),
    (["--trace", "/nowhere"], "/nowhere holds no trace"),
    (["--trace", "/nowhere", "--scenario", "mixed"], "--trace /nowhere: says what the call costs, and so does --scenario"),
])
def test_what_is_refused_is_one_line(capsys, arguments, text):
    assert text in refused(capsys, *arguments)


def test_what_cannot_be_simulated_is_refused_before_anything_is_printed(capsys, tmp_path):
    (tmp_path / "whole.json").write_text(json.dumps({"F": 1, "B": 2}))
    for arguments in (["--scenario", str(tmp_path / "whole.json"), "--modes", "strict:1f1b", "ready:fill-r:2p"],
                      ["--scenario", "mixed", str(tmp_path / "whole.json"), "--modes", "strict:1f1b", "ready:fill-r:2p"],
                      ["--chunks", "2", "--modes", "strict:1f1b", "megatron-1f1b"], ["--chunks", "2", "--modes", "strict:1f1b", "strict:zb-v:2p"], ["--picture", "x.what"]):
        assert main(arguments) == 2
        assert capsys.readouterr().out == ""


def test_a_file_in_seconds_says_its_own_unit(capsys, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"unit": 1, "F": 3, "B": 4}))
    lines = said(capsys, *SMALL[:4], "--seeds", "1", "--chunks", "2", "--scenario", str(tmp_path / "mine.json"), "--json", str(tmp_path / "out.json"))
    assert "forward 6 s on average" in lines[0] and json.loads((tmp_path / "out.json").read_text())["unit_s"] == 6.0
    assert "forward 0.02 s on average" in said(capsys, *SMALL[:4], "--scenario", "J3", "--seeds", "1")[0]


def test_the_search(capsys):
    lines = said(capsys, *SMALL, "--search", "--memory-bound", "2")
    assert lines[0].startswith("2 ranks, 4 microbatches, scenario uniform") and lines[1].split()[0] == "policy"
    assert lines[2].split()[1] == "13.0000", "within two activations a split backward reaches 3M + P - 1"


def test_a_trace_is_predicted_from(capsys, tmp_path):
    """A run of two stages, written as a trace: the mode it ran under takes as long as it was measured to, another less."""
    for rank, times in enumerate(([(0, 1), (1, 2), (4, 6), (7, 9)], [(1, 2), (2, 4), (4, 5), (5, 7)])):
        recorder = Recorder(rank=rank, stages=[rank], directory=tmp_path, ranks=2)
        recorder.begin_call(0, microbatches=2, forward_only=False, now=0.0)
        tokens = ("0F0", "0F1", "0B0", "0B1") if rank == 0 else ("1F0", "1B0", "1F1", "1B1")
        for token, (start, end) in zip(tokens, times, strict=True):
            recorder.action(parse_action(token), float(start), float(end), 1, 0.0)
        for microbatch, came in enumerate((4, 7) if rank == 0 else (1, 2)):
            recorder.arrival(Edge(1 - rank, rank), microbatch, float(came))
        recorder.end_call(9.0)
        recorder.close()
    lines = said(capsys, "--trace", str(tmp_path), "--modes", "strict:1f1b:1f1b", "ready:f-first:2p")
    assert lines[0].startswith("2 ranks, 2 microbatches, as traced in") and lines[2].startswith("measured: 9.0000 s")
    assert lines[4].split()[:2] == ["strict:1f1b:1f1b", "9.0000"]
    assert "--stages 3: the trace is of 2" in refused(capsys, "--trace", str(tmp_path), "--stages", "3")


def test_needs_neither_torch_nor_megatron():
    script = "import sys; import rrfp.simulate.command; sys.exit(bool({'torch', 'megatron', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
