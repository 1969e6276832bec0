"""A virtual clock over the schedulers of all ranks: durations and delays in, makespan and spans out."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from rrfp.action import Action, Edge
from rrfp.errors import RRFPError
from rrfp.placement import Placement
from rrfp.scheduler.arbiter import Scheduler


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
    delay: Callable[[Edge, Action], float] = lambda edge, action: 0.0,
    *,
    lanes: int = 1,
    announce_delay: float = 0.0,
) -> Result:
    """Run the schedulers of all ranks to the end.

    Args:
        schedulers: one per rank, fresh.
        duration: how long an action takes.
        delay: how long the message of an action spends on an edge, not counting what queues before it on its lane.
        lanes: FIFO lanes per edge; messages take them in turn, and one never overtakes another of its own lane.
        announce_delay: how long an announcement takes.

    Raises:
        Deadlock: if nothing can move any more.
    """
    receivers: dict[Edge, list[int]] = {}
    for index, scheduler in enumerate(schedulers):
        for edge in sorted({edge for task in scheduler.dependencies.tasks.values() for edge in task.arrivals}):
            receivers.setdefault(edge, []).append(index)
    events: list[tuple[float, int, Callable[[float], None], int]] = []
    serial = count()
    busy = [False] * len(schedulers)
    timer: list[float | None] = [None] * len(schedulers)
    sent: dict[Edge, int] = {}
    lane_free: dict[tuple[Edge, int], float] = {}
    spans: dict[Action, Span] = {}
    rows: list[list[Action]] = [[] for _ in schedulers]

    def at(time: float, rank: int, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(serial), what, rank))

    def finish(rank: int, action: Action, now: float) -> None:
        scheduler, busy[rank] = schedulers[rank], False
        scheduler.completed(action, now)
        for edge in scheduler.task(action).sends:
            number = sent[edge] = sent.get(edge, -1) + 1
            lane = edge, number % lanes
            # A lane is FIFO: a message is never there before the one that left before it.
            lane_free[lane] = arrival = max(now + delay(edge, action), lane_free.get(lane, 0.0))
            for receiver in receivers.get(edge, ()):
                at(arrival, receiver, lambda _, r=receiver, e=edge: schedulers[r].arrived(e, action.microbatch))

    def start(rank: int, action: Action, now: float) -> None:
        scheduler, busy[rank] = schedulers[rank], True
        scheduler.launched(action, now)
        rows[rank].append(action)
        spans[action] = Span(now, now + duration(action))
        at(spans[action].end, rank, lambda time: finish(rank, action, time))
        for edge in scheduler.task(action).sends:
            for receiver in receivers.get(edge, ()):
                news = (edge, action.microbatch, now, scheduler.duration_of(action.kind))
                if announce_delay:
                    at(now + announce_delay, receiver, lambda _, r=receiver, n=news: schedulers[r].announced(*n))
                else:
                    schedulers[receiver].announced(*news)

    def ask(rank: int, now: float) -> None:
        if busy[rank]:
            return
        decision = schedulers[rank].choose(now)
        if decision.action is not None:
            start(rank, decision.action, now)
        elif decision.wake_at is not None and decision.wake_at != timer[rank]:
            timer[rank] = decision.wake_at
            at(decision.wake_at, rank, lambda _: None)

    now = 0.0
    for rank in range(len(schedulers)):
        ask(rank, now)
    while events:
        now, touched = events[0][0], set()
        # Everything that happens at one instant is known before anybody decides.
        while events and events[0][0] == now:
            _, _, what, rank = heapq.heappop(events)
            what(now)
            touched.add(rank)
        for rank in sorted(touched):
            ask(rank, now)
    if not all(scheduler.finished for scheduler in schedulers):
        raise Deadlock("; ".join(f"rank {rank}: {', '.join(s.explain())}" for rank, s in enumerate(schedulers) if not s.finished))
    makespan = max((span.end for span in spans.values()), default=0.0)
    return Result(makespan, spans, rows, [scheduler.peak_in_flight for scheduler in schedulers])


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
) -> Result:
    """One call of a chain under a policy.

    Args:
        policy: a `rrfp.policy.Policy`.
        durations: by (kind, stage, microbatch), as `rrfp.simulate.scenarios.draw` gives them.
        delays: by (kind, stage, microbatch) of the action that the message makes ready, kind F or B; B serves I too.
        lanes: default: the policy's.
    """
    schedulers = [policy.scheduler(placement, r, microbatches, forward_only=forward_only) for r in range(placement.ranks)]

    def delay(edge: Edge, action: Action) -> float:
        return delays["F" if action.kind == "F" else "B", edge.destination, action.microbatch] if delays else 0.0

    return drive(schedulers, lambda action: durations[action.kind, action.stage, action.microbatch], delay,
                 lanes=lanes or policy.lanes, announce_delay=announce_delay)
