"""A group of real processes that run engine-only calls: emulated stages, the real engine, scheduler and transport.

The group is started once for a layout; jobs (a policy, microbatches, durations) run inside it one after another, all ranks in step.
"""

import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rrfp.action import Action
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
    """One call of every rank. `durations`: seconds by (kind, stage, microbatch), or by kind alone."""

    policy: Policy
    microbatches: int
    durations: dict = field(default_factory=lambda: {"F": 0.02, "B": 0.04})
    nbytes: int = 1 << 16

    def duration(self, action: Action) -> float:
        key = (action.kind, action.stage, action.microbatch)
        return self.durations[key] if key in self.durations else self.durations[action.kind]


@dataclass(frozen=True)
class Outcome:
    """seconds: from the first rank's start to the last rank's end. parts (nanoseconds by cause) and peaks: per rank."""

    seconds: float
    peaks: list[int]
    parts: list[dict]


def run(ranks: int, jobs: Sequence[Job], *, start_deadline: float = 120.0, call_timeout: float = 60.0,
        progress: Callable[[int, Outcome], None] | None = None) -> list[Outcome]:
    """Run `jobs` in order on `ranks` forked processes. Raises RuntimeError with the first rank's traceback if one fails."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(ranks), context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="rrfp-") as directory:
        workers = [context.Process(target=_work, args=(rank, ranks, jobs, directory, barrier, results, start_deadline, call_timeout), daemon=True)
                   for rank in range(ranks)]
        for worker in workers:
            worker.start()
        outcomes = []
        try:
            for index in range(len(jobs)):
                rows = {}
                while len(rows) < ranks:
                    rank, row = results.get()
                    if isinstance(row, str):
                        raise RuntimeError(f"rank {rank} failed:\n{row}")
                    rows[rank] = row
                ordered = [rows[rank] for rank in range(ranks)]
                outcome = Outcome(max(r[1] for r in ordered) - min(r[0] for r in ordered), [r[2] for r in ordered], [r[3] for r in ordered])
                outcomes.append(outcome)
                if progress is not None:
                    progress(index, outcome)
        finally:
            for worker in workers:
                worker.join(5.0)
                if worker.is_alive():
                    worker.terminate()
                    worker.join(5.0)
    return outcomes


def _work(rank, ranks, jobs, directory, barrier, results, start_deadline, call_timeout) -> None:
    try:
        placement = Placement.looped(ranks)
        tasks = chain(placement, rank, 1).tasks.values()
        transport = ZmqTransport(
            rank=rank, edges_in=sorted({e for t in tasks for e in t.arrivals}), edges_out=sorted({e for t in tasks for e in t.sends}),
            owner=dict(enumerate(placement.owners)), store=FileStore(directory), slot_bytes=1 << 17)
        recorder = Recorder(rank=rank, stages=(rank,), directory=None)
        engine = Engine(rank=rank, owner=placement.rank_of, transport=transport, agreement=Solo(), recorder=recorder, timeout=call_timeout)
        transport.open(engine.post, deadline=start_deadline)
        durations: dict[str, float] = {}
        for job in jobs:
            scheduler = job.policy.scheduler(placement, rank, job.microbatches, durations=durations)
            executor = EmulatedExecutor(job.duration, release=transport.release, nbytes=job.nbytes)
            barrier.wait(call_timeout)
            start = time.monotonic()
            engine.run(scheduler, executor, announce=job.policy.announces, microbatches=job.microbatches)
            end = time.monotonic()
            barrier.wait(call_timeout)
            durations = dict(scheduler.durations)
            results.put((rank, (start, end, scheduler.peak_in_flight, recorder.last_call.parts())))
        transport.close(deadline=20.0)
    except BaseException:
        results.put((rank, traceback.format_exc()))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
