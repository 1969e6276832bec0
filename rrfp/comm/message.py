"""The wire format: one frame of 64 bytes of header, then the parts' metadata or a small body.

Layout (little endian, version 1): magic, version, kind, flags, lane, parts, source and destination stage, microbatch, call,
sequence number of the lane, slot, payload bytes, CRC-32 of the whole frame. Header and metadata share one frame because each
receive hands the interpreter lock over once more. Everything here is pure: bytes in, values out, or `Malformed`.
"""

import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from rrfp.action import Edge
from rrfp.comm.transport import Failure, Part, Payload

MAGIC = b"RRFP"
VERSION = 1
ALIGNMENT = 64
MAX_PARTS = 1024
MAX_DIMENSIONS = 32
MAX_TEXT = 64 << 10  # bytes of an ABORT's traceback
MAX_LINE = 4 << 10  # bytes of each of its other texts
MAX_CONTROL = 128 << 10  # bytes of a control frame: an ABORT is the longest
MAX_FRAME = 1 << 20  # bytes of a frame of payload
MAX_HANDLE = 1 << 10  # bytes by which a GPU's memory is opened in another process

_HEADER = struct.Struct("<4sBBHHHIIIQQQQI")  # in the order above
_PAD = bytes(64 - _HEADER.size)
HEADER_BYTES = _HEADER.size + len(_PAD)
_CRC_AT = _HEADER.size - 4
_PART = struct.Struct("<BBBx")
_CREDIT = struct.Struct("<i16s")
_DURATION = struct.Struct("<d")
_FAREWELL = struct.Struct("<IIQ")
_FAILURE = struct.Struct("<i?HHI")  # rank, lost, bytes of where, text and traceback, which follow in UTF-8

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
_MAX_ELEMENTS = 1 << 58  # times the largest item: still a signed 64-bit number
_NAMES = tuple(ITEMSIZE)
_CODES = {name: code for code, name in enumerate(_NAMES)}


class Malformed(Exception):
    """What came in is not a message of this format. The text says which rule it breaks."""


class Kind(IntEnum):
    DATA = 1
    CREDIT = 2
    ANNOUNCE = 3
    NEED = 4
    HELLO = 5
    HEARTBEAT = 6
    ABORT = 7
    BYE = 8
    BYE_SEEN = 9
    CALL = 10


INLINE = 1  # flag of DATA: the payload follows in frames of the same message, not in the slot


class Header(NamedTuple):
    kind: Kind
    flags: int = 0
    lane: int = 0
    edge: Edge = Edge(0, 0)
    microbatch: int = 0
    call: int = 0
    sequence: int = 0
    slot: int = 0
    nbytes: int = 0
    parts: int = 0


class Spec(NamedTuple):
    """A part without its bytes. nbytes is 0 if `none`."""

    dtype: str
    shape: tuple[int, ...]
    none: bool

    @property
    def nbytes(self) -> int:
        return 0 if self.none else math.prod(self.shape) * ITEMSIZE[self.dtype]


def encode(header: Header, body: bytes = b"") -> bytes:
    """Header and body as one frame, the CRC filled in."""
    kind, flags, lane, edge, microbatch, call, sequence, slot, nbytes, parts = header
    packed = _HEADER.pack(
        MAGIC, VERSION, kind, flags, lane, parts, edge.source, edge.destination, microbatch, call, sequence, slot, nbytes, 0
    )
    frame = bytearray(packed + _PAD + body)
    struct.pack_into("<I", frame, _CRC_AT, zlib.crc32(frame))
    return bytes(frame)


def decode(frame) -> tuple[Header, memoryview]:
    """The header and the body of a frame. Raises Malformed on a wrong length, magic, version, checksum or kind."""
    view = memoryview(frame)
    if len(view) < HEADER_BYTES:
        raise Malformed(f"a frame of {len(view)} bytes is shorter than a header of {HEADER_BYTES}: truncated")
    magic, version, kind, flags, lane, parts, source, destination, microbatch, call, sequence, slot, nbytes, crc = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise Malformed(f"a frame starts with {magic!r} instead of {MAGIC!r}: not a message of this package")
    if version != VERSION:
        raise Malformed(f"message version {version}, this rank speaks {VERSION}: install the same release on every rank")
    rest = zlib.crc32(view[_CRC_AT + 4 :], zlib.crc32(bytes(4), zlib.crc32(view[:_CRC_AT])))
    if rest != crc:
        raise Malformed(f"checksum {rest:08x} of a frame, its header says {crc:08x}: corrupted")
    try:
        kind = Kind(kind)
    except ValueError:
        raise Malformed(f"message kind {kind} is unknown") from None
    header = Header(kind, flags, lane, Edge(source, destination), microbatch, call, sequence, slot, nbytes, parts)
    return header, view[HEADER_BYTES:]


