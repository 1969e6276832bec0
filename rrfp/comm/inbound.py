"""One incoming edge: which slots are granted, what may come next in each lane, and what a frame must satisfy. No sockets here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rrfp.action import Edge
from rrfp.comm.memory import Buffer, Pool
from rrfp.comm.message import (
    ALIGNMENT,
    INLINE,
    MAX_FRAME,
    MAX_PARTS,
    Header,
    Malformed,
    Spec,
    decode_parts,
    frame_sizes,
    offsets,
    payload_of,
)
from rrfp.comm.transport import Arrival, Payload
from rrfp.errors import PipelineError

MAX_ANNOUNCED = 1 << 16
"""Announcements of an edge, of this call and those ahead, that are taken."""


@dataclass(slots=True, eq=False)
class Lease:
    """What backs an arrival: its buffer, and which of the two things were done with it."""

    inlet: "Inlet"
    buffer: Buffer
    consumed: bool = False
    released: bool = False


class Inlet:
    """The receiver's end of an edge. Not thread-safe: the transport locks.

    Invariant: `granted` holds exactly the slots that the sender may write to; at most `credits` of them. So whatever the sender
    does, at most `credits` messages wait here, of at most `limit` bytes.
    """

    def __init__(
        self, edge: Edge, peer: int, *, lanes: int, credits: int, slot_bytes: int, limit: int, shared: bool,
        make: Callable[[int, int], Buffer] = Buffer,
    ):
        self.edge, self.peer, self.lanes, self.credits, self.limit, self.shared = edge, peer, lanes, credits, limit, shared
        self.pool = Pool(slot_bytes, memory=shared, make=make)
        self.granted: dict[int, Buffer] = {}
        self.received = [0] * lanes
        self.announced: set[tuple[int, int]] = set()

    def begin(self, call: int) -> None:
        """Forget what was announced for earlier calls."""
        self.announced = {which for which in self.announced if which[0] >= call}

    def announce(self, call: int, microbatch: int) -> None:
        """Count an announcement. Raises Malformed if there is one too many: each is kept until its call ends."""
        if (call, microbatch) in self.announced:
            raise Malformed(f"microbatch {microbatch} of call {call} is announced twice on edge {self.edge}")
        if len(self.announced) >= MAX_ANNOUNCED:
            raise Malformed(f"more than {MAX_ANNOUNCED} announcements on edge {self.edge}")
        self.announced.add((call, microbatch))

    def grant(self, nbytes: int = 0) -> Buffer:
        buffer = self.pool.take(nbytes)
        self.granted[buffer.slot] = buffer
        return buffer

    def replace(self, slot: int, nbytes: int) -> Buffer:
        """The sender gives a slot back that is too small for `nbytes`. Raises Malformed beyond the limit."""
        if nbytes > self.limit + MAX_PARTS * ALIGNMENT:  # parts are aligned in a slot
            raise Malformed(f"a message of {nbytes} bytes is over the limit of {self.limit}: raise max_message_bytes")
        if slot not in self.granted:
            raise Malformed(f"slot {slot} is given back but was not granted")
        self.pool.drop(self.granted.pop(slot))
        return self.grant(nbytes)

    def accept(self, header: Header, body: memoryview, frames: list, lane: int, time: float) -> Arrival:
        """Check everything, then make an arrival of it. Raises Malformed; nothing has changed then."""
        specs = self._check(header, body, lane)
        buffer = self.granted[header.slot]
        if header.flags & INLINE:
            payload = self._inline(specs, frames)
        else:
            payload = self._in_slot(specs, frames, buffer)
        self.received[lane] += 1
        del self.granted[header.slot]
        return Arrival(header.call, self.edge, lane, header.microbatch, payload, time, Lease(self, buffer))

    def _check(self, header: Header, body: memoryview, lane: int) -> tuple[Spec, ...]:
        if header.edge != self.edge or header.lane != lane:
            raise Malformed(f"a message for edge {header.edge} lane {header.lane} came in on edge {self.edge} lane {lane}")
        expected = self.received[lane] + 1
        if header.sequence != expected:
            what = "lost" if header.sequence > expected else "duplicated"
            raise Malformed(f"message {header.sequence} of lane {lane} after {expected - 1}: a message was {what}")
        if header.nbytes > self.limit:
            raise Malformed(f"a message of {header.nbytes} bytes is over the limit of {self.limit}: raise max_message_bytes")
        if header.slot not in self.granted:
            raise Malformed(f"slot {header.slot} was not granted")
        return decode_parts(body, header.parts, header.nbytes)

    def _inline(self, specs: tuple[Spec, ...], frames: list) -> Payload:
        sizes = [spec.nbytes for spec in specs if not spec.none]
        found, expected = [len(frame) for frame in frames], frame_sizes(sizes)
        if found != expected:
            raise Malformed(
                f"{sum(found)} bytes in {len(found)} frames, the header promises {sum(expected)} in {len(expected)}: truncated"
            )
        left = iter(frames)
        return payload_of(specs, [_gather(left, size) for size in sizes])

    def _in_slot(self, specs: tuple[Spec, ...], frames: list, buffer: Buffer) -> Payload:
        if frames:
            raise Malformed(f"{len(frames)} frames follow a message whose bytes are in slot {buffer.slot}")
        sizes = [spec.nbytes for spec in specs if not spec.none]
        starts, end = offsets(sizes)
        if end > buffer.size:
            raise Malformed(f"a message of {end} bytes in slot {buffer.slot} of {buffer.size}")
        empty = np.empty(0, np.uint8)
        return payload_of(specs, (buffer.view(a, n) if n else empty for a, n in zip(starts, sizes, strict=True)))

    def consume(self, lease: Lease) -> Buffer:
        """A fresh buffer for the credit that goes back."""
        if lease.consumed:
            raise PipelineError(f"an arrival of edge {self.edge} was consumed twice")
        lease.consumed = True
        return self.grant()

    def release(self, lease: Lease) -> None:
        if lease.released:
            raise PipelineError(f"an arrival of edge {self.edge} was released twice")
        lease.released = True
        self.pool.give(lease.buffer)

    def state(self) -> dict:
        return {
            "direction": "in",
            "peer": self.peer,
            "credits": len(self.granted),
            "received": sum(self.received),
            "waiting": self.credits - len(self.granted),
            "buffers": self.pool.count,
            "buffer_bytes": self.pool.nbytes,
        }


def _gather(frames: Iterator, size: int) -> np.ndarray:
    """The next `size` bytes in one piece, aligned for any dtype."""
    if 0 < size <= MAX_FRAME:
        array = np.frombuffer(next(frames), np.uint8)
        return array if array.ctypes.data % 8 == 0 else array.copy()
    whole, end = np.empty(size, np.uint8), 0
    while end < size:
        frame = np.frombuffer(next(frames), np.uint8)
        whole[end : end + len(frame)] = frame
        end += len(frame)
    return whole
