"""Mutation of messages: of the parsers of the wire format, and of a transport whose sockets are played by the fuzzer.

Everything is drawn from one `random.Random`. A finding is an exception of a kind that nobody promised, a value outside what was
promised, or more memory than was promised; it carries the bytes that made it.
"""

import math
import random
import struct
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np

from rrfp.action import Edge
from rrfp.comm import message
from rrfp.comm.inbound import MAX_ANNOUNCED, Inlet
from rrfp.comm.links import Links, Peer
from rrfp.comm.memory import round_up
from rrfp.comm.message import Header, Kind, Malformed
from rrfp.comm.outbound import Outlet, Sender
from rrfp.comm.transport import Announcement, Arrival, Departure, Failure, Part
from rrfp.comm.zmq_transport import ZmqTransport

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 31, 32, 33, 63, 64, 65, 127, 255, 256, 1023, 1024, 1025, 65535, 1 << 16, (1 << 31) - 1, 1 << 31,
           (1 << 32) - 1, 1 << 32, 4 << 30, 1 << 58, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
DOUBLES = tuple(struct.pack("<d", x) for x in (0.0, -0.0, -1.0, 1e308, math.inf, -math.inf, math.nan, 5e-324))
TEXTS = (b"\x1b[2J", b"\n", b"\0", b"\xff\xfe", b"\xed\xa0\x80", "\u202e".encode(), b"[" * 100, b'{"a":', b"NaN", b"9" * 50)
FIELDS = ((4, 1), (5, 1), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8))  # of the header
AMOUNT = 8 << 20
"""Bytes that one message may make a parser hold for a moment: frames are of at most one MiB, words are kept as text."""


OFTEN = (Kind.CREDIT, Kind.NEED, Kind.ANNOUNCE, Kind.ANNOUNCE, Kind.CALL, Kind.HELLO, Kind.HEARTBEAT)
"""Control messages that a sequence survives."""


class Finding(AssertionError):
    """Something that no message may cause."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Finding(text)


# ------------------------------------------------------------------------------------------------------------------- mutations


def mutate(rng: random.Random, data: bytes, *, most: int) -> bytes:
    """Between one and four changes. The result has at most `most` bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) + rng.randint(-1, 1) & (1 << 8 * width) - 1
                data[at : at + width] = number.to_bytes(width, "little")
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randint(1, 16)]
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 64)] * rng.choice((1, 2, 50))
            case 6:
                data[at:at] = rng.choice(TEXTS)
            case 7:
                data[at : at + 8] = rng.choice(DOUBLES)
    return bytes(data[:most])


def reseal(frame: bytes) -> bytes:
    """With a checksum that is right, or nothing behind it would ever be reached."""
    if len(frame) < message.HEADER_BYTES:
        return frame
    frame = bytearray(frame)
    frame[56:60] = bytes(4)
    frame[56:60] = zlib.crc32(frame).to_bytes(4, "little")
    return bytes(frame)


def mutate_frame(rng: random.Random, frame: bytes, *, most: int) -> bytes:
    """Fields of the header by themselves, the body, or anything; mostly with a checksum that is right."""
    way = rng.randrange(4)
    if way == 0 and len(frame) >= message.HEADER_BYTES:
        head, body = frame[: message.HEADER_BYTES], frame[message.HEADER_BYTES :]
        frame = head + mutate(rng, body, most=most - len(head))
    elif way == 1:
        frame = mutate(rng, frame, most=most)
    else:
        frame = bytearray(frame)
        for at, width in rng.sample(FIELDS, rng.randint(1, 2)):
            if rng.random() < 0.5:
                value = rng.choice(NUMBERS) & (1 << 8 * width) - 1
            else:
                value = int.from_bytes(frame[at : at + width], "little") + rng.choice((-1, 1)) & (1 << 8 * width) - 1
            frame[at : at + width] = value.to_bytes(width, "little")
    return reseal(bytes(frame)) if rng.random() < 0.9 else bytes(frame)


# --------------------------------------------------------------------------------------------------------------------- parsers


def _payload(rng: random.Random) -> tuple[Part, ...]:
    parts = []
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        dtype, shape = rng.choice(list(message.ITEMSIZE)), tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 4)))
        nbytes = math.prod(shape) * message.ITEMSIZE[dtype]
        parts.append(Part(dtype, shape, None if rng.random() < 0.2 else np.zeros(nbytes, np.uint8)))
    return tuple(parts)


