"""Starts a group of real processes once, and has them run jobs of tests/megatron/jobs.py one after another, all ranks in step."""

import json
import multiprocessing
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

    layout: more arguments of `parallel_state.initialize_model_parallel` (tensor_model_parallel_size, ...).

    Use as a context manager; `run(job, **arguments)` returns every rank's result, and raises AssertionError with the first rank's
    traceback if the job failed. Every wait has a deadline.
    """

    def __init__(self, ranks: int, *, pipeline: int | None = None, **layout):
        self.ranks = ranks
        self._directory = tempfile.TemporaryDirectory(prefix="rrfp-group-")
        self._folder = Path(self._directory.name)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "RRFP_REPORT_DIR": str(self._folder),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)]),
            "PYTHONFAULTHANDLER": "1",
        }
        self._processes, self._pipes = [], []
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            settings = {"folder": str(self._folder), "pipeline": pipeline or ranks, "layout": layout, "pipe": theirs.fileno()}
            log = open(self._folder / f"log{rank}.txt", "w")
            with log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore::UserWarning", str(HERE / "jobs.py"), json.dumps(settings)],
                        stdout=log,
                        stderr=log,
                        pass_fds=[theirs.fileno()],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )
            theirs.close()

    def run(self, job: str, *, deadline: float = 100.0, **arguments) -> list:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((job, arguments)))
        until = time.monotonic() + deadline
        results = [self._result(rank, until) for rank in range(self.ranks)]
        failed = [(rank, text) for rank, (ok, text) in enumerate(results) if not ok]
        assert not failed, f"job {job} failed on rank {failed[0][0]}:\n{failed[0][1]}\n{self._tails()}"
        return [value for _, value in results]

    def _result(self, rank: int, until: float):
        assert self._pipes[rank].poll(max(0.0, until - time.monotonic())), f"rank {rank} gave no result in time\n{self._tails()}"
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            raise AssertionError(f"rank {rank} ended with {self._processes[rank].wait(10)}\n{self._tails()}") from None

    def _tails(self) -> str:
        logs = [(self._folder / f"log{rank}.txt").read_text()[-3000:] for rank in range(self.ranks)]
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(logs))

    def kill(self) -> None:
        """End every process, whatever it is doing: for a group whose failure was wanted."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait(10)
        self._directory.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        for pipe in self._pipes:
            pipe.close()  # the end of the jobs
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
