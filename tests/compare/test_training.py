"""`rrfp compare-training`: a user's command under several modes. Most runs are of a pretended training; one is real."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from rrfp import cli
from rrfp.compare import training, training_command
from rrfp.compare.training import TrainingFailed, check_command, flags_of, parse_modes, read_log, read_trace, train
from rrfp.compare.training_results import TITLES
from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, str(Path(__file__).with_name("fake_training.py"))]
MODES = ["megatron-1f1b", "strict:1f1b:1f1b", "ready:bf:2p"]
RUNGS = ["megatron-1f1b", "strict:1f1b:1f1b", "strict:1f1b:eager", "ready:bf:2p"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def compare(tmp_path, capsys):
    """compare(*words of the command, modes, options) -> (status, output, JSON or None)."""

    def run(*words, modes=MODES, options=("--iterations", "3", "--warm-up", "1")):
        status = cli.main(["compare-training", *options, "--modes", *modes, "--out", str(tmp_path), "--", *FAKE, *words])
        path = tmp_path / "comparison.json"
        return status, capsys.readouterr(), json.loads(path.read_text()) if path.exists() else None

    return run


def test_table_figures_and_picture(compare, tmp_path):
    status, said, whole = compare(options=("--iterations", "4", "--warm-up", "2", "--repeats", "2"))
    assert status == 0, said.err
    by_name = {mode["name"]: mode for mode in whole["modes"]}
    assert list(by_name) == MODES and [mode["losses"] for mode in whole["modes"]] == ["reference", "equal", "equal"]
    assert by_name["ready:bf:2p"]["ratio"] == pytest.approx(2, rel=0.01) and by_name["strict:1f1b:1f1b"]["ratio"] == 1
    assert by_name["megatron-1f1b"]["seconds"] == pytest.approx([2.203, 2.204] * 2)  # the first two iterations are not measured
    assert by_name["ready:bf:2p"]["schedule_s"] == pytest.approx([1.0] * 4)
    assert by_name["ready:bf:2p"]["shares"]["computing"] == pytest.approx(75) and by_name["ready:bf:2p"]["gib"] == 2
    assert by_name["megatron-1f1b"]["peak_in_flight"] == [1, 1] and whole["emulated"]
    assert "EMULATED" in said.out and "GiB" in said.out
    assert by_name["megatron-1f1b"]["overruns"] == 8 and "8 of 16" not in said.out and "THE MACHINE WAS BUSY" in said.out
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "iteration 4/4" in said.err and (tmp_path / "ready-bf-2p/repeat1/log.txt").is_file()


def test_the_ladder_has_no_rung_above_a_missing_one(compare):
    _, said, whole = compare(modes=RUNGS)
    assert [step["mode"] for step in whole["ladder"]["steps"]] == RUNGS and whole["ladder"]["total"] == pytest.approx(2, rel=0.01)
    assert "readiness" in said.out and "over 2 iterations" in said.out
    _, said, whole = compare(modes=MODES)
    assert [step["mode"] for step in whole["ladder"]["steps"]] == RUNGS[:2] and "readiness" not in said.out


def test_modes_take_turns_at_being_first(compare):
    _, said, _ = compare(options=("--iterations", "2", "--warm-up", "1", "--repeats", "3"))
    order = [line.split(",")[0] for line in said.err.splitlines() if line.rstrip().endswith("starting")]
    assert order == [*MODES, *MODES[1:], MODES[0], MODES[2], *MODES[:2]]


def test_one_digit_of_one_loss_is_noticed(compare):
    """Negative control."""
    status, said, whole = compare("--fault", "differ:strict")
    assert status == 1 and [mode["losses"] for mode in whole["modes"]][::2] == ["reference", "equal"]
    assert "strict:1f1b:1f1b: DIFFERENT from iteration 2 on (lm loss 4.800001E+00 instead of 4.800000E+00)" in said.out


def test_pipelines_of_one_job_count_together(compare, tmp_path):
    _, _, whole = compare("--replicas", "2")
    for mode, seconds in zip(whole["modes"], (4, 4, 2), strict=True):
        assert mode["peak_in_flight"] == [2, 2] and mode["schedule_s"] == pytest.approx([seconds] * 2)  # the slower replica's
    calls, timeline = read_trace(tmp_path / "megatron-1f1b/repeat0/trace")
    assert len(calls) == 3 and len(timeline.ranks) == 2 and [call.actions for call in calls] == [8] * 3


def test_what_a_longer_run_left_is_not_read(compare):
    compare(options=("--iterations", "5", "--warm-up", "1"))
    status, said, whole = compare()
    assert status == 0 and len(whole["modes"][0]["seconds"]) == 2, said.err


@pytest.mark.parametrize(("fault", "says"), [
    ("fail", "rrfp: --rrfp-limit 1: deliberate (exit status 2; whole output: "),
    ("short", "it logged 2 iterations instead of 3; its --train-iters must be at least that"),
])
def test_a_mode_that_fails_does_not_stop_the_others(compare, fault, says):
    status, said, whole = compare("--fault", f"{fault}:strict")
    assert status == 1 and says in said.out and says in whole["modes"][1]["missing"]
    assert whole["modes"][2]["losses"] == "equal"


def test_without_a_reference_there_is_no_comparison(compare):
    status, said, whole = compare("--fault", "fail:1f1b")
    assert status == 1 and whole is None and "rrfp compare-training: megatron-1f1b: rrfp: --rrfp-limit 1: deliberate" in said.err
    assert "strict" not in said.err


def test_a_training_that_says_nothing_is_ended(tmp_path):
    before = psutil.Process().children(recursive=True)
    with pytest.raises(TrainingFailed, match=r"no output \(nothing was printed for 0.5 s \(--timeout\); whole output: "):
        train(["sh", "-c", "sleep 600"], [], tmp_path, iterations=2, timeout=0.5, progress=print)
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


def test_what_a_training_leaves_behind_does_not_hold_up_the_comparison(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PID", str(tmp_path / "pid"))
    status, said, _ = compare("--fault", "leave:strict")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert status == 0, said.err


def test_an_interrupt_leaves_no_process(compare, monkeypatch):
    def interrupt(line):
        if "iteration" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(training_command, "_Progress", lambda name: interrupt)
    before, handler = psutil.Process().children(recursive=True), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        training_command.main(["--out", "unused", "--iterations", "3", "--warm-up", "1", "--", *FAKE, "--fault", "hang:1f1b"])
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- modes
def test_every_mode_of_the_default_is_one_of_training():
    modes = parse_modes(TITLES)
    assert list(modes) == list(TITLES)
    assert flags_of("megatron-1f1b", None) == ["--pipeline-schedule", "1f1b"] and flags_of("default", None) == ["--pipeline-schedule", "rrfp"]


@pytest.mark.parametrize("text", ["strict:1f1b:eager", "ready:fill-alt:2p:free:lanes=4", "ready:bfw:2p"])
def test_flags_say_what_the_mode_says(text):
    policy = parse_mode(text)
    flags = flags_of(text, policy)
    given = dict(zip(flags[2::2], flags[3::2]))
    assert given == {"--rrfp-mode": policy.mode, "--rrfp-hint": policy.hint, "--rrfp-limit": policy.limit, "--rrfp-order": policy.order,
                     "--rrfp-lanes": str(policy.lanes)}
    assert (training.SPLIT in flags) == policy.split


def test_what_training_lacks_is_named_and_does_not_run(compare, monkeypatch):
    monkeypatch.setattr(training, "SPLIT", "--rrfp-that-is-not-there")
    status, said, whole = compare(modes=["megatron-1f1b", "ready:bfw:2p"])
    assert status == 0 and whole["modes"][1]["missing"] == "needs --rrfp-that-is-not-there" and "ready:bfw:2p   needs" in said.out


def test_the_log_is_read_whole():
    text = "x\n iteration 1/ 9 | consumed samples: 4 | elapsed time per iteration (ms): 12.5 | a time: 3 | lm loss: 1.0 | grad norm: nan |\n"
    (step,) = read_log(text)
    other = "Number of parameters in transformer block in billions:  0.00\n"  # of another rank, on the same line
    assert read_log(text.rstrip() + other) == read_log(text.rstrip() + "[Rank 0] memory (MB) | allocated: 1.0 |\n") == (step,)
    assert step.milliseconds == 12.5 and step.fields == {"consumed samples": "4", "lm loss": "1.0", "grad norm": "nan"}


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "no command"),
    (["--", "x", "--rrfp-hint", "bf"], "--rrfp-hint in the command: the comparison gives it"),
    (["--", "x", "--save=there"], "--save in the command: every run would write there"),
    (["--", "bash", "my run.sh", "--dry-run"], "--dry-run in the command: it trains nothing then, and there is nothing to compare; leave it out, or "
     "run by itself `bash 'my run.sh' --dry-run`"),
    (["--", "x", "--presets"], "--presets in the command: it trains nothing then"),
    (["--", "x", "-h"], "-h in the command: it trains nothing then"),
    (["--modes", "torch-1f1b", "--", "x"], "--modes torch-1f1b: is no mode of a training"),
    (["--modes", "ready:nothing:2p", "--", "x"], "--rrfp-hint nothing"),
    (["--iterations", "2", "--warm-up", "2", "--", "x"], "--warm-up 2: leaves nothing of --iterations 2"),
])
def test_refusals(arguments, says):
    with pytest.raises(ConfigurationError) as refusal:
        training_command.main(arguments)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_command_that_is_not_there(capsys):
    assert training_command.main(["--out", "out", "--", "no-such-command"]) == 1
    assert "no-such-command: can't be run (No such file or directory)" in capsys.readouterr().err


def test_a_plain_command_is_accepted():
    check_command(["torchrun", "-m", "rrfp", "pretrain_gpt.py", "--rrfp-emulate", "lengths"])


# --------------------------------------------------------------------------------------------------------------- scripts
def test_compare_sh_tells_its_options_from_the_trainings(tmp_path):
    """With a pretended environment, and a python that says what it was given."""
    scripts, tools = tmp_path / "scripts", tmp_path / "bin"
    scripts.mkdir()
    tools.mkdir()
    (scripts / "compare.sh").write_text((ROOT / "scripts/compare.sh").read_text())
    (scripts / "env.sh").write_text("true\n")
    (tools / "python").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (tools / "python").chmod(0o755)

    def run(*arguments):
        done = subprocess.run(["bash", str(scripts / "compare.sh"), *arguments], capture_output=True, text=True, timeout=20,
                              env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"})
        return done.returncode, done.stdout.splitlines(), done.stderr

    script = str(scripts / "pretrain_gpt.sh")
    assert run("gpt", "--cpu", "--lr", "1") == (0, ["-m", "rrfp", "compare-training", "--", "bash", script, "--cpu", "--lr", "1"], "")
    for option in ("--repeats", "--iterations=20"):
        status, said, refusal = run("gpt", "--cpu", option, "3")
        assert (status, said) == (2, []) and refusal == (f"rrfp: {option}: is an option of the comparison; write those before a --, for example bash "
                                                         "scripts/compare.sh gpt --repeats 3 -- --cpu\n")
    assert run("gpt", "--repeats", "3", "--", "--cpu")[1] == ["-m", "rrfp", "compare-training", "--repeats", "3", "--", "bash", script, "--cpu"]
    words = run("stages", "--stages", "8")[1]
    assert words[:4] == ["-m", "rrfp", "compare", "--explain"] and words[-2:] == ["--stages", "8"]
    assert run("rnn")[0] == 2 and "rnn: must be gpt, vlm or stages" in run("rnn")[2]


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_a_real_training(tmp_path, full, monkeypatch):
    """A tiny GPT under Megatron's schedule and by readiness, every loss equal digit for digit."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STAGES", "2")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    modes = ["megatron-1f1b", "strict:1f1b:1f1b", "ready:bf:2p", "default"] if full else ["megatron-1f1b", "ready:bf:2p"]
    status = training_command.main([
        "--modes", *modes, "--iterations", "3", "--warm-up", "1", "--out", str(tmp_path / "out"), "--", sys.executable,
        str(ROOT / "scripts/recipe.py"), "gpt", "--cpu", "--hidden-size", "32", "--rrfp-emulate", "uniform:3"])
    whole = json.loads((tmp_path / "out/comparison.json").read_text())
    assert status == 0 and [mode["losses"] for mode in whole["modes"]] == ["reference"] + ["equal"] * (len(modes) - 1), whole
    assert [mode["peak_in_flight"] for mode in whole["modes"]][:2] == [[2, 1], [4, 1] if not full else [2, 1]]
    assert whole["emulated"] and all(len(mode["seconds"]) == 2 for mode in whole["modes"])
