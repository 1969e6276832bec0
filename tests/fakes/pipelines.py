"""Whole pipelines on fake GPUs: real engines, schedulers, transports and agreement, actions that are kernels.

A kernel checks its inputs when the stream gets to it: those of its own action, and of the forward that it undoes, whose memory was let
go of as soon as the kernel was queued. Every payload names the action that made it and its edge.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from fake_cuda import WAIT as PATIENCE
from fake_cuda import Machine
from fake_nccl import Fabric
from rig import WAIT, Rig, together

from rrfp.comm.nccl_transport import NcclTransport
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Failure, Part
from rrfp.engine.launches import Launches
from rrfp.engine.loop import Engine
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.tp_coord.agreement import Solo
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.opening import open_agreement
from rrfp.trace.recorder import Recorder

SIZE = 700


class KernelExecutor:
    """Runs actions on a fake device. collective: called with the actions so far inside every action, on the engine's thread; or None.

    split: gradients come from I.
    """

    padded = 0.0

    def __init__(self, device, launches: Launches, *, release, collective=None, split=False, lengthen=lambda action: 0.0):
        self.capacity = launches.capacity
        self.wrong: list[str] = []
        self.order: list = []
        self._device, self._launches, self._release, self._collective, self._lengthen = device, launches, release, collective, lengthen
        self._backward = "I" if split else "B"
        self._kept: dict = {}

    def launch(self, task, inputs, done):
        action, device = task.action, self._device
        self.order.append(action)
        running = self._launches.start(action.kind, action.stage)
        kept = self._kept.pop((action.stage, action.microbatch), ()) if task.in_flight < 0 else ()
        reads = [(arrival, arrival.payload[0].data) for arrival in (*inputs, *kept)]
        device.kernel(partial(self._read, action, reads), what=f"{action} reads")
        if self._collective is not None:
            self._collective(self.order)
        outputs = {edge: (Part("uint8", (SIZE,), device.allocate(SIZE)),) for edge in task.sends}
        device.kernel(partial(self._write, action, outputs), what=f"{action} writes")
        if task.in_flight > 0:
            self._kept[action.stage, action.microbatch] = inputs
        for arrival in kept if task.in_flight > 0 else (*inputs, *kept):
            self._release(arrival)
        self._launches.finish(running, outputs, done, lengthen=self._lengthen(action))

    def _read(self, action, reads):
        for arrival, memory in reads:
            text = bytes(memory).rstrip(b"\0").decode(errors="replace")
            source = f"{arrival.edge.source}{'F' if arrival.edge.source < arrival.edge.destination else self._backward}{arrival.microbatch}"
            if text != f"{source} {arrival.edge}":
                self.wrong.append(f"{action} read {text!r} of {source} over {arrival.edge}")

    def _write(self, action, outputs):
        for edge, (part,) in outputs.items():
            part.data[:] = np.frombuffer(f"{action} {edge}".encode().ljust(SIZE, b"\0"), np.uint8)


@dataclass
class Case:
    """One run. path: as --rrfp-transport."""

    path: str
    seed: int
    ranks: int = 3
    microbatches: int = 6
    members: int = 1
    connections: int = 8
    run_ahead: int = 1
    credits: int = 2
    lanes: int = 1
    policy: Policy = field(default_factory=Policy)
    calls: tuple = (False, False)
    """forward_only of each."""
    ahead: bool = False
    """--rrfp-decide-ahead."""
    agreed: bool = True
    """False: every member orders its transfers by itself."""
    replicas: bool = False
    """Members are data-parallel replicas: each decides by itself, and what they share is a reduction, on a stream of its own."""
    forced: bool = True
    """A replica reduces a stage's gradients in its last backward. False: some in their first action."""
    pace: float = 0.0
    wait: float = PATIENCE
    """As `Machine`'s."""

    @classmethod
    def draw(cls, path: str, seed: int, **fixed) -> "Case":
        rng = Random(f"{path}/{seed}")
        lanes = rng.choice((1, 1, 2))
        order = "free" if lanes > 1 else "microbatch"
        split = rng.random() < 0.25
        hint = "fill-r" if split else rng.choice(("auto", "announced", "bf", "alt", "fill-alt", "1f1b", "b-first"))
        policy = Policy(split=split, hint=hint, limit=rng.choice(("1f1b", "eager", "2p")), order=order, lanes=lanes)
        drawn = {"ranks": rng.choice((2, 3)), "microbatches": rng.randint(1, 7), "connections": rng.choice((1, 8)), "run_ahead": rng.randint(0, 2),
                 "credits": rng.randint(1, 3), "pace": rng.choice((0.0, 0.0, 1e-4)), "ahead": rng.random() < 0.5,
                 "calls": rng.choice(((False, False), (False, True, False)))}
        return cls(path, seed, lanes=lanes, policy=policy, **{**drawn, **fixed})


