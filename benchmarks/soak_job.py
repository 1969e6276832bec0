"""The job that benchmarks/soak.py runs: one process of it, and what it checks."""

import gc
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rrfp.action import Action, Edge
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Arrival, Part, Payload
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.compare.work import Sleep
from rrfp.engine.loop import Engine
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.dependencies import Task, chain
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.opening import open_agreement
from rrfp.trace.recorder import Recorder

LARGEST = 1 << 16
"""Bytes of the largest message."""
MOST_MICROBATCHES = 6
LONGEST_ACTION, LONGEST_DELAY = 0.001, 0.002
"""Seconds."""


@dataclass(frozen=True)
class Layout:
    """ranks of a pipeline, chunks of each, members: pipelines whose processes at a stage agree, and the agreement they use."""

    ranks: int
    chunks: int = 1
    members: int = 1
    agreement: str = "auto"

    @property
    def workers(self) -> int:
        return self.ranks * self.members

    @property
    def placement(self) -> Placement:
        return Placement.looped(self.ranks, self.chunks)


LAYOUTS = {
    "pp": Layout(4),
    "chunks": Layout(2, chunks=2),
    "domains": Layout(2, members=2, agreement="shared-memory"),
    "domains-messages": Layout(2, members=2, agreement="messages"),
    "eight": Layout(4, members=2),
}
DEEPEST = Policy(hint="fill-alt", limit="2p")
POLICIES = (Policy(), Policy(), Policy(hint="bf"), DEEPEST, Policy(hint="1f1b", mode="strict"))
WARM_UP = 16


@dataclass(frozen=True)
class Block:
    """Iterations `first` to `last - 1` of every rank, which are in step at both ends only."""

    first: int
    last: int
    name: str = "soak"


@dataclass(frozen=True)
class Iteration:
    forward_only: bool
    microbatches: int
    policy: Policy

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Iteration":
        """The same on every rank. In the first ones most is in flight, so that most buffers are made then."""
        if number < WARM_UP:
            return cls(False, MOST_MICROBATCHES, DEEPEST)
        draw = random.Random(f"{seed}/{number}")
        return cls(draw.random() < 0.125, draw.randint(1, MOST_MICROBATCHES), draw.choice(POLICIES))


