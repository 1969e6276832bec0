"""One call of a trace as a graph: every action with the action before it on its rank and what it needed from elsewhere."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rrfp.action import Action, Edge
from rrfp.simulate.measured import CREDITS
from rrfp.trace.files import Call, Ran, Timeline

_SLACK = 1e-9  # seconds: rounding of times that are equal by construction


@dataclass(eq=False)
class Input:
    """What an action needed from another one. Over an edge it was `sent` and has `arrived`; a local hand-off has edge None."""

    edge: Edge | None
    microbatch: int | None
    sent: float
    """Where the sender's record is lost, equal to `arrived`."""
    arrived: float
    producer: "Step | None"
    """None where the trace does not hold it."""
    left: float = 0.0
    """From when on only the edge itself held it: sent, and with a credit of its receiver, or with a receiver who came for it."""

    @property
    def latency(self) -> float:
        return self.arrived - self.left


@dataclass(eq=False)
class Step:
    """An action that ran, times in seconds from the call's begin."""

    action: Action
    rank: int
    start: float
    end: float
    in_flight: int
    padded: float
    previous: "Step | None" = None
    """What the rank ran before it."""
    inputs: list[Input] = field(default_factory=list)

    @property
    def free(self) -> float:
        """When the rank had nothing else to do; 0.0 at the call's begin."""
        return self.previous.end if self.previous is not None else 0.0

    @property
    def last_input(self) -> Input | None:
        return max(self.inputs, key=lambda each: each.arrived, default=None)

    @property
    def ready(self) -> float:
        """When the last of its inputs was there; 0.0 if it needs none."""
        last = self.last_input
        return last.arrived if last is not None else 0.0

    @property
    def direction(self) -> str:
        """`F`, or `B` for whatever carries gradients or follows them."""
        return "F" if self.action.kind == "F" else "B"


@dataclass(eq=False)
class Graph:
    """One call of every rank. Times are seconds from `begin`, which is the first rank's begin on the timeline's clock."""

    number: int
    begin: float
    seconds: float
    rows: dict[int, list[Step]]
    """Rank -> its actions by start."""
    rank_of: dict[int, int]
    microbatches: int
    forward_only: bool
    mode: str | None
    waits: dict[int, list[tuple[str, float, float]]]
    """Rank -> the waits as they were recorded: cause, start, end."""
    ended: dict[int, float]
    """Rank -> when its call ended, or, of a rank that was lost, the last thing known of it."""
    lost: frozenset[int]
    latencies: dict[Edge, list[Input]]
    """Edge -> its messages whose sending and arrival are both known, in the order of sending."""

    @property
    def steps(self) -> Iterable[Step]:
        return (step for row in self.rows.values() for step in row)

    def waited(self, rank: int, start: float, end: float) -> list[tuple[str, float, float]]:
        """The recorded waits of a rank that overlap (start, end). They don't overlap each other, so their ends ascend too."""
        waits = self.waits[rank]
        first = bisect_right(waits, start, key=lambda wait: wait[2])
        return waits[first:bisect_left(waits, end, key=lambda wait: wait[1])]

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in self.rank_of.items() if owner == rank]


def graph(timeline: Timeline, number: int) -> Graph:
    """The graph of one call. Raises ConfigurationError if no rank has it."""
    calls = timeline.of_call(number)
    begin = min(call.begin for call in calls.values())
    end = max(call.end for call in calls.values())
    rows = {rank: _row(rank, call, begin) for rank, call in calls.items()}
    latencies = _connect(rows, calls, begin)
    first = next(iter(calls.values()))
    found = Graph(
        number=number,
        begin=begin,
        seconds=end - begin,
        rows=rows,
        rank_of=timeline.rank_of,
        microbatches=first.microbatches,
        forward_only=first.forward_only,
        mode=first.mode,
        waits={rank: sorted(((w.cause, w.start - begin, w.end - begin) for w in call.waits), key=lambda wait: wait[1])
               for rank, call in calls.items()},
        ended={rank: call.end - begin for rank, call in calls.items()},
        lost=frozenset(rank for rank, call in calls.items() if not call.complete),
        latencies=latencies,
    )
    _date(found)
    return found


