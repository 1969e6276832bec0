"""The wire format: what is encoded comes back, and what is not a message is refused with a reason."""

import random
import zlib

import numpy as np
import pytest

from rrfp.action import Edge
from rrfp.comm import message
from rrfp.comm.message import HEADER_BYTES, Header, Kind, Malformed, decode, decode_parts, encode, encode_parts
from rrfp.comm.transport import Failure, Part

HEADER = Header(Kind.DATA, 1, 3, Edge(1000, 1023), 511, 2**40, 2**50, 77, 2**33, 5)


def test_header_is_64_bytes_and_comes_back():
    frame = encode(HEADER, b"body")
    header, body = decode(frame)
    assert HEADER_BYTES == 64 and len(frame) == 68 and header == HEADER and bytes(body) == b"body"


def test_the_layout_is_fixed():
    """A golden frame: another layout needs another version."""
    assert encode(Header(Kind.CREDIT, 0, 1, Edge(2, 3), 4, 5, 6, 7, 8, 9)).hex() == (
        "52524650" "01" "02" "0000" "0100" "0900" "02000000" "03000000" "04000000" "0500000000000000" "0600000000000000"
        "0700000000000000" "0800000000000000" "3b840563" "00000000"
    )  # fmt: skip


def test_every_single_flipped_byte_is_noticed():
    frame = encode(HEADER, encode_parts((Part("float32", (3, 4), None),)))
    for at in range(len(frame)):
        broken = bytearray(frame)
        broken[at] ^= 0x40
        with pytest.raises(Malformed):
            decode(broken)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "shorter than a header of 64: truncated"),
        (encode(HEADER)[:63], "truncated"),
        (b"GET / HTTP/1.1\r\n" * 5, "not a message of this package"),
        (encode(HEADER, b"abc")[:-1], "corrupted"),
        (encode(HEADER) + b"x", "corrupted"),
    ],
)
def test_what_is_not_a_message(frame, text):
    with pytest.raises(Malformed, match=text):
        decode(frame)


def _resealed(frame: bytes, at: int, value: int) -> bytes:
    broken = bytearray(frame)
    broken[at] = value
    broken[56:60] = bytes(4)
    broken[56:60] = zlib.crc32(broken).to_bytes(4, "little")
    return bytes(broken)


def test_another_version_and_an_unknown_kind():
    with pytest.raises(Malformed, match="message version 9, this rank speaks 1"):
        decode(_resealed(encode(HEADER), 4, 9))
    with pytest.raises(Malformed, match="kind 99 is unknown"):
        decode(_resealed(encode(HEADER), 5, 99))


def test_parts_come_back(seed):
    rng = random.Random(seed)
    for _ in range(200):
        payload = []
        for _ in range(rng.randint(0, 5)):
            dtype = rng.choice(list(message.ITEMSIZE))
            shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 4)))
            nbytes = int(np.prod(shape, dtype=int)) * message.ITEMSIZE[dtype]
            payload.append(Part(dtype, shape, rng.choice([None, np.zeros(nbytes, np.uint8)])))
        nbytes = message.check_payload(payload)
        specs = decode_parts(memoryview(encode_parts(payload)), len(payload), nbytes)
        assert [(s.dtype, s.shape, s.none) for s in specs] == [(p.dtype, p.shape, p.data is None) for p in payload]


@pytest.mark.parametrize(
    ("body", "parts", "nbytes", "text"),
    [
        (b"", 1, 0, "promises 1 parts, the frame ends after 0: truncated"),
        (encode_parts((Part("float32", (2, 3), None),))[:-1], 1, 0, "dimensions of part 0 of 1 are cut off: truncated"),
        (encode_parts((Part("float32", (2,), None),)), 0, 0, "follow the last of 0 parts"),
        (encode_parts((Part("float32", (2,), np.zeros(8, np.uint8)),)), 1, 9, "promises 9 bytes, its parts hold 8"),
        (bytes([200, 0, 0, 0]), 1, 0, "dtype code 200"),
        (bytes([0, 33, 0, 0]) + bytes(33 * 8), 1, 0, "33 dimensions"),
        (bytes([0, 0, 2, 0]), 1, 0, "no such tensor"),
        (b"", 2000, 0, "2000 parts: 1024 at most"),
    ],
)
def test_metadata_that_does_not_fit(body, parts, nbytes, text):
    with pytest.raises(Malformed, match=text):
        decode_parts(memoryview(body), parts, nbytes)


def test_random_bytes_never_get_through(seed, full):
    rng = random.Random(seed)
    for _ in range(20_000 if full else 2_000):
        with pytest.raises(Malformed):
            decode(rng.randbytes(rng.randint(0, 200)))
        with pytest.raises(Malformed):
            decode_parts(memoryview(rng.randbytes(rng.randint(1, 60))), rng.randint(0, 3), rng.randint(1 << 40, 1 << 60))


def test_offsets_are_aligned():
    assert message.offsets([1, 64, 65, 0, 3]) == ([0, 64, 128, 256, 256], 259)
    assert message.offsets([]) == ([], 0)


def test_a_failure_comes_back_and_a_long_traceback_keeps_its_end():
    failure = Failure(3, "3F1", "it broke", "a" * 200_000 + "the end", True)
    heard = message.decode_failure(message.encode_failure(failure))
    assert heard[:3] == failure[:3] and heard.lost and heard.traceback.endswith("the end") and len(heard.traceback) == 64 << 10


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"rank": "1", "where": "", "text": ""}', b'{"rank": 1, "x": 2}'])
def test_an_abort_that_cannot_be_read(body):
    with pytest.raises(Malformed, match="ABORT"):
        message.decode_failure(body)


def test_bodies_of_the_wrong_length():
    assert message.decode_credit(message.encode_credit(7, b"n" * 16)) == (7, b"n" * 16, b"")
    assert message.decode_credit(message.encode_credit(-1, bytes(16), b"handle")) == (-1, bytes(16), b"handle")
    with pytest.raises(Malformed, match="1024 bytes at most, got 1025"):
        message.decode_credit(message.encode_credit(7, bytes(16), bytes(1025)))
    assert message.decode_duration(message.encode_duration(0.125)) == 0.125
    for decoder in (message.decode_credit, message.decode_duration):
        with pytest.raises(Malformed, match="got 3"):
            decoder(b"abc")
