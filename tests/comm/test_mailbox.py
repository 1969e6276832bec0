import threading
from queue import Empty, SimpleQueue

import pytest

from rrfp.comm.mailbox import Mailbox


class Recording(SimpleQueue):
    """Tells which looks reached the library's queue."""

    def __init__(self):
        self.looks = []

    def get(self, block=True, timeout=None):
        self.looks.append((block, timeout))
        return super().get(block, timeout)


def leave_the_lock_free(box) -> None:
    """A wait that ended empty takes the queue's lock; the next `put` frees it; its item is taken without it."""
    with pytest.raises(Empty):
        box.get(timeout=1e-4)
    box.put("something")
    assert box.get() == "something"


def test_a_timed_wait_ends_however_short_it_is():
    box = Mailbox()
    ended = threading.Event()

    def wait_often():
        for _ in range(1000):
            leave_the_lock_free(box)
            with pytest.raises(Empty):
                box.get(timeout=1e-6)
        ended.set()

    thread = threading.Thread(target=wait_often, daemon=True)
    thread.start()
    assert ended.wait(60), "a wait of a microsecond did not end"
    thread.join(10)


def test_a_timed_wait_takes_the_free_lock_away_first():
    """What the fix rests on, and so its negative control: without the first look the library's timed look comes straight away."""
    class Watched(Mailbox, Recording):
        pass

    box = Watched()
    with pytest.raises(Empty):
        box.get(timeout=1e-4)
    assert box.looks == [(False, None), (True, 1e-4)]


def test_items_come_in_order_and_wake_a_waiter():
    box = Mailbox()
    got = []
    thread = threading.Thread(target=lambda: got.extend(box.get(timeout=30) for _ in range(3)))
    thread.start()
    for item in (1, 2, 3):
        box.put(item)
    thread.join(30)
    assert got == [1, 2, 3]


@pytest.mark.parametrize("timeout", [0, -1e-3])
def test_no_time_left_is_empty_at_once(timeout):
    with pytest.raises(Empty):
        Mailbox().get(timeout=timeout)
