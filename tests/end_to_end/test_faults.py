"""What every rank of a real training job does when one of them fails: four bare processes, no agent that would end the others.

Each test prints the seconds from the fault to the end of every rank.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import faults_job  # noqa: E402
from faults_job import RANKS, ROOT, SCRIPT, Server  # noqa: E402

TIMEOUT = 10
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Arguments of a tiny GPT on real text, four stages, eight microbatches an iteration."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), str(folder)], check=True, timeout=120,
                   capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    arguments = (ROOT / "scripts/tiny_gpt.args").read_text().split() + (folder / "text.args").read_text().split()
    return [*arguments, "--distributed-backend", "gloo", "--pipeline-model-parallel-size", str(RANKS), "--train-iters", "3",
            "--pipeline-schedule", "rrfp", "--rrfp-timeout", str(TIMEOUT)]


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def name(rank: int) -> str:
    return f"stage {rank} (rank {rank})"


def fault(rank: int, what: str, where: str, call: int = 1, microbatch: int = 0) -> dict:
    return {"rank": rank, "what": what, "where": where, "call": call, "microbatch": microbatch}


def others(ended, rank):
    return [end for end in ended if end.rank != rank]


def seconds(capsys, text: str, ended) -> None:
    with capsys.disabled():
        print(f"\n  {text}: " + ", ".join(f"rank {end.rank} {end.seconds:.1f} s (status {end.code})" for end in ended), end=" ")


# Every stage, in warm-up (its first forward of an iteration), in steady state, and at three places outside the schedule.
KILLS = [fault(rank, "kill", where, microbatch=microbatch) for rank in range(RANKS)
         for where, microbatch in [("forward", 0), ("forward", 5), ("optimizer", 0), ("save", 0), ("data", 0)]]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"rank{kill['rank']}-{kill['where']}{kill['microbatch']}")
def test_a_killed_rank_is_named_by_every_survivor(server, data, tmp_path, capsys, kill):
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"] if kill["where"] == "save" else []
    ended = server.run(tmp_path, data + saving, fault=kill)
    seconds(capsys, f"kill -9 of rank {kill['rank']}, {kill['where']} {kill['microbatch']}", ended)
    assert ended[kill["rank"]].code == -signal.SIGKILL
    for end in others(ended, kill["rank"]):
        assert end.code == 1
        assert end.seconds < 30
        assert f"[rrfp] {name(end.rank)}: {name(kill['rank'])} was lost" in end.output
        assert f"{name(kill['rank'])} was lost" in end.report


def test_data_loader_workers_end_with_their_rank(server, data, tmp_path, capsys):
    """They are forks of it: they must neither keep it looking alive nor say goodbye for it."""
    ended = server.run(tmp_path, [*data, "--num-workers", "2"], fault=fault(0, "kill", "forward", microbatch=5))
    seconds(capsys, "kill -9 of rank 0 with data loader workers", ended)
    for end in others(ended, 0):
        assert end.seconds < 30 and f"{name(0)} was lost" in end.output
    assert ended[0].code == -signal.SIGKILL
    workers_gone(str(tmp_path))


def workers_gone(marker: str, *, deadline: float = 20.0) -> None:
    """No process that writes into this test's folder is left: each ends within the deadline, which its descriptor announces."""
    until = time.monotonic() + deadline
    for pid in [pid for pid in os.listdir("/proc") if pid.isdigit() and uses(pid, marker)]:
        try:
            descriptor = os.pidfd_open(int(pid))
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} is left"


