"""A pipeline whose stages are domains of two, in real processes: engine, scheduler, transport and agreement, without a model.

Rank of the job = stage x members + member. The members of one index form a pipeline with its own transport; the members of one
stage a domain. Durations and delays differ between members, so that without an agreement they would take different orders.
"""

import os
import random
import signal
import time

from rrfp.action import Action
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.compare.work import Sleep, WorkExecutor
from rrfp.engine.loop import Engine
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.dependencies import chain
from rrfp.tp_coord.agreement import Solo
from rrfp.tp_coord.domain import domain_of
from rrfp.tp_coord.opening import open_agreement
from rrfp.trace.recorder import Recorder


class Rank:
    """One process of the job."""

    def __init__(self, kind: str | None, rank: int, stages: int, members: int, directory, *, timeout: float = 20.0, **options):
        stage, member = divmod(rank, members)
        self.rank, self.stage, self.member = rank, stage, member
        self.placement = Placement.looped(stages)
        self._rng = random.Random(0)
        store = FileStore(directory)
        tasks = chain(self.placement, stage, 1).tasks.values()
        edges_in = sorted({edge for task in tasks for edge in task.arrivals})
        owner = {each: each * members + member for each in range(stages)}
        self.transport = ZmqTransport(
            rank=rank, edges_in=edges_in, edges_out=sorted({edge for task in tasks for edge in task.sends}), owner=owner,
            store=store,
            delay=lambda edge, microbatch: self._rng.random() * 0.004, namespace=f"pipeline{member}", lanes=2, heartbeat_s=0.2,
            told_of=range(stages * members))
        groups = [[each * members + other for other in range(members)] for each in range(stages)]
        self.agreement = Solo() if kind is None else open_agreement(
            kind, domain=domain_of(rank, groups, stage_of=lambda each: each // members), rank=rank, store=store, edges=edges_in,
            lanes=2, deadline=30.0, heartbeat_s=0.2, silence_s=1.0, **options)
        self.engine = Engine(rank=rank, owner=owner.__getitem__, transport=self.transport, agreement=self.agreement,
                             timeout=timeout, recorder=Recorder(rank=rank, stages=(stage,), directory=None))
        self.transport.open(self.engine.post, deadline=30.0)
        self.agreement.open(self.engine.wake, self.engine.hear)

    def run(self, seed: int, microbatches: int, policy: Policy, fault=None) -> list[Action]:
        """One call. Returns what was launched, in order. fault: (action, what to do there) for this rank."""
        self._rng = random.Random(f"{seed} {self.rank}")
        scheduler = policy.scheduler(self.placement, self.stage, microbatches)
        order = []

        def duration(action: Action) -> float:
            order.append(action)
            if fault is not None and str(action) == fault[0]:
                fault[1]()
            return self._rng.random() * 0.004

        executor = WorkExecutor(duration, work=Sleep(), release=self.transport.release, nbytes=1 << 10)
        self.engine.run(scheduler, executor, announce=scheduler.announces, microbatches=microbatches)
        return order

    def close(self) -> None:
        self.agreement.close()
        self.transport.close(deadline=10.0)


def fail() -> None:
    raise ValueError("an action that fails")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def timed(function) -> tuple[str, float]:
    """What it raised, and when."""
    try:
        function()
    except Exception as error:
        return str(error), time.monotonic()
    return "no error", time.monotonic()
