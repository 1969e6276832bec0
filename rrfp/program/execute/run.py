"""A lowered program, opened on this rank: its parameters, its communicators, its place in the pipeline, and the engine over them."""

import contextlib
import hashlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from rrfp.comm import rendezvous
from rrfp.comm.rendezvous import Fact
from rrfp.comm.transport import Departure, Event, Failure
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.engine.failure import FailureLatch
from rrfp.engine.loop import FIRST_CALL, Engine
from rrfp.engine.watchdog import Watcher
from rrfp.errors import ConfigurationError, PipelineError
from rrfp.program.capture import Captured
from rrfp.program.dag import ALL_TO_ALL, SEND, Node
from rrfp.program.execute.collectives import Collectives
from rrfp.program.execute.exchange import ExchangeTransport
from rrfp.program.execute.executor import ProgramExecutor
from rrfp.program.execute.parameters import MakeOptimizer, Parameters, check_optimizer, check_parameters
from rrfp.program.execute.pool import Pool
from rrfp.program.execute.streams import Streams
from rrfp.program.execute.wiring import Wiring, losses
from rrfp.program.plan import Lowered
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.opening import open_agreement
from rrfp.trace.recorder import Recorder

OPEN_DEADLINE = 120.0
CLOSE_DEADLINE = 10.0
CREDITS = 4
COLLECTIVE_SHARE = 0.7
"""Share of the timeout that a collective may take: below the watcher's, so that whoever waits for one says which."""
SWITCH_INTERVAL = 1e-4
"""Seconds for which a thread may keep the interpreter lock while another wants it: the streams' threads wait for no long turn."""
_openings = itertools.count()


@dataclass(frozen=True)
class Emulation:
    """Durations for tests and benchmarks on machines whose own say nothing: what is emulated is slept.

    seconds: an action, or a collective, takes at least so long, by its node. delay: seconds by which a message of an edge is late.
    """

    seconds: Callable[[Node], float] = lambda node: 0.0
    delay: Callable | None = None


@dataclass(frozen=True)
class Peak:
    """The most that a device held in a step. activations: of units. gathered: bytes of ZeRO-3's gathered parameters."""

    activations: int = 0
    gathered: int = 0