class Contents:
    """What a message holds, as both its ends know it: pieces of one random block, chosen by call, edge and microbatch."""

    def __init__(self, seed: int):
        self._seed = seed
        self._block = np.random.default_rng(seed).integers(0, 256, 2 * LARGEST, np.uint8)
        self._block.flags.writeable = False

    def of(self, call: int, edge: Edge, microbatch: int) -> Payload:
        draw = random.Random(hash((self._seed, call, *edge, microbatch)))
        start, nbytes = draw.randrange(LARGEST), int(LARGEST ** draw.uniform(0.3, 1.0))
        tensors = [self._block[start : start + nbytes]] if nbytes % 2 else [self._block[start : start + nbytes // 2],
                                                                          self._block[start + 1 : start + 1 + nbytes // 2]]
        parts = [Part("uint8", (len(tensor),), tensor) for tensor in tensors]
        return tuple([*parts, Part("float32", (2, 3), None)] if nbytes % 8 == 0 else parts)

    def check(self, call: int, arrival: Arrival) -> None:
        """Raises ValueError."""
        expected = self.of(call, arrival.edge, arrival.microbatch)
        same = len(expected) == len(arrival.payload) and all(
            (a.dtype, a.shape) == (b.dtype, b.shape)
            and (np.array_equal(a.data, b.data) if a.data is not None and b.data is not None else a.data is b.data)
            for a, b in zip(expected, arrival.payload, strict=True))
        if arrival.call != call or not same:
            raise ValueError(f"call {call}: the message of call {arrival.call} on edge {arrival.edge} for microbatch "
                             f"{arrival.microbatch} has other contents than were sent")


class CheckingExecutor:
    """Sleeps, checks every input, keeps it as autograd would, and makes outputs that the receiver can check."""

    capacity, padded = 1, 0.0

    def __init__(self, call: int, contents: Contents, *, duration: Callable[[], float], release: Callable[[Arrival], None]):
        self.checked = 0
        self._call, self._contents, self._duration, self._release = call, contents, duration, release
        self._kept: dict[tuple[int, int], tuple[Arrival, ...]] = {}

    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Callable[[Mapping[Edge, Payload]], None]) -> None:
        action: Action = task.action
        self._check(inputs)
        time.sleep(self._duration())
        if task.in_flight > 0:
            self._kept[action.stage, action.microbatch] = inputs
        else:
            over = inputs + (self._kept.pop((action.stage, action.microbatch), ()) if task.in_flight < 0 else ())
            self._check(over)
            for arrival in over:
                self._release(arrival)
        done({edge: self._contents.of(self._call, edge, action.microbatch) for edge in task.sends})

    def _check(self, inputs: tuple[Arrival, ...]) -> None:
        for arrival in inputs:
            self._contents.check(self._call, arrival)
            self.checked += 1


def late(draw: random.Random, longest: float) -> float:
    """Seconds: mostly nothing, often a little, at times much."""
    luck = draw.random()
    return 0.0 if luck < 0.6 else draw.uniform(0.0, longest / 10) if luck < 0.97 else draw.uniform(0.0, longest)


class Worker:
    """One process of the job; what `rrfp.compare.group.Group` wants of a stage. `leak` is called after every iteration."""

    def __init__(
        self, index: int, workers: int, directory: str, *, layout: Layout, seed: int, leak: Callable[[int, list], None] | None = None,
        start_deadline: float, call_timeout: float,
    ):
        self.work = Sleep()
        self._index, self._seed, self._leak, self._leaked = index, seed, leak, []
        self._placement, self._contents = layout.placement, Contents(seed)
        self._rank, member = divmod(index, layout.members)
        self._durations, delays = random.Random(f"{seed}/durations/{index}"), random.Random(f"{seed}/delays/{index}")
        self._calls = self._messages = 0
        tasks = chain(self._placement, self._rank, 1).tasks.values()
        edges_in, edges_out = (sorted({edge for task in tasks for edge in getattr(task, way)}) for way in ("arrivals", "sends"))
        owner = {stage: layout.members * rank + member for stage, rank in enumerate(self._placement.owners)}
        store = FileStore(directory)
        self._transport = ZmqTransport(
            rank=index, edges_in=edges_in, edges_out=edges_out, owner=owner, store=store, slot_bytes=1 << 12,
            delay=lambda edge, microbatch: late(delays, LONGEST_DELAY), namespace=f"rrfp{member}")
        domain = Domain(tuple(range(layout.members * self._rank, layout.members * (self._rank + 1))))
        self._agreement = open_agreement(
            layout.agreement, domain=domain, rank=index, store=store, edges=edges_in, deadline=start_deadline)
        self._engine = Engine(
            rank=index, owner=owner.__getitem__, transport=self._transport, agreement=self._agreement,
            recorder=Recorder(rank=index, stages=self._placement.stages_of(self._rank), directory=None), timeout=call_timeout)
        self._agreement.open(self._engine.wake, self._engine.hear)
        self._transport.open(self._engine.post, deadline=start_deadline)

    def prepare(self, block: Block) -> Callable[[], tuple[int, dict[str, int]]]:
        def go() -> tuple[int, dict[str, int]]:
            peak = max(self._run(Iteration.drawn(self._seed, number)) for number in range(block.first, block.last))
            gc.collect()  # what is in a cycle is no leak
            return peak, {"calls": self._calls, "messages": self._messages, "objects": sys.getallocatedblocks()}

        return go

    def _run(self, iteration: Iteration) -> int:
        policy, microbatches, forward_only = iteration.policy, iteration.microbatches, iteration.forward_only
        scheduler = policy.scheduler(self._placement, self._rank, microbatches, forward_only=forward_only)
        executor = CheckingExecutor(self._calls, self._contents, duration=lambda: late(self._durations, LONGEST_ACTION),
                                    release=self._transport.release)
        self._engine.run(scheduler, executor, announce=scheduler.announces, forward_only=forward_only, microbatches=microbatches)
        self._calls += 1
        self._messages += executor.checked // 2  # each one twice
        if self._leak is not None:
            self._leak(self._index, self._leaked)
        return scheduler.peak_in_flight

    def close(self) -> None:
        self._transport.close(deadline=20.0)
        self._agreement.close()
