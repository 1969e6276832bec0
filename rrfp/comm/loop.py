"""The receive thread: one poller over sockets and descriptors, one handler each, and a tick. It blocks there, never spins."""

import math
import os
import threading
import time
import traceback
from collections.abc import Callable

import zmq


class Loop:
    """Handlers run on the loop's thread. An exception in one is handed to `fail(where, text, traceback)`; the loop goes on.

    enter: what the thread does first.
    """

    def __init__(self, *, name: str, interval: float, tick: Callable[[], None], fail: Callable[[str, str, str], None],
                 enter: Callable[[], None] = lambda: None):
        self._interval, self._tick, self._fail, self._enter = interval, tick, fail, enter
        self._poller = zmq.Poller()
        self._handlers: dict = {}
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.add(self._wake, lambda: os.eventfd_read(self._wake))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, source: zmq.Socket | int, handler: Callable[[], None]) -> None:
        """Before `start`, or from a handler. What is added first is served first."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def remove(self, source: zmq.Socket | int) -> None:
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, until: float) -> bool:
        """Whether the thread ended in time."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def close(self) -> None:
        os.close(self._wake)

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        try:
            self._enter()
            while not self._stopping:
                wait = max(0, math.ceil(1000 * (due - time.monotonic())))
                for source, _ in self._poller.poll(wait):
                    self._guarded(self._handlers.get(source))
                if time.monotonic() >= due:
                    due = time.monotonic() + self._interval
                    self._guarded(self._tick)
        except Exception as error:  # the poller itself: nothing can be heard any more
            self._fail("the receive thread", f"{type(error).__name__}: {error}", traceback.format_exc())

    def _guarded(self, handler: Callable[[], None] | None) -> None:
        if handler is None:  # removed by an earlier handler of this round
            return
        try:
            handler()
        except zmq.Again:
            pass  # the library may wake its reader before a message of several frames is whole
        except Exception as error:
            self._fail("the receive thread", f"{type(error).__name__}: {error}", traceback.format_exc())
