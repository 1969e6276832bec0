"""A virtual clock over the schedulers of all ranks: durations and delays in, makespan and spans out."""

import gc
import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from rrfp.action import Action, Edge
from rrfp.errors import RRFPError
from rrfp.placement import Placement
from rrfp.scheduler.arbiter import MOST_UNSENT, Scheduler

CREDITS = 4
"""Messages of one edge that may be under way or not consumed yet: the transport's default."""


class Deadlock(RRFPError):
    """Nothing is under way and not everything has run. The message is every rank's explanation."""


class Span(NamedTuple):
    """When an action ran, in the unit of the durations."""

    start: float
    end: float


@dataclass(frozen=True)
class Result:
    """What a simulated call did.

    makespan: end of the last action.
    spans: start and end of every action.
    rows: per rank, its actions in the order in which they ran.
    peak_in_flight: per rank.
    """

    makespan: float
    spans: Mapping[Action, Span]
    rows: list[list[Action]]
    peak_in_flight: list[int]


def drive(
    schedulers: Sequence[Scheduler],
    duration: Callable[[Action], float],
    delay: Callable[[Edge, Action], float] | None = None,
    *,
    lanes: int = 1,
    announce: bool = True,
    announce_delay: float = 0.0,
    decision: float = 0.0,
    decide_ahead: bool = False,
) -> Result:
    """Run the schedulers of all ranks to the end.

    Where a scheduler counts what has not left (`Scheduler.bound_unsent`), its messages leave as the transport lets them: an edge has
    `CREDITS`, and one comes back when the receiver launches what the message is for. Elsewhere limits bound them, and they leave at once.

    Args:
        schedulers: one per rank, fresh.
        duration: how long an action takes.
        delay: how long the message of an action spends on an edge, not counting what queues before it on its lane; None: no time.
        lanes: FIFO lanes per edge, dealt by microbatch as the transport does; a message never overtakes another of its own lane.
        announce: whether stages announce what they start (no hint but `announced` listens).
        announce_delay: how long an announcement takes.
        decision: what every decision of a domain costs before its action starts.
        decide_ahead: a rank decides what comes next when it starts an action, if something else can run then: that costs nothing,
            but what the running action makes ready, and what arrives meanwhile, is not looked at. As `Engine`'s.

    Raises:
        Deadlock: if nothing can move any more.
    """
    receivers: dict[Edge, tuple[int, ...]] = {}
    for index, scheduler in enumerate(schedulers):
        for edge in {edge for task in scheduler.dependencies.tasks.values() for edge in task.arrivals}:
            receivers[edge] = (*receivers.get(edge, ()), index)
    # (time, serial number, rank, what, its arguments): what happens at one instant happens in the order in which it was caused.
    events: list[tuple[float, int, int, Callable[..., None] | None, tuple]] = []
    serial = count()
    push = heapq.heappush
    busy = [False] * len(schedulers)
    timer: list[float | None] = [None] * len(schedulers)
    lane_free: dict[tuple[Edge, int], float] = {}
    unsent: dict[Edge, deque[tuple[int, Action]]] = {}  # of the edges whose sender counts: who has messages that have not left
    under_way: Counter[tuple[Edge, int]] = Counter()  # by edge and receiver: left, and not consumed
    decided: list[Action | None] = [None] * len(schedulers)
    spans: dict[Action, Span] = {}
    rows: list[list[Action]] = [[] for _ in schedulers]

    def finish(rank: int, action: Action, now: float) -> None:
        scheduler, busy[rank] = schedulers[rank], False
        scheduler.completed(action, now)
        task = scheduler.task(action)
        for edge in task.sends:
            if edge not in receivers:
                continue  # nobody waits for it
            if scheduler.counts_unsent(task):
                unsent.setdefault(edge, deque()).append((rank, action))
                send(edge, now)
            else:
                leave(edge, action, now)

    def send(edge: Edge, now: float) -> None:
        while unsent[edge] and all(under_way[edge, receiver] < CREDITS for receiver in receivers[edge]):
            rank, action = unsent[edge].popleft()
            under_way.update((edge, receiver) for receiver in receivers[edge])
            push(events, (now, next(serial), rank, schedulers[rank].left, (edge,)))
            leave(edge, action, now)

    def leave(edge: Edge, action: Action, now: float) -> None:
        lane = edge, action.microbatch % lanes if lanes > 1 else 0
        # A lane is FIFO: a message is never there before the one that left before it.
        arrival = now if delay is None else now + delay(edge, action)
        lane_free[lane] = arrival = max(arrival, lane_free.get(lane, 0.0))
        for receiver in receivers[edge]:
            push(events, (arrival, next(serial), receiver, schedulers[receiver].arrived, (edge, action.microbatch)))

    def start(rank: int, action: Action, now: float) -> None:
        scheduler, busy[rank] = schedulers[rank], True
        scheduler.launched(action, now)
        if decide_ahead:
            decided[rank] = scheduler.choose(now).action
        rows[rank].append(action)
        end = now + duration(action)
        spans[action] = Span(now, end)
        push(events, (end, next(serial), rank, finish, (rank, action, end)))
        task = scheduler.task(action)
        for edge in task.arrivals if unsent else ():
            if edge in unsent:
                under_way[edge, rank] -= 1
                send(edge, now)
        if not announce:
            return
        for edge in task.sends:
            for receiver in receivers.get(edge, ()):
                news = edge, action.microbatch, now, scheduler.duration_of(action.kind)
                if announce_delay:
                    push(events, (now + announce_delay, next(serial), receiver, schedulers[receiver].announced, news))
                else:
                    schedulers[receiver].announced(*news)

    def ask(rank: int, now: float) -> None:
        action, wake_at = schedulers[rank].choose(now)
        if decided[rank] is not None:
            start(rank, decided[rank], now)
        elif action is not None:
            start(rank, action, now + decision)
        elif wake_at is not None and wake_at != timer[rank]:
            timer[rank] = wake_at
            push(events, (wake_at, next(serial), rank, None, ()))

    for rank in range(len(schedulers)):
        ask(rank, 0.0)
    while events:
        now, touched = events[0][0], set()
        # Everything that happens at one instant is known before anybody decides.
        while events and events[0][0] == now:
            _, _, rank, what, arguments = heapq.heappop(events)
            if what is not None:
                what(*arguments)
            touched.add(rank)
        for rank in sorted(touched) if len(touched) > 1 else touched:
            if not busy[rank]:
                ask(rank, now)
    if not all(scheduler.finished for scheduler in schedulers):
        raise Deadlock("; ".join(f"rank {rank}: {', '.join(s.explain())}" for rank, s in enumerate(schedulers) if not s.finished))
    makespan = max((span.end for span in spans.values()), default=0.0)
    return Result(makespan, spans, rows, [scheduler.peak_in_flight for scheduler in schedulers])


