"""Networks to test transports on: scripted, and real sockets with all ranks in this process, inside a host and as if across."""

import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rrfp.action import Edge
from rrfp.comm import outbound
from rrfp.comm.clock import VirtualClock
from rrfp.comm.loop import Loop
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.scripted_transport import ScriptedNetwork
from rrfp.comm.transport import Arrival, Part
from rrfp.comm.zmq_transport import ZmqTransport

sys.path.insert(0, str(Path(__file__).parent))  # helpers lie beside the tests

WAIT = 20.0


def make_part(nbytes: int, value: int = 0, dtype: str = "uint8") -> Part:
    size = {"uint8": 1, "bfloat16": 2, "float32": 4}[dtype]
    return Part(dtype, (nbytes // size,), np.full(nbytes, value % 256, np.uint8))


class Activity:
    """Ends waits for a state of real transports: told after everything that one of their threads has done."""

    def __init__(self, monkeypatch):
        self._done = threading.Condition()
        guarded, tell = Loop._guarded, self._tell

        def handle(loop, handler):
            guarded(loop, handler)
            tell()

        class Queue(Mailbox):
            def get(self, *arguments, **options):
                tell()  # the send thread has done what it got before
                return super().get(*arguments, **options)

        monkeypatch.setattr(Loop, "_guarded", handle)
        monkeypatch.setattr(outbound, "Mailbox", Queue)

    def _tell(self):
        with self._done:
            self._done.notify_all()

    def wait_for(self, condition) -> bool:
        """Whether it holds within WAIT seconds."""
        with self._done:
            return self._done.wait_for(condition, WAIT)


class Network:
    """Ranks with an inbox each. `get` waits for the next event of a rank, `settle` until a condition holds."""

    def __init__(self, kind: str, owner: dict[int, int], edges: list[Edge], directory, activity: Activity, **options):
        self.kind, self._activity = kind, activity
        self.ranks = sorted(set(owner.values()))
        self.boxes = {rank: Mailbox() for rank in self.ranks}
        if kind == "scripted":
            self.clock = VirtualClock()
            self.scripted = ScriptedNetwork(owner, edges, clock=self.clock, **options)
            self.transports = {rank: self.scripted.transport(rank) for rank in self.ranks}
            for rank in self.ranks:
                self.transports[rank].open(self.boxes[rank].put, deadline=WAIT)
            return
        if "delays" in options:
            options["delay"] = options.pop("delays")
        self.store = FileStore(directory)
        self.transports = {
            rank: ZmqTransport(
                rank=rank,
                edges_in=[edge for edge in edges if owner[edge.destination] == rank],
                edges_out=[edge for edge in edges if owner[edge.source] == rank],
                owner=owner,
                store=self.store,
                interface="127.0.0.1",
                host=f"host{rank}" if kind == "tcp" else None,
                **options,
            )
            for rank in self.ranks
        }
        errors = []

        def enter(rank):
            try:
                self.transports[rank].open(self.boxes[rank].put, deadline=WAIT)
            except Exception as error:  # seen by the test below
                errors.append(error)

        threads = [threading.Thread(target=enter, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.close()
            raise errors[0]

    def __getitem__(self, rank):
        return self.transports[rank]

    def begin(self, call: int = 0):
        for transport in self.transports.values():
            transport.begin(call)

    def get(self, rank: int, kind: type = object):
        """The next event of a kind; others are dropped."""
        until = time.monotonic() + WAIT
        while True:
            if self.kind == "scripted":
                self.clock.run_until_idle()
            try:
                event = self.boxes[rank].get(timeout=0 if self.kind == "scripted" else until - time.monotonic())
            except (queue.Empty, ValueError):
                raise AssertionError(f"rank {rank} heard nothing: {self[rank].state()}") from None
            if isinstance(event, kind):
                return event

    def take(self, rank: int, count: int, *, consume: bool = True) -> list[Arrival]:
        """The next arrivals, their payload copied out."""
        taken = []
        for _ in range(count):
            arrival = self.get(rank)
            assert isinstance(arrival, Arrival), arrival
            arrival.payload = tuple(p if p.data is None else p._replace(data=p.data.copy()) for p in arrival.payload)
            taken.append(arrival)
            if consume:
                self[rank].consumed(arrival)
                self[rank].release(arrival)
        return taken

    def settle(self, condition):
        if self.kind == "scripted":
            self.clock.run_until_idle()
            met = condition()
        else:
            met = self._activity.wait_for(condition)
        assert met, {rank: transport.state() for rank, transport in self.transports.items()}

    def empty(self, rank: int) -> bool:
        if self.kind == "scripted":
            self.clock.run_until_idle()
        return self.boxes[rank].empty()

    def close(self):
        threads = [threading.Thread(target=t.close, kwargs={"deadline": 5.0}) for t in self.transports.values()]
        if self.kind == "scripted":
            for transport in self.transports.values():
                transport.close(deadline=5.0)
            return
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def activity(monkeypatch):
    return Activity(monkeypatch)


@pytest.fixture
def network(tmp_path, activity):
    """network(kind, owner, edges, **options); closed after the test."""
    made = []

    def make(kind, owner, edges, **options):
        made.append(Network(kind, owner, [Edge(*edge) for edge in edges], tmp_path / str(len(made)), activity, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def part():
    return make_part
