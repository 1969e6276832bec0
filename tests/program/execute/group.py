"""Groups of real processes that run jobs one after another. All are forks of one process that has imported torch and captured the models."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.program.execute.preload"])


class Group:
    """`ranks` processes in one gloo job, started once. A context manager.

    `run(job, ...)` runs a function of `jobs.py` on every rank and returns their results; AssertionError with the first rank's traceback
    if it raised. Every wait has a deadline.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._directory = tempfile.TemporaryDirectory(prefix="rrfp-program-")
        pairs = [_CONTEXT.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self.processes = [_CONTEXT.Process(target=_work, args=(rank, ranks, self._directory.name, theirs), daemon=True)
                          for rank, (_, theirs) in enumerate(pairs)]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def run(self, job: str, *, deadline: float = 200.0, **arguments) -> list:
        found = self.attempt(job, deadline=deadline, **arguments)
        failed = [(rank, value) for rank, (ok, value) in enumerate(found) if not ok]
        assert not failed, f"{job} failed on rank {failed[0][0]}:\n{failed[0][1]}"
        return [value for _, value in found]

    def attempt(self, job: str, *, deadline: float = 200.0, **arguments) -> list[tuple[bool, object]]:
        """(whether it returned, its result or traceback) of every rank. A process that ended has (False, "ended with CODE")."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        until, found = time.monotonic() + deadline, {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                self.kill()
                raise AssertionError(f"{job}: ranks {sorted(waiting.values())} gave no result within {deadline:.0f} s; their stacks are in stderr")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(10)
                    found[rank] = False, f"ended with {self.processes[rank].exitcode}"
        return [found[rank] for rank in range(self.ranks)]

    @property
    def usable(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """End every process, which says where it is."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGABRT)
            process.join(10)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # the end of the jobs
        until = time.monotonic() + 20
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        left = [process for process in self.processes if process.is_alive()]
        for process in left:
            process.kill()
            process.join(10)
        self._directory.cleanup()
        assert not left, f"ranks {[process.name for process in left]} did not end"

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _work(rank: int, ranks: int, directory: str, pipe) -> None:
    from torch import distributed as dist

    from tests.program.execute import jobs

    faulthandler.enable()
    dist.init_process_group("gloo", init_method=f"file://{Path(directory)}/store", rank=rank, world_size=ranks)
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, getattr(jobs, job)(**arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
