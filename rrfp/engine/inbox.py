"""Where the rank loop waits: for what other threads hand it, and for pipes of other processes."""

import os
import select
import time
from collections import deque
from queue import Empty

_STEP = 1e-4
"""Seconds between looks during the last millisecond of a wait: `poll` counts in whole ones."""


class Inbox:
    """`put` never blocks and may be called from any thread; only one thread gets.

    A queue alone (`rrfp.comm.mailbox`) would need a thread that waits for the pipes and hands on what they tell: one more
    wake-up, which costs more than most decisions of an agreement. Its descriptor lives as long as it does.
    """

    def __init__(self):
        self._items: deque = deque()
        self._waiting = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def __del__(self):
        os.close(self._bell)

    def listen(self, descriptor: int) -> None:
        """From now on a `get` also ends when this pipe has something: it is emptied, and None is what was got.

        The reading end must not block, and must stay open for as long as anybody gets.
        """
        self._poll.register(descriptor, select.POLLIN)

    def put(self, item) -> None:
        self._items.append(item)
        # The reader says that it waits before it looks for the last time, so one of the two sees the other.
        if self._waiting:
            os.eventfd_write(self._bell, 1)

    def empty(self) -> bool:
        return not self._items

    def get_nowait(self):
        """The first item. Raises queue.Empty."""
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None

    def get(self, timeout: float | None = None):
        """The first item, or None if a descriptor has something. Raises queue.Empty after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise Empty
            if self._wait(left):
                return None
        return self._items.popleft()

    def _wait(self, left: float | None) -> bool:
        """Until there is an item (perhaps), for `left` seconds at most. Whether a descriptor has something."""
        if left is not None and left < 1e-3:
            time.sleep(min(left, _STEP))
            milliseconds = 0
        else:
            milliseconds = None if left is None else int(1e3 * left)
        self._waiting = True
        try:
            found = [] if self._items else self._poll.poll(milliseconds)
        finally:
            self._waiting = False
        for descriptor, _ in found:
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
            else:
                os.read(descriptor, 1 << 12)
        return any(descriptor != self._bell for descriptor, _ in found)
