"""The command, whole: one small run of all modes on real processes, real compute, refusals, and a rank that fails."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise

import psutil
import pytest

from rrfp.action import Edge
from rrfp.compare import command, measure
from rrfp.compare.measure import parse_modes
from rrfp.errors import ConfigurationError
from rrfp.simulate.command import main as simulate
from rrfp.trace.files import read

STAGES, MICROBATCHES = 3, 4
ALL = ["megatron-1f1b", "torch-1f1b", "torch-zbv", "strict:1f1b:1f1b", "ready:announced:1f1b", "ready:fill-r:2p-1",
       "ready:alt:2p:free:lanes=2"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """(directory, output, JSON) of one comparison of all modes with one late message, at F = I = W = 2 ms."""
    out = tmp_path_factory.mktemp("compare")
    late = [[0] * MICROBATCHES for _ in range(STAGES)]
    late[1][2] = 40
    (out / "late.json").write_text(json.dumps({"F": 1, "I": 1, "W": 1, "delays": {"F": late}, "unit": 0.002}))
    done = rrfp_compare("--scenario", str(out / "late.json"), "--modes", *ALL, "--repeats", "2", "--json", str(out / "all.json"),
                        "--picture", str(out / "all.png"), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done, json.loads((out / "all.json").read_text())


def rrfp_compare(*arguments):
    command = [sys.executable, "-m", "rrfp", "compare", "--stages", str(STAGES), "--microbatches", str(MICROBATCHES), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.timeout(150)
def test_every_mode_runs_and_is_reported(everything):
    out, done, whole = everything
    assert [mode["name"] for mode in whole["modes"]] == ALL
    assert whole["compute"] == "emulated" and whole["unit_s"] == pytest.approx(0.002)
    for mode in whole["modes"]:
        assert len(mode["seconds"]) == 2 and mode["q1_s"] <= mode["median_s"] <= mode["q3_s"]
        assert len(mode["peak_in_flight"]) == STAGES
        assert sum(mode["shares"].values()) == pytest.approx(100)
        assert {"computing", "blocked_f", "blocked_b", "agreement", "runtime"} <= mode["shares"].keys()
    by_name = {mode["name"]: mode for mode in whole["modes"]}
    for name in ("megatron-1f1b", "torch-1f1b", "strict:1f1b:1f1b"):
        assert by_name[name]["peak_in_flight"] == [3, 2, 1]
    assert by_name["torch-1f1b"]["simulated_s"] is None and by_name["megatron-1f1b"]["simulated_s"] > 0
    assert "EMULATED" in done.stdout and "repeat 2 of 2" in done.stderr and "3 processes are up" in done.stderr
    assert (out / "all.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(150)
def test_no_mode_beats_its_bound(everything):
    """Negative control for the delays: the late message is on every mode's way, and no mode is faster than physics."""
    for mode in everything[2]["modes"]:
        bound = everything[2]["split_bound_s" if mode["name"] in ("torch-zbv", "ready:fill-r:2p-1") else "bound_s"]
        assert min(mode["seconds"]) >= (bound if mode["name"] != "torch-zbv" else 0.08), mode["name"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["megatron-1f1b", "strict:1f1b:1f1b"])
def test_a_message_is_late_from_when_it_was_sent(everything, name):
    timeline = read(everything[0] / name.replace(":", "-"))
    assert len(timeline.calls) == 2 and {call.mode for call in timeline.of_call(timeline.calls[0]).values()} == {name}
    for number in timeline.calls:
        calls, took = timeline.of_call(number), {}
        for call in calls.values():
            took |= {(m.edge, m.microbatch): -m.time for call in calls.values() for m in call.sent}
        for call in calls.values():
            for message in call.arrivals:
                took[message.edge, message.microbatch] += message.time
        assert len(took) == 2 * (STAGES - 1) * MICROBATCHES
        assert took[Edge(0, 1), 2] >= 0.08 - 1e-4 and min(took.values()) >= 0
        assert all(one.end <= other.start + 1e-9 for call in calls.values() for one, other in pairwise(call.actions))


