"""Hints: which of the admitted actions goes first. One fresh object per rank and call.

A hint ranks, it never blocks, with two exceptions that say so: `Announced` waits, for a bounded time, for work a neighbour has
started; `Strict` obeys its list.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from rrfp.action import Action
from rrfp.scheduler.arbiter import WAIT, Decision, Queue, Scheduler, direction

Row = tuple[tuple[Action, ...], ...]
"""A list for one rank: groups in order. A group of several actions is a tie: whichever is ready first may go first."""


class Hint:
    """What a scheduler asks of a hint."""

    strict = False
    """True: an order to obey; nothing may overrule it."""
    listens = False
    """True: it looks at what neighbours announce, so every stage has to announce what it starts."""

    def bind(self, scheduler: Scheduler) -> None:
        """Called once, before the first question."""

    def keys(self, queue: Queue) -> Mapping[Action, int]:
        """Order among the ready microbatches of one (stage, kind) when the order is free: smallest first."""
        return {action: index for index, action in enumerate(queue.actions)}

    def choose(self, scheduler: Scheduler, now: float) -> Decision:
        """What to launch. Asked twice without news, the answer is the same."""
        raise NotImplementedError

    def launched(self, action: Action) -> None:
        """`action` was launched: here a rule advances."""


def _first(scheduler: Scheduler, *ways: str) -> Decision:
    for way in ways:
        if (action := scheduler.best(way)) is not None:
            return Decision(action)
    return WAIT


class Rounds(Hint):
    """The paper's rounds: at most one action of the first direction, then at most one of the second (Appendix A, Algorithm 1).

    W runs only when neither is ready, and then a new round begins (section 7.1): `bfw` is `bf` with I for B. `fb` probes F first.
    What the paper leaves open: the W is the oldest of the rank; a forward that the limit does not admit is not ready; at the bound of
    pending W the scheduler runs one before another I; what is left at the end drains oldest first.
    """

    def __init__(self, probes: str):
        self._probes = probes
        self._next = 0

    def choose(self, scheduler, now):
        decision = _first(scheduler, *self._probes[self._next:], *self._probes, "W")
        if decision.action is None:
            # A probe of both directions found nothing: the round is over, as in Algorithm 1's loop.
            self._next = 0
        return decision

    def launched(self, action):
        way = direction(action.kind)
        if way != "other":
            self._next = (self._probes.index(way) + 1) % 2 if way in self._probes else 0


class Prefer(Hint):
    """A fixed preference: `b-first` or `f-first`, W when neither is ready."""

    def __init__(self, ways: str):
        self._ways = ways

    def choose(self, scheduler, now):
        return _first(scheduler, *self._ways, "W")


class Alternate(Hint):
    """`alt`: after F prefer B, after B prefer F, else whatever is ready; W when neither is."""

    _last = "B"

    def choose(self, scheduler, now):
        return _first(scheduler, *("BF" if self._last == "F" else "FB"), "W")

    def launched(self, action):
        if direction(action.kind) in "FB":
            self._last = direction(action.kind)


def _unreturned(scheduler: Scheduler) -> int:
    """Forwards started whose backward has not started: F - B, or F - I when the backward is split."""
    return scheduler.started["F"] - scheduler.started["B"] - scheduler.started["I"]


class Fill(Alternate):
    """`fill`: F first while fewer than `target` are out, then B first. `fill-alt`: above the target alternate. W in gaps."""

    def __init__(self, target: int, *, alternate: bool = False):
        self._target, self._alternate = target, alternate

    def choose(self, scheduler, now):
        if _unreturned(scheduler) < self._target:
            return _first(scheduler, *"FBW")
        return super().choose(scheduler, now) if self._alternate else _first(scheduler, *"BFW")


class FillRelease(Hint):
    """`fill-r`: like fill, but when memory holds back a wanted F, W goes before another I."""

    def __init__(self, target: int):
        self._target = target

    def choose(self, scheduler, now):
        forwards_left = any(queue.kind == "F" and queue.head is not None for queue in scheduler.queues)
        if forwards_left and _unreturned(scheduler) < min(self._target, scheduler.limit):
            if scheduler.in_flight >= scheduler.limit:
                return _first(scheduler, *"FWB")
            return _first(scheduler, *"FBW")
        return _first(scheduler, *"BFW")


class _Listed(Hint):
    """What hints over a list share: where each entry stands.

    In microbatch order a list is read as a sequence of (stage, kind): its n-th entry of one belongs to the n-th microbatch.
    """

    def __init__(self, row: Row):
        self._row = row
        self._place = {action: place for place, action in enumerate(action for group in row for action in group)}
        self._places: dict[tuple[int, str], list[int]] = {}
        for action, place in self._place.items():
            self._places.setdefault((action.stage, action.kind), []).append(place)

    def bind(self, scheduler):
        self._free = scheduler.order == "free"
        self._queues = [queue for queue in scheduler.queues if (queue.stage, queue.kind) in self._places]

    def keys(self, queue):
        return {action: self._place[action] for action in queue.actions}

    def _place_of(self, queue: Queue, action: Action) -> int:
        return self._place[action] if self._free else self._place_of_next(queue)

    def _place_of_next(self, queue: Queue) -> int:
        return self._places[queue.stage, queue.kind][queue.launched]


class Ranked(_Listed):
    """A list in ready mode: of everything admitted, the entry that stands first in it."""

    def choose(self, scheduler, now):
        best = None
        for queue in self._queues:
            if (action := scheduler.candidate(queue)) is not None:
                place = self._place_of(queue, action)
                if best is None or place < best[0]:
                    best = (place, action)
        return WAIT if best is None else Decision(best[1])


class Announced(_Listed):
    """Wait for announced work, over a list: never leave the list for a moment's gain while its next input is on its way.

    Places go by count, in free order too: the n-th entry of a (stage, kind) is whichever of its microbatches runs n-th.

    The list's head runs if it can. If its input is missing but a neighbour announced that it started the producing action,
    nothing runs (not even W) until it arrives or is overdue: announced start + the neighbour's average + slack x own average of
    F. Else the list is left: the first entry of another kind that can run goes, over at most `skips` missing entries of the
    head's kind.

    Args:
        row: the list.
        skips: K, how many missing entries may be skipped; None: any number.
        slack: in units of this rank's own average F.
    """

    listens = True

    def __init__(self, row: Row, *, skips: int | None, slack: float):
        super().__init__(row)
        self._skips, self._slack = skips, slack

    def choose(self, scheduler, now):
        # The head's queue is the one whose first entry not launched stands first.
        head, head_place = None, None
        for queue in self._queues:
            if queue.launched < len(queue.actions):
                place = self._place_of_next(queue)
                if head is None or place < head_place:
                    head, head_place = queue, place
        if head is None:
            return WAIT
        ready = scheduler.ready_in(head)
        if ready is not None and scheduler.admits(head, ready):
            return Decision(ready)
        detour = self._detour(scheduler, head, missing=ready is None)
        if detour is None:
            return WAIT
        # The hold is timed from the head's own announcement, not from the newest one.
        until = None if ready is not None else scheduler.hold_until(head.head, self._slack)
        return Decision(None, until) if until is not None and now < until else Decision(detour)

    def _detour(self, scheduler: Scheduler, head: Queue, *, missing: bool) -> Action | None:
        best = None
        for queue in self._queues:
            if queue is not head and (action := scheduler.candidate(queue)) is not None:
                place = self._place_of_next(queue)
                if best is None or place < best[0]:
                    best = (place, action)
        if best is None:
            return None
        if missing and self._skips is not None:
            # Entries of the head's kind that stand before the detour and have not run. Memory holding a ready head is not a skip.
            before = bisect_left(self._places[head.stage, head.kind], best[0]) - head.launched
            if before > self._skips:
                return None
        return best[1]


class Strict(_Listed):
    """The control: the list obeyed as a fixed order. Its next group runs, in whatever order its actions become ready."""

    strict = True

    @property
    def due(self) -> Sequence[Action]:
        """Actions of the group that is next, less those launched."""
        return self._left

    def bind(self, scheduler):
        super().bind(scheduler)
        self._at = 0
        self._left: Sequence[Action] = self._row[0] if self._row else ()

    def choose(self, scheduler, now):
        for action in self._left:
            # Not just any ready action: inside a tie, too, microbatches of one (stage, kind) keep their order.
            if scheduler.candidate(scheduler.queue(action.stage, action.kind)) == action:
                return Decision(action)
        return WAIT

    def launched(self, action):
        self._left = tuple(other for other in self._left if other != action)
        if not self._left and self._at + 1 < len(self._row):
            self._at += 1
            self._left = self._row[self._at]
