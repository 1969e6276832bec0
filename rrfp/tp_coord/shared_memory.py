"""The channel inside a host: one page of memory that all members map, and two bells (pipes) each.

The leader owns the page: an anonymous memory file, opened by the others through `/proc/<pid>/fd/<fd>`, so nothing is left behind
however the processes end. Every word and every record has one writer:

    64 bytes      a random nonce: whoever reads it there shares the leader's host
    per member    words: heartbeat, goodbye, decisions taken, bytes of its failure; then one word per lane; then its failure
    the ring      records of 64 bytes, the sequence number first

A word is stored at once (8 aligned bytes). x86 keeps the order of stores, so that a reader that sees a record's number sees the
record; on other processors it may not, and so the record is read again until its checksum agrees too. A bell is one byte in a
non-blocking pipe: a full pipe rings already. Who rings has written before; the system call orders both. News of decisions ring
the bell that the engine's thread itself listens to while it waits: a thread between would cost another wake-up. Failures and
goodbyes ring the other, which the channel's thread listens to, also while an action runs.
"""

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from rrfp.comm.memory import NONCE_BYTES
from rrfp.comm.message import Malformed, decode_failure, encode_failure
from rrfp.comm.transport import Failure
from rrfp.tp_coord.channel import ListeningChannel, Peer
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.record import RECORD_BYTES, Decision, decode, encode

RING = 1024
"""Decisions that a follower may be behind. Inside actions with collectives nobody is behind by more than the launches ahead."""
REREADS = 10_000
_WORD = 8
_HEAD = 64
_BEAT, _LEFT, _TAKEN, _FAILED, _LANES = range(5)
_FAILURE_BYTES = 256 << 10  # pages that nobody writes cost nothing
_TEXT, _TRACEBACK = 4 << 10, 32 << 10  # letters of a failure that are told: JSON takes up to six bytes for one


class Bell(NamedTuple):
    """A pipe of this process, or its two ends' numbers: neither end blocks."""

    listen: int
    door: int

    @classmethod
    def make(cls) -> "Bell":
        return cls(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)


