"""A process that was stopped itself (SIGSTOP, a suspended job) must not take its own absence for the others'. The wall clock is never asked."""

import ast
import threading
from pathlib import Path
from queue import Empty
from types import SimpleNamespace

import pytest

import rrfp
from rrfp.comm.transport import Announcement
from rrfp.engine import watchdog
from rrfp.engine.failure import FailureLatch
from rrfp.engine.loop import STOPPED, Engine
from rrfp.engine.watchdog import TICK, Watcher
from rrfp.tp_coord.agreement import Solo


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    monotonic = __call__


def engine_that_waits(clock, wakes_at, event=None):
    """An engine whose inbox gives `event`, or nothing, at `wakes_at`."""
    engine = Engine(rank=0, owner=int, transport=SimpleNamespace(), agreement=Solo(), recorder=None, timeout=10.0, clock=clock)
    engine.last_progress = clock.now

    def get(timeout):
        clock.now = wakes_at
        if event is None:
            raise Empty
        return event

    engine._inbox = SimpleNamespace(get=get)
    return engine


@pytest.mark.parametrize("event", [None, Announcement(-5, None, 0, 0.0, 0.0)], ids=["nothing came", "something came"])
@pytest.mark.parametrize("late, counts_anew", [(0.0, False), (STOPPED - 0.1, False), (STOPPED + 0.1, True), (3600.0, True)])
def test_a_wait_that_ends_far_too_late_counts_from_its_end(event, late, counts_anew):
    clock = Clock()
    start, wake_at = clock.now, clock.now + 10.0
    engine = engine_that_waits(clock, wake_at + late, event)
    engine._wait(wake_at)
    assert engine.last_progress == (clock.now if counts_anew else start)


class Told:
    """Stands in for the event that ends the watcher: each wait of a tick takes as long as the next of `ticks`."""

    def __init__(self, clock, ticks):
        self._clock, self._ticks, self._set = clock, iter(ticks), False

    def wait(self, _):
        tick = next(self._ticks, None)
        if self._set or tick is None:
            return True
        self._clock.now += tick
        return False

    def set(self):
        self._set = True


def watched(monkeypatch, ticks, *, running=None):
    """The failure that a watcher latches over these ticks: its peer was last seen, and its action began, when the first tick does."""
    clock = Clock()
    begun = clock.now
    monkeypatch.setattr(watchdog, "time", clock)
    latch = FailureLatch()
    latch.set_event = Told(clock, ticks)
    engine = SimpleNamespace(
        rank=0, latch=latch, patience=20.0, timeout=20.0, in_call=True, running=running, last_progress=begun, abort=lambda failure: None,
        hang_report=lambda: "", transport=SimpleNamespace(state=lambda: {"peers": {1: clock.now - begun}}))
    watcher = object.__new__(Watcher)
    watcher.__dict__ = {"_engine": engine, "_departed": set(), "_silences": dict, "_details": "", "told": threading.Event(),
                        "_arm": lambda: None, "_abort": lambda failure: None, "_tell": lambda latch: None}
    watcher._watch()
    return latch.failure


STOP = 3600.0


@pytest.mark.parametrize("running", [None, "2F3"])
def test_after_a_stop_of_its_own_a_watcher_gives_everybody_their_time(monkeypatch, running):
    assert watched(monkeypatch, [TICK] * 5 + [STOP] + [TICK] * 10, running=running) is None
    failure = watched(monkeypatch, [TICK] * 5 + [STOP] + [TICK] * 20, running=running)
    assert failure.where == (running or "heartbeat") and " 17 s" in failure.text, failure


@pytest.mark.parametrize("running", [None, "2F3"])
def test_a_watcher_that_was_not_stopped_names_the_silent(monkeypatch, running):
    """The control."""
    assert watched(monkeypatch, [TICK] * 15, running=running) is None
    assert " 17 s" in watched(monkeypatch, [TICK] * 17, running=running).text


def test_nothing_decides_by_the_wall_clock():
    """It may jump. `time.time()` and dates stand only where they are written down for a reader."""
    allowed = {"trace/recorder.py", "engine/loop.py", "engine/watchdog.py", "megatron/failures.py", "report/hang.py"}
    root = Path(rrfp.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("time", "now", "utcnow", "strftime", "localtime", "gmtime"):
                if isinstance(node.value, ast.Name) and node.value.id in ("time", "datetime"):
                    found.add(str(path.relative_to(root)))
    assert found <= allowed, found - allowed
