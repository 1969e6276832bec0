"""One reader, many writers, and pipes beside them: nothing is lost, and no wait outlasts its time."""

import gc
import os
import random
import select
import threading
import time
from queue import Empty
from types import SimpleNamespace

import pytest

from rrfp.engine import inbox
from rrfp.engine.inbox import Inbox


@pytest.fixture
def pipe():
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


def test_a_timed_wait_ends_however_short_it_is():
    box = Inbox()
    for _ in range(1000):
        with pytest.raises(Empty):
            box.get(timeout=1e-6)


@pytest.mark.parametrize("timeout", [2e-4, 3.3e-3])
def test_a_timed_wait_is_not_cut_to_whole_milliseconds(timeout):
    box, start = Inbox(), time.monotonic()
    with pytest.raises(Empty):
        box.get(timeout=timeout)
    assert time.monotonic() - start >= timeout


@pytest.mark.parametrize("timeout", [0, -1e-3])
def test_no_time_left_is_empty_at_once(timeout):
    with pytest.raises(Empty):
        Inbox().get(timeout=timeout)


def test_what_is_here_comes_without_time():
    box = Inbox()
    box.put("something")
    assert not box.empty() and box.get(timeout=0) == "something" and box.empty()
    with pytest.raises(Empty):
        box.get_nowait()


@pytest.mark.parametrize("timeout", [None, 30, 5e-4])
def test_nothing_is_lost_between_a_look_and_a_wait(timeout, seed):
    """Four writers that write at random moments, and a reader that often has just looked in vain."""
    box, each = Inbox(), 500

    def write(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        for item in range(each):
            box.put((number, item))
            time.sleep(draw.choice((0, 0, 1e-5, 1e-4)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    got: list = []
    until = time.monotonic() + 60
    while len(got) < 4 * each and time.monotonic() < until:
        try:
            got.append(box.get(timeout=timeout))
        except Empty:
            pass
    for thread in threads:
        thread.join(30)
    assert [[item for number, item in got if number == one] for one in range(4)] == [list(range(each))] * 4


def test_a_reader_asleep_is_woken():
    box, asleep, poll = Inbox(), threading.Event(), select.poll()
    got: list = []
    poll.register(box._bell, select.POLLIN)

    def fall_asleep(milliseconds):
        asleep.set()  # it has looked for the last time
        return poll.poll(milliseconds)

    box._poll = SimpleNamespace(poll=fall_asleep)
    thread = threading.Thread(target=lambda: got.append(box.get(timeout=30)))
    thread.start()
    assert asleep.wait(30)
    box.put("morning")
    thread.join(30)
    assert got == ["morning"]


def test_without_the_bell_a_reader_sleeps_on(monkeypatch):
    """The control of the test above: a put that does not ring is found only when the time is over."""
    box = Inbox()
    monkeypatch.setattr(inbox.os, "eventfd_write", lambda descriptor, value: None)
    timer = threading.Timer(0.01, box.put, args=("unheard",))
    start = time.monotonic()
    timer.start()
    assert box.get(timeout=0.2) == "unheard" and time.monotonic() - start >= 0.19
    timer.join(10)


def test_a_pipe_wakes_a_reader_and_is_emptied(pipe):
    box = Inbox()
    box.listen(pipe[0])
    timer = threading.Timer(0.01, os.write, args=(pipe[1], b"!!!"))
    timer.start()
    assert box.get(timeout=30) is None
    timer.join(10)
    with pytest.raises(Empty):
        box.get(timeout=1e-4)


def test_items_go_before_pipes(pipe):
    box = Inbox()
    box.listen(pipe[0])
    os.write(pipe[1], b"!")
    box.put("first")
    assert box.get() == "first" and box.get() is None


def test_its_descriptor_goes_with_it():
    gc.collect()  # others', of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    box = Inbox()
    box.put(1)
    del box
    assert set(os.listdir("/proc/self/fd")) == before