def _words(rng: random.Random) -> str:
    return "".join(rng.choice("ab 0>1\n\x1b\u202eü日") for _ in range(rng.randint(0, 20)))


def _failure(rng: random.Random) -> Failure:
    return Failure(rng.randint(0, 3), _words(rng), _words(rng), _words(rng) * rng.choice((1, 1, 5000)), rng.random() < 0.5)


def _edge(rng: random.Random) -> Edge:
    return Edge(rng.randrange(4), rng.randrange(4))


def _check_frame(frame: bytes) -> None:
    header, body = message.decode(frame)
    again, rest = message.decode(message.encode(header, bytes(body)))
    require(again == header and rest == body, "a header does not come back")
    require(len(body) == len(frame) - message.HEADER_BYTES, "a body of another length")


def _check_parts(data: bytes) -> None:
    parts, nbytes = struct.unpack_from("<HQ", data.ljust(10, b"\0"))
    specs = message.decode_parts(memoryview(data[10:]), parts, nbytes)
    require(len(specs) == parts <= message.MAX_PARTS, "another number of parts")
    require(sum(spec.nbytes for spec in specs) == nbytes, "another number of bytes")
    for spec in specs:
        require(len(spec.shape) <= 32, f"{len(spec.shape)} dimensions")
        # What it becomes is a tensor, whose strides are signed 64-bit numbers.
        require(math.prod(size or 1 for size in spec.shape) * message.ITEMSIZE[spec.dtype] < 1 << 63, f"a tensor of {spec.shape}")
    again = message.encode_parts(tuple(Part(s.dtype, s.shape, None if s.none else np.empty(0)) for s in specs))
    require(message.decode_parts(memoryview(again), parts, nbytes) == specs, "parts do not come back")


def _check_duration(body: bytes) -> None:
    require(0 <= message.decode_duration(body) < math.inf, "a duration that is none")


def _check_credit(body: bytes) -> None:
    require(message.encode_credit(*message.decode_credit(body)) == body, "a credit does not come back")


def _check_farewell(body: bytes) -> None:
    sent = message.decode_farewell(body)
    require(message.decode_farewell(message.encode_farewell(sent)) == sent, "a goodbye does not come back")


def _printable(text: str, keep: str = "") -> bool:
    return all(c.isprintable() or c in keep for c in text)


def _check_call(body: bytes) -> None:
    facts = message.decode_call(body)
    require(all(_printable(word) for pair in facts.items() for word in pair), "a call with words that cannot be printed")
    encoded = message.encode_call(facts)
    require(len(encoded) > message.MAX_LINE or message.decode_call(encoded) == facts, "a call does not come back")


def _check_failure(body: bytes) -> None:
    failure = message.decode_failure(memoryview(body))
    require(_printable(failure.where) and _printable(failure.text) and _printable(failure.traceback, "\n\t"), "unsafe to print")
    encoded = message.encode_failure(failure)
    require(len(encoded) < message.MAX_CONTROL - message.HEADER_BYTES, f"an ABORT of {len(encoded)} bytes")
    again = message.decode_failure(memoryview(encoded))
    require(again.rank == failure.rank and again.lost == failure.lost, "an ABORT does not come back")
    require(failure.where.startswith(again.where) and failure.traceback.endswith(again.traceback), "an ABORT does not come back")


def _any_frame(rng: random.Random) -> bytes:
    payload = _payload(rng)
    header = Header(rng.choice(list(Kind)), rng.randrange(2), rng.randrange(3), _edge(rng), rng.randrange(5), rng.randrange(3),
                    rng.randrange(5), rng.randrange(5), message.check_payload(payload), len(payload))  # fmt: skip
    return message.encode(header, rng.choice((b"", message.encode_parts(payload))))


def _any_parts(rng: random.Random) -> bytes:
    payload = _payload(rng)
    if rng.random() < 0.2:  # at the bounds, from where one change leads over them
        sides, parts = rng.choice((0, 1, message.MAX_DIMENSIONS)), rng.choice((1, message.MAX_PARTS))
        payload = (Part("uint8", (1,) * sides, None),) * parts
    return struct.pack("<HQ", len(payload), message.check_payload(payload)) + message.encode_parts(payload)


