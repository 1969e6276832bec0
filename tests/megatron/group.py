"""Starts a group of real processes once, and has them run jobs of tests/megatron/jobs.py one after another, all ranks in step."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


class Group:
    """`ranks` processes with Megatron's model parallelism initialised at PP = `pipeline` (default: all ranks).

    Use as a context manager; `run(job, **arguments)` returns every rank's result, and raises AssertionError with the first rank's
    traceback if the job failed. Every wait has a deadline.
    """

    def __init__(self, ranks: int, *, pipeline: int | None = None, options: dict | None = None):
        self.ranks = ranks
        self._directory = tempfile.TemporaryDirectory(prefix="rrfp-group-")
        self._folder = Path(self._directory.name)
        self._jobs = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "RRFP_REPORT_DIR": str(self._folder),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]),
            "PYTHONFAULTHANDLER": "1",
        }
        arguments = json.dumps({"folder": str(self._folder), "pipeline": pipeline or ranks, "options": options or {}})
        self._processes = []
        for rank in range(ranks):
            log = open(self._folder / f"log{rank}.txt", "w")
            with log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore::UserWarning", str(HERE / "jobs.py"), arguments],
                        stdout=log,
                        stderr=log,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )

    def run(self, job: str, *, deadline: float = 100.0, **arguments) -> list:
        index, self._jobs = self._jobs, self._jobs + 1
        self._publish(f"job{index}", (job, arguments))
        until = time.monotonic() + deadline
        results = [self._result(index, rank, until) for rank in range(self.ranks)]
        failed = [(rank, text) for rank, (ok, text) in enumerate(results) if not ok]
        assert not failed, f"job {job} failed on rank {failed[0][0]}:\n{failed[0][1]}\n{self._tails()}"
        return [value for _, value in results]

    def _result(self, index: int, rank: int, until: float):
        path = self._folder / f"result{index}-{rank}"
        while not path.exists():
            code = self._processes[rank].poll()
            assert code is None or path.exists(), f"rank {rank} ended with {code}\n{self._tails()}"
            assert time.monotonic() < until, f"rank {rank} gave no result in time\n{self._tails()}"
            time.sleep(0.005)
        return pickle.loads(path.read_bytes())

    def _publish(self, name: str, value) -> None:
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(pickle.dumps(value))
        partial.replace(self._folder / name)

    def _tails(self) -> str:
        logs = [(self._folder / f"log{rank}.txt").read_text()[-3000:] for rank in range(self.ranks)]
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(logs))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._publish(f"job{self._jobs}", None)
        try:
            for rank, process in enumerate(self._processes):
                try:
                    code = process.wait(30 if kind is None else 1)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGABRT)  # faulthandler writes every thread's stack into the log
                    process.wait(10)
                    assert kind is not None, f"rank {rank} did not end\n{self._tails()}"
                else:
                    assert kind is not None or code == 0, f"rank {rank} ended with {code}\n{self._tails()}"
        finally:
            self._directory.cleanup()
