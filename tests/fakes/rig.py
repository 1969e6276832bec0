"""Ranks in threads of this process: real transports over real sockets, payloads on fake GPUs, by any of the three paths."""

import faulthandler
import queue
import threading
import time

import numpy as np
from fake_cuda import POISON, FakeDevice, FakeMemory, Machine
from fake_nccl import Fabric

from rrfp.action import Edge
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.paths import make_transport, probe, settle
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Arrival, Failure, Part

WAIT = 60.0
"""Seconds for what is known to come: long, since other work may hold this process up. What never comes is a `Deadlock` much sooner."""
PATHS = ("ipc", "host", "nccl")


def together(*calls):
    """Each in a thread; returns what they return, raises what the first raised."""
    results, errors = [None] * len(calls), []

    def run(index, call):
        try:
            results[index] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, name=f"rank {item[0]}") for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT)  # longer than an engine's patience in its first call: it says more
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(f"{thread.name} does not end")
    if errors:
        raise errors[0]
    return results


class Rig:
    """`ranks` in a row, one stage each, with their transports open. Several may share a device.

    choice: as --rrfp-transport. hosts: rank -> name of its host. fabric, member: of several pipelines on one machine.
    """

    def __init__(self, machine: Machine, directory, choice: str, *, ranks=2, hosts=None, shared_device=False, resident=1, leads=True,
                 reachable=True, fabric=None, member=0, **options):
        self.machine, self.ranks, self.choice = machine, ranks, choice
        self.store = FileStore(directory)
        self.fabric = fabric or Fabric(machine, resident=resident)
        self.owner = {stage: stage for stage in range(ranks)}
        self.edges = [Edge(a, b) for a in range(ranks) for b in (a - 1, a + 1) if 0 <= b < ranks]
        self.boxes = [Mailbox() for _ in range(ranks)]
        self.posts = [box.put for box in self.boxes]
        """Where a rank's events go."""
        self.devices = [FakeDevice(machine, (member, 0 if shared_device else rank), process=f"p{member}.{rank}", reachable=reachable)
                        for rank in range(ranks)]
        self.transports = [None] * ranks
        hosts = hosts or {}

        def open_(rank):
            device = self.devices[rank]
            device.enter()
            host = hosts.get(rank)
            reach = {} if choice in ("nccl", "host") else probe(
                device, rank=rank, edges=self.edges, owner=self.owner, store=self.store, until=time.monotonic() + WAIT, host=host)
            paths = settle(choice, edges=self.edges, owner=self.owner, reach=reach)
            transport = self.transports[rank] = make_transport(
                paths, device, rank=rank, owner=self.owner, store=self.store, interface="127.0.0.1", host=host,
                nccl=lambda: self.fabric.end(rank, device, name=f"pipeline {member}"), leads=leads, **options)
            transport.open(lambda event: self.posts[rank](event), deadline=WAIT)
            return paths

        try:
            self.paths = together(*[lambda rank=rank: open_(rank) for rank in range(ranks)])[0]
        except BaseException:
            self.close()
            raise

    def __getitem__(self, rank):
        return self.transports[rank]

    def memory(self, rank, data) -> FakeMemory:
        """Bytes on a rank's device that appear there when its compute stream gets to it, and the host has seen that."""
        device = self.devices[rank]
        memory = np.full(len(data), POISON, np.uint8).view(FakeMemory)
        device.kernel(lambda: np.copyto(memory, data))
        device.synchronize(device.record(device.compute))
        return memory

    def part(self, rank, nbytes, value) -> Part:
        return Part("uint8", (nbytes,), self.memory(rank, np.full(nbytes, value % 256, np.uint8)))

    def begin(self, call=0):
        for transport in self.transports:
            transport.begin(call)

    def issue(self, rank):
        transport = self.transports[rank]
        while (due := getattr(transport, "due", lambda: None)()) is not None:
            assert transport.issue(due)

    def get(self, rank, kind=Arrival):
        """The next event of a kind; others are dropped. What may be issued is, on all ranks: this thread is everybody's engine."""
        until = time.monotonic() + WAIT
        while True:
            for other in range(self.ranks):
                self.devices[other].enter()
                self.issue(other)
            try:
                event = self.boxes[rank].get(timeout=0.002)
            except queue.Empty:
                assert time.monotonic() < until, f"rank {rank} heard nothing: {self[rank].state()}; {self.machine.stuck()}"
                continue
            if isinstance(event, kind):
                return event
            assert not isinstance(event, Failure), event

    def read(self, rank, arrival) -> list:
        """Its bytes, as a kernel on the compute stream sees them."""
        device, copies = self.devices[rank], []
        for part in arrival.payload:
            device.kernel(lambda part=part: copies.append(None if part.data is None else bytes(part.data)))
        device.synchronize(device.record(device.compute))
        return copies

    def close(self):
        together(*[lambda t=t: t.close(deadline=WAIT) for t in self.transports if t is not None])