def check_payload(payload: Payload) -> int:
    """Bytes of a payload. Raises ValueError if a part's bytes are not what its dtype and shape ask for."""
    if len(payload) > MAX_PARTS:
        raise ValueError(f"a message of {len(payload)} parts: {MAX_PARTS} at most")
    total = 0
    for dtype, shape, data in payload:
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype {dtype!r} cannot be sent: one of {', '.join(ITEMSIZE)}")
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {len(shape)} dimensions: {MAX_DIMENSIONS} at most")
        if data is None:
            continue
        if isinstance(data, np.ndarray) and (data.dtype != "uint8" or data.ndim != 1 or not data.flags.c_contiguous):
            raise ValueError(f"a part's data is 1-D contiguous uint8, got {data.ndim}-D {data.dtype}")
        if data.nbytes != math.prod(shape) * ITEMSIZE[dtype]:
            raise ValueError(f"{dtype} of shape {tuple(shape)} has {math.prod(shape) * ITEMSIZE[dtype]} bytes, got {data.nbytes}")
        total += data.nbytes
    return total


def encode_parts(payload: Payload) -> bytes:
    """Per part: dtype code, number of dimensions, 1 if there is no tensor, the dimensions."""
    return b"".join(
        _PART.pack(_CODES[dtype], len(shape), data is None) + struct.pack(f"<{len(shape)}Q", *shape)
        for dtype, shape, data in payload
    )


def decode_parts(body: memoryview, parts: int, nbytes: int) -> tuple[Spec, ...]:
    """The parts that a DATA frame promises. Raises Malformed unless they fit the header's count and bytes exactly."""
    if parts > MAX_PARTS:
        raise Malformed(f"a message of {parts} parts: {MAX_PARTS} at most")
    specs, at = [], 0
    for _ in range(parts):
        if len(body) < at + _PART.size:
            raise Malformed(f"the header promises {parts} parts, the frame ends after {len(specs)}: truncated")
        code, dimensions, none = _PART.unpack_from(body, at)
        at += _PART.size
        if code >= len(_NAMES) or dimensions > MAX_DIMENSIONS or none > 1:
            raise Malformed(f"part {len(specs)} has dtype code {code}, {dimensions} dimensions: no such tensor")
        if len(body) < at + 8 * dimensions:
            raise Malformed(f"the dimensions of part {len(specs)} of {parts} are cut off: truncated")
        shape = struct.unpack_from(f"<{dimensions}Q", body, at)
        # Of an empty tensor too, whose other dimensions nothing else bounds: its strides are computed from them.
        if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
            raise Malformed(f"part {len(specs)} has the shape {shape}: no such tensor")
        specs.append(Spec(_NAMES[code], shape, bool(none)))
        at += 8 * dimensions
    if at != len(body):
        raise Malformed(f"{len(body) - at} bytes follow the last of {parts} parts")
    if sum(spec.nbytes for spec in specs) != nbytes:
        raise Malformed(f"the header promises {nbytes} bytes, its parts hold {sum(spec.nbytes for spec in specs)}")
    return tuple(specs)


def offsets(sizes) -> tuple[list[int], int]:
    """Where each part starts in a slot (64-byte aligned, so that views of any dtype are aligned), and where the last ends."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def frame_sizes(sizes: Iterable[int]) -> list[int]:
    """How parts of these sizes travel outside a slot: in frames of at most MAX_FRAME bytes, none for an empty part.

    What a connection may make its receiver hold before it is known whose it is, is one frame.
    """
    return [min(MAX_FRAME, size - start) for size in sizes for start in range(0, size, MAX_FRAME)]


def encode_credit(fd: int, nonce: bytes, handle: bytes = b"") -> bytes:
    """handle: of a slot in a GPU's memory."""
    return _CREDIT.pack(fd, nonce) + handle


