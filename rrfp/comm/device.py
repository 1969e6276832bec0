"""What this package asks of a GPU: memory, streams and events. `rrfp.comm.cuda` answers with torch.cuda; tests with a fake as strict.

Rules of the house, which the fake enforces:

- A thread uses a device only after `enter` (the current device of CUDA is a thread's own).
- Nothing is read, reused or announced before an event that comes after its last use is known to be complete *on the host*. So a stream
  is never made to wait for anything that might not come: under CUDA_DEVICE_MAX_CONNECTIONS=1 such a wait holds up every other stream.
- Nobody waits for the whole device. A transfer that spins for its peer would be waited for too.
"""

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rrfp.comm.mailbox import Mailbox

Stream = Any
Event = Any


class Memory(Protocol):
    """Contiguous bytes on a device. A slice shares them and keeps them alive."""

    nbytes: int

    def __getitem__(self, where: slice) -> "Memory": ...

    def tensor(self):
        """A flat uint8 tensor of torch over these bytes. This very object stays alive as long as anybody uses the tensor's storage."""


class Device(Protocol):
    """One GPU, as one process uses it."""

    compute: Stream
    """The stream that actions run on."""

    def enter(self) -> None:
        """This thread is about to use the device."""

    def allocate(self, nbytes: int) -> Memory:
        """Memory whose earlier users, if it had any, have finished: safe to write from any stream at once."""

    def memory_of(self, tensor) -> Memory:
        """The bytes of a contiguous tensor; the tensor stays alive with them."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Host memory that streams can copy from and to."""

    def stream(self) -> Stream:
        """A new one, of high priority."""

    def copy(self, to: Memory | np.ndarray, source: Memory | np.ndarray, stream: Stream) -> None:
        """Queue a copy by the copy engine. Host memory must be `pinned`."""

    def delay(self, seconds: float, stream: Stream) -> None:
        """Keep the stream busy."""

    def record(self, stream: Stream) -> Event:
        """An event that is complete when all that is queued on the stream now is."""

    def done(self, event: Event) -> bool: ...

    def synchronize(self, event: Event) -> None:
        """Block this thread, without the interpreter lock, until the event is complete. Raises RuntimeError if the device has failed."""

    def seconds(self, start: Event, end: Event) -> float:
        """Between two complete events."""

    def share(self, memory: Memory) -> bytes:
        """A handle by which another process of this host can `open` the memory. Raises OSError."""

    def open(self, handle: bytes) -> Memory:
        """Another process' memory. Raises OSError if it can't be reached."""


class Worker:
    """A thread that may block on a device: it does what it is handed, in order.

    An error is handed to `fail(where, text, traceback)` and ends it: what comes behind would meet the same device. Jobs that are left
    are dropped then. The thread is a daemon, since nothing but an abort ends a wait for an event that never comes.
    """

    def __init__(self, device: Device, *, name: str, fail: Callable[[str, str, str], None]):
        self._device, self._name, self._fail = device, name, fail
        self._jobs = Mailbox()
        self._changed = threading.Condition()
        self._put = self._did = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._put += 1
        self._jobs.put(job)

    @property
    def pending(self) -> int:
        """Jobs that are not done."""
        return self._put - self._did

    def drain(self, *, until: float) -> bool:
        """Whether all that was put has been done by `until` (time.monotonic())."""
        with self._changed:
            target = self._put
            self._changed.wait_for(lambda: self._did >= target or self._broken, max(0.0, until - time.monotonic()))
            return self._did >= target

    def interrupt(self) -> None:
        """Wake whoever waits in `drain`: the rest is not worth waiting for."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def stop(self, *, until: float) -> bool:
        """Whether the thread ended in time, with all that was put before."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._device.enter()
            while (job := self._jobs.get()) is not None:
                job()
                del job  # what it held is not kept alive until the next one
                with self._changed:
                    self._did += 1
                    self._changed.notify_all()
        except Exception as error:
            self.interrupt()
            self._fail(f"the thread {self._name}", f"{type(error).__name__}: {error}", traceback.format_exc())
