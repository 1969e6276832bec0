"""Why each action started when it did, and what every idle second of a rank was for."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rrfp.action import Edge
from rrfp.report.steps import Graph, Input, Step

CAUSES = (
    "warm-up", "drain", "late message", "slow upstream", "slow downstream", "memory limit", "fixed order", "announced wait", "runtime",
)
"""What a rank was idle for, in the order of reports.

    warm-up, drain    before the rank's first backward, after its last forward: the bubble of any pipeline
    late message      what it waited for had been sent, longer ago than messages usually take
    slow upstream     the activation that it waited for was not computed yet;  slow downstream: the gradient
    memory limit      it held a ready forward back while a later stage was idle for want of one
    fixed order       something was ready, but not what the order demanded next
    announced wait    something was ready, but announced work was worth waiting for
    runtime           the rest: choosing, bookkeeping, Megatron's own work around the actions

Where an agreement took time that is a cause of its own, `agreement`; of a rank that was lost, what follows is `lost`.
"""

LATE = 2.0
"""A message is late if it took longer than this many times what is usual..."""
NOTICE = 0.02
"""...and if that excess is at least this share of a usual action: shorter is no cause of anything."""


@dataclass(frozen=True)
class Wait:
    """A piece of a rank's idle time: the waits of a rank and its actions tile the call. Seconds from the call's begin."""

    rank: int
    cause: str
    """One of `CAUSES`, `agreement` or `lost`."""
    start: float
    end: float
    culprit: str | None
    """What it waited for then: the action that was running (`5F3`), the edge that carried it (`4>5`), or None."""


def usual_latency(graph: Graph) -> dict[Edge, float]:
    """What a message takes when nothing is wrong with its edge: the edge's median, or that of all edges if it is smaller."""
    medians = {edge: median(each.latency for each in messages) for edge, messages in graph.latencies.items()}
    overall = median(medians.values()) if medians else 0.0
    return {edge: min(value, overall) for edge, value in medians.items()}


def notable(graph: Graph) -> float:
    """The shortest excess, in seconds, that is worth a word."""
    durations = [step.end - step.start for step in graph.steps]
    return NOTICE * median(durations) if durations else 0.0


