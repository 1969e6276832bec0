"""A group of real processes that runs calls of a pipeline: emulated stages, the real engine, scheduler and transport.

The group is started once for a layout; jobs (a mode, microbatches, durations, delays) run inside it one after another, ranks in
step. `Stage` runs RRFP's modes; `Contenders` adds baselines. A baseline is made in every rank's process as
`make(rank, ranks, directory, work=work)` and has

    prepare(job) -> go      go() is what is timed: it runs the call and returns the rank's peak in flight and the nanoseconds by
                            cause (as `Breakdown.parts` names them). It takes `job.duration(action)` seconds of `work.spend` per
                            action, and a message is late by `job.delays`, counted from when it was sent. It records the call
                            with `Recorders(rank, ranks).of(job, stages)`. Every rank prepares at the same time.
    close()                 lets go of everything.

Baselines on torch share one default gloo group: `join_gloo`. `directory` is empty at the start and shared by the ranks.
"""

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

from rrfp.action import Action, Edge
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.compare.work import Sleep, Work, WorkExecutor
from rrfp.engine.loop import Engine
from rrfp.mode import mode_name
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.dependencies import chain
from rrfp.tp_coord.agreement import Solo
from rrfp.trace.recorder import Recorder


@dataclass(frozen=True)
class Job:
    """One call of every rank.

    mode: RRFP's policy, or the name of a baseline.
    durations: seconds by (kind, stage, microbatch), or by kind alone.
    nbytes: size of a message.
    delays: seconds by which a message is late, by (kind F or B, receiving stage, microbatch).
    trace: directory into which the ranks record the call, or None.
    """

    mode: Policy | str
    microbatches: int
    durations: Mapping = field(default_factory=lambda: {"F": 0.02, "B": 0.04})
    nbytes: int = 1 << 16
    delays: Mapping = field(default_factory=dict)
    trace: Path | None = None

    @property
    def name(self) -> str:
        return self.mode if isinstance(self.mode, str) else mode_name(self.mode)

    def duration(self, action: Action) -> float:
        key = (action.kind, action.stage, action.microbatch)
        return self.durations[key] if key in self.durations else self.durations[action.kind]

    def delay(self, edge: Edge, microbatch: int) -> float:
        """Seconds by which a message is late."""
        return self.delays.get(("F" if edge.source < edge.destination else "B", edge.destination, microbatch), 0.0)


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    seconds: from the first rank's start to the last rank's end.
    peaks: per rank, most activations in flight.
    parts: per rank, nanoseconds by cause.
    overruns: actions of all ranks that took noticeably longer than asked for (`rrfp.compare.work`).
    """

    seconds: float
    peaks: list[int]
    parts: list[dict[str, int]]
    overruns: int = 0


class Recorders:
    """One rank's recorders: one for every directory, so that each mode can be traced into its own."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks = rank, ranks
        self._made: dict[Path | None, Recorder] = {}

    def of(self, job: Job, stages: tuple[int, ...]) -> Recorder:
        """Takes the next call of `job`, in which this rank has `stages`."""
        if job.trace not in self._made:
            self._made[job.trace] = Recorder(rank=self._rank, stages=stages, directory=job.trace, ranks=self._ranks)
        recorder = self._made[job.trace]
        recorder.mode = job.name
        return recorder

    def close(self) -> None:
        for recorder in self._made.values():
            recorder.close()


class Stage:
    """One rank of RRFP in its process.

    Args:
        lanes: FIFO lanes per edge.
        credits: messages per edge that may be under way or not yet consumed.
        work: spends the actions' seconds.
        placement: which rank has which stages; default: each has one.
    """

    def __init__(
        self, rank: int, ranks: int, directory: str, *, start_deadline: float, call_timeout: float, lanes: int = 1, credits: int = 4,
        work: Work | None = None, placement: Placement | None = None,
    ):
        self.rank, self.placement, self.work = rank, placement or Placement.looped(ranks), work or Sleep()
        self._job: Job | None = None
        tasks = chain(self.placement, rank, 1).tasks.values()
        self._transport = ZmqTransport(
            rank=rank, edges_in=sorted({edge for task in tasks for edge in task.arrivals}),
            edges_out=sorted({edge for task in tasks for edge in task.sends}), credits=credits, lanes=lanes,
            owner=dict(enumerate(self.placement.owners)), store=FileStore(directory), slot_bytes=1 << 17,
            namespace=f"rrfp-lanes{lanes}", delay=lambda edge, microbatch: self._job.delay(edge, microbatch))
        self._recorders = Recorders(rank, ranks)
        self._engine = Engine(rank=rank, owner=self.placement.rank_of, transport=self._transport, agreement=Solo(),
                              recorder=Recorder(rank=rank, stages=self.placement.stages_of(rank), directory=None), timeout=call_timeout)
        self._transport.open(self._engine.post, deadline=start_deadline)
        self._durations: dict[str, dict[str, float]] = {}

    def prepare(self, job: Job) -> Callable[[], tuple[int, dict[str, int]]]:
        """What is timed: runs the job, returns the peak in flight and the parts of the time."""
        self._job, policy, name = job, job.mode, job.name
        # The moving averages that the last call of this mode has left.
        scheduler = policy.scheduler(
            self.placement, self.rank, job.microbatches, durations=self._durations.get(name))
        executor = WorkExecutor(job.duration, work=self.work, release=self._transport.release, nbytes=job.nbytes)
        self._engine.recorder = recorder = self._recorders.of(job, self.placement.stages_of(self.rank))
        recorder.mode = mode_name(policy.settled(self.placement, job.microbatches))

        def go():
            self._engine.run(scheduler, executor, announce=scheduler.announces, microbatches=job.microbatches)
            self._durations[name] = dict(scheduler.durations)
            return scheduler.peak_in_flight, recorder.last_call.parts()

        return go

    def close(self) -> None:
        self._transport.close(deadline=20.0)
        self._recorders.close()


