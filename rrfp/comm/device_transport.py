"""What the paths of payloads that end on a GPU have in common, beside the one inside a host that needs nothing of this (`cuda_ipc`)."""

import os
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rrfp.action import Edge
from rrfp.comm.cuda_ipc import DeviceBuffer, DeviceSlots
from rrfp.comm.device import Device
from rrfp.comm.memory import Pool
from rrfp.comm.transport import Arrival, Failure, Transport


class Landed(NamedTuple):
    """What backs an arrival on a device: the inner transport's arrival, whose credit it is, and the buffer if it has bytes."""

    arrival: Arrival
    buffer: DeviceBuffer | None


class DeviceTransport:
    """What the paths over a device have in common: a transport inside, a pool of buffers per edge, failures of their own.

    Args:
        inner: a transport of host memory, not open yet.
        device: this process' GPU.
        rank: this pipeline rank.
        edges: those whose payloads take this path.
    """

    def __init__(self, inner: Transport, device: Device, *, rank: int, edges: Iterable[Edge]):
        self._inner, self._device, self._rank = inner, device, rank
        self._edges = frozenset(edges)
        self._lock = threading.RLock()  # a tensor that goes inside the lock gives its buffer back there
        make = DeviceSlots(device, share=False).make
        self._pools = {edge: Pool(0, memory=True, make=make) for edge in self._edges}
        self._call = -1
        self._pid = os.getpid()
        self._failed = self._closed = False
        self.announce = inner.announce

    def begin(self, call: int, facts: Mapping[str, str] | None = None) -> None:
        self._call = call
        self._inner.begin(call, facts)

    def consumed(self, arrival: Arrival) -> None:
        self._inner.consumed(arrival.slot.arrival if arrival.edge in self._edges else arrival)

    def release(self, arrival: Arrival) -> None:
        if os.getpid() != self._pid:
            return  # a forked child lets go of a tensor that its parent still has
        if arrival.edge not in self._edges:
            self._inner.release(arrival)
        elif (buffer := arrival.slot.buffer) is not None:
            with self._lock:
                self._pools[arrival.edge].give(buffer)

    def abort(self, failure: Failure) -> None:
        self._hear_failure()
        self._inner.abort(failure)

    def _take(self, edge: Edge, nbytes: int) -> DeviceBuffer | None:
        with self._lock:
            return self._pools[edge].take(nbytes) if nbytes else None

    def _hear_failure(self) -> None:
        """Nothing more is worth waiting for."""
        self._failed = True

    def _fail(self, where: str, text: str, traceback: str) -> None:
        if self._failed or self._closed:
            return
        failure = Failure(self._rank, where, text, traceback)
        self._post(failure)
        self.abort(failure)

    def _close_pools(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.close()
