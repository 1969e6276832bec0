"""Every replica names the same first failure within seconds, whoever failed; and the job's one report has all of them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rrfp.report import failures

HERE = Path(__file__).parent
TIMEOUT = 4.0
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def jobs():
    process = subprocess.Popen([sys.executable, "-W", "ignore", str(HERE / "replicas_job.py")], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"})

    def run(folder, **job):
        """Runs a job; [exit status, seconds from the fault to the end] and what was printed, per rank."""
        job = {"folder": str(folder), "fault": "none", "rank": -1, "timeout": TIMEOUT, "ring": True, "calls": 1000} | job
        print(json.dumps(job), file=process.stdin, flush=True)
        while not (line := process.stdout.readline()).startswith("["):  # imports may say things of their own
            assert line, "the jobs' process ended"
        return [(code, seconds, (folder / f"out{rank}.txt").read_text()) for rank, (code, seconds) in enumerate(json.loads(line))]

    yield run
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def first_line(output: str) -> str:
    """What a rank says first, without its own name and numbers of processes."""
    said = re.search(r"^\[rrfp\] stage \d \(rank \d\): (.*)$", output, re.M)
    return re.sub(r"process \d+", "process N", said[1]) if said else ""


# Who fails, how, what its own pipeline says, and what the other says.
SILENT = r"was lost \(heartbeat\): no sign of life for \d s: stopped, or its machine hangs"
ENDED = r"was lost \(0>1, 1>0\): rank {} \(process N\) ended without saying goodbye"
CASES = [
    (0, "kill", "stage 0 (rank 0)", ENDED.format(0)),  # the rank that keeps the job's store
    (3, "kill", "stage 1 (rank 3)", ENDED.format(1)),
    (0, "stop", "stage 0 (rank 0)", SILENT),
    (2, "stop", "stage 1 (rank 2)", SILENT),
    (3, "raise", "stage 1 (rank 3)", r"failed \(1F2\): ValueError: a fault on purpose"),
    (1, "raise", "stage 0 (rank 1)", r"failed \(0F2\): ValueError: a fault on purpose"),
]


@pytest.mark.parametrize("rank, fault, name, text", CASES, ids=[f"{fault}-rank{rank}" for rank, fault, *_ in CASES])
def test_all_replicas_name_the_same_first_failure(jobs, tmp_path, capsys, rank, fault, name, text):
    ended = jobs(tmp_path, fault=fault, rank=rank)
    with capsys.disabled():
        print(f"\n  {fault} of rank {rank}: " + ", ".join(f"rank {r} {seconds:.1f} s ({code})" for r, (code, seconds, _) in enumerate(ended)), end=" ")
    same = rank % 2  # a pipeline is ranks 0, 2 or 1, 3
    for other, (code, seconds, output) in enumerate(ended):
        if other == rank:
            assert code == {"kill": -signal.SIGKILL, "stop": -signal.SIGKILL, "raise": 1}[fault]
            continue
        assert code == 1 and seconds < (TIMEOUT if fault == "stop" else 0) + 8, output
        # A replica may hear it from the one that lost its neighbour, or see it itself: in the ring, the neighbour has no edges to name.
        said = first_line(output)
        if other % 2 != same:
            assert said.startswith("in another pipeline, ")
            said = said.removeprefix("in another pipeline, ")
        assert re.fullmatch(f"{re.escape(name)} {text}", said) or (
            other % 2 != same and fault == "kill" and said == f"{name} was lost: it (process N) ended without saying goodbye"), output
        assert re.search(r"report in \S+/report\.txt; this process ends within 15 s$", output, re.M), output
    (folder,) = failures.find(tmp_path)
    report = failures.load([folder])
    assert report.culprit == rank and report.verdict.startswith(name)
    assert report.absent == (() if fault == "raise" else (rank,))
    assert (folder / "report.txt").read_text() == report.text()


def test_a_normal_end_is_silent(jobs, tmp_path):
    for code, _, output in jobs(tmp_path, calls=3):
        assert code == 0 and "[rrfp]" not in output and "Traceback" not in output, output
    assert not failures.find(tmp_path)


def test_without_the_ring_the_other_replica_hears_nothing(jobs, tmp_path):
    """Negative control: no collective breaks here, so the other pipeline runs its calls to their end."""
    ended = jobs(tmp_path, fault="raise", rank=3, calls=30, ring=False)
    assert ended[0][0] == ended[2][0] == 0 and ended[1][0] == ended[3][0] == 1
