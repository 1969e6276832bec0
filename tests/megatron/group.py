"""Starts a group of real processes once, and has them run the jobs of a script beside this one after another, all ranks in step."""

import json
import os
import pickle
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Listener
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "end_to_end"))
from job import server  # noqa: E402


class Group:
    """`ranks` processes with Megatron's model parallelism initialised at PP = `pipeline` (default: all ranks).

    script: whose jobs they are.
    layout: more arguments of `parallel_state.initialize_model_parallel` (tensor_model_parallel_size, ...).

    Use as a context manager; `run(job, **arguments)` returns every rank's result, and raises AssertionError with the first rank's
    traceback if the job failed. Every wait has a deadline.
    """

    def __init__(self, ranks: int, *, pipeline: int | None = None, script: str = "group_jobs.py", **layout):
        self.ranks = ranks
        self._directory = tempfile.TemporaryDirectory(prefix="rrfp-group-")
        self._folder = Path(self._directory.name)
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RRFP_REPORT_DIR": str(self._folder)}
        settings = {"folder": str(self._folder), "pipeline": pipeline or ranks, "layout": layout, "door": str(self._folder / "door")}
        with Listener(settings["door"], "AF_UNIX", backlog=ranks) as door:
            door._listener._socket.settimeout(60)  # accept has no deadline of its own
            self._job = server(HERE / script, untouched=False).start(
                "megatron", [json.dumps(settings)], folder=self._folder,
                variables=[common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)])
            pipes = [door.accept() for _ in range(ranks)]
        self._pipes = [pipe for _, pipe in sorted(((pipe.recv(), pipe) for pipe in pipes), key=lambda pair: pair[0])]

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
            self._job.wait(deadline=10)
            raise AssertionError(f"rank {rank} ended with {self._job.codes[rank]}\n{self._tails()}") from None

    def _tails(self) -> str:
        logs = [self._job.output(rank)[-3000:] for rank in range(self.ranks)]
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(logs))

    def kill(self) -> None:
        """End every process, whatever it is doing: for a group whose failure was wanted."""
        for pipe in self._pipes:
            pipe.close()
        self._job.wait(deadline=0)
        self._directory.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        for pipe in self._pipes:
            pipe.close()  # the end of the jobs
        try:
            if not self._job.ended(deadline=30 if kind is None else 1):
                for rank in self._job.left():
                    os.kill(self._job.pids[rank], signal.SIGABRT)  # faulthandler writes every thread's stack into the log
                left = self._job.left()
                self._job.wait(deadline=10)
                assert kind is not None, f"ranks {left} did not end\n{self._tails()}"
            assert kind is not None or set(self._job.codes.values()) == {0}, f"ranks ended with {self._job.codes}\n{self._tails()}"
        finally:
            self._directory.cleanup()
