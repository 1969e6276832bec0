"""Whatever comes in is a value or is refused: mutated messages, for a minute, and everything that was found before."""

import math
import random
import struct
import time

import fuzzer
import pytest

from rrfp.action import Edge
from rrfp.comm import inbound, message, outbound, zmq_transport
from rrfp.comm.message import Header, Kind, encode, encode_duration, encode_parts
from rrfp.comm.transport import Failure, Part


@pytest.mark.timeout(500)
def test_parsers(seed, full):
    """Half a minute of mutations; under `--all` two and a half."""
    counts = fuzzer.fuzz_parsers(random.Random(seed), until=time.monotonic() + (150 if full else 30), least=4000)
    print(dict(counts))
    for name in fuzzer.PARSERS:
        assert counts[name, True] > 5 and counts[name, False] > 5, (name, counts)  # both ways out are taken, often


@pytest.mark.timeout(500)
def test_transport(seed, full):
    """The other half minute: sequences of messages into the handlers of a transport whose sockets are played."""
    counts = fuzzer.fuzz_transport(random.Random(seed), until=time.monotonic() + (150 if full else 30), least=4000)
    print(dict(counts))
    assert min(counts[came] for came in ("went on", "failed", "engine")) > 100, counts


def _part(*sides: int, none: bool = False) -> bytes:
    """One float32 part in the form that the fuzzer's parser of parts takes."""
    return struct.pack("<HQ", 1, 0) + bytes([11, len(sides), none, 0]) + struct.pack(f"<{len(sides)}Q", *sides)


FOUND = {
    "a goodbye of nested lists": ("farewell", b"[" * 100_001),
    "a goodbye with an infinite number": ("farewell", b'{"0>1": Infinity}'),
    "an abort of nested lists": ("failure", b"[" * 100_000),
    "an abort that promises more than it has": ("failure", struct.pack("<i?HHI", 0, False, 9, 9, 1 << 31) + b"0F0"),
    "an abort that is not UTF-8": ("failure", struct.pack("<i?HHI", 0, False, 1, 0, 0) + b"\xff"),
    "an abort with a surrogate": ("failure", struct.pack("<i?HHI", 0, False, 3, 0, 0) + b"\xed\xa0\x80"),
    "a duration that is not a number": ("duration", struct.pack("<d", math.nan)),
    "a duration without end": ("duration", struct.pack("<d", math.inf)),
    "an empty tensor with a huge side": ("parts", _part(0, 1 << 63)),
    "an empty tensor of many long sides": ("parts", _part(0, *[1 << 32] * 31)),
    "no tensor, of a size beyond numbers": ("parts", _part(1 << 40, 1 << 40, none=True)),
    "a call of an odd number of words": ("call", b"name"),
    "a call that is too long": ("call", b"x\0y\0" * 5000),
}  # fmt: skip
"""Each got through, or broke out, in some version of the parsers."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before_is_refused(name):
    fuzzer.tracemalloc.start()
    try:
        assert not fuzzer.try_parser(*FOUND[name])
    finally:
        fuzzer.tracemalloc.stop()


ANNOUNCED = encode(Header(Kind.ANNOUNCE, edge=Edge(0, 1), call=0, microbatch=1), encode_duration(1.0))
CREDIT = encode(Header(Kind.CREDIT, edge=Edge(1, 0), slot=1), message.encode_credit(-1, bytes(16)))
ENTERED = encode(Header(Kind.CALL, call=0), message.encode_call({"forward_only": "False"}))
SEQUENCES = {
    "announced twice": [ENTERED, ANNOUNCED, ANNOUNCED],
    "a slot beyond the limit": [encode(Header(Kind.NEED, edge=Edge(0, 1), slot=1, nbytes=1 << 62))],
    "credits without end": [CREDIT] * 5,
    "an abort of a rank that is none": [encode(Header(Kind.ABORT), message.encode_failure(Failure(1 << 30, "", "")))],
    "a lane that is none": [encode(Header(Kind.DATA, lane=65535, edge=Edge(0, 1), sequence=1, slot=1))],
}
"""Control messages of rank 0."""


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_that_were_found_before_are_refused(name, seed):
    fuzzer.tracemalloc.start()
    played = fuzzer.Played(random.Random(seed), shared=False)
    try:
        if played.call < 0:
            played.begin()
        for frame in SEQUENCES[name]:
            played.control(0, frame)
            last = played.check()
        assert last == "failed" and played.events[-1].text.startswith("from rank 0: ")
    finally:
        fuzzer.tracemalloc.stop()
        played.close()


# ------------------------------------------------------------------------------------------------------------ negative controls


def _any_duration(body):
    return struct.unpack("<d", bytes(body[:8]).ljust(8))[0]


def _grant_any(outlet):
    outlet.granted += 1


def _replace_any(inlet, slot, nbytes):
    inlet.pool.drop(inlet.granted.pop(slot))
    return inlet.grant(nbytes)


class _Everybody:
    """In the place of an attribute: contains every rank."""

    def __get__(self, owner, kind=None):
        return range(1 << 31)

    def __set__(self, owner, value):
        pass


REMOVED = {
    "the length of a header": (message, "HEADER_BYTES", 8, "parsers"),
    "the number of dimensions": (message, "MAX_DIMENSIONS", 255, "parsers"),
    "the number of elements": (message, "_MAX_ELEMENTS", math.inf, "parsers"),
    "which numbers are a duration": (message, "decode_duration", _any_duration, "parsers"),
    "what may be printed": (message, "_printable", lambda text, keep="": text, "parsers"),
    "whose an abort may be": (zmq_transport.ZmqTransport, "_told_of", _Everybody(), "transport"),
    "how many credits": (outbound.Outlet, "grant", _grant_any, "transport"),
    "which slots": (inbound.Inlet, "replace", _replace_any, "transport"),
    "which announcements": (inbound.Inlet, "announce", lambda inlet, call, microbatch: None, "transport"),
    "which durations": (zmq_transport, "decode_duration", _any_duration, "transport"),
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_bound_that_is_removed_is_noticed(name, monkeypatch, seed):
    where, what, instead, which = REMOVED[name]
    fuzz = {"parsers": fuzzer.fuzz_parsers, "transport": fuzzer.fuzz_transport}[which]
    monkeypatch.setattr(where, what, instead, raising=name != "whose an abort may be")  # set by each transport
    with pytest.raises(fuzzer.Finding) as found:
        fuzz(random.Random(seed), until=time.monotonic() + 60)
    print(found.value)


def test_good_messages_are_taken(seed):
    """What is fuzzed is the real thing: unharmed, it does what it should."""
    played = fuzzer.Played(random.Random(0), shared=False)
    part = Part("float32", (2,), fuzzer.np.zeros(8, fuzzer.np.uint8))
    fuzzer.tracemalloc.start()
    try:
        if played.call < 0:
            played.begin()
        played.control(0, ENTERED)
        played.control(0, ANNOUNCED)
        slot = next(iter(played.transport._links.inlets[Edge(0, 1)].granted))
        header = Header(Kind.DATA, message.INLINE, 1, Edge(0, 1), 1, 0, 1, slot, 8, 1)
        played.data(0, 1, encode(header, encode_parts((part,))), [bytes(8)])
        assert played.check() == "went on" and [type(event).__name__ for event in played.events] == ["Announcement", "Arrival"]
    finally:
        fuzzer.tracemalloc.stop()
        played.close()
