"""NCCL as strict as the real one, on the streams of `fake_cuda.Machine`.

No tags: operations of a communicator and a pair match in the order in which they were issued. A posted operation occupies its stream
until its counterpart has started. One launch order per device: an operation starts when all that were issued before it on its device
have started; with `resident=1` only when they have ended, as before CUDA 12.3 (what is safe there is safe everywhere). Calls from two
threads at once, or of different threads, are an error. A communicator exists when all its members have connected, and connecting blocks.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from fake_cuda import Deadlock, FakeDevice, FakeMemory, FakeStream, Machine, Op


@dataclass(eq=False)
class Transfer:
    """An issued operation of one end."""

    what: str
    communicator: Hashable
    peer: int
    memory: FakeMemory | None
    started: bool = False
    partner: "Transfer | None" = None
    done: bool = False


@dataclass(eq=False)
class Fabric:
    """What connects the devices of a machine."""

    machine: Machine
    resident: int = 1
    """How many operations may occupy a device at once."""
    posted: dict = field(default_factory=lambda: defaultdict(list))
    """(communicator, source, destination, "send" or "recv") -> started ones without a partner."""
    members: dict = field(default_factory=lambda: defaultdict(set))
    order: dict = field(default_factory=lambda: defaultdict(list))
    """By device, what was issued and has not ended."""

    issuing: dict = field(default_factory=lambda: defaultdict(threading.Lock))
    threads: dict = field(default_factory=dict)
    """By device: held inside a call, and the thread that calls."""

    def end(self, rank: int, device: FakeDevice, *, name: Hashable = None) -> "FakeNccl":
        """name: sets its communicators apart from those of other pipelines, whose ranks have the same numbers."""
        return FakeNccl(self, rank, device, name)


class FakeNccl:
    """One rank's end."""

    def __init__(self, fabric: Fabric, rank: int, device: FakeDevice, name: Hashable = None):
        self.fabric, self.rank, self.device, self.name = fabric, rank, device, name
        self.aborted = False
        self.issued: list[str] = []

    def connect(self, communicator: Hashable, ranks: tuple[int, ...]) -> None:
        """Blocks until every member has."""
        machine, members = self.fabric.machine, self.fabric.members[self.name, communicator]
        with machine.changed:
            members.add(self.rank)
            machine.changed.notify_all()
        machine.wait_for(lambda: members >= set(ranks), f"rank {self.rank} connects {communicator}")

    def connected(self, communicator: Hashable, ranks: tuple[int, ...]) -> bool:
        """`connect` for hosts of one thread: begins, and says whether it is over."""
        self.fabric.members[self.name, communicator].add(self.rank)
        return self.fabric.members[self.name, communicator] >= set(ranks)

    def send(self, communicator: Hashable, memory: FakeMemory, peer: int, stream: FakeStream) -> None:
        self._issue("send", communicator, (self.rank, peer), memory, peer, stream)

    def recv(self, communicator: Hashable, memory: FakeMemory, peer: int, stream: FakeStream) -> None:
        self._issue("recv", communicator, (peer, self.rank), memory, peer, stream)

    def finish(self, communicator: Hashable, stream: FakeStream) -> Callable[[], None]:
        event = self.device.record(stream)
        return lambda: self.device.synchronize(event)

    def all_reduce(self, communicator: Hashable, peer: int, stream: FakeStream) -> None:
        """Of two ranks, without data: who takes part is all that matters here."""
        self._issue("all-reduce", communicator, tuple(sorted((self.rank, peer))), None, peer, stream)

    def abort(self) -> None:
        self.aborted = True
        self.fabric.machine.break_down("NCCL was aborted")

    def _issue(self, what: str, communicator, pair, memory, peer: int, stream: FakeStream) -> None:
        issuing = self.fabric.issuing[self.device.index]
        assert issuing.acquire(blocking=False), "two threads call NCCL at once"
        try:
            here = threading.get_ident()
            assert self.fabric.threads.setdefault(self.device.index, here) == here, "NCCL is called from two threads"
            assert not self.aborted, "NCCL was aborted"
            if not self.fabric.members[self.name, communicator] >= {self.rank, peer}:
                raise Deadlock(f"rank {self.rank} uses {communicator} before rank {peer} has connected: its host waits inside the call")
            self.issued.append(f"{what} {communicator}")
            self._queue(Transfer(f"{what} {communicator}", communicator, peer, memory), what, (self.name, communicator, *pair), stream)
        finally:
            issuing.release()

    def _queue(self, transfer: Transfer, what: str, key: tuple, stream: FakeStream) -> None:
        fabric, order = self.fabric, self.fabric.order[self.device.index]
        other = {"send": "recv", "recv": "send"}.get(what, what)
        with fabric.machine.changed:
            order.append(transfer)

        def may_start() -> bool:
            before = order[: order.index(transfer)]
            return all(one.started for one in before) and len(before) < fabric.resident

        def start() -> None:
            transfer.started = True
            if waiting := [one for one in fabric.posted[*key, other] if one is not transfer]:
                partner = waiting[0]
                fabric.posted[*key, other].remove(partner)
                source, target = (transfer, partner) if what == "send" else (partner, transfer)
                if what in ("send", "recv"):
                    # As NCCL: nobody checks. Bytes that no one sent stay what they were, those that do not fit are lost.
                    size = min(len(source.memory), len(target.memory))
                    np.copyto(target.memory[:size], source.memory[:size])
                for one in (transfer, partner):
                    one.done = True
                    fabric.order[self._device_of(one, transfer)].remove(one)
            else:
                transfer.home = self.device.index
                fabric.posted[*key, what].append(transfer)

        fabric.machine.queue(stream, Op(transfer.what, start, may_start=may_start, finished=lambda: transfer.done))

    def _device_of(self, one: Transfer, own: Transfer):
        return self.device.index if one is own else one.home