def _harm_parts(rng: random.Random, data: bytes) -> bytes:
    """Another number of parts or dimensions, with all the bytes that it promises."""
    parts, nbytes = struct.unpack_from("<HQ", data)
    code, dimensions, none = rng.randrange(22), rng.randrange(256), rng.randrange(3)
    sides = [rng.choice((0, 1, 1, 1, 2, 1 << 32))] * dimensions
    if sides and rng.random() < 0.5:
        sides[0] = 0  # then the others are of no consequence for the bytes
    more = bytes((code, dimensions, none, 0)) + struct.pack(f"<{dimensions}Q", *sides)
    return struct.pack("<HQ", parts + rng.randrange(2) & 65535, nbytes + rng.randrange(2)) + data[10:] + more


PARSERS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], None]]] = {
    "frame": (_any_frame, _check_frame),
    "parts": (_any_parts, _check_parts),
    "duration": (lambda rng: message.encode_duration(rng.random()), _check_duration),
    "credit": (lambda rng: message.encode_credit(rng.randrange(9), rng.randbytes(16)), _check_credit),
    "farewell": (lambda rng: message.encode_farewell({_edge(rng): rng.randrange(9) for _ in range(3)}), _check_farewell),
    "call": (lambda rng: message.encode_call({_words(rng).replace("\0", ""): _words(rng) for _ in range(3)}), _check_call),
    "failure": (lambda rng: message.encode_failure(_failure(rng)), _check_failure),
}
"""Name -> what makes a good body, and what reads one: returns, or raises Malformed or Finding."""


def try_parser(name: str, data: bytes) -> bool:
    """Whether it was accepted. Raises Finding, which names the bytes."""
    _, check = PARSERS[name]
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        check(data)
        accepted = True
    except Malformed:
        accepted = False
    except Exception as error:
        raise Finding(f"{name} {data.hex()}: {type(error).__name__}: {error}") from error
    _, peak = tracemalloc.get_traced_memory()
    require(peak - before <= AMOUNT, f"{name} {data.hex()}: {peak - before} bytes are held")
    return accepted


def fuzz_parsers(rng: random.Random, *, until: float, least: int = 0) -> Counter:
    """Until time.monotonic() reaches `until`, and at least `least` inputs. How many were accepted and refused, per parser."""
    counts: Counter = Counter()
    names = list(PARSERS)
    tracemalloc.start()
    try:
        while time.monotonic() < until or counts.total() < least:
            name = rng.choice(names)
            good = PARSERS[name][0](rng)
            if rng.random() < 0.05:
                data = good
            elif name == "parts" and rng.random() < 0.3:
                data = _harm_parts(rng, good)
            else:
                data = (mutate_frame if name == "frame" else mutate)(rng, good, most=2 * message.MAX_CONTROL)
            accepted = try_parser(name, data)
            require(accepted or data != good, f"{name} {data.hex()}: refused, though nothing is wrong")
            counts[name, accepted] += 1
    finally:
        tracemalloc.stop()
    return counts


# ------------------------------------------------------------------------------------------------------------------- transport


class _Frame:
    """What the library hands over: bytes, whose they are, whether more follow."""

    def __init__(self, data: bytes, user: int, more: bool = False):
        self.buffer, self.user, self.more = memoryview(data), user, more

    def get(self, name: str) -> str:
        assert name == "User-Id"
        return str(self.user)


class _Socket:
    """Played: gives one message."""

    def __init__(self, first, frames: list[bytes]):
        self._first, self._frames = first, frames
        self.rcvmore = bool(frames)

    def recv(self, flags, copy: bool = True):
        return self._first

    def recv_multipart(self, copy: bool = True):
        return self._frames


