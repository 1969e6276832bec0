"""Costs from the trace of a real run: what its actions and messages took, apart from what the schedule made them wait.

What belongs to the call, and so is kept: how long every action ran; how long every message was under way by itself; what the engine
spends between actions. What belongs to the schedule it ran under, and is taken out: waiting for inputs, for memory, for announced
work; a message's time behind others of its lane, or without a credit.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.simulate.clock import CREDITS
from rrfp.simulate.costs import Costs
from rrfp.trace.files import Call, Message, Timeline, read

_BASELINES = ("megatron-", "torch-")
"""Modes whose messages are received by a call that waits, on the compute path."""

Key = tuple[str, int, int]


def from_trace(directory: Path, *, call: int | None = None, calls: Sequence[int] | None = None) -> Costs:
    """The costs of a traced run, as `costs_of` takes them from its timeline.

    Args:
        directory: what --rrfp-trace was given.
        call: that call alone; default: the last training call that every rank completed.
        calls: instead, the median of these calls for each action and message, so that one call's noise isn't predicted again.

    Raises:
        ConfigurationError: there is no trace, or it does not hold a whole training call.
    """
    return costs_of(read(directory), call=call, calls=calls)


def costs_of(timeline: Timeline, *, call: int | None = None, calls: Sequence[int] | None = None) -> Costs:
    """What one call of `timeline` cost; with `calls`, the median of each action and message over these calls.

    The engine's time between actions (its median) is part of the actions' durations, and the time in which an arrival wakes it
    part of the messages' delays. What a call spends before its first action and after its last counts on the first forward of stage
    0, which every policy runs first. `seconds` is the measured time, from the first rank's begin to the last rank's end. Stages at the
    start that ran forwards only are frozen, there and in what is simulated.

    Raises:
        ConfigurationError: if a rank is missing, a call is not a complete training call, or its stages are not placed as Megatron does.
    """
    placement = _placement(timeline)
    numbers = calls or [timeline.typical_call() if call is None else call]
    measured = [_measure(timeline, number, placement) for number in numbers]
    modes = {each.mode for each in measured}
    if any((each.microbatches, each.durations.keys()) != (measured[0].microbatches, measured[0].durations.keys()) for each in measured):
        raise ConfigurationError(f"calls {', '.join(map(str, numbers))} do not run the same actions; name calls that do")
    gap = median([gap for each in measured for gap in each.gaps] or [0.0])
    wake = max(0.0, median([gap for each in measured for gap in each.wakes] or [gap]) - gap)
    durations = {key: _median(each.durations[key] for each in measured) + gap for key in measured[0].durations}
    if measured[0].split:
        durations |= {("B", s, m): taken + durations.get(("W", s, m), gap) - gap for (kind, s, m), taken in durations.items() if kind == "I"}
    durations["F", 0, 0] += max(0.0, _median(each.around for each in measured) - gap)
    delays = _delays(measured, placement, wake)
    return Costs(placement.stages, placement.stages // placement.ranks, measured[0].microbatches, durations, delays,
                 seconds=_median(each.seconds for each in measured), mode=modes.pop() if len(modes) == 1 else None)


def each_call(timeline: Timeline) -> list[Costs]:
    """The costs of every whole training call, without the first one (connecting, warming up) if there are others.

    Raises:
        ConfigurationError: if there is none.
    """
    whole = [n for n in timeline.calls if all(
        n in t.calls and t.calls[n].complete and not t.calls[n].forward_only for t in timeline.ranks.values())]
    if not whole:
        raise ConfigurationError("the trace holds no training call that every rank completed; trace a run for longer")
    return [costs_of(timeline, call=number) for number in whole[1:] or whole]


@dataclass
class _Measured:
    """One call, apart from its schedule's waiting. Seconds."""

    microbatches: int
    split: bool
    seconds: float
    mode: str | None
    around: float = 0.0
    """Before the first action and after the last."""
    durations: dict[Key, float] = field(default_factory=dict)
    known: dict[Key, float] = field(default_factory=dict)
    """Delays of messages that nothing held back."""
    most: dict[Key, float] = field(default_factory=dict)
    """Of the others only this is known: they took at most so long by themselves."""
    gaps: list[float] = field(default_factory=list)
    """From the end of an action to the start of the next, where the next was possible."""
    wakes: list[float] = field(default_factory=list)
    """From an arrival to the start of the action that waited for it."""


def _placement(timeline: Timeline) -> Placement:
    """The trace's own map of stages to ranks."""
    if timeline.missing:
        names = ", ".join(f"rank{rank}.jsonl" for rank in timeline.missing)
        raise ConfigurationError(f"the trace lacks {names}: a call is simulated from all its ranks; copy the missing files beside the others")
    owners = timeline.rank_of
    ranks = len(timeline.ranks)
    if list(owners) != list(range(len(owners))) or list(owners.values()) != [stage % ranks for stage in owners]:
        raise ConfigurationError(f"the trace places stages on ranks {list(owners.values())}: only Megatron's own placement (stage s on rank "
                                 "s mod P) can be simulated from a trace")
    return Placement.of(list(owners.values()))


