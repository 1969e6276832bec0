"""Payload memory shared by two processes of one host.

The receiver owns every buffer: an anonymous memory file (`memfd_create`), so nothing is ever left behind in a file system and no
size limit of /dev/shm applies. A credit names it by process id, descriptor and a random nonce that stands at its start. The
sender opens `/proc/<pid>/fd/<fd>`, checks the nonce (which proves that both see the same host), and writes. Buffers are sealed
against resizing, so that nobody can shrink one under its reader.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rrfp.comm.message import ALIGNMENT
from rrfp.errors import PipelineError

NONCE_BYTES = 16
MAX_MAPPED = 1024
"""Buffers of one edge that its sender keeps mapped, however many the receiver names."""


def _map(fd: int, size: int) -> np.ndarray:
    """The payload part of a memory file, on large pages where the kernel grants them to shared memory (docs/transport.md)."""
    memory = mmap.mmap(fd, ALIGNMENT + size)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[ALIGNMENT:]


class Grant(NamedTuple):
    """A credit as the sender sees it. `size` is 0 for one without memory."""

    slot: int
    size: int = 0
    fd: int = -1
    nonce: bytes = bytes(NONCE_BYTES)
    handle: bytes = b""
    """Of memory on a GPU (`rrfp.comm.cuda_ipc`)."""


def round_up(nbytes: int) -> int:
    """Up to an eighth more, so that slowly growing messages seldom ask for a new buffer. Untouched pages cost nothing."""
    step = 1 << max(12, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


class Buffer:
    """One slot of an incoming edge. `size` bytes follow the nonce; a slot of size 0 has no memory at all."""

    __slots__ = ("slot", "size", "fd", "nonce", "_view")

    busy = False
    """Whether a device may still read it, though nobody here does."""

    def __init__(self, slot: int, size: int):
        self.slot, self.size, self.fd, self._view = slot, size, -1, None
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        if size:
            try:
                self._make()
            except OSError as error:
                self.close()
                raise PipelineError(_no_memory(size, error)) from error

    def _make(self) -> None:
        self.fd = os.memfd_create("rrfp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, ALIGNMENT + self.size)
        os.pwrite(self.fd, self.nonce, 0)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def grant(self) -> Grant:
        return Grant(self.slot, self.size, self.fd, self.nonce)

    def view(self, start: int, nbytes: int) -> np.ndarray:
        if self._view is None:
            try:
                self._view = _map(self.fd, self.size)
            except OSError as error:
                raise PipelineError(_no_memory(self.size, error)) from error
        return self._view[start : start + nbytes]

    def given_back(self) -> None:
        """Nobody here reads it any more."""

    def close(self) -> None:
        """Lets go of the memory; views that are still held keep it alive."""
        self._view = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _no_memory(size: int, error: OSError) -> str:
    way_out = {
        errno.EMFILE: "every receive buffer is a descriptor: raise this process' limit (ulimit -n)",
        errno.ENFILE: "every receive buffer is a descriptor: raise the host's limit (fs.file-max)",
    }.get(error.errno, "give this rank more memory, or a smaller --rrfp-limit")
    return f"no receive buffer of {size} bytes can be had: {os.strerror(error.errno)}; {way_out}"


class Pool:
    """The buffers of one incoming edge: taken for a credit, given back on release, reused. Not thread-safe: its owner locks.

    make: what makes a buffer, from its slot and size.
    """

    def __init__(self, size: int, *, memory: bool, make: Callable[[int, int], Buffer] = Buffer):
        self._size, self._memory, self._make = size, memory, make
        self._free: list[Buffer] = []
        self._all: dict[int, Buffer] = {}
        self._next = 1

    @property
    def count(self) -> int:
        return len(self._all)

    @property
    def nbytes(self) -> int:
        return sum(buffer.size for buffer in self._all.values())

    def take(self, nbytes: int = 0) -> Buffer:
        """A free buffer of the usual size, which never shrinks; smaller ones are dropped on the way."""
        self._size = max(self._size, round_up(nbytes))
        for index in reversed(range(len(self._free))):  # last in, first out: its pages are warm
            if self._free[index].busy:
                continue
            buffer = self._free.pop(index)
            if buffer.size >= self._size or not self._memory:
                return buffer
            self.drop(buffer)
        buffer = self._make(self._next, self._size if self._memory else 0)
        self._all[buffer.slot] = buffer
        self._next += 1
        return buffer

    def give(self, buffer: Buffer) -> None:
        if buffer.slot in self._all:  # not after close
            buffer.given_back()
            self._free.append(buffer)

    def drop(self, buffer: Buffer) -> None:
        self._all.pop(buffer.slot, None)
        buffer.close()

    def close(self) -> None:
        self._free.clear()
        for buffer in list(self._all.values()):
            self.drop(buffer)


class Mappings:
    """The sender's view of a peer's buffers, by slot."""

    def __init__(self, pid: int):
        self._pid = pid
        self._views: dict[int, np.ndarray] = {}

    def write(self, grant: Grant, starts: list[int], arrays: list[np.ndarray]) -> None:
        """Copy arrays to their places. Raises OSError if this process cannot reach the peer's buffer."""
        view = self._views.get(grant.slot)
        if view is None:
            view = self._views[grant.slot] = self._open(grant)
        for start, array in zip(starts, arrays, strict=True):
            np.copyto(view[start : start + len(array)], array)  # gives up the interpreter lock

    def _open(self, grant: Grant) -> np.ndarray:
        for slot in [slot for slot, view in self._views.items() if len(view) < grant.size]:
            del self._views[slot]  # the receiver grows its buffers together; one still in use is mapped again
        while len(self._views) >= MAX_MAPPED:
            del self._views[next(iter(self._views))]
        fd = os.open(f"/proc/{self._pid}/fd/{grant.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(fd, NONCE_BYTES, 0) != grant.nonce:
                raise OSError(f"/proc/{self._pid}/fd/{grant.fd} is not the granted buffer: its nonce differs")
            # Writing behind the end of a file kills the writer: the end must be there, and stay.
            if os.fstat(fd).st_size < ALIGNMENT + grant.size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"/proc/{self._pid}/fd/{grant.fd} is not the granted buffer: it is too short, or could be cut")
            return _map(fd, grant.size)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._views.clear()
