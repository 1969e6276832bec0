"""The chain of actions, messages and pauses that made a call as long as it was: shortening anything else gains nothing at once."""

from collections import Counter
from dataclasses import dataclass

from rrfp.report.steps import Graph, Step


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
    while step is not None:
        add(str(step.action), step.start, step.end, "compute", step)
        message = step.last_input
        if message is not None and message.arrived > step.free and message.arrived <= step.start + 1e-9:
            _pause(graph, step, min(message.arrived, step.start), add)
            producer = message.producer
            # Where a record is lost the path goes on at the rank itself, as if the message had been on its way all the time.
            left = max(message.sent, producer.end) if producer is not None else step.free
            if message.edge is not None:
                add(f"message {message.edge} {message.microbatch}", left, min(message.arrived, step.start), "message", step)
            if producer is not None:
                add("runtime", producer.end, left, "runtime", producer)
                step = producer
                continue
        else:
            _pause(graph, step, step.free, add)
        step = step.previous
    return segments[::-1]


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
