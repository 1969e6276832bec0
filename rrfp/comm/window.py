"""Which calls a rank listens to. Ranks are not in step between calls, so what belongs to a later one waits for it."""

from collections.abc import Callable

from rrfp.comm.transport import Announcement, Arrival, Event
from rrfp.errors import PipelineError


class CallWindow:
    """Posts what belongs to the current call, keeps what belongs to later ones. Not thread-safe: its owner locks.

    ahead: how many calls a sender may be ahead. It sends at least one message of every edge in each call, so that is its
    credits: a first stage that only runs forwards (evaluation, one microbatch per call) gets so far before anything holds it.
    """

    def __init__(self, *, ahead: int = 1):
        self._ahead = ahead
        self.call: int | None = None
        self._early: list[Arrival | Announcement] = []

    def begin(self, call: int, post: Callable[[Event], None]) -> tuple[Arrival, str] | None:
        """Start a call and post what came early for it. Returns an arrival that fits neither it nor a later one, and why."""
        if self.call is not None and call <= self.call:
            raise PipelineError(f"call {call} begins after call {self.call}: call numbers only grow")
        self.call = call
        early, self._early = self._early, []
        for event in early:
            if isinstance(event, Arrival) and (wrong := self.wrong(event.call)):
                return event, wrong
            self.deliver(event, post)
        return None

    def wrong(self, call: int) -> str | None:
        """Why a payload of this call cannot come now. Before the first call any can."""
        if self.call is None or self.call <= call <= self.call + self._ahead:
            return None
        return f"a message of call {call} during call {self.call}"

    def deliver(self, event: Arrival | Announcement, post: Callable[[Event], None]) -> None:
        if self.call is None or event.call > self.call:
            self._early.append(event)
        elif event.call == self.call:
            post(event)
        # else an announcement that came after its call: it travels beside the payloads, so that is no mistake, and of no use

    def clear(self) -> None:
        self._early.clear()