def decode_credit(body) -> tuple[int, bytes, bytes]:
    if len(body) < _CREDIT.size:
        raise Malformed(f"a credit's body has {_CREDIT.size} bytes, got {len(body)}")
    if len(body) > _CREDIT.size + MAX_HANDLE:
        raise Malformed(f"a credit's handle has {MAX_HANDLE} bytes at most, got {len(body) - _CREDIT.size}")
    return *_CREDIT.unpack_from(body), bytes(body[_CREDIT.size :])


def encode_duration(seconds: float) -> bytes:
    return _DURATION.pack(seconds)


def decode_duration(body) -> float:
    if len(body) != _DURATION.size:
        raise Malformed(f"a duration has {_DURATION.size} bytes, got {len(body)}")
    (seconds,) = _DURATION.unpack(body)
    if not 0 <= seconds < math.inf:
        raise Malformed(f"a duration of {seconds} seconds")
    return seconds


def encode_farewell(sent: Mapping[Edge, int]) -> bytes:
    """The body of a BYE: how many messages have left, per edge."""
    return b"".join(_FAREWELL.pack(*edge, count) for edge, count in sent.items())


def decode_farewell(body) -> dict[Edge, int]:
    if len(body) % _FAREWELL.size:
        raise Malformed(f"a BYE that cannot be read: {len(body)} bytes, {_FAREWELL.size} per edge")
    return {Edge(source, destination): count for source, destination, count in _FAREWELL.iter_unpack(body)}


def encode_call(facts: Mapping[str, str]) -> bytes:
    """The body of a CALL: what the call is, as names and values in turn."""
    return "\0".join(word for pair in facts.items() for word in pair).encode()


def decode_call(body) -> dict[str, str]:
    """Raises Malformed. The texts are safe to print."""
    if len(body) > MAX_LINE:
        raise Malformed(f"a CALL of {len(body)} bytes: {MAX_LINE} at most")
    try:
        words = str(body, "utf-8").split("\0") if len(body) else []
    except UnicodeDecodeError as error:
        raise Malformed(f"a CALL that cannot be read: {error}") from None
    if len(words) % 2:
        raise Malformed(f"a CALL that cannot be read: {len(words)} words")
    return {_printable(name): _printable(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def encode_failure(failure: Failure) -> bytes:
    """The body of an ABORT. A long traceback loses its beginning: the last lines are the telling ones."""
    where, text, traceback = (
        part.encode(errors="backslashreplace") for part in (failure.where, failure.text, failure.traceback)
    )
    # Cut in bytes, and never inside a character.
    where, text = (part[:MAX_LINE].decode(errors="ignore").encode() for part in (where, text))
    traceback = traceback[-MAX_TEXT:].decode(errors="ignore").encode()
    return _FAILURE.pack(failure.rank, failure.lost, len(where), len(text), len(traceback)) + where + text + traceback


def decode_failure(body) -> Failure:
    """Raises Malformed. The texts are safe to print: control characters are spelled out, only a traceback has lines."""
    try:
        rank, lost, *lengths = _FAILURE.unpack_from(body)
        if len(body) != _FAILURE.size + sum(lengths):
            raise Malformed(f"an ABORT that cannot be read: texts of {lengths} bytes in a body of {len(body)}")
        a, b = _FAILURE.size + lengths[0], _FAILURE.size + lengths[0] + lengths[1]
        where, text, traceback = (str(part, "utf-8") for part in (body[_FAILURE.size : a], body[a:b], body[b:]))
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed(f"an ABORT that cannot be read: {error}") from None
    return Failure(rank, _printable(where), _printable(text), _printable(traceback, keep="\n\t"), lost)


def _printable(text: str, keep: str = "") -> str:
    """A peer's words end up in terminals and logs: no escape sequence, no second line, no reversed writing."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def payload_of(specs: tuple[Spec, ...], arrays) -> Payload:
    """Specs and the arrays of those that are not none, put together."""
    arrays = iter(arrays)
    return tuple(Part(spec.dtype, spec.shape, None if spec.none else next(arrays)) for spec in specs)