@contextmanager
def _no_garbage() -> Iterator[None]:
    """No searches for reference cycles meanwhile: of millions of small objects, none of them in a cycle, they take a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def simulate(
    policy,
    placement: Placement,
    microbatches: int,
    durations: Mapping[tuple[str, int, int], float],
    delays: Mapping[tuple[str, int, int], float] | None = None,
    *,
    lanes: int | None = None,
    announce_delay: float = 0.0,
    forward_only: bool = False,
    first_trainable: int = 0,
    weightless: Collection[int] = (),
    decision: float = 0.0,
    decide_ahead: bool = False,
) -> Result:
    """One call of a chain under a policy.

    Args:
        policy: a `rrfp.policy.Policy`.
        durations: by (kind, stage, microbatch), as `rrfp.simulate.scenarios.draw` gives them.
        delays: by (kind, stage, microbatch) of the action that the message makes ready, kind F or B; B serves I too.
        lanes: default: the policy's.
        first_trainable, weightless: as `Policy.scheduler`'s, the second of all ranks.
        decision, decide_ahead: as `drive`'s.
    """
    def delay(edge: Edge, action: Action) -> float:
        return delays["F" if action.kind == "F" else "B", edge.destination, action.microbatch]

    with _no_garbage():
        schedulers = [policy.scheduler(placement, r, microbatches, forward_only=forward_only, first_trainable=first_trainable, weightless=weightless)
                      for r in range(placement.ranks)]
        for scheduler in schedulers:
            if forward_only or min(scheduler.dependencies.stages) < first_trainable:
                scheduler.bound_unsent(MOST_UNSENT)  # as in training: nothing else holds forwards that hold no activation
        # An action is the key (kind, stage, microbatch).
        return drive(schedulers, durations.__getitem__, delay if delays else None, lanes=lanes or policy.lanes,
                     announce=schedulers[0].announces, announce_delay=announce_delay,
                     decision=decision, decide_ahead=decide_ahead)
