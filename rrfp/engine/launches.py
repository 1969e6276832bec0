"""Actions on a GPU: launched by the engine's thread, completed when the device has run them.

Invariant 8: what hangs on an action (readiness, credits, what is in flight) hangs on its completion, which a worker waits for, one
action after another: the compute stream runs them in that order. Nobody waits for the device as a whole, nor in the engine's thread.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from rrfp.comm.device import Device, Event, Worker
from rrfp.engine.executor import Done, Outputs, Span
from rrfp.errors import PipelineError


class Running(NamedTuple):
    """An action that is being launched: the event before it, its kind and stage."""

    start: Event
    key: tuple[str, int]


class Launches:
    """One device's actions over all calls.

    Args:
        device: the GPU.
        run_ahead: how many actions may be queued on the device behind the one that runs. With none, the device idles from an action's end
            until the host has seen it, decided and launched; with each one more, a decision is older when it takes effect.
        fail: fail(where, text, traceback) of an error of the device.
        clock: the engine's.
    """

    def __init__(self, device: Device, *, run_ahead: int, fail: Callable[[str, str, str], None],
                 clock: Callable[[], float] = time.monotonic):
        self.capacity = 1 + run_ahead
        self.device, self._clock = device, clock
        self._worker = Worker(device, name="rrfp-completions", fail=fail)
        self._worker.start()
        self._anchor: tuple[Event, float] | None = None
        """An event, and when the host saw it: what relates the device's times to the clock's."""
        self._took: dict[tuple[str, int], float] = {}

    def begin(self) -> None:
        """A call starts: relate the device's clock to the host's anew."""
        event = self.device.record(self.device.compute)

        def seen() -> None:
            self.device.synchronize(event)
            self._anchor = event, self._clock()

        self._worker.put(seen)

    def start(self, kind: str, stage: int) -> Running:
        """The next thing that is queued on the compute stream is an action's."""
        return Running(self.device.record(self.device.compute), (kind, stage))

    def took(self, kind: str, stage: int) -> float:
        """Seconds that such an action took when it completed last, without what it was lengthened by; 0 before the first."""
        return self._took.get((kind, stage), 0.0)

    def finish(self, running: Running, outputs: Outputs, done: Done, *, lengthen: float = 0.0) -> None:
        """All of the action is queued: call `done` when it has run. lengthen: seconds for which the device stays busy behind it."""
        device = self.device
        computed = end = device.record(device.compute)
        if lengthen > 0:
            device.delay(lengthen, device.compute)
            end = device.record(device.compute)

        def complete() -> None:
            device.synchronize(end)
            now = self._clock()
            anchor, anchored = self._anchor
            times = [anchored + device.seconds(anchor, event) for event in (running.start, end)]
            self._took[running.key] = device.seconds(running.start, computed)
            padded = device.seconds(computed, end) if lengthen > 0 else 0.0
            done(outputs, Span(min(times[0], now), min(times[1], now), padded))

        self._worker.put(complete)

    def close(self, *, deadline: float) -> None:
        """Raises PipelineError if an action is still running then."""
        if not self._worker.stop(until=time.monotonic() + deadline):
            raise PipelineError("an action on the GPU did not end in time")