class Explanation:
    """Every action's reason and every rank's waits."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.usual = usual_latency(graph)
        self.notable = notable(graph)
        self._starts = {rank: [step.start for step in row] for rank, row in graph.rows.items()}
        self._hungry = self._hunger()
        self.waits: list[Wait] = []
        """By rank, then start."""
        self.reasons: dict[Step, tuple[str, str | None]] = {}
        """Step -> why it started then, and what the rank idled for before it (None: for nothing)."""
        for rank in sorted(graph.rows):
            self._explain_rank(rank)

    # ------------------------------------------------------------------ messages
    def late_since(self, message: Input) -> float | None:
        """From when on a message was late; None if it was not."""
        if message.edge is None or message.edge not in self.usual:
            return None
        usual, took = self.usual[message.edge], message.latency
        late = took > LATE * usual and took - usual > self.notable
        return message.left + usual if late else None

    def _hunger(self) -> dict[int, list[tuple[float, float]]]:
        """Rank -> when a stage after its first was idle for want of an activation, as disjoint intervals."""
        gaps = {}
        for rank, row in self.graph.rows.items():
            gaps[rank] = [(step.free, step.ready) for step in row if step.direction == "F" and step.ready > step.free]
        several = len(self.graph.rank_of) > len(self.graph.rows)
        hungry, after = {}, []
        for rank in sorted(self.graph.rows, reverse=True):
            # With several chunks every rank has stages after this one's.
            others = [gap for other in gaps if other != rank for gap in gaps[other]] if several else after
            hungry[rank] = _union(others)
            after = _union(after + gaps[rank])
        return hungry

    # ------------------------------------------------------------------ one rank
    def _explain_rank(self, rank: int) -> None:
        graph, row = self.graph, self.graph.rows[rank]
        peak = max((step.in_flight for step in row), default=0)
        backwards = [step for step in row if step.direction == "B"]
        forwards = [step for step in row if step.direction == "F"]
        if backwards:
            warm, drained = backwards[0].start, forwards[-1].end if forwards else 0.0
        else:
            warm, drained = row[0].start if row else 0.0, row[-1].end if row else 0.0
        upcoming = _Upcoming(row)
        for step in row:
            upcoming.pass_(step)
            held, why = None, None
            before = step.previous
            if (other := upcoming.earliest_forward(step)) is not None and other.ready < step.ready:
                count = before.in_flight - (before.action.kind in ("B", "W")) if before is not None else 0
                held, why = other, "memory limit" if count >= peak or self._obeys_readiness else "fixed order"
            elif not self._obeys_readiness and (other := upcoming.earliest_backward(step)) is not None and other.ready < step.ready:
                held, why = other, "fixed order"
            self._gap(rank, step, warm, drained, held, why)
            self.reasons[step] = self._reason(step, peak)
        last, ended = row[-1].end if row else 0.0, graph.ended[rank]
        if rank in graph.lost:
            self._add(rank, "lost", max(last, ended), graph.seconds, None)
            self._add(rank, "runtime", last, ended, None)
        else:
            self._add(rank, "drain", last, graph.seconds, None)

    @property
    def _obeys_readiness(self) -> bool:
        return (self.graph.mode or "").startswith("ready:")

    def _gap(self, rank: int, step: Step, warm: float, drained: float, held: Step | None, why: str | None) -> None:
        """The idle time before a step, cut where its cause changes."""
        start, end = step.free, step.start
        if end <= start:
            return
        message = step.last_input
        arrived = min(max(step.ready, start), end)
        late = self.late_since(message) if message is not None else None
        slow = "slow upstream" if step.direction == "F" else "slow downstream"
        spans = [(max(begin, start), min(stop, end), cause) for cause, begin, stop in self.graph.waited(rank, start, end)]
        hungry = _overlaps(self._hungry[rank], start, arrived) if why == "memory limit" else []
        cuts = {start, arrived, end, *(time for span in spans for time in span[:2]), *(time for gap in hungry for time in gap)}
        if late is not None:
            cuts.add(late)
        if held is not None:
            cuts.add(held.ready)
        cuts = sorted(time for time in cuts if start <= time <= end)
        for begin, stop in pairwise(cuts):
            middle = (begin + stop) / 2
            recorded = {cause for first, last, cause in spans if first <= middle <= last}
            if middle < arrived:
                if late is not None and middle > late:
                    cause = "late message"
                elif "announced" in recorded:
                    cause = "announced wait"
                elif end <= warm:
                    cause = "warm-up"
                elif start >= drained:
                    cause = "drain"
                elif held is not None and middle > held.ready and (why == "fixed order" or _inside(hungry, middle)):
                    cause = why
                else:
                    cause = slow
                culprit = str(message.edge) if cause == "late message" else self._owed_by(step, begin)
            else:
                culprit = None
                if "announced" in recorded:
                    cause = "announced wait"
                elif "agreement" in recorded:
                    cause = "agreement"
                elif "send" in recorded:
                    cause = "slow downstream"
                elif not step.inputs and recorded & {"F", "B"}:
                    # It waited for something whose record is lost.
                    cause = slow
                else:
                    cause = "runtime"
            self._add(rank, cause, begin, stop, culprit)

    def _add(self, rank: int, cause: str, start: float, end: float, culprit: str | None) -> None:
        if end <= start:
            return
        last = self.waits[-1] if self.waits else None
        if last is not None and (last.rank, last.cause, last.end) == (rank, cause, start) and culprit in (None, last.culprit):
            self.waits[-1] = Wait(rank, cause, last.start, end, last.culprit)
        else:
            self.waits.append(Wait(rank, cause, start, end, culprit))

    # ------------------------------------------------------------------ who
    def _owed_by(self, step: Step, at: float) -> str | None:
        """What the input of a waiting step was held up by at that moment: an action that ran, or an edge that carried it."""
        while True:
            message = step.last_input
            if message is None or message.arrived <= at:
                running = bisect_right(self._starts[step.rank], at) - 1
                row = self.graph.rows[step.rank]
                return str(row[running].action) if running >= 0 and row[running].end > at else str(step.action)
            if message.sent <= at or message.producer is None:
                return None if message.edge is None else str(message.edge)
            if message.producer.start <= at:
                return str(message.producer.action)
            step = message.producer

    def _reason(self, step: Step, peak: int) -> tuple[str, str | None]:
        before, message = step.previous, step.last_input
        if step.ready > step.free:
            source = f"over {message.edge}" if message.producer is None else str(message.producer.action)
            if self.late_since(message) is not None:
                return f"input {source} arrived, late on {message.edge}", str(message.edge)
            return f"input {source} arrived", self._owed_by(step, step.free)
        held = [cause for cause, _, _ in self.graph.waited(step.rank, step.free, step.start)] if step.start > step.free else []
        if "announced" in held:
            return "held for announced work until then", "announced work"
        if "agreement" in held:
            return "its domain agreed", "agreement"
        if before is None:
            return "the call began", None
        freed = step.action.kind == "F" and before.action.kind in ("B", "W") and before.in_flight >= peak
        if freed and step.ready <= before.start:
            return f"{before.action} ended and freed its memory", None
        return f"after {before.action} ended", None


class _Upcoming:
    """The next action of every (stage, kind) of a row, while a reader walks along it."""

    def __init__(self, row: list[Step]):
        self._queues: dict[tuple[int, str], list[Step]] = defaultdict(list)
        for step in reversed(row):
            self._queues[step.action.stage, step.action.kind].append(step)

    def pass_(self, step: Step) -> None:
        self._queues[step.action.stage, step.action.kind].pop()

    def _earliest(self, forward: bool, but: Step) -> Step | None:
        heads = [queue[-1] for (_, kind), queue in self._queues.items() if queue and (kind == "F") == forward]
        # A backward of the same chain that needs this very step is not ready, whatever its inputs say.
        return min((head for head in heads if all(each.producer is not but for each in head.inputs)),
                   key=lambda head: head.ready, default=None)

    def earliest_forward(self, step: Step) -> Step | None:
        return self._earliest(True, step)

    def earliest_backward(self, step: Step) -> Step | None:
        return self._earliest(False, step)


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _overlaps(intervals: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """What of sorted disjoint intervals lies in [start, end]."""
    first = max(bisect_right(intervals, (start,)) - 1, 0)
    found = []
    for begin, stop in intervals[first:]:
        if begin >= end:
            break
        if stop > start:
            found.append((max(begin, start), min(stop, end)))
    return found


def _inside(intervals: list[tuple[float, float]], time: float) -> bool:
    return any(start <= time <= end for start, end in intervals)