class Played:
    """Rank 1 of a row of three, as its receive thread sees it: rank 0 sends it activations, rank 2 gradients.

    Good messages are made from what it has granted, so that mutations of them get far. How many are harmed is drawn per sequence.
    """

    CREDITS, LANES, LIMIT = 3, 2, 1 << 16

    def __init__(self, rng: random.Random, *, shared: bool):
        self.rng, self.shared, self.harm = rng, shared, rng.choice((0.0, 0.03, 0.1, 0.3, 0.8))
        owner = {0: 0, 1: 1, 2: 2}
        self.inward, self.outward = (Edge(0, 1), Edge(2, 1)), (Edge(1, 2), Edge(1, 0))
        self.transport = ZmqTransport(
            rank=1, edges_in=self.inward, edges_out=self.outward, owner=owner, store=None, credits=self.CREDITS, lanes=self.LANES,
            max_message_bytes=self.LIMIT, host="here",
        )  # fmt: skip
        links = self.transport._links = Links(peers={
            rank: Peer(rank, "", shared=shared, far=False, pid=1, seen=0.0, hello=True, connected=True) for rank in (0, 2)
        })  # fmt: skip
        for edge in self.inward:
            inlet = links.inlets[edge] = Inlet(
                edge, edge.source, lanes=self.LANES, credits=self.CREDITS, slot_bytes=100, limit=self.LIMIT, shared=shared
            )
            for _ in range(self.CREDITS):
                inlet.grant()
        for edge in self.outward:
            links.outlets[edge] = Outlet(edge, edge.destination, [None] * self.LANES, None, most_credits=self.CREDITS)
        self.transport._sender = Sender([], delay=None, need=None, fail=None, name="played")  # never started
        self.events: list = []
        self.held: list[Arrival] = []
        self.transport._post = self.events.append
        self.call = -1
        if rng.random() < 0.9:
            self.begin()

    def close(self) -> None:
        for inlet in self.transport._links.inlets.values():
            inlet.pool.close()

    def begin(self) -> None:
        self.call += 1
        self.transport.begin(self.call, {"forward_only": "False"})

    def step(self) -> str:
        """One message, or one thing that the engine does. Returns what came of it."""
        rng = self.rng
        if rng.random() < 0.15:
            self._engine()
            return "engine"
        source = rng.choice((0, 2))
        if rng.random() < 0.4:
            lane = rng.randrange(self.LANES)
            self.data(source, lane, *self._payload_message(source, lane))
            return self.check()
        frame = self._control_message(source)
        if self._harmed():
            frame = mutate_frame(rng, frame, most=4096)
        for _ in range(rng.choice((1, 2, 8)) if self._harmed() else 1):
            self.control(source, frame, more=self._harmed() and rng.random() < 0.1)
        return self.check()

    def _harmed(self) -> bool:
        return self.rng.random() < self.harm

    def data(self, source: int, lane: int, first: bytes, frames: list[bytes]) -> None:
        self._run(lambda: self.transport._on_data(
            _Socket(first, frames), self.transport._links.inlets[Edge(source, 1)], lane), "data", first, *frames)  # fmt: skip

    def control(self, source: int, frame: bytes, *, more: bool = False) -> None:
        self.transport._links.inbox = _Socket(_Frame(frame, source, more), [])
        self._run(self.transport._on_control, f"control from {source}", frame)

    def _run(self, handler: Callable[[], None], what: str, *frames: bytes) -> None:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            handler()
        except Exception as error:
            raise Finding(f"{what} {[frame.hex() for frame in frames]}: {type(error).__name__}: {error}") from error
        _, peak = tracemalloc.get_traced_memory()
        require(peak - before <= AMOUNT, f"{what} {[frame.hex() for frame in frames]}: {peak - before} bytes are held")

    def _engine(self) -> None:
        rng = self.rng
        last = self.transport._roll.last
        if self.transport._failure is None and min(last.get(rank, -1) for rank in (0, 2)) > self.call or self._harmed():
            self.begin()
        self.held += [event for event in self.events if isinstance(event, Arrival)]
        self.events.clear()
        while self.held and rng.random() < 0.7:
            arrival = self.held.pop(rng.randrange(len(self.held)))
            inlet = arrival.slot.inlet
            inlet.consume(arrival.slot)
            inlet.release(arrival.slot)

    def _payload_message(self, source: int, lane: int) -> tuple[bytes, list[bytes]]:
        rng, edge = self.rng, Edge(source, 1)
        inlet = self.transport._links.inlets[edge]
        payload = _payload(rng)
        inline = rng.random() < (0.3 if self.shared else 0.9)
        slot = next(iter(inlet.granted), 0)
        header = Header(Kind.DATA, message.INLINE if inline else 0, lane, edge, rng.randrange(4), max(0, self.call),
                        inlet.received[lane] + 1, slot, message.check_payload(payload), len(payload))  # fmt: skip
        first = message.encode(header, message.encode_parts(payload))
        frames = [part.data.tobytes() for part in payload if part.data is not None and part.data.size] if inline else []
        if not self._harmed():
            return first, frames
        if frames and rng.random() < 0.5:
            frames[rng.randrange(len(frames))] = rng.randbytes(rng.choice((0, 1, 5, 100)))
            return first, rng.choice((frames, frames[1:], frames * 3))
        return mutate_frame(rng, first, most=4096), frames

    def _control_message(self, source: int) -> bytes:
        rng = self.rng
        inward, outward = Edge(source, 1), Edge(1, source)
        slot = next(iter(self.transport._links.inlets[inward].granted), 0)
        last = self.transport._roll.last.get(source)
        kind = rng.choice(list(Kind) if self._harmed() else OFTEN)
        if kind is Kind.ANNOUNCE and last is None:
            kind = Kind.CALL
        match kind:
            case Kind.CREDIT:
                outlet = self.transport._links.outlets[outward]
                if outlet.spent < outlet.granted and rng.random() < 0.5:  # as if something had been sent
                    outlet.spent += 1
                    self.transport._sender._queue.get_nowait()
                header = Header(Kind.CREDIT, edge=outward, slot=rng.randrange(9))
                return message.encode(header, message.encode_credit(3, bytes(16)))
            case Kind.NEED:
                return message.encode(Header(Kind.NEED, edge=inward, slot=slot, nbytes=rng.choice((0, 9, self.LIMIT))))
            case Kind.ANNOUNCE:
                header = Header(Kind.ANNOUNCE, edge=inward, call=last, microbatch=rng.randrange(100))
                return message.encode(header, message.encode_duration(rng.random()))
            case Kind.CALL:
                call = max(0, self.call) if last is None else last + 1 & (1 << 64) - 1
                return message.encode(Header(Kind.CALL, call=call), message.encode_call({"forward_only": "False"}))
            case Kind.ABORT:
                return message.encode(Header(Kind.ABORT), message.encode_failure(_failure(rng)))
            case Kind.BYE:
                return message.encode(Header(Kind.BYE), message.encode_farewell({inward: rng.randrange(3)}))
            case _:
                return message.encode(Header(kind), b"")

    def check(self) -> str:
        """What may wait here is bounded, whatever came. Returns whether a failure is known."""
        transport = self.transport
        kinds = Counter(type(event) for event in self.events)
        require(set(kinds) <= {Arrival, Announcement, Failure, Departure}, f"events {kinds}")
        require(kinds[Failure] <= 1 and kinds[Departure] <= 2, f"events {kinds}")
        for failure in (event for event in self.events if isinstance(event, Failure)):
            require(_printable(failure.where) and _printable(failure.text), f"unsafe to print: {failure}")
            require(failure.rank in (0, 1, 2), f"a failure of rank {failure.rank}")
        announced = Counter((e.call, e.edge, e.microbatch) for e in self.events if isinstance(e, Announcement))
        require(not announced or max(announced.values()) == 1, f"announced more than once: {announced.most_common(1)}")
        for announcement in (event for event in self.events if isinstance(event, Announcement)):
            require(0 <= announcement.duration < math.inf, f"a duration of {announcement.duration}")
        arrivals = [event for event in (*self.events, *self.held, *transport._window._early) if isinstance(event, Arrival)]
        early = Counter((type(event), event.edge) for event in transport._window._early)
        for edge, inlet in transport._links.inlets.items():
            require(len(inlet.granted) <= self.CREDITS, f"edge {edge} has granted {len(inlet.granted)} slots")
            pending = sum(arrival.edge == edge for arrival in arrivals)
            require(len(inlet.granted) + pending <= self.CREDITS, f"edge {edge} holds {pending} messages")
            require(early[Announcement, edge] <= MAX_ANNOUNCED and early[Arrival, edge] <= self.CREDITS, f"kept early: {early}")
            most = round_up(self.LIMIT + message.MAX_PARTS * message.ALIGNMENT)
            require(all(buffer.size <= most for buffer in inlet.granted.values()), f"edge {edge}: a buffer over the limit")
        for edge, outlet in transport._links.outlets.items():
            require(outlet.granted - outlet.spent <= self.CREDITS, f"edge {edge} has {outlet.granted - outlet.spent} credits")
        waiting = sum(outlet.granted - outlet.spent for outlet in transport._links.outlets.values())
        require(transport._sender._queue.qsize() == waiting, "more credits wait than there are")
        return "failed" if transport._failure is not None else "went on"


def fuzz_transport(rng: random.Random, *, until: float, least: int = 0) -> Counter:
    """Sequences of messages, until time.monotonic() reaches `until`, and at least `least` messages. What came of them."""
    counts: Counter = Counter()
    tracemalloc.start()
    try:
        while time.monotonic() < until or counts.total() < least:
            played = Played(rng, shared=rng.random() < 0.3)
            try:
                after = 0
                for _ in range(40):
                    came = played.step()
                    counts[came] += 1
                    after += came == "failed"
                    if after > 3:
                        break
            finally:
                played.close()
    finally:
        tracemalloc.stop()
    return counts
