"""Engines of a whole pipeline under a virtual clock: real `Engine`, `Scheduler` and `Agreement`, scripted transport, no threads.

Every payload names the action that made it and its edge. Inputs are read when their action ends, and again when its backward
has: memory that was given back or written too early shows as other bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rrfp.action import Action, Edge
from rrfp.comm.clock import VirtualClock
from rrfp.comm.scripted_transport import ScriptedNetwork
from rrfp.comm.transport import Arrival, Part
from rrfp.engine.loop import Engine
from rrfp.policy import Policy
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import Dependencies, Task, chain
from rrfp.tp_coord.agreement import Solo
from rrfp.tp_coord.scripted_agreement import ScriptedDomain
from rrfp.trace.recorder import Recorder


def text_of(arrival: Arrival) -> str:
    return bytes(arrival.payload[0].data).decode(errors="replace")


class VirtualExecutor:
    """Actions take virtual seconds and complete later than they are launched.

    A stage input is kept until the action that gives its slot back has completed, as autograd keeps it.
    """

    padded = 0.0

    def __init__(
        self, clock: VirtualClock, duration: Callable[[Action], float], *, release: Callable[[Arrival], None], capacity: int
    ):
        self.capacity = capacity
        self.log: list[tuple[Action, float]] = []
        """What was launched, and when."""
        self.ended: dict[Action, float] = {}
        self.inputs: dict[Action, list[str]] = {}
        self.peak = self.held = 0
        self._clock, self._duration, self._release = clock, duration, release
        self._kept: dict[tuple[int, int | None], tuple[Arrival, ...]] = {}

    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Callable) -> None:
        now = self._clock.now()
        self.log.append((task.action, now))
        self.held += max(task.in_flight, 0)
        self.peak = max(self.peak, self.held)
        self._clock.call_at(now + self._duration(task.action), lambda: self._end(task, inputs, done))

    def _end(self, task: Task, inputs: tuple[Arrival, ...], done: Callable) -> None:
        action = task.action
        self.ended[action] = self._clock.now()
        self.inputs[action] = self._read(inputs)
        place = (action.stage, action.microbatch)
        if task.in_flight > 0:
            self._kept[place] = inputs
        else:
            for arrival in inputs:
                self._release(arrival)
        if task.in_flight < 0:
            self.held += task.in_flight
            kept = self._kept.pop(place, ())
            self._read(kept)
            for arrival in kept:
                self._release(arrival)
        done({edge: self.payload(action, edge) for edge in task.sends})

    def _read(self, inputs: tuple[Arrival, ...]) -> list[str]:
        texts = [text_of(arrival) for arrival in inputs]
        for arrival, text in zip(inputs, texts, strict=True):
            where = f"{arrival.edge}, microbatch {arrival.microbatch}"
            assert text.endswith(f" {arrival.edge}"), f"the memory of {where}, was written: {text!r}"
        return texts

    @staticmethod
    def payload(action: Action, edge: Edge):
        data = np.frombuffer(f"{action} {edge}".encode(), np.uint8)
        return (Part("uint8", (len(data),), data),)

    @property
    def order(self) -> list[Action]:
        return [action for action, _ in self.log]


class NoTransport:
    """Of a pipeline of one."""

    def open(self, post, *, deadline):
        pass

    begin = release = flush = abort = close = lambda self, *arguments, **options: None

    def state(self) -> dict:
        return {"call": None, "edges": {}, "peers": {}}


@dataclass(frozen=True)
class Call:
    """schedulers: a fresh one for a rank. limits: what each rank was promised to hold at most. The rest is `Engine.begin`'s."""

    schedulers: Callable[[int], Scheduler]
    announce: bool = False
    forward_only: bool = False
    microbatches: int = 0
    limits: tuple[int, ...] | None = None

    @classmethod
    def chain(cls, placement, microbatches: int, policy: Policy | None = None, *, forward_only: bool = False) -> "Call":
        policy = policy or Policy()
        return cls(lambda rank: policy.scheduler(placement, rank, microbatches, forward_only=forward_only),
                   announce=policy.scheduler(placement, 0, microbatches).announces, forward_only=forward_only, microbatches=microbatches,
                   limits=tuple(policy.limits(placement, microbatches)))


