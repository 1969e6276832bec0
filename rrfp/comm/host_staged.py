"""Payloads of GPUs through host memory: copied down on one side, up on the other, each on a stream of its own.

For pairs between which nothing faster works: hosts without NCCL between them, GPUs that can't open each other's memory, links that are
slow or faulty. It wraps any transport of host memory; edges that it is not told of pass through as they are.

Threads. `down` waits until a payload has arrived in pinned memory and hands it to the inner transport; `up` brings what arrives to the
device and posts it. Both keep the order of what they are given, so lanes stay FIFO; everything else that the inner transport posts
passes by, but for a goodbye, which comes after all that was sent. An error of one of them is a Failure, told to every neighbour.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from rrfp.action import Edge
from rrfp.comm.device import Device, Worker
from rrfp.comm.device_transport import DeviceTransport, Landed
from rrfp.comm.message import check_payload, offsets
from rrfp.comm.transport import Arrival, Departure, Event, Failure, Payload, Transport
from rrfp.errors import PipelineError


class HostStaged(DeviceTransport):
    """As `DeviceTransport`. See `rrfp.comm.transport.Transport` for what the methods promise."""

    def __init__(self, inner: Transport, device: Device, *, rank: int, edges: Iterable[Edge]):
        super().__init__(inner, device, rank=rank, edges=edges)
        self._streams = device.stream(), device.stream()
        self._down = Worker(device, name=f"rrfp-rank{rank}-down", fail=self._fail)
        self._up = Worker(device, name=f"rrfp-rank{rank}-up", fail=self._fail)
        self._staged: Counter[Edge] = Counter()  # by the caller's thread
        self._handed: Counter[Edge] = Counter()  # by the thread `down`

    def open(self, post: Callable[[Event], None], *, deadline: float) -> None:
        self._post = post
        self._down.start()
        self._up.start()
        try:
            self._inner.open(self._hear, deadline=deadline)
        except BaseException:
            self._stop(time.monotonic() + 1.0)
            raise

    def send(self, edge: Edge, microbatch: int, payload: Payload, *, tell: bool = False) -> None:
        if edge not in self._edges:
            self._inner.send(edge, microbatch, payload, tell=tell)
            return
        check_payload(payload)
        stream = self._streams[0]
        copies = tuple(part if part.data is None else part._replace(data=self._device.pinned(part.data.nbytes)) for part in payload)
        for part, copied in zip(payload, copies, strict=True):
            if part.data is not None and part.data.nbytes:
                self._device.copy(copied.data, part.data, stream)
        event = self._device.record(stream)

        def hand_on(payload=payload) -> None:  # which stays alive until it has been copied
            self._device.synchronize(event)
            plain = tuple(part if part.data is None else part._replace(data=part.data.view(np.ndarray)) for part in copies)
            self._inner.send(edge, microbatch, plain, tell=tell)
            self._handed[edge] += 1

        self._staged[edge] += 1
        self._down.put(hand_on)

    def flush(self, *, deadline: float) -> None:
        until = time.monotonic() + deadline
        if not self._down.drain(until=until):
            raise PipelineError(f"messages did not leave: {self._down.pending} wait for their copy from the GPU")
        self._inner.flush(deadline=max(0.0, until - time.monotonic()))

    def close(self, *, deadline: float) -> None:
        if self._closed:
            return
        until = time.monotonic() + deadline
        if not self._failed:
            self._down.drain(until=until)
        self._closed = True
        try:
            self._inner.close(deadline=max(0.0, until - time.monotonic()))
        finally:
            self._stop(max(until, time.monotonic() + 1.0))

    def _stop(self, until: float) -> None:
        ended = [worker.stop(until=until) for worker in (self._down, self._up)]
        self._close_pools()
        if not all(ended):
            raise PipelineError(f"rank {self._rank}: a copy between the GPU and host memory did not end in time")

    def state(self) -> dict:
        state = self._inner.state()
        for edge in self._edges:
            if (end := state.get("edges", {}).get(str(edge))) is not None and end["direction"] == "out":
                end["waiting"] += self._staged[edge] - self._handed[edge]
        return state

    def _hear_failure(self) -> None:
        super()._hear_failure()
        self._down.interrupt()
        self._up.interrupt()

    # ------------------------------------------------------------------ the inner transport's receive thread, which may not block
    def _hear(self, event: Event) -> None:
        if isinstance(event, Arrival) and event.edge in self._edges:
            self._up.put(lambda: self._land(event))
        elif isinstance(event, Departure):
            self._up.put(lambda: self._post(event))
        else:
            if isinstance(event, Failure):
                self._hear_failure()
            self._post(event)

    # ------------------------------------------------------------------ the thread `up`
    def _land(self, arrival: Arrival) -> None:
        device, stream = self._device, self._streams[1]
        sizes = [0 if part.data is None else part.data.nbytes for part in arrival.payload]
        starts, extent = offsets(sizes)
        buffer, parts = self._take(arrival.edge, extent), []
        staging = device.pinned(extent)
        for part, start, size in zip(arrival.payload, starts, sizes, strict=True):
            if size:
                np.copyto(staging[start : start + size], part.data)
                device.copy(buffer.view(start, size), staging[start : start + size], stream)
                part = part._replace(data=buffer.view(start, size))
            parts.append(part)
        device.synchronize(device.record(stream))
        arrival.payload = ()
        self._inner.release(arrival)
        self._post(Arrival(arrival.call, arrival.edge, arrival.lane, arrival.microbatch, tuple(parts), time.monotonic(),
                           Landed(arrival, buffer)))
