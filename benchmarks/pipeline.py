"""A group of real processes that run engine-only calls: emulated stages, the real engine, scheduler and transport.

The group is started once for a layout; jobs (a policy, microbatches, durations) run inside it one after another, ranks in step.
"""

import gc
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from rrfp.action import Action, Edge
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.engine.emulated import EmulatedExecutor
from rrfp.engine.loop import Engine
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.dependencies import chain
from rrfp.tp_coord.agreement import Solo
from rrfp.trace.recorder import Recorder


@dataclass(frozen=True)
class Job:
    """One call of every rank.

    durations: seconds by (kind, stage, microbatch), or by kind alone.
    delays: seconds by which a message is late, by (kind, receiving stage, microbatch).
    """

    policy: Policy
    microbatches: int
    durations: dict = field(default_factory=lambda: {"F": 0.02, "B": 0.04})
    nbytes: int = 1 << 16
    delays: dict = field(default_factory=dict)

    def duration(self, action: Action) -> float:
        key = (action.kind, action.stage, action.microbatch)
        return self.durations[key] if key in self.durations else self.durations[action.kind]


@dataclass(frozen=True)
class Outcome:
    """seconds: from the first rank's start to the last rank's end. parts (nanoseconds by cause) and peaks: per rank."""

    seconds: float
    peaks: list[int]
    parts: list[dict]


class Stage:
    """One rank in its process. `trace`: directory of a trace, or None."""

    def __init__(
        self, rank: int, ranks: int, directory: str, *, start_deadline: float, call_timeout: float, trace: Path | None = None
    ):
        self.rank, self.placement = rank, Placement.looped(ranks)
        self._delays: dict = {}
        tasks = chain(self.placement, rank, 1).tasks.values()
        self._transport = ZmqTransport(
            rank=rank, edges_in=sorted({edge for task in tasks for edge in task.arrivals}),
            edges_out=sorted({edge for task in tasks for edge in task.sends}),
            owner=dict(enumerate(self.placement.owners)), store=FileStore(directory), slot_bytes=1 << 17, delay=self._delay)
        self._recorder = Recorder(rank=rank, stages=(rank,), directory=trace, ranks=ranks)
        self._engine = Engine(rank=rank, owner=self.placement.rank_of, transport=self._transport, agreement=Solo(),
                              recorder=self._recorder, timeout=call_timeout)
        self._transport.open(self._engine.post, deadline=start_deadline)
        self._durations: dict[str, float] = {}

    def _delay(self, edge: Edge, microbatch: int) -> float:
        return self._delays.get(("F" if edge.source < edge.destination else "B", edge.destination, microbatch), 0.0)

    def prepare(self, job) -> Callable[[], tuple[int, dict]]:
        """What is timed: runs the job, returns the peak in flight and the parts of the time."""
        self._delays = job.delays
        scheduler = job.policy.scheduler(self.placement, self.rank, job.microbatches, durations=self._durations)
        executor = EmulatedExecutor(job.duration, release=self._transport.release, nbytes=job.nbytes)

        def go():
            self._engine.run(scheduler, executor, announce=job.policy.announces, microbatches=job.microbatches)
            self._durations = dict(scheduler.durations)
            return scheduler.peak_in_flight, self._recorder.last_call.parts()

        return go

    def close(self) -> None:
        self._transport.close(deadline=20.0)
        self._recorder.close()


class Group:
    """Forked processes, one per rank. A context manager: closes in good order, or ends them after an error.

    Args:
        stage: makes a rank's `Stage`, in its process: stage(rank, ranks, directory, start_deadline=, call_timeout=).
        call_timeout: seconds without progress after which a call fails; a whole job may take ten more than three times that.

    Raises:
        RuntimeError: a rank failed (with its traceback), ended, or was not done in time.
    """

    def __init__(self, ranks: int, *, stage: Callable = Stage, start_deadline: float = 120.0, call_timeout: float = 60.0):
        self.ranks, self._call_timeout = ranks, call_timeout
        self.left_behind: list[str] = []
        """After closing: threads and descriptors that ranks still had once they had closed everything."""
        self._directory = tempfile.TemporaryDirectory(prefix="rrfp-")
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(ranks)
        pipes = [context.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pipes]

        def make(rank: int) -> Stage:
            return stage(rank, ranks, self._directory.name, start_deadline=start_deadline, call_timeout=call_timeout)

        self._workers = [
            context.Process(target=_work, args=(rank, make, pipes, barrier, call_timeout), daemon=True) for rank in range(ranks)
        ]
        for worker in self._workers:
            worker.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            self._collect(start_deadline)
        except BaseException:
            self._end(1.0)
            raise

    def run(self, job) -> Outcome:
        for pipe in self._pipes:
            pipe.send(job)
        rows = self._collect(10.0 + 3 * self._call_timeout)
        starts, ends, peaks, parts = zip(*rows, strict=True)
        return Outcome(max(ends) - min(starts), list(peaks), list(parts))

    def close(self) -> None:
        """Every rank says goodbye, and reports what it could not let go of."""
        for pipe in self._pipes:
            pipe.send(None)
        try:
            self.left_behind = [f"rank {rank}: {what}" for rank, left in enumerate(self._collect(60.0)) for what in left]
        finally:
            self._end(10.0)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close() if kind is None else self._end(1.0)

    def _collect(self, deadline: float) -> list:
        """One answer of every rank."""
        until = time.monotonic() + deadline
        rows, open_pipes = {}, {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes:
            ready = wait(list(open_pipes), max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(f"ranks {sorted(open_pipes.values())} gave no answer within {deadline:.0f} s")
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    rows[rank] = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} ended without a word") from None
                if isinstance(rows[rank], str):
                    raise RuntimeError(f"rank {rank} failed:\n{rows[rank]}")
        return [rows[rank] for rank in range(self.ranks)]

    def _end(self, patience: float) -> None:
        until = time.monotonic() + patience
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join(10.0)
            worker.close()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()


def run(ranks: int, jobs: Sequence[Job], *, start_deadline: float = 120.0, call_timeout: float = 60.0,
        progress: Callable[[int, Outcome], None] | None = None) -> list[Outcome]:
    """Run `jobs` in order on a group of `ranks` processes. Raises RuntimeError as `Group` does."""
    outcomes = []
    with Group(ranks, start_deadline=start_deadline, call_timeout=call_timeout) as group:
        for index, job in enumerate(jobs):
            outcomes.append(group.run(job))
            if progress is not None:
                progress(index, outcomes[-1])
    return outcomes


def _work(rank: int, make: Callable, pipes, barrier, call_timeout: float) -> None:
    pipe = pipes[rank][1]
    for ours, theirs in pipes:  # else nobody would notice the end of another
        ours.close()
        if theirs is not pipe:
            theirs.close()
    try:
        before = _held()
        stage = make(rank)
        pipe.send(None)
        while (job := pipe.recv()) is not None:
            go = stage.prepare(job)
            barrier.wait(call_timeout)
            start = time.monotonic()
            row = go()
            end = time.monotonic()
            barrier.wait(call_timeout)
            pipe.send((start, end, *row))
        stage.close()
        del stage
        gc.collect()
        pipe.send(sorted(_held() - before))
    except EOFError:
        pass  # the parent is gone, or ends us
    except BaseException:
        pipe.send(traceback.format_exc())


def _held() -> set[str]:
    """Threads and open descriptors of this process."""
    held = {f"thread {thread.name}" for thread in threading.enumerate()}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held.add(f"descriptor {descriptor}: {os.readlink(f'/proc/self/fd/{descriptor}')}")
        except OSError:
            pass  # the one that listed them
    return held


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
