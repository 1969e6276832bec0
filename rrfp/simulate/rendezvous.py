"""Megatron's own 1F1B, modelled: its sends and receives meet on the compute path, and computing waits for both.

Megatron-LM runs a communication call between actions and waits for all of it: `send_forward_recv_backward` returns only when the
neighbour has taken the activation *and* sent its gradient (`forward_backward_pipelining_without_interleaving` and
`P2PCommunicator`). A stage that is late to receive so holds back its sender.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.simulate.clock import Result, Span
from rrfp.simulate.costs import Costs


class _Message(NamedTuple):
    """What makes (kind, stage, microbatch) ready at `stage`."""

    kind: str
    stage: int
    microbatch: int


class _Exchange(NamedTuple):
    """One communication call: the messages handed over and taken, all of which it waits for."""

    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]


def check_modelled(costs: Costs) -> None:
    """Raises ConfigurationError with several chunks per rank, or frozen stages."""
    if costs.chunks > 1:
        raise ConfigurationError(f"megatron-1f1b, {costs.chunks} chunks: only Megatron's schedule for one chunk per rank is modelled;"
                                 " use strict:1f1b:1f1b")
    if costs.first_trainable:
        raise ConfigurationError("megatron-1f1b, frozen stages: Megatron's own schedule runs backwards there too, and these costs know none;"
                                 " use strict:1f1b:1f1b")


def simulate_megatron_1f1b(costs: Costs, *, message_cost: float = 0.0) -> Result:
    """One training call of Megatron's non-interleaved 1F1B.

    A message moves when both sides have asked for it and takes `message_cost` seconds of both. Where it is late, its receiver gets
    it that much after it was sent; its sender does not wait for that.

    Raises:
        ConfigurationError: as `check_modelled` does.
    """
    check_modelled(costs)
    ranks, durations = costs.stages, costs.durations
    spans: dict[Action, Span] = {}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    sent: dict[_Message, float] = {}
    awaited: dict[_Message, float] = {}

    def run(rank: int) -> Iterator[_Exchange]:
        """A rank's course: yields a call whose other sides are not there yet, to be continued when they are."""
        now = 0.0
        for step in _course(rank, ranks, costs.microbatches):
            if isinstance(step, Action):
                spans[step] = Span(now, now + durations[step])
                rows[rank].append(step)
                now = spans[step].end
                continue
            sent.update((message, now) for message in step.sends)
            awaited.update((message, now) for message in step.receives)
            yield step
            moved = [max(sent[message], awaited[message]) + message_cost for message in (*step.sends, *step.receives)]
            late = [sent[message] + message_cost + costs.delays[message] for message in step.receives]
            now = max([now, *moved, *late])

    courses = [run(rank) for rank in range(ranks)]
    waiting = [next(course, None) for course in courses]
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        step = waiting[rank]
        if step is not None and all(message in sent and message in awaited for message in (*step.sends, *step.receives)):
            waiting[rank] = next(courses[rank], None)
            # Itself again, and the neighbours, who may wait for what it has just posted.
            ready.extend(other for other in (rank, rank - 1, rank + 1) if 0 <= other < ranks)
    peaks = [min(ranks - rank, costs.microbatches) for rank in range(ranks)]
    return Result(max(span.end for span in spans.values()), spans, rows, peaks)


def _course(rank: int, ranks: int, microbatches: int) -> Iterator[Action | _Exchange]:
    """Megatron's order of computing and communicating on one rank."""
    warm_up = min(ranks - rank - 1, microbatches)
    steady = microbatches - warm_up

    def exchange(*, f_out: int | None = None, b_out: int | None = None, f_in: int | None = None, b_in: int | None = None):
        up, down = rank < ranks - 1, rank > 0
        sends = [_Message("F", rank + 1, f_out)] if up and f_out is not None else []
        sends += [_Message("B", rank - 1, b_out)] if down and b_out is not None else []
        receives = [_Message("F", rank, f_in)] if down and f_in is not None else []
        receives += [_Message("B", rank, b_in)] if up and b_in is not None else []
        if sends or receives:
            yield _Exchange(tuple(sends), tuple(receives))

    for m in range(warm_up):
        yield from exchange(f_in=m)
        yield Action("F", rank, m)
        yield from exchange(f_out=m)
    if steady:
        yield from exchange(f_in=warm_up)
    for m in range(steady):
        yield Action("F", rank, warm_up + m)
        yield from exchange(f_out=warm_up + m, b_in=m)
        yield Action("B", rank, m)
        yield from exchange(b_out=m, f_in=warm_up + m + 1 if m + 1 < steady else None)
    for m in range(steady, microbatches):
        yield from exchange(b_in=m)
        yield Action("B", rank, m)
        yield from exchange(b_out=m)
