"""scripts/gpu_check: its refusals, its deadlines and its verdicts, with ranks that do what a test wants of them."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPECIFICATION = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
gpu_check = sys.modules["gpu_check"] = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(gpu_check)

RANK = """
import json, os, pathlib, sys, time
part, folder, rank = sys.argv[1], pathlib.Path(sys.argv[2]), os.environ["RANK"]
what = json.loads(os.environ["PLAY"]).get(part, {}).get(rank, {})
if what.get("hangs"):
    if child := os.fork():
        (folder / "child").write_text(str(child))
    time.sleep(600)
if what.get("dies"):
    sys.exit("CUDA error: out of memory")
result = {"ok": True, "verdict": "ok", "details": f"{part} went well"} | what
(folder / f"rank{rank}.json").write_text(json.dumps(result))
"""


def has_ended(process: int) -> bool:
    """Whether it has, though whoever adopted it may not have asked yet; within ten seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        os.sched_yield()
    return False


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(play, *arguments, gpus=...): runs the check on ranks that play, as {part: {rank: what}}; (exit status, its parts by name)."""
    (tmp_path / "gpu_check_rank.py").write_text(RANK)
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    monkeypatch.setattr(gpu_check, "run_agreement", lambda options, ranks, *, deadline: ("ok", f"among {ranks}"))
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *arguments, **options: None)  # doctor has tests of its own
    monkeypatch.setattr(signal, "signal", lambda *handler: None)  # pytest's process keeps its handlers
    out = tmp_path / "out"

    def run(play, *arguments, gpus=2):
        monkeypatch.setenv("PLAY", json.dumps(play))
        monkeypatch.setattr(gpu_check, "count_gpus", lambda: gpus)
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(out), *arguments])
        status = gpu_check.main()
        return status, {part["part"]: part for part in json.loads((out / "verdict.json").read_text())["parts"]}

    run.out = out
    return run


def test_without_a_gpu_one_line_says_what_to_do(check, capsys):
    with pytest.raises(FileNotFoundError):  # no verdict is written
        check({}, gpus=0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "can use no GPU here" in said[0] and "--rehearse" in said[0]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
@pytest.mark.parametrize("arguments, said", [
    ([], "this machine has no GPU"), (["--python", "/nowhere/python"], "this machine has no GPU"),
    (["--rehearse", "--python", "/nowhere/python"], "--python /nowhere/python: can't import"), (["--python"], "--python needs an interpreter")])
def test_the_command_refuses_before_anything_is_installed(arguments, said):
    done = subprocess.run(["bash", str(ROOT / "scripts/gpu_check.sh"), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr


def test_all_is_well(check, capsys):
    status, parts = check({})
    assert status == 0 and {part["verdict"] for part in parts.values()} == {"ok"} and list(parts) == [name for name, *_ in gpu_check.PARTS]
    said = capsys.readouterr().out
    assert "2 processes, 2 GPUs" in said and "parity went well" in said and said.count("memory went well") == 2  # once when it ends, once in the table


def test_one_gpu_is_shared_and_nccl_is_not_tried(check):
    status, parts = check({}, gpus=1)
    assert status == 0 and parts["nccl"]["verdict"] == "not run" and parts["nccl"]["details"] == "needs 2 GPUs, there is 1"


def test_slower_is_said_and_is_no_failure(check):
    status, parts = check({"time": {"0": {"verdict": "slower", "details": "1.31 x"}, "1": {"verdict": "slower", "details": ""}}})
    assert status == 0 and parts["time"]["verdict"] == "slower" and parts["time"]["details"] == "1.31 x"


@pytest.mark.parametrize("what, said", [
    ({"dies": True}, "rank 1: CUDA error: out of memory"), ({"ok": False, "details": "differ by 1e-3"}, "rank 1: differ by 1e-3")])
def test_a_rank_that_fails_is_named_and_the_rest_goes_on(check, what, said):
    status, parts = check({"parity": {"1": what}})
    assert status == 1 and parts["parity"]["verdict"] == "FAILED" and said in parts["parity"]["details"]
    assert parts["time"]["verdict"] == "ok"


def test_a_rank_that_hangs_is_ended_with_its_children(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "PARTS", tuple((name, 6, *rest) for name, _, *rest in gpu_check.PARTS[:2]))
    status, parts = check({"memory": {"1": {"hangs": True}}})
    assert status == 1 and "ranks [1] did not end within 6 s" in parts["memory"]["details"] and parts["parity"]["verdict"] == "ok"
    assert has_ended(int((check.out / "memory/child").read_text()))


def test_what_there_is_no_time_for_is_not_begun(check, monkeypatch):
    """Every part is bounded by what is left, so all of them end within the budget."""
    given = []
    now = [1000.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])

    def slow(options, name, ranks, gpus, *, deadline):
        given.append((name, deadline))
        now[0] += deadline + gpu_check.GRACE  # as late as it can be
        return "FAILED", "late"

    monkeypatch.setattr(gpu_check, "run_part", slow)
    status, parts = check({})
    assert status == 1 and parts["time"]["verdict"] == "not run" and parts["time"]["details"] == "no time left"
    assert now[0] - 1000.0 <= gpu_check.BUDGET + gpu_check.GRACE < 475 < 480, "scripts/gpu_check.sh ends it at 475 s"
    assert all(deadline <= most for (_, deadline), (_, most, *_) in zip(given, gpu_check.PARTS, strict=False))


def test_the_shell_ends_it_within_eight_minutes():
    words = (ROOT / "scripts/gpu_check.sh").read_text().split("exec timeout ")[1].split()
    assert words[:3] == ["--kill-after", "5", "475"] and gpu_check.BUDGET + gpu_check.GRACE < 475


def test_ended_from_outside_it_leaves_nobody(tmp_path):
    """A signal while ranks run ends them."""
    code = f"""
import importlib.util, signal, subprocess, sys
spec = importlib.util.spec_from_file_location("gpu_check", {str(ROOT / "scripts/gpu_check.py")!r})
check = importlib.util.module_from_spec(spec); spec.loader.exec_module(check)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
with check.nobody_left() as processes:
    processes.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    print(processes[0].pid, flush=True)
    check.wait_for(processes, 500.0)
"""
    outer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(outer.stdout.readline())
    outer.terminate()
    assert outer.wait(60) == 3
    outer.stdout.close()
    assert has_ended(child)
