"""The chain of actions, messages and pauses that made a call as long as it was: shortening anything else gains nothing at once."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from rrfp.report.steps import Graph, Input, Step


@dataclass(frozen=True)
class Segment:
    """A piece of the critical path; its segments tile the call. Seconds from the call's begin."""

    name: str
    """An action, `message 1>2 3` (edge and microbatch), or what a pause was for."""
    start: float
    end: float
    what: str
    """`compute`, `message`, `announced wait` or `runtime`."""
    rank: int
    """Of a message: the receiver's."""
    stage: int | None
    """Of an action; of a message the receiving stage."""

    @property
    def cause(self) -> str:
        """What totals are kept for: `compute stage 3`, `message 2>3`, `runtime`."""
        if self.what == "compute":
            return f"compute stage {self.stage}"
        return self.name.rsplit(" ", 1)[0] if self.what == "message" else self.what


def critical_path(graph: Graph) -> list[Segment]:
    """From the call's begin to its end: walked backwards from the last action, each time to what happened last before.

    That is the message which made it ready if it arrived after the rank was free, else the rank's previous action (which is also
    what frees memory). Empty where no action was recorded.
    """
    last = max(graph.steps, key=lambda step: step.end, default=None)
    if last is None:
        return []
    segments: list[Segment] = []

    def add(name: str, start: float, end: float, what: str, step: Step) -> None:
        if end > start:
            stage = None if what in ("runtime", "announced wait") else step.action.stage
            segments.append(Segment(name, start, end, what, step.rank, stage))

    add("runtime", last.end, graph.seconds, "runtime", last)
    step: Step | None = last
    started = False
    """Whether the path leads to the start of `step`, not through its work."""
    while step is not None:
        if not started:
            add(str(step.action), step.start, step.end, "compute", step)
        started = False
        message = step.last_input
        if message is None or not step.free < message.arrived <= step.start + 1e-9:
            _pause(graph, step, step.free, add)
            step = step.previous
            continue
        arrived, producer = min(message.arrived, step.start), message.producer
        _pause(graph, step, arrived, add)
        held = _holder(graph, step, message)
        if held is not None:
            holder, started = held
            left = holder.start if started else holder.end
        elif producer is not None:
            left = max(message.sent, producer.end)
            holder = producer
        else:
            # Where a record is lost the path goes on at the rank itself, as if the message had been on its way all the time.
            holder, left = step.previous, step.free
        if message.edge is not None:
            add(f"message {message.edge} {message.microbatch}", left, arrived, "message", step)
        if held is None and producer is not None:
            add("runtime", producer.end, left, "runtime", producer)
        step = holder
    return segments[::-1]


def _holder(graph: Graph, step: Step, message: Input) -> tuple[Step, bool] | None:
    """What on the receiving rank held a message that had been sent, and whether until its start: None if nothing did.

    That is the start of the action that gave the credit back, or, in a rendezvous, the end of what ran until the receiver came.
    """
    if message.edge is None or message.left <= message.sent + 1e-9 or message.left >= message.arrived:
        return None
    row = graph.rows[step.rank]
    index = bisect_right(row, message.left, key=lambda each: each.start) - 1
    if index < 0 or row[index] is step:
        return None
    return row[index], row[index].end > message.left


def _pause(graph: Graph, step: Step, since: float, add) -> None:
    """The time between `since`, when a step could have started, and its start: held for announced work, or runtime."""
    until = step.start
    for cause, start, end in reversed(graph.waited(step.rank, since, until)):
        if cause == "announced":
            add("runtime", min(end, until), until, "runtime", step)
            add("announced wait", max(start, since), min(end, until), "announced wait", step)
            until = max(start, since)
    add("runtime", since, until, "runtime", step)


def totals(path: list[Segment]) -> dict[str, float]:
    """Cause -> seconds on the path, largest first."""
    sums: Counter[str] = Counter()
    for segment in path:
        sums[segment.cause] += segment.end - segment.start
    return dict(sums.most_common())