class Run:
    """All ranks of all members of a case; `executors[member][rank]` is a list of those of its calls."""

    def __init__(self, case: Case, directory: Path, *, machine: Machine | None = None, lengthen=lambda action: 0.0):
        self.case, self.directory, self.lengthen = case, directory, lengthen
        self.machine = machine or Machine(seed=case.seed, connections=case.connections, wait=case.wait, pace=case.pace)
        self.machine.start()
        fabric = Fabric(self.machine, resident=1)
        self.rigs = []
        self.executors = [[[] for _ in range(case.ranks)] for _ in range(case.members)]
        self.recorders = {}
        try:
            for member in range(case.members):
                self.rigs.append(Rig(self.machine, directory / f"pipeline{member}", case.path, ranks=case.ranks, fabric=fabric, member=member,
                                     leads=member == 0 or not case.agreed or case.replicas, credits=case.credits, lanes=case.lanes))
            self.fabric = fabric
            together(*[partial(self._rank, member, rank) for member in range(case.members) for rank in range(case.ranks)])
        finally:
            together(*[rig.close for rig in self.rigs])
            self.machine.stop()

    def _rank(self, member: int, rank: int) -> None:
        case, rig = self.case, self.rigs[member]
        device, transport = rig.devices[rank], rig[rank]
        device.enter()
        agreement = Solo()
        if case.members > 1 and not case.replicas:
            agreement = open_agreement("auto", domain=Domain(tuple(range(case.members))), rank=member,
                                       store=FileStore(self.directory / f"domain{rank}"),
                                       edges=[edge for edge in rig.edges if edge.destination == rank], lanes=case.lanes, deadline=WAIT)
        recorder = self.recorders[member, rank] = Recorder(rank=rank, stages=(rank,), directory=None, debug=True)
        engine = Engine(rank=rank, owner=rig.owner.__getitem__, transport=transport, agreement=agreement, recorder=recorder, timeout=WAIT,
                        decide_ahead=case.ahead, issuer=transport if isinstance(transport, NcclTransport) else None)

        rig.posts[rank] = engine.post
        while not rig.boxes[rank].empty():
            engine.post(rig.boxes[rank].get())
        agreement.open(engine.wake, engine.hear)
        collective = None
        if case.members > 1:
            end = self.fabric.end(member, device, name=f"stage {rank}")
            end.connect("group", tuple(range(case.members)))
            stream = device.stream() if case.replicas else device.compute
            collective = partial(self._share, partial(end.all_reduce, "group", 1 - member, stream), member == rank)
        launches = Launches(device, run_ahead=case.run_ahead,
                            fail=lambda where, text, trace: engine.hear(Failure(rank, where, text, trace)))
        placement = Placement.looped(case.ranks, 1)
        try:
            for forward_only in case.calls:
                launches.begin()
                executor = KernelExecutor(device, launches, release=transport.release, collective=collective, split=case.policy.split,
                                          lengthen=self.lengthen)
                self.executors[member][rank].append(executor)
                scheduler = case.policy.scheduler(placement, rank, case.microbatches, forward_only=forward_only)
                engine.run(scheduler, executor, announce=scheduler.announces, forward_only=forward_only, microbatches=case.microbatches)
        finally:
            launches.close(deadline=WAIT)
            agreement.close()

    def _share(self, all_reduce, early: bool, order: list) -> None:
        """What members do together in the last action of `order`."""
        case, last = self.case, order[-1]
        backward = "W" if case.policy.split else "B"
        if not case.forced and early:
            due = len(order) == 1
        else:
            due = last.kind == backward and sum(action.kind == backward for action in order) == case.microbatches
        if due or not case.replicas:
            all_reduce()

    def check(self) -> "Run":
        for member, ranks in enumerate(self.executors):
            for rank, calls in enumerate(ranks):
                for call, executor in enumerate(calls):
                    assert not executor.wrong, executor.wrong[:3]
                    assert len(executor.order) == self.case.microbatches * (1 if self.case.calls[call] else 3 if self.case.policy.split else 2)
                    assert self.case.replicas or executor.order == self.executors[0][rank][call].order, f"members of stage {rank} differ"
                assert len(calls) == len(self.case.calls)
        return self