@pytest.mark.timeout(150)
def test_compute_hides_a_late_message_of_megatron(tmp_path):
    """It is late from its sending, not from when its receiver asks for it: here stage 1 computes for longer than it is late."""
    (tmp_path / "hidden.json").write_text(json.dumps({
        "unit": 1.0, "F": 0.001, "B": {"mean": [0.001, 0.9]}, "delays": {"F": [[0, 0], [0, 0.6]]}}))
    done = subprocess.run([sys.executable, "-m", "rrfp", "compare", "--stages", "2", "--microbatches", "2", "--scenario",
                           str(tmp_path / "hidden.json"), "--modes", "megatron-1f1b", "--repeats", "1", "--out", str(tmp_path)],
                          check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    timeline = read(tmp_path / "megatron-1f1b")
    call = timeline.of_call(timeline.calls[0])[1]
    started = {str(ran.action): ran.start for ran in call.actions}
    ended = {str(ran.action): ran.end for ran in call.actions}
    assert started["1F1"] - ended["1B0"] < 0.5


def test_real_compute(tmp_path, capsys):
    path = tmp_path / "real.json"
    arguments = ["--stages", "2", "--microbatches", "2", "--scenario", "uniform", "--unit", "0.002", "--repeats", "1", "--compute",
                 "real", "--modes", "strict:1f1b:1f1b", "ready:alt:2p", "--json", str(path)]
    assert command.main(arguments) == 0
    assert json.loads(path.read_text())["compute"] == "real"
    assert "compute for real" in capsys.readouterr().out


def test_more_ranks_than_cores_that_compute_for_real_are_warned_about(capsys):
    options = command._parser().parse_args(["--stages", "3", "--microbatches", "1", "--scenario", "uniform", "--compute", "real"])
    command._work(options, 2)
    assert capsys.readouterr().err.startswith("warning: 3 ranks compute on 2 cores")
    command._work(options, 3)
    assert capsys.readouterr().err == ""


def test_a_hint_from_a_file_which_is_for_one_number_of_microbatches(tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert command.main(["--stages", "2", "--microbatches", "3", "--scenario", "uniform", "--unit", "0.002", "--repeats", "1",
                         "--modes", f"strict:{tmp_path}/mine.csv:2", f"ready:{tmp_path}/mine.csv:2p"]) == 0
    assert f"ready:{tmp_path}/mine.csv:2p" in capsys.readouterr().out


def test_lists_on_a_v_run_for_real(tmp_path, capsys):
    """Two processes of two chunks: whole and split backwards in one list, hand-offs within a rank, the real transport."""
    modes = ["strict:zb-v:4", "ready:zb-v:4", "strict:dualpipe-v:5", "ready:dualpipe-v:5"]
    assert command.main(["--stages", "2", "--microbatches", "5", "--placement", "v", "--scenario", "jitter-0.3", "--unit", "0.004", "--repeats", "1",
                         "--modes", *modes, "--json", str(tmp_path / "v.json"), "--out", str(tmp_path)]) == 0
    assert "jitter-0.3: 2 ranks of 2 chunks in a V, 5 microbatches" in capsys.readouterr().out
    whole = json.loads((tmp_path / "v.json").read_text())
    assert [mode["name"] for mode in whole["modes"]] == modes and (whole["chunks"], whole["placement"]) == (2, "v")
    assert all(mode["median_s"] >= whole["split_bound_s"] for mode in whole["modes"])
    timeline = read(tmp_path / "strict-dualpipe-v-5")
    assert {ran.action.kind for call in timeline.of_call(timeline.calls[0]).values() for ran in call.actions} == {"F", "B", "I", "W"}


def test_explain_simulated(capsys, tmp_path):
    path = tmp_path / "ladder.json"
    assert command.main(["--stages", "4", "--microbatches", "8", "--scenario", "mixed", "--explain", "--simulated", "--repeats", "2",
                         "--modes", "ready:bf:2p", "--json", str(path)]) == 0
    out, whole = capsys.readouterr().out, json.loads(path.read_text())
    assert "asynchronous transport" in out and "SIMULATED" in out and "lanes=8" in out
    assert len(whole["ladder"]["steps"]) == 6 and len(whole["modes"]) == 9
    assert whole["modes"][-1]["name"] == "ready:bf:2p"


def test_simulated_says_what_rrfp_simulate_says(tmp_path):
    asked = ["--stages", "4", "--microbatches", "8", "--scenario", "paper-multimodal", "--seeds", "3-5", "--modes", "megatron-1f1b",
             "strict:1f1b:1f1b", "ready:alt:2p", "ready:fill-r:2p-1:free:lanes=4"]
    assert command.main([*asked, "--simulated", "--json", str(tmp_path / "compare.json")]) == 0
    assert simulate([*asked, "--json", str(tmp_path / "simulate.json")]) == 0
    ours, other = (json.loads((tmp_path / name).read_text()) for name in ("compare.json", "simulate.json"))
    for key in ("scenario", "stages", "microbatches", "compute", "unit_s", "seeds"):
        assert ours[key] == other[key], key
    for key in ("bound_s", "split_bound_s"):
        assert ours[key] == pytest.approx(other[key])
    for mine, its in zip(ours["modes"], other["modes"], strict=True):
        assert mine["name"] == its["name"] and mine["peak_in_flight"] == its["peak_in_flight"]
        for key in ("median_s", "q1_s", "q3_s", "ratio", "over_bound"):
            assert mine[key] == pytest.approx(its[key]), key
        # Of the repeats taken together here, of each repeat there; rounded here.
        for part, share in its["shares"].items():
            assert mine["shares"][part] == pytest.approx(share, abs=1.5), part


@pytest.mark.parametrize("scenario", ["J3", "organ-pipe:lengths", "mixed"])
def test_the_unit_is_what_was_asked_for(scenario, capsys):
    assert command.main(["--stages", "2", "--microbatches", "2", "--scenario", scenario, "--simulated", "--repeats", "1", "--unit", "0.002"]) == 0
    assert "unit 2 ms" in capsys.readouterr().out


class Broken:
    """Work that fails in the first action of the second call."""

    emulated, overruns, left = True, 0, 6

    def spend(self, seconds):
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("deliberate")


def test_a_rank_that_fails_is_shown_and_leaves_no_process(monkeypatch, capsys):
    monkeypatch.setattr(command, "_work", lambda options, cores: Broken())
    before = psutil.Process().children()
    status = command.main(["--stages", "2", "--microbatches", "2", "--scenario", "uniform", "--modes", "strict:1f1b:1f1b"])
    assert status == 1 and "ZeroDivisionError: deliberate" in capsys.readouterr().err
    assert [child for child in psutil.Process().children() if child not in before] == []


class Suicidal(Broken):
    def spend(self, seconds):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "_work", lambda options, cores: Suicidal())
    status = command.main(["--stages", "2", "--microbatches", "2", "--scenario", "uniform", "--modes", "strict:1f1b:1f1b"])
    assert status == 1
    assert re.search(r"^rrfp compare: rank [01] ended without a word: killed by SIGKILL$", capsys.readouterr().err, re.MULTILINE)


def test_a_termination_is_an_interrupt(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(measure, "measure", lambda *arguments, **options: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        command.main(["--stages", "2", "--microbatches", "2", "--scenario", "uniform", "--modes", "strict:1f1b:1f1b"])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("arguments", "says"), [
    (["--stages", "1"], r"--stages 1: a pipeline has at least 2 stages"),
    (["--modes", "gpipe"], r"--modes gpipe: is no mode; use megatron-1f1b, torch-1f1b, torch-zbv, ready:HINT:LIMIT"),
    (["--modes", "ready:nothing:1f1b"], "--rrfp-hint nothing"),
    (["--modes", "strict:zb-h2:1f1b"], "--rrfp-limit"),
    (["--scenario", "calm"], "calm"),
    (["--simulated", "--modes", "torch-zbv"], "--modes torch-zbv: is not modelled"),
    (["--microbatches", "2", "--modes", "torch-1f1b"], "--microbatches 2: torch-1f1b"),
    (["--json", "nowhere/figures.json"], "--json nowhere/figures.json: there is no directory nowhere"),
    (["--picture", "p.what"], "--picture p.what: is a PNG"),
    (["--out", "/proc/nowhere"], "--out /proc/nowhere: no directory can be made there"),
    (["--placement", "v"], r"--modes megatron-1f1b: runs one stage per process, and this comparison has several"),
    (["--chunks", "2", "--modes", "torch-zbv"], r"--modes torch-zbv: runs one stage per process"),
    (["--modes", "strict:zb-v:2p"], r"--rrfp-hint zb-v: is a list with a V placement"),
    (["--out", "traces", "--simulated"], "--out traces: --simulated runs nothing to trace"),
    (["--unit", "40"], "--timeout 60: an action of this scenario and its message may take 80 s.*use --timeout 240"),
    (["--compute", "real", "--simulated"], "--compute real: --simulated runs nothing"),
    (["--picture", "p.png", "--simulated", "--modes", "ready:alt:2p"], "--picture p.png: --simulated runs nothing to draw"),
])
def test_refusals_are_one_line(arguments, says):
    given = ["--stages", "3", "--microbatches", "4", "--scenario", "uniform", *arguments]
    with pytest.raises(ConfigurationError, match=says) as refusal:
        command.main(given)
    assert "\n" not in str(refusal.value)


def test_seeds_and_repeats():
    def seeds(*arguments):
        return command._seeds(command._parser().parse_args(
            ["--stages", "3", "--microbatches", "4", "--scenario", "uniform", *arguments]))

    assert seeds() == [0, 1, 2, 3, 4]
    assert seeds("--seeds", "15-17") == [15, 16, 17]
    assert seeds("--repeats", "2") == [0, 1]
    assert seeds("--seeds", "7", "--repeats", "3") == [7, 7, 7]


def test_lanes_of_modes_that_do_not_say():
    modes = parse_modes(["megatron-1f1b", "ready:alt:2p", "ready:alt:2p:lanes=1", "strict:1f1b:1f1b"], lanes=3)
    assert list(modes) == ["megatron-1f1b", "ready:alt:2p:lanes=3", "ready:alt:2p", "strict:1f1b:1f1b:lanes=3"]