def _measure(timeline: Timeline, number: int, placement: Placement) -> _Measured:
    calls = timeline.of_call(number)
    _check(calls, number, placement)
    ran = {each.action: each for call in calls.values() for each in call.actions}
    split = any(action.kind == "I" for action in ran)
    begin, end = min(call.begin for call in calls.values()), max(call.end for call in calls.values())
    measured = _Measured(calls[0].microbatches, split, end - begin, calls[0].mode)
    measured.durations = {tuple(action): each.end - each.start for action, each in ran.items()}
    _check_actions(measured, number, placement)
    first, last = min(each.start for each in ran.values()), max(each.end for each in ran.values())
    measured.around = first - begin + end - last

    arrived: dict[Action, float] = {}
    previous = {after.action: before.end for call in calls.values()
                for before, after in pairwise(sorted(call.actions, key=lambda each: each.start))}
    backward = "I" if split else "B"
    for call in calls.values():
        edges: dict[Edge, list[Message]] = {}
        for message in call.arrivals:
            edges.setdefault(message.edge, []).append(message)
        for edge, messages in edges.items():
            kind = "F" if edge.source < edge.destination else backward
            if (kind, edge.destination, 0) not in measured.durations:
                raise ConfigurationError(f"call {number}: stage {edge.destination} got gradients and ran no backward: the trace lacks some of what "
                                         "it did; name another call")
            arrived |= {Action(kind, edge.destination, message.microbatch): message.time for message in messages}
            _add_messages(measured, kind, edge, messages, ran, previous, call)
    for call in calls.values():
        holds = [wait for wait in call.waits if wait.cause in ("announced", "agreement")]
        for action in (each.action for each in call.actions if each.action in previous):
            start, came, free = ran[action].start, arrived.get(action, 0.0), previous[action]
            if any(wait.start < start and wait.end > max(came, free) for wait in holds):
                continue
            (measured.wakes if came > free else measured.gaps).append(start - max(came, free))
    return measured


def _add_messages(measured: _Measured, kind: str, edge: Edge, messages: list[Message], ran: dict, previous: dict, call: Call) -> None:
    """What each message of an edge took by itself, or at most."""
    mode = measured.mode or ""
    lanes = int(found[1]) if (found := re.search(r"\blanes=(\d+)", mode)) else 1
    messages = sorted(messages, key=lambda message: ran[Action(kind, edge.source, message.microbatch)].end)
    taken = sorted(ran[Action(kind, edge.destination, message.microbatch)].start for message in messages)
    before: dict[int, float] = {}
    times: list[tuple[Key, float, float, float, float]] = []
    for index, message in enumerate(messages):
        lane, key = message.microbatch % lanes, (kind if kind == "F" else "B", edge.destination, message.microbatch)
        left = ran[Action(kind, edge.source, message.microbatch)].end
        # Before its receiver has begun the call nobody can take it; a credit comes back when an earlier one is taken.
        at = max(message.time, call.begin) if index == 0 else message.time
        credit = taken[index - CREDITS] if index >= CREDITS else left
        behind = before.get(lane, left)
        if mode.startswith(_BASELINES):
            # A rendezvous: it is received when its receiver comes for it, and when what that sends in the same call was taken too.
            came = previous.get(Action(kind, edge.destination, message.microbatch), left)
            paired = any(came <= sent.time <= at for sent in call.sent)
            behind = at if paired else max(behind, came)
        times.append((key, left, credit, behind, at))
        before[lane] = max(message.time, before.get(lane, 0.0))
    alone = sorted(max(0.0, at - left) for _, left, credit, behind, at in times if max(credit, behind) <= left)
    least = alone[len(alone) // 20] if alone else 0.0
    for key, left, credit, behind, at in times:
        if behind > left and at - behind <= least:
            # What comes within the least latency of the one before it was there already, waiting for it.
            measured.most[key] = max(0.0, at - left)
        else:
            gated = left < credit <= at - least
            measured.known[key] = max(0.0, at - (credit if gated else left))


def _delays(measured: list[_Measured], placement: Placement, wake: float) -> dict[Key, float]:
    """Seconds of every message: its median where known, otherwise what messages like it took, as far as that is possible.

    wake: seconds that an arrival takes to wake its receiver.
    """
    alike = {kind: sorted(late for each in measured for key, late in each.known.items() if key[0] == kind) for kind in "FB"}
    delays = {}
    for kind in "FB":
        for s in range(placement.stages):
            for m in range(measured[0].microbatches):
                key = kind, s, m
                if known := [each.known[key] for each in measured if key in each.known]:
                    delays[key] = median(known) + wake
                elif most := [each.most[key] for each in measured if key in each.most]:
                    possible = [late for late in alike[kind] if late <= min(most)]
                    delays[key] = (median(possible) if possible else min(most)) + wake
                else:
                    delays[key] = 0.0  # no message: the ends of the chain, and neighbours on one rank
    return delays


def _check(calls: dict[int, Call], number: int, placement: Placement) -> None:
    absent = [rank for rank in range(placement.ranks) if rank not in calls or not calls[rank].complete]
    if absent:
        raise ConfigurationError(f"call {number}: ranks {', '.join(map(str, absent))} did not complete it; name another call")
    if any(call.forward_only for call in calls.values()):
        raise ConfigurationError(f"call {number} is an evaluation, forwards only; name a training call")


def _check_actions(measured: _Measured, number: int, placement: Placement) -> None:
    kinds = ("F", "I", "W") if measured.split else ("F", "B")
    ran = {(kind, s) for kind, s, _ in measured.durations}
    first = min((s for kind, s in ran if kind in ("B", "I")), default=None)
    if first is None:
        raise ConfigurationError(f"call {number} ran no backward: every stage is frozen, and nothing is to be chosen; name another call")
    for s in range(placement.stages):
        for kind in kinds:
            if kind != "F" and s < first or kind == "W" and (kind, s) not in ran:
                continue  # frozen; or nothing of its I waits
            for m in range(measured.microbatches):
                if (kind, s, m) not in measured.durations:
                    raise ConfigurationError(f"call {number} did not run {Action(kind, s, m)}: only calls in which every stage, apart from frozen "
                                             f"ones at the start, runs {', '.join(kinds)} of every microbatch can be simulated")


def _median(values: Iterable[float]) -> float:
    return median(list(values))
