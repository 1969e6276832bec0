"""Runs a training job of four bare processes with a fault, and says what became of each."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rrfp.comm.mailbox import Mailbox
from rrfp.comm.ports import reserve_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = str(HERE / "faults_script.py")
RANKS = 4


@dataclass
class Ended:
    """One rank of a job. `seconds` counts from the fault (from the start of the job if there was none)."""

    rank: int
    code: int
    seconds: float
    output: str
    report: str
    """Its failure report, empty if it wrote none."""


def environment(folder: Path, fault: dict) -> dict:
    fault = {**fault, "mark": str(folder / "mark")} if fault else {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "OMP_NUM_THREADS": "1",
            "RRFP_REPORT_DIR": str(folder), "RRFP_TEST_FAULT": json.dumps(fault)}


def rank_environment(rank: int) -> dict:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}


class Server:
    """`faults_server.py` in a process of its own."""

    def __init__(self):
        self._process = subprocess.Popen([sys.executable, str(HERE / "faults_server.py"), SCRIPT], cwd=ROOT, text=True,
                                         env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                                              "PYTHONWARNINGS": "ignore"},
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lines = Mailbox()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("["):  # imports may say things of their own
                self._lines.put(json.loads(line))

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(10)
        self._process.stdout.close()

    def run(self, folder: Path, arguments: list[str], *, fault: dict | None = None, deadline: float = 100.0) -> list[Ended]:
        """Run the job to its end. What is still there at `deadline`, and a rank that stopped itself, is killed."""
        fault = fault or {}
        common = environment(folder, fault)
        outputs = [folder / f"out{rank}.txt" for rank in range(RANKS)]
        start = time.monotonic()
        job = {"argv": ["--cpu", SCRIPT, *arguments], "env": [{**common, **rank_environment(rank)} for rank in range(RANKS)],
               "output": list(map(str, outputs))}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        pids = self._lines.get(timeout=60)
        ended: dict[int, tuple[int, float]] = {}
        try:
            while len(ended) < RANKS:
                if fault.get("what") == "stop" and len(ended) == RANKS - 1:
                    os.kill(pids[fault["rank"]], signal.SIGKILL)
                pid, code, when = self._lines.get(timeout=max(0.0, start + deadline - time.monotonic()))
                ended[pids.index(pid)] = code, when
        except queue.Empty:
            for rank in set(range(RANKS)) - set(ended):
                os.kill(pids[rank], signal.SIGKILL)
            while len(ended) < RANKS:
                pid, code, when = self._lines.get(timeout=30)
                ended[pids.index(pid)] = code, when
        mark = folder / "mark"
        zero = float(mark.read_text()) if mark.exists() else start
        result = [Ended(rank, ended[rank][0], ended[rank][1] - zero, outputs[rank].read_text(), report(folder, rank))
                  for rank in range(RANKS)]
        for end in result:
            print(f"rank {end.rank}: exit status {end.code} after {end.seconds:.1f} s\n{end.output[-6000:]}\n")
        return result


def report_path(folder: Path, rank: int) -> Path | None:
    """What that rank wrote into the report of the job's one failure; None if nothing."""
    return next(iter(folder.glob(f"rrfp-failure-*/rank{rank}.txt")), None)


def report(folder: Path, rank: int) -> str:
    path = report_path(folder, rank)
    return "" if path is None else path.read_text()