@dataclass
class Member:
    """One rank (of one domain member) and what was seen of it."""

    rank: int
    member: int
    engine: Engine
    executors: list[VirtualExecutor] = field(default_factory=list)
    schedulers: list[Scheduler] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    arrived: dict[tuple[int, Edge, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    """(call, edge, lane) -> microbatches in the order of arrival."""
    most_waiting: Counter = field(default_factory=Counter)
    """Edge -> most messages that were here and not dispatched."""
    error: BaseException | None = None
    running: bool = False
    wake: float = 0.0

    @property
    def executor(self) -> VirtualExecutor:
        return self.executors[-1]

    @property
    def order(self) -> list[Action]:
        return self.executor.order

    def say(self) -> str:
        return f"rank {self.rank}.{self.member}: {'; '.join(self.schedulers[-1].explain()) if self.schedulers else 'idle'}"


class Cluster:
    """All engines.

    Args:
        owner: stage -> rank.
        edges: every edge that crosses ranks.
        duration: duration(action, member), seconds.
        delay: delay(edge, microbatch, member), seconds.
        members: ranks per stage that must agree; `agree=False` lets each go its own way (negative control).
        engine, executor, network: classes to use instead.
        options: more arguments for the network.
    """

    def __init__(
        self,
        owner: Mapping[int, int],
        edges: Iterable[Edge],
        *,
        duration: Callable[[Action, int], float] = lambda action, member: 2.0 if action.kind == "B" else 1.0,
        delay: Callable[[Edge, int, int], float] = lambda edge, microbatch, member: 0.0,
        members: int = 1,
        agree: bool = True,
        news: Callable[[int], float] = lambda member: 0.0,
        capacity: int = 1,
        credits: int = 4,
        lanes: int = 1,
        timeout: float = 1e6,
        decide_ahead: bool = False,
        engine: type[Engine] = Engine,
        executor: type[VirtualExecutor] = VirtualExecutor,
        transport: Callable = lambda transport: transport,
        network: type[ScriptedNetwork] = ScriptedNetwork,
        **options,
    ):
        self.clock = VirtualClock()
        self.capacity, self.credits, self.lanes, self.owner = capacity, credits, lanes, dict(owner)
        self._duration, self._executor = duration, executor
        self.edges = sorted(set(edges))
        # A rank without edges has no neighbours.
        self.networks = [
            network(owner, self.edges, clock=self.clock, credits=credits, lanes=lanes,
                    delays=lambda edge, microbatch, member=member: delay(edge, microbatch, member), **options)
            for member in range(members if self.edges else 0)
        ]
        self.members: list[Member] = []
        for rank in sorted(set(owner.values())):
            domain = ScriptedDomain(members, clock=self.clock, delay=news)
            for index in range(members):
                agreement = domain.agreement(index) if members > 1 and agree else Solo()
                end = self.networks[index].transport(rank) if self.networks else NoTransport()
                one = engine(rank=rank, owner=self.owner.__getitem__, transport=transport(end),
                             agreement=agreement, recorder=Recorder(rank=rank, stages=(rank,), directory=None, debug=True),
                             timeout=timeout, decide_ahead=decide_ahead, clock=self.clock.now)
                member = Member(rank, index, one)
                one.transport.open(lambda event, member=member: self._post(member, event), deadline=0.0)
                agreement.open(one.wake)
                self.members.append(member)

    @classmethod
    def of(cls, placement, **options) -> "Cluster":
        """A chain of stages."""
        return cls.of_dependencies((chain(placement, rank, 1) for rank in range(placement.ranks)), **options)

    @classmethod
    def of_dependencies(cls, pipeline: Iterable[Dependencies], **options) -> "Cluster":
        """Any graph."""
        pipeline = list(pipeline)
        owner = {stage: dependencies.rank for dependencies in pipeline for stage in dependencies.stages}
        return cls(owner, {edge for d in pipeline for task in d.tasks.values() for edge in task.arrivals}, **options)

    def _post(self, member: Member, event) -> None:
        if isinstance(event, Arrival):
            member.arrived[event.call, event.edge, event.lane].append(event.microbatch)
            here = sum(len(m) for (call, edge, _), m in member.arrived.items() if edge == event.edge)
            calls = zip(member.schedulers, member.executors, strict=True)
            gone = sum(event.edge in scheduler.task(a).arrivals for scheduler, executor in calls for a in executor.order)
            member.most_waiting[event.edge] = max(member.most_waiting[event.edge], here - gone)
        member.engine.post(event)

    def __getitem__(self, rank: int) -> Member:
        """The first member of a rank."""
        return next(member for member in self.members if member.rank == rank)

    # ------------------------------------------------------------------ driving
    def run(self, *calls: Call, only: Iterable[int] | None = None, strict: bool = True) -> "Cluster":
        """Every rank runs `calls` one after another, at its own pace. An error ends a rank; `strict` raises the first."""
        ranks = set(self.owner.values()) if only is None else set(only)
        todo = {id(member): list(calls) if member.rank in ranks else [] for member in self.members}
        while True:
            for member in self.members:
                if member.error is None and self._has_news(member):
                    try:
                        self._step(member, todo[id(member)])
                    except Exception as error:
                        member.engine.fail(error)
                        member.error, member.running = error, False
                        if strict:
                            raise
            times = [member.wake for member in self.members if member.running]
            if not times:
                return self
            if (due := self.clock.next_event_time()) is not None:
                times.append(due)
            assert min(times) < float("inf"), "; ".join(member.say() for member in self.members)
            self.clock.advance_to(min(times))

    def _has_news(self, member: Member) -> bool:
        """Whether its loop has anything to look at: like a thread that waits for its inbox or its timer."""
        return (not member.running or member.engine.scheduler.finished or self.clock.now() >= member.wake
                or not member.engine._inbox.empty())

    def _step(self, member: Member, calls: list[Call]) -> None:
        engine = member.engine
        while True:
            if not member.running:
                if not calls:
                    return
                self._begin(member, calls.pop(0))
            if (wake := engine.advance()) is not None:
                member.wake = wake
                return
            deadline = engine.last_progress + engine.patience
            stuck = any(end["direction"] == "out" and end["waiting"] for end in engine.transport.state()["edges"].values())
            if stuck and self.clock.now() < deadline and engine.latch.failure is None:
                member.wake = deadline
                return
            engine.end()
            member.running = False

    def _begin(self, member: Member, call: Call) -> None:
        executor = self._executor(self.clock, lambda action: self._duration(action, member.member),
                                  release=member.engine.transport.release, capacity=self.capacity)
        member.executors.append(executor)
        member.schedulers.append(call.schedulers(member.rank))
        member.limits.append(call.limits[member.rank] if call.limits else member.schedulers[-1].limit)
        member.running = True
        member.engine.begin(member.schedulers[-1], executor, announce=call.announce, forward_only=call.forward_only,
                            microbatches=call.microbatches)

    # ------------------------------------------------------------------ what must hold after every run
    def check(self) -> "Cluster":
        """Every action once, on its inputs; lanes FIFO in dispatch order; limits; credits all back; members in step."""
        self.clock.run_until_idle()
        for member in self.members:
            for call, (scheduler, executor) in enumerate(zip(member.schedulers, member.executors, strict=True)):
                tasks = scheduler.dependencies.tasks
                assert sorted(map(str, executor.order)) == sorted(map(str, tasks)), f"rank {member.rank}"
                assert executor.held == 0
                assert max(executor.peak, scheduler.peak_in_flight) <= member.limits[call]
                for action, task in tasks.items():
                    for before in task.after:
                        assert executor.ended[before] <= dict(executor.log)[action]
                    producers = [self._producer(call, edge, action.microbatch) for edge in task.arrivals]
                    assert executor.inputs[action] == [f"{p} {edge}" for p, edge in zip(producers, task.arrivals, strict=True)]
                self._check_lanes(member, call)
            first = next(other for other in self.members if other.rank == member.rank)
            assert [executor.order for executor in member.executors] == [executor.order for executor in first.executors]
            for edge, end in member.engine.transport.state()["edges"].items():
                assert end["credits"] == self.credits and end["waiting"] == 0, f"edge {edge}: {end}"
            assert all(waiting <= self.credits for waiting in member.most_waiting.values()), "more waiting than credits"
        for network in self.networks:
            for link in network.links.values():
                assert link.outstanding == 0
        return self

    def _producer(self, call: int, edge: Edge, microbatch) -> Action:
        tasks = self[self.owner[edge.source]].schedulers[call].dependencies.tasks.values()
        return next(task.action for task in tasks if edge in task.sends and task.action.microbatch == microbatch)

    def _check_lanes(self, member: Member, call: int) -> None:
        scheduler = member.schedulers[call]
        for edge in {edge for task in scheduler.dependencies.tasks.values() for edge in task.sends}:
            receiver = next(m for m in self.members if m.rank == self.owner[edge.destination] and m.member == member.member)
            for lane in range(self.lanes):
                sent = [a.microbatch for a in member.executors[call].order if edge in scheduler.task(a).sends]
                sent = [microbatch for microbatch in sent if microbatch % self.lanes == lane]
                assert receiver.arrived[call, edge, lane] == sent, f"{edge} lane {lane}"
