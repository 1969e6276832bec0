"""Virtual time: events at exact instants, run in order, ties in order of scheduling. Nothing here sleeps."""

import heapq
import itertools
from collections.abc import Callable

from rrfp.errors import PipelineError


class VirtualClock:
    """Seconds that pass only when told to. Deterministic; not thread-safe (one driver)."""

    def __init__(self, start: float = 0.0):
        self._now = start
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at `when`, or at once when the clock moves next if that has passed."""
        heapq.heappush(self._events, (max(when, self._now), next(self._order), action))

    def next_event_time(self) -> float | None:
        """When something happens next, None if nothing is due."""
        return self._events[0][0] if self._events else None

    def advance_to(self, when: float) -> None:
        """Run everything due up to and including `when`, which becomes now. What these events schedule in that time runs too."""
        while self._events and self._events[0][0] <= when:
            self._now, _, action = heapq.heappop(self._events)
            action()
        self._now = max(self._now, when)

    def advance(self, seconds: float = 0.0) -> None:
        self.advance_to(self._now + seconds)

    def run_until_idle(self, *, most: int = 1_000_000) -> None:
        """Run until nothing is due. Raises PipelineError after `most` events: something schedules itself for ever."""
        for _ in range(most):
            if not self._events:
                return
            self.advance_to(self._events[0][0])
        raise PipelineError(f"the clock ran {most} instants and is not idle")