def _row(rank: int, call: Call, begin: float) -> list[Step]:
    row: list[Step] = []
    for ran in sorted(call.actions, key=lambda ran: (ran.start, ran.end)):
        row.append(_step(rank, ran, begin, row[-1] if row else None))
    return row


def _step(rank: int, ran: Ran, begin: float, previous: Step | None) -> Step:
    # Overlaps (a recorder's mistake, clocks of two hosts) are clipped as the breakdown clips them.
    start = max(ran.start - begin, previous.end if previous is not None else 0.0)
    return Step(ran.action, rank, start, max(start, ran.end - begin), ran.in_flight, ran.padded, previous)


def _connect(rows: dict[int, list[Step]], calls: dict[int, Call], begin: float) -> dict[Edge, list[Input]]:
    """Gives every step its inputs, from what was sent and what arrived; returns the messages by edge."""
    at: dict[tuple[int, int | None], list[Step]] = defaultdict(list)
    known: dict[Action, Step] = {}
    for row in rows.values():
        for step in row:
            at[step.action.stage, step.action.microbatch].append(step)
            known[step.action] = step
    sent = {(each.edge, each.microbatch): each.time - begin for call in calls.values() for each in call.sent}
    latencies: dict[Edge, list[Input]] = defaultdict(list)
    for call in calls.values():
        for edge, microbatch, time in call.arrivals:
            arrived = time - begin
            left = sent.get((edge, microbatch))
            message = Input(edge, microbatch, arrived if left is None else min(left, arrived), arrived, None, arrived)
            if left is not None:
                sources = at[edge.source, microbatch]
                before = bisect_right(sources, left + _SLACK, key=lambda step: step.end) - 1
                message.producer = sources[before] if before >= 0 else None
                latencies[edge].append(message)
            # The first action of that microbatch at the destination that started afterwards is the one that needed it.
            targets = at[edge.destination, microbatch]
            after = bisect_left(targets, arrived - _SLACK, key=lambda step: step.start)
            if after < len(targets):
                targets[after].inputs.append(message)
    for step in known.values():
        kind, stage, microbatch = step.action
        # Between two stages of one rank nothing is sent: a hand-off. Backwards use what their own forward left behind.
        neighbour = stage - 1 if kind == "F" else stage + 1
        local = [Action(kind, neighbour, microbatch)] if kind in ("F", "B", "I") else []
        if kind == "W":
            local = [Action("I", stage, microbatch)]
        elif kind in ("B", "I"):
            local.append(Action("F", stage, microbatch))
        for each in local:
            other = known.get(each)
            if other is not None and other.rank == step.rank and other.end <= step.start + _SLACK:
                step.inputs.append(Input(None, microbatch, other.end, other.end, other, other.end))
    return dict(latencies)


def _date(graph: Graph) -> None:
    """Tells each message when only its edge held it."""
    meets = graph.mode is not None and not graph.mode.startswith(("ready:", "strict:"))
    ends = {rank: [step.end for step in row] for rank, row in graph.rows.items()}
    consumed: dict[Edge, list[float]] = defaultdict(list)
    for step in graph.steps:
        for each in step.inputs:
            if each.edge is not None:
                consumed[each.edge].append(step.start)
    for edge, messages in graph.latencies.items():
        messages.sort(key=lambda message: message.sent)
        taken = sorted(consumed[edge])
        for index, message in enumerate(messages):
            held = message.sent
            if meets:
                # A rendezvous: its receiver comes for it when it has ended what it ran before.
                before = bisect_right(ends[graph.rank_of[edge.destination]], message.arrived) - 1
                held = ends[graph.rank_of[edge.destination]][before] if before >= 0 else 0.0
            elif CREDITS <= index < len(taken) + CREDITS:
                held = taken[index - CREDITS]
            message.left = min(max(message.sent, held), message.arrived)
