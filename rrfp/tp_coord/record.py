"""What members tell each other, as bytes: a word of 64 bits for what arrived, a record of 64 bytes for what was decided. Pure."""

import struct
import zlib
from typing import NamedTuple

from rrfp.action import Action
from rrfp.comm.message import Malformed

RECORD_BYTES = 64
_RECORD = struct.Struct("<QQIiI32sI")  # sequence, call, stage, microbatch (-1: none), digest, kind, CRC-32 of the rest
_CRC_AT = RECORD_BYTES - 4
_ACTION = struct.Struct("<QIi")
_MESSAGE = struct.Struct("<Qi")


class Decision(NamedTuple):
    """One entry of the agreed sequence.

    sequence: 1, 2, ... over the life of the domain.
    digest: of the whole sequence up to and including this entry.
    """

    sequence: int
    call: int
    action: Action
    digest: int


def fold(digest: int, call: int, action: Action) -> int:
    """The running digest after one more action."""
    microbatch = -1 if action.microbatch is None else action.microbatch
    return zlib.crc32(_ACTION.pack(call, action.stage, microbatch) + action.kind.encode(), digest)


def encode(decision: Decision) -> bytes:
    """Raises ValueError if the kind does not fit."""
    sequence, call, action, digest = decision
    kind = action.kind.encode()
    if len(kind) > 32:
        raise ValueError(f"the kind of {action} has {len(kind)} letters: 32 at most can be agreed on")
    microbatch = -1 if action.microbatch is None else action.microbatch
    packed = _RECORD.pack(sequence, call, action.stage, microbatch, digest, kind, 0)[:_CRC_AT]
    return packed + zlib.crc32(packed).to_bytes(4, "little")


def decode(record) -> Decision:
    """Raises Malformed unless it is a whole record."""
    if len(record) != RECORD_BYTES or zlib.crc32(record[:_CRC_AT]) != int.from_bytes(record[_CRC_AT:], "little"):
        raise Malformed(f"a decision of {len(record)} bytes whose checksum is wrong: corrupted")
    sequence, call, stage, microbatch, digest, kind, _ = _RECORD.unpack(record)
    try:
        kind = kind.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise Malformed(f"a decision for an action of kind {kind!r}") from None
    return Decision(sequence, call, Action(kind, stage, None if microbatch < 0 else microbatch), digest)


class Receipt(NamedTuple):
    """How many messages of one lane a member has received in a call, and a digest of all that the lane ever brought.

    It is one word, so that a reader in another process sees all of it or an older one.
    """

    call: int
    count: int
    digest: int

    @property
    def word(self) -> int:
        return (self.call & 0xFFFF) << 48 | self.count << 24 | self.digest & 0xFFFFFF

    @classmethod
    def of(cls, word: int, *, near: int) -> "Receipt":
        """The receipt whose call is the nearest to `near` that the word's 16 bits allow."""
        return cls(near + ((word >> 48) - near + 0x8000) % 0x10000 - 0x8000, word >> 24 & 0xFFFFFF, word & 0xFFFFFF)


def fold_message(digest: int, call: int, microbatch: int | None) -> int:
    """The digest of a lane after one more message."""
    return zlib.crc32(_MESSAGE.pack(call, -1 if microbatch is None else microbatch), digest)