class Run:
    """What is open: connections, threads, parameters. All ranks of the job make one at the same point.

    The arguments are `compile`'s.
    """

    def __init__(self, captured: Captured, program: Lowered, *, mode: str, limit: int | None, optimizer: MakeOptimizer, trace, timeout: float,
                 interface: str | None, emulation: Emulation):
        self.program, self._limit = program, limit
        self._device = device = dist.get_rank()
        _check_job(program)
        self._plan = plan = program.plans[program.rank_of[device]]
        self._replica = plan.devices.index(device)
        store = dist.PrefixStore(f"rrfp-program/{next(_openings)}", dist.distributed_c10d._get_default_store())
        check_parameters(program, captured.weights)
        check_optimizer(program, optimizer)
        fullest = max(program.plans, key=lambda each: each.peak)
        program.scheduler(fullest.rank, mode=mode, limit=limit)  # refuses a limit that is too small for any rank, on every rank
        self._compare(store, captured, f"{mode}, limit {limit}")
        self._tensors = next(iter(captured.weights.values())).device
        self.parameters = Parameters(program, captured.weights, device=device, make_optimizer=optimizer)
        directory = None if trace is None else Path(trace) / f"pipeline{self._replica}"
        self.recorder = Recorder(rank=plan.rank, stages=plan.dependencies.stages, directory=directory, ranks=len(program.plans), mode=mode)
        self._durations: dict[str, float] = {}
        self._departed: set[int] = set()
        latch = FailureLatch()
        self._collectives = Collectives(program, device=device, timeout=FIRST_CALL * timeout)
        nodes = {**program.dag.nodes, **self._collectives.gathers}
        self._streams = Streams(
            rank=device, device=self._tensors, latch=latch, fail=self._fail, deadline=self._deadline, record=self.recorder.moved,
            seconds=lambda name: emulation.seconds(nodes[name]) if name in nodes else 0.0)
        self._wiring = wiring = Wiring(program, plan.rank)
        self._exchanges = {key: [(item.via, plan.messages[key[0]].stream, self._collectives.exchange(item.via)) for item in items]
                           for key, items in wiring.items.items() if plan.messages[key[0]].kind == ALL_TO_ALL}
        counts = Counter(stream for each in self._exchanges.values() for _, stream, _ in each)
        self._collectives.connect(self.parameters, self._streams, counts)
        try:
            self._open(store, latch, timeout, interface, emulation)
        except BaseException:
            self._collectives.close(self._collectives.streams)
            raise
        pool = self._make_pool()
        self._executor = ProgramExecutor(
            program, plan, functions=captured.functions, loss=captured.traced.loss, wiring=wiring, parameters=self.parameters, pool=pool,
            streams=self._streams, collectives=self._collectives, release=self._transport.release, device=self._tensors, seconds=emulation.seconds)
        self._pool = pool
        makers = losses(program, captured.traced.loss)
        self._pieces = len(makers)
        self._loss_type = getattr(torch, captured.traced.tensors[captured.traced.loss].dtype)
        self._loss_device = program.dag.nodes[next(iter(makers))].devices[self._replica]
        self.peak = Peak()
        self._closed = False

    def _compare(self, store, captured: Captured, mode: str) -> None:
        """Every rank has the same program and the same parameters to begin with."""
        sums = hashlib.sha256(repr([(name, value.detach().double().sum().item()) for name, value in captured.weights.items()]).encode())
        facts = {
            "the program": Fact(self.program.digest[:12], "give every rank the same model and directives"),
            "the mode": Fact(mode, "give every rank the same"),
            "the parameters": Fact(sums.hexdigest()[:12], "initialise the model with the same seed on every rank, or load the same checkpoint"),
            "torch": Fact(torch.__version__, "install the same release on every rank"),
        }
        rendezvous.compare(store, "facts", "hello", self._device, range(dist.get_world_size()), facts, until=time.monotonic() + OPEN_DEADLINE)

    def _open(self, store, latch: FailureLatch, timeout: float, interface: str | None, emulation: Emulation) -> None:
        program, plan, device = self.program, self._plan, self._device
        owner = {unit: program.plans[rank].devices[self._replica] for unit, rank in enumerate(program.owners)}
        edges = [edge for edge, message in plan.messages.items() if message.kind == SEND]
        local = [edge for edge, message in plan.messages.items() if message.kind == ALL_TO_ALL]
        heartbeat = min(2.0, timeout / 10)
        agreement = open_agreement(
            "auto", domain=Domain(tuple(sorted(plan.devices))), rank=device, store=store, namespace="agreement",
            edges=[*local, *(edge for edge in edges if owner[edge.destination] == device)], deadline=OPEN_DEADLINE,
            heartbeat_s=heartbeat, silence_s=4 * timeout, interface=interface)
        microbatches = 1 + max((action.microbatch or 0 for action in plan.nodes), default=0)
        below = ZmqTransport(
            rank=device, edges_in=[edge for edge in edges if owner[edge.destination] == device],
            edges_out=[edge for edge in edges if owner[edge.source] == device], owner=owner, store=store, namespace=f"pipeline{self._replica}",
            # Out of order, a message may be wanted that lies behind all others of its edge.
            credits=CREDITS if program.order == "microbatch" else max(CREDITS, microbatches), interface=interface, delay=emulation.delay,
            heartbeat_s=heartbeat, told_of=range(dist.get_world_size()))
        self._transport = ExchangeTransport(below, streams=self._streams, exchanges=self._exchanges, issued=self._collectives.exchanged)
        self._agreement = agreement
        self._engine = Engine(rank=device, owner=owner.__getitem__, transport=self._transport, agreement=agreement, recorder=self.recorder,
                              timeout=timeout, latch=latch)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        try:
            self._transport.open(self._post, deadline=OPEN_DEADLINE)
        except BaseException:
            agreement.close()
            raise
        agreement.open(self._engine.wake, self._engine.hear)
        self._watcher = Watcher(self._engine, departed=self._departed, report=lambda text, view: None)

    def _make_pool(self) -> Pool:
        plan, dag = self._plan, self.program.dag
        row = [(action, plan.gathers[action]) for group in plan.row for action in group if action in plan.gathers]
        titles = dict.fromkeys(bucket for _, bucket in row)
        return Pool(row, prefetch={title: dag.buckets[title].prefetch for title in titles},
                    nbytes={title: self.parameters.stores[title].nbytes for title in titles}, gather=self._collectives.gather,
                    free=lambda title: self.parameters.stores[title].free(), wait=self._streams.wait)

    def _post(self, event: Event) -> None:
        if type(event) is Departure:
            self._departed.add(event.rank)
        self._engine.post(event)

    def _deadline(self) -> float:
        return COLLECTIVE_SHARE * self._engine.patience

    def _fail(self, failure: Failure) -> None:
        """From a stream's thread."""
        self._engine.post(failure)
        self._transport.abort(failure)

    def step(self, batch: Mapping[str, torch.Tensor], *, mode: str) -> torch.Tensor:
        if self._closed:
            raise PipelineError("step: this program is closed")
        scheduler = self.program.scheduler(self._plan.rank, mode=mode, limit=self._limit)
        scheduler.durations |= self._durations
        with self._told():
            self._compare_rows(self._executor.begin(batch))
        self._collectives.begin()
        self._engine.run(scheduler, self._executor, announce=scheduler.announces, microbatches=self._pieces)
        self._durations = dict(scheduler.durations)
        self.peak = Peak(max(self.peak.activations, scheduler.peak_in_flight), max(self.peak.gathered, self._pool.peak))
        with self._told():
            found = torch.zeros(self._pieces, device=self._tensors, dtype=self._loss_type)
            for piece, loss in self._executor.losses.items():
                found[piece] = loss
            self._executor.finish()
            return self._collectives.from_rank(found, self._loss_device)

    def _compare_rows(self, rows: Mapping[str, int]) -> None:
        """A mean over replicas is the mean over all rows only where each has equally many, and only then all-to-alls fit. Asked in every step:
        no replica knows whether another's batch has changed."""
        if not rows:
            return
        first, *others = (each.tolist() for each in self._collectives.of_replicas("rows", torch.tensor(list(rows.values()), device=self._tensors)))
        for rank, found in zip(self._plan.devices[1:], others, strict=True):
            for name, wanted, given in zip(rows, first, found, strict=True):
                if given != wanted:
                    raise ConfigurationError(f"step: batch: {name} has {wanted} rows on rank {self._plan.devices[0]} and {given} on rank {rank},"
                                             " which are replicas; give replicas equally many")

    @contextlib.contextmanager
    def _told(self):
        """What fails outside the engine's call is told to all ranks, too."""
        try:
            yield
        except Exception as error:
            self._engine.fail(error)
            raise

    def mean(self, losses: torch.Tensor) -> float:
        with self._told():
            return torch.stack(self._collectives.of_replicas("mean", losses.double().mean())).mean().item()

    def state_dict(self) -> dict[str, torch.Tensor]:
        with self._told():
            return self._state()

    def _state(self) -> dict[str, torch.Tensor]:
        dag, found = self.program.dag, {}
        for title, store in self.parameters.stores.items():
            if store.sharing.zero == 3:
                self._streams.wait(self._collectives.gather(title))
        for segment in dag.segments:
            if dag.homes[segment] != self._plan.devices:
                continue
            ways = dag.sharded.get(segment, 1)
            for name in dag.owned(segment):
                own = self.parameters.weights(segment)[name].detach()
                found[name] = torch.cat(self._collectives.of_replicas("state", own)[:ways]) if ways > 1 else own.clone()
        for store in self.parameters.stores.values():
            if store.sharing.zero == 3:
                store.free()
        return found

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watcher.close(exiting=False)
        try:
            self._transport.close(deadline=CLOSE_DEADLINE)
        finally:
            self._agreement.close()
            self._streams.end()
            # After a failure threads may stand in collectives whose others never come. Each rank closes what it does not stand in: that
            # ends the others' waiting.
            for deadline in (0.2, CLOSE_DEADLINE):
                self._collectives.close(self._collectives.streams - self._streams.busy(deadline=deadline))
            self.recorder.close()


def _check_job(program: Lowered) -> None:
    devices = sorted(program.rank_of)
    world = dist.get_world_size()
    if devices != list(range(world)):
        raise ConfigurationError(f"place: the program runs on devices {', '.join(map(str, devices))}, and this job has ranks 0 to {world - 1}:"
                                 " a device is a global rank; start as many, or place on all of them")
    for plan in program.plans:
        if list(plan.devices) != sorted(plan.devices):
            raise ConfigurationError(f"place: devices {list(plan.devices)}: must ascend, for so torch numbers the members of a group; sort them")
