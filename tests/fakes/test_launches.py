"""Actions that complete by event: order, times, what lengthens them, errors, and the end."""

import threading

import pytest
from fake_cuda import FakeDevice

from rrfp.comm.mailbox import Mailbox
from rrfp.engine.launches import Launches
from rrfp.errors import PipelineError

WAIT = 10.0


@pytest.fixture
def launches(machine):
    """launches(**options): (launches, its device, what completes, what fails)."""
    made = []

    def make(**options):
        device, completed, failed = FakeDevice(machine()), Mailbox(), Mailbox()
        made.append(Launches(device, run_ahead=1, fail=lambda *words: failed.put(words), **options))
        return made[-1], device, completed, failed

    yield make
    for one in made:
        one.close(deadline=WAIT)


def finish(one, completed, kind, **options):
    running = one.start(kind, 0)
    one.finish(running, {kind: ()}, lambda outputs, span: completed.put((outputs, span)), **options)


def test_completions_come_in_the_order_of_launches_with_the_devices_times(launches):
    one, device, completed, _ = launches(clock=lambda: 1e9)
    assert one.capacity == 2 and one.took("F", 0) == 0.0
    one.begin()
    for kind in "FBF":
        device.kernel(lambda: None)
        finish(one, completed, kind)
    spans = []
    for kind in "FBF":
        outputs, span = completed.get(timeout=WAIT)
        assert list(outputs) == [kind] and span.padded == 0.0
        spans.append(span)
    assert all(a.start <= a.end <= b.start for a, b in zip(spans, spans[1:]))
    assert one.took("F", 0) > 0


def test_what_lengthens_an_action_is_known_and_not_counted_as_its_own(launches):
    one, _, completed, _ = launches()
    one.begin()
    finish(one, completed, "F", lengthen=5.0)
    _, span = completed.get(timeout=WAIT)
    assert span.padded == pytest.approx(5.0, abs=1e-3) and one.took("F", 0) < 1.0


def test_no_action_ends_after_the_host_has_seen_it(launches):
    one, _, completed, _ = launches(clock=lambda: 7.0)
    one.begin()
    finish(one, completed, "F", lengthen=5.0)
    _, span = completed.get(timeout=WAIT)
    assert span.start <= span.end == 7.0


def test_an_error_of_the_device_is_told(launches):
    one, device, completed, failed = launches()
    one.begin()
    device.machine.break_down("CUDA error: misaligned address")
    finish(one, completed, "F")
    where, text, trace = failed.get(timeout=WAIT)
    assert where == "the thread rrfp-completions" and "misaligned address" in text and "Traceback" in trace


def test_an_action_that_never_ends_is_named_at_the_end(machine, monkeypatch):
    device, gate = FakeDevice(machine()), threading.Event()
    one = Launches(device, run_ahead=0, fail=lambda *words: None)
    monkeypatch.setattr(device, "synchronize", lambda event: gate.wait(WAIT))
    one.begin()
    with pytest.raises(PipelineError, match="did not end in time"):
        one.close(deadline=0.01)
    gate.set()
    one.close(deadline=WAIT)