class Contenders:
    """All ways of running that one rank's process offers: a `Stage` per number of lanes, and baselines by name.

    Args:
        lanes: the numbers of lanes that RRFP's jobs will ask for.
        baselines: how to make them, by the name that a job gives as its mode.
        options: for `Stage`.
    """

    def __init__(
        self, rank: int, ranks: int, directory: str, *, lanes: Iterable[int] = (1,), baselines: Mapping[str, Callable] | None = None,
        work: Work | None = None, **options,
    ):
        self.work = work or Sleep()
        self._stages = {
            n: Stage(rank, ranks, directory, lanes=n, work=self.work, **options) for n in lanes}
        self._baselines = {name: make(rank, ranks, directory, work=self.work) for name, make in (baselines or {}).items()}

    def prepare(self, job: Job) -> Callable[[], tuple[int, dict[str, int]]]:
        runner = self._baselines[job.mode] if isinstance(job.mode, str) else self._stages[job.mode.lanes]
        return runner.prepare(job)

    def close(self) -> None:
        for each in (*self._stages.values(), *self._baselines.values()):
            each.close()
        if self._baselines:
            import torch

            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def join_gloo(rank: int, ranks: int, directory: str, *, timeout: float = 120.0) -> None:
    """Makes this process a member of the ranks' default gloo group, once. `Contenders` leaves it.

    timeout: seconds after which a rank that waits for another fails.
    """
    import torch

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))


class Group:
    """Forked processes, one per rank. A context manager: closes in good order, or ends them after an error.

    Args:
        stage: makes what runs jobs in a rank's process, a `Stage` or `Contenders`: stage(rank, ranks, directory, start_deadline=, call_timeout=).
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

        def make(rank: int):
            return stage(rank, ranks, self._directory.name, start_deadline=start_deadline, call_timeout=call_timeout)

        self._workers = [
            context.Process(target=_work, args=(rank, make, pipes, barrier, call_timeout), daemon=True) for rank in range(ranks)
        ]
        for worker in self._workers:
            worker.start()
        for _, theirs in pipes:
            theirs.close()
        self.pids = [worker.pid for worker in self._workers]
        """The ranks' processes."""
        try:
            # The ranks know who did not come to the start, so they have the first word.
            self._collect(start_deadline + 5.0)
        except BaseException:
            self._end(1.0)
            raise

    def run(self, job, *, lasts: float = 0.0) -> Outcome:
        """One job on all ranks. Raises RuntimeError as the class says.

        lasts: seconds that the job may take by itself, added to every patience.
        """
        for pipe in self._pipes:
            pipe.send((job, lasts))
        rows = self._collect(10.0 + 3 * self._call_timeout + lasts)
        starts, ends, overruns, peaks, parts = zip(*rows, strict=True)
        return Outcome(max(ends) - min(starts), list(peaks), list(parts), sum(overruns))

    def close(self) -> None:
        """Every rank says goodbye, and reports what it could not let go of."""
        for pipe in self._pipes:
            pipe.send(None)
        try:
            self.left_behind = [f"rank {rank}: {what}" for rank, left in enumerate(self._collect(120.0)) for what in left]
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
                    raise RuntimeError(f"rank {rank} ended without a word{self._how_it_ended(rank)}") from None
                if isinstance(rows[rank], str):
                    raise RuntimeError(f"rank {rank} failed:\n{rows[rank]}")
        return [rows[rank] for rank in range(self.ranks)]

    def _how_it_ended(self, rank: int) -> str:
        self._workers[rank].join(1.0)
        code = self._workers[rank].exitcode
        return "" if code is None else f": killed by {signal.Signals(-code).name}" if code < 0 else f": exit status {code}"

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
        while (task := pipe.recv()) is not None:
            job, lasts = task
            go = stage.prepare(job)
            barrier.wait(call_timeout)
            overruns, start = stage.work.overruns, time.monotonic()
            row = go()
            end = time.monotonic()
            barrier.wait(call_timeout + lasts)
            pipe.send((start, end, stage.work.overruns - overruns, *row))
            del go  # it holds the stage
        stage.close()
        del stage
        gc.collect()
        pipe.send(sorted(_held() - before))
    except EOFError:
        pass  # the parent is gone, or ends us
    except BaseException:
        with suppress(OSError):  # if the parent is gone, nobody reads it
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