class Doors(NamedTuple):
    """Where another member is rung: write ends of its bells."""

    news: int
    alarm: int

    @classmethod
    def open(cls, pid: int, news: int, alarm: int) -> "Doors":
        """Those of another process. Raises OSError if they cannot be reached from here."""
        opened: list[int] = []
        try:
            for door in (news, alarm):
                opened.append(os.open(f"/proc/{pid}/fd/{door}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return cls(*opened)

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)


class Page:
    """The memory, mapped. Offsets in bytes."""

    def __init__(self, fd: int, members: int, lanes: int):
        self.members, self.lanes = members, lanes
        self._stride = -(-_WORD * (_LANES + lanes) // 64) * 64 + _FAILURE_BYTES
        self._ring = _HEAD + members * self._stride
        self.size = self._ring + RING * RECORD_BYTES
        self.fd = fd
        self._memory: mmap.mmap | None = None

    @classmethod
    def create(cls, members: int, lanes: int) -> "Page":
        page = cls(os.memfd_create("rrfp-agreement", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), members, lanes)
        os.ftruncate(page.fd, page.size)
        page.nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(page.fd, page.nonce, 0)
        fcntl.fcntl(page.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        page.map()
        return page

    @classmethod
    def open(cls, pid: int, fd: int, nonce: bytes, members: int, lanes: int) -> "Page":
        """The page of another process. Raises OSError if it cannot be reached from here: another host, or another user."""
        path = f"/proc/{pid}/fd/{fd}"
        page = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), members, lanes)
        try:
            if os.pread(page.fd, NONCE_BYTES, 0) != nonce:
                raise OSError(f"{path} is not the leader's page: its nonce differs")
            page.map()
        except BaseException:
            page.close()
            raise
        return page

    def map(self) -> None:
        self._memory = mmap.mmap(self.fd, self.size)
        self.bytes = memoryview(self._memory)
        self.words = self.bytes.cast("Q")

    def word(self, member: int, index: int) -> int:
        """Where a member's word is, in words."""
        return (_HEAD + member * self._stride) // _WORD + index

    def failure(self, member: int) -> int:
        return _HEAD + (member + 1) * self._stride - _FAILURE_BYTES

    def record(self, sequence: int) -> int:
        return self._ring + (sequence - 1) % RING * RECORD_BYTES

    def close(self) -> None:
        if self._memory is not None:
            self.words.release()
            self.bytes.release()
            self._memory.close()
            self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedMemoryChannel(ListeningChannel):
    """Args:
    page: mapped; this channel closes it.
    news, alarm: this member's bells. It keeps the ends that others write to, so that they never end; closed here too.
    doors: the other members' by rank.
    The rest is `ListeningChannel`'s.
    """

    def __init__(self, domain: Domain, rank: int, peers: Iterable[Peer], *, page: Page, news: Bell, alarm: Bell,
                 doors: Mapping[int, Doors], heartbeat_s: float, silence_s: float):
        # Of those that may judge a member, the lowest speaks first: then all members hear one text.
        super().__init__(rank, peers, heartbeat_s=heartbeat_s, silence_s=silence_s,
                         judges=lambda peer: rank == next(iter(domain.others(peer))))
        self._page, self._news, self._alarm, self._doors, self._domain = page, news, alarm, dict(doors), domain
        self._me = domain.members.index(rank)
        self._index = {member: index for index, member in enumerate(domain.members)}
        self._beats: dict[int, int] = {}
        self._room = 0
        """Leader: every follower has taken so many decisions."""
        self._loop.add(alarm.listen, self._on_alarm)
        self._loop.start()

    # ------------------------------------------------------------------ the engine's thread
    @property
    def bell(self) -> int:
        return self._news.listen

    def begin(self, call: int, words: Mapping[int, int]) -> None:
        self._begin(call)
        self._store(words)

    def publish(self, words: Mapping[int, int]) -> None:
        self._store(words)
        self._ring(self._doors[self._domain.leader].news)

    def _store(self, words: Mapping[int, int]) -> None:
        for index, word in words.items():
            self._page.words[self._page.word(self._me, _LANES + index)] = word

    def words(self, index: int) -> Iterable[tuple[int, int]]:
        page = self._page
        return [(rank, page.words[page.word(self._index[rank], _LANES + index)]) for rank in self._peers]

    def put(self, decision: Decision) -> bool:
        page, sequence = self._page, decision.sequence
        if sequence - self._room > RING:
            self._room = min(page.words[page.word(self._index[rank], _TAKEN)] for rank in self._peers)
            if sequence - self._room > RING:
                return False
        at = page.record(sequence)
        record = encode(decision)
        page.bytes[at + _WORD : at + RECORD_BYTES] = record[_WORD:]
        page.words[at // _WORD] = sequence  # last: who sees it may read the rest
        for doors in self._doors.values():
            self._ring(doors.news)
        return True

    def look(self, sequence: int) -> Decision | None:
        page = self._page
        at = page.record(sequence)
        if page.words[at // _WORD] != sequence:
            return None
        for _ in range(REREADS):
            with suppress(Malformed):
                return decode(bytes(page.bytes[at : at + RECORD_BYTES]))
        return decode(bytes(page.bytes[at : at + RECORD_BYTES]))

    def took(self, sequence: int) -> None:
        self._page.words[self._page.word(self._me, _TAKEN)] = sequence
        if sequence % (RING // 2) == 0:
            self._ring(self._doors[self._domain.leader].news)  # it may wait for room

    # ------------------------------------------------------------------ any thread
    @staticmethod
    def _ring(door: int) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # it rings already; or its process has ended, which its watch tells
            os.write(door, b"!")

    def _spread(self, failure: Failure, source: int | None) -> None:
        if source is not None:
            return  # everybody reads everybody's area
        short = failure._replace(
            where=failure.where[:_TEXT], text=failure.text[:_TEXT], traceback=failure.traceback[-_TRACEBACK:])
        data, page = encode_failure(short), self._page
        at = page.failure(self._me)
        page.bytes[at : at + len(data)] = data
        page.words[page.word(self._me, _FAILED)] = len(data)
        self._alarm_all()

    def _alarm_all(self) -> None:
        for doors in self._doors.values():
            self._ring(doors.alarm)

    # ------------------------------------------------------------------ the channel's thread
    def _on_alarm(self) -> None:
        os.read(self._alarm.listen, 1 << 16)
        for peer in self._peers.values():
            self._last_words(peer)

    def _last_words(self, peer: Peer) -> None:
        page, index = self._page, self._index[peer.rank]
        if (size := page.words[page.word(index, _FAILED)]) and self._failure is None:
            at = page.failure(index)
            self.fail(decode_failure(page.bytes[at : at + min(size, _FAILURE_BYTES)]), source=peer.rank)
        if peer.left is None and (left := page.words[page.word(index, _LEFT)]):
            self._left(peer, left - 2)

    def _sign(self) -> None:
        page = self._page
        page.words[page.word(self._me, _BEAT)] += 1
        for peer in self._peers.values():
            beat = page.words[page.word(self._index[peer.rank], _BEAT)]
            if beat != self._beats.get(peer.rank):
                self._beats[peer.rank], peer.seen = beat, time.monotonic()
            self._last_words(peer)

    def _say_goodbye(self, until: float) -> None:
        self._page.words[self._page.word(self._me, _LEFT)] = self._call + 2  # 0: still here; -1: before any call
        self._alarm_all()

    def _free(self) -> None:
        self._page.close()
        for each in (self._news, self._alarm, *self._doors.values()):
            each.close()