def uses(pid: str, marker: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1").startswith(marker)
    except OSError:
        return False


def test_a_stopped_rank_is_reported_within_the_timeout(server, data, tmp_path, capsys):
    ended = server.run(tmp_path, data, fault=fault(2, "stop", "forward", microbatch=3))
    seconds(capsys, "SIGSTOP of rank 2", ended)
    for end in others(ended, 2):
        assert end.code == 1
        assert end.seconds < TIMEOUT + 20
        assert f"{name(2)} was lost (heartbeat): no sign of life for" in end.output
    # The report of a neighbour shows whose sign of life is old, and what is missing.
    for text in (ended[1].report, ended[3].report):
        if "nothing has moved" in text:
            silent = dict(re.findall(r"rank (\d): last sign of life ([\d.]+) s ago", text))
            assert float(silent["2"]) > 0.7 * TIMEOUT
            assert all(float(ago) < 5 for rank, ago in silent.items() if rank != "2")
    assert any("nothing has moved" in end.report for end in ended)


def test_an_action_that_never_returns_is_reported_with_its_stack(server, data, tmp_path, capsys):
    ended = server.run(tmp_path, data, fault=fault(2, "block", "forward", microbatch=3))
    seconds(capsys, "blocked 2F3", ended)
    for end in ended:
        assert end.code == 1
        assert f"{name(2)} failed (2F3): 2F3 has been running for" in end.output
        assert end.seconds < TIMEOUT + 30
        assert "threading.Event().wait(300)" in end.report  # the very line, on every rank
    assert all(end.seconds < TIMEOUT + 20 for end in others(ended, 2))


def test_an_exception_in_a_forward_step_reaches_all_ranks(server, data, tmp_path, capsys):
    ended = server.run(tmp_path, data, fault=fault(1, "raise", "forward", microbatch=3))
    seconds(capsys, "exception in 1F3", ended)
    for end in others(ended, 1):
        assert end.code == 1 and end.seconds < 30
        assert f"{name(1)} failed (1F3): ValueError: a fault on purpose" in end.output
        assert f"traceback of {name(1)}" in end.output and "in strike" in end.output
    assert "ValueError: a fault on purpose" in ended[1].output and "was lost" not in ended[1].output
    assert ended[1].report


@pytest.mark.parametrize("what, text, code", [("raise", "ValueError: a fault on purpose", 1), ("exit", "SystemExit: 3", 3)])
def test_an_end_outside_the_schedule_reaches_all_ranks(server, data, tmp_path, capsys, what, text, code):
    rank = 2 if what == "raise" else 1
    ended = server.run(tmp_path, data, fault=fault(rank, what, "optimizer"))
    seconds(capsys, f"{text} outside the schedule on rank {rank}", ended)
    assert ended[rank].code == code
    for end in others(ended, rank):
        assert end.code == 1 and end.seconds < 30
        assert f"{name(rank)} failed (outside the schedule): {text}" in end.output
        assert text in end.report


def test_a_data_iterator_that_ends_early(server, data, tmp_path, capsys):
    """And closing the pipeline afterwards leaves no thread, descriptor or shared memory of it."""
    ended = server.run(tmp_path, data, fault={**fault(3, "end", "iterator", microbatch=3), "close": True})
    seconds(capsys, "data ends early on rank 3", ended)
    assert re.search(r"^StopIteration", ended[3].output, re.M)  # as under Megatron, not wrapped
    assert "PipelineError" not in ended[3].output
    for end in ended:
        assert end.code == 1
        assert re.search(r"opened [1-9]\d* descriptors; leftovers: none", end.output)
    for end in others(ended, 3):
        assert end.seconds < 30
        assert f"{name(3)} failed (3F3): StopIteration" in end.output
        told = faults_job.report_path(tmp_path, end.rank).stat().st_mtime
        assert told - (tmp_path / "mark").stat().st_mtime < 5
    workers_gone(str(tmp_path))


def test_without_the_watcher_nobody_names_the_lost_rank(server, data, tmp_path):
    """The control: under Megatron's own schedule survivors end too, by an error of the collective that happens to break."""
    ended = server.run(tmp_path, [*data, "--pipeline-schedule", "1f1b"], fault=fault(1, "kill", "optimizer"), deadline=40)
    assert not any("was lost" in end.output or end.report for end in ended)


@pytest.mark.parametrize("forks", ["data loader workers", "asynchronous checkpoints"])
def test_a_normal_end_is_silent_and_quick(server, data, tmp_path, forks):
    more = ["--num-workers", "2"] if forks == "data loader workers" else \
        ["--async-save", "--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    ended = server.run(tmp_path, [*data, *more])
    for end in ended:
        assert end.code == 0
        assert not end.report
        said = [line for line in end.output.splitlines() if "[rrfp]" in line]
        assert all(line.startswith("[rrfp] hint ") for line in said), said
        assert "Traceback" not in end.output
    assert max(end.seconds for end in ended) - min(end.seconds for end in ended) < 30
    workers_gone(str(tmp_path))


def test_under_torchrun_a_report_and_the_summary_name_the_lost_rank(data, tmp_path):
    """The agent ends the survivors at once; what they printed may be lost, the files are not."""
    struck = faults_job.environment(tmp_path, fault(1, "kill", "forward", microbatch=5))
    environment = {**os.environ, **struck, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
         "--master-port", struck["MASTER_PORT"], "-m", "rrfp", "--cpu", SCRIPT, *data],
        cwd=ROOT, env=environment, timeout=200, capture_output=True, text=True)
    assert run.returncode == 1
    reports = [text for rank in range(RANKS) if (text := faults_job.report(tmp_path, rank))]
    assert reports and all(f"{name(1)} was lost" in text for text in reports)
    summary = run.stderr[run.stderr.index("FAILED"):]
    assert "SIGKILL" in summary or f"{name(1)} was lost" in summary
