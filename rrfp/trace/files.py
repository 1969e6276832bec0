"""Reads the files of one run back into a `Timeline`: one clock for all ranks, whatever is there of a killed one."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rrfp.action import Action, Edge, parse_action, parse_edge
from rrfp.errors import ConfigurationError
from rrfp.trace.breakdown import Breakdown, break_down
from rrfp.trace.clocks import Clock, Crossing, HostClock, align, describe


class Ran(NamedTuple):
    """An action that ran. Seconds; `padded` is the emulated part at its end."""

    action: Action
    start: float
    end: float
    in_flight: int
    padded: float


class Waited(NamedTuple):
    cause: str
    start: float
    end: float


class Message(NamedTuple):
    """A message over `edge` for `microbatch`, when it came in (at its destination) or was handed over (at its source)."""

    edge: Edge
    microbatch: int
    time: float


class Moved(NamedTuple):
    """A collective that ran on a stream of its own."""

    stream: str
    what: str
    start: float
    end: float


@dataclass
class Call:
    """One call of one rank, times in seconds of the timeline's clock."""

    number: int
    microbatches: int
    forward_only: bool
    begin: float
    end: float
    complete: bool = False
    """False if the rank was lost inside: `end` is then the last thing known."""
    actions: list[Ran] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    arrivals: list[Message] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    mode: str | None = None
    """What it ran under (`rrfp.mode`), if the trace says."""

    def shift(self, clock: HostClock) -> None:
        """Turns all times of this host's clock into the first host's."""

        def right(time: float) -> float:
            return time + clock.offset(self.number, time)

        self.begin, self.end = right(self.begin), right(self.end)
        self.actions = [ran._replace(start=right(ran.start), end=right(ran.end)) for ran in self.actions]
        self.waits = [wait._replace(start=right(wait.start), end=right(wait.end)) for wait in self.waits]
        self.arrivals = [message._replace(time=right(message.time)) for message in self.arrivals]
        self.sent = [message._replace(time=right(message.time)) for message in self.sent]
        self.moved = [moved._replace(start=right(moved.start), end=right(moved.end)) for moved in self.moved]


@dataclass
class RankTrace:
    rank: int
    stages: tuple[int, ...]
    calls: dict[int, Call]
    host: str = ""
    boot: str = ""
    """Ranks of the same boot of a host share a clock."""
    epoch: float | None = None
    """The wall time, in seconds since 1970, at which that clock stood at zero."""


@dataclass
class Timeline:
    """A run: what each rank did, on one clock."""

    ranks: dict[int, RankTrace]
    missing: tuple[int, ...] = ()
    """Ranks that should have written a file and did not."""
    notes: tuple[str, ...] = ()
    """What a reader should know: cut-off files, unfinished calls, how well the clocks of several hosts are related."""
    clocks: dict[str, Clock] = field(default_factory=dict)
    """Host -> what was learnt of its clock; the first one's is the timeline's. Empty if all ranks share a clock."""

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Stage -> rank, in order of stages."""
        return dict(sorted((stage, trace.rank) for trace in self.ranks.values() for stage in trace.stages))

    @cached_property
    def calls(self) -> tuple[int, ...]:
        """The calls that at least one rank began, ascending."""
        return tuple(sorted({number for trace in self.ranks.values() for number in trace.calls}))

    def of_call(self, number: int) -> dict[int, Call]:
        """Rank -> that call. Raises ConfigurationError if no rank has it."""
        found = {rank: trace.calls[number] for rank, trace in sorted(self.ranks.items()) if number in trace.calls}
        if not found:
            raise ConfigurationError(f"call {number} is not in the trace: it holds calls {_span(self.calls)}")
        return found

    def typical_call(self) -> int:
        """The last call that every rank completed, a training one if there is any. Raises ConfigurationError if there is none."""
        whole = [n for n in self.calls if all(n in t.calls and t.calls[n].complete for t in self.ranks.values())]
        whole = [n for n in whole if not self._forward_only(n)] or whole
        if not whole:
            raise ConfigurationError("the trace holds no call that every rank completed: name one with --call")
        return whole[-1]

    def breakdowns(self) -> list[Breakdown]:
        """One per rank and complete call."""
        return [
            break_down(
                call.actions,
                call.waits,
                call.begin,
                call.end,
                rank=trace.rank,
                call=call.number,
                microbatches=call.microbatches,
                forward_only=call.forward_only,
            )
            for trace in self.ranks.values()
            for call in trace.calls.values()
            if call.complete
        ]

    def _forward_only(self, number: int) -> bool:
        return any(call.forward_only for call in self.of_call(number).values())


def has_trace(directory: Path) -> bool:
    """Whether `read` finds files there."""
    return any(any(Path(directory).glob(pattern)) for pattern in ("rank*.jsonl", "trace/rank*.jsonl"))


def read(directory: Path, *, calls: Iterable[int] | None = None) -> Timeline:
    """Reads `directory/rank*.jsonl`.

    Clocks: files of one boot share a monotonic clock. Another host's is related to it through both headers' wall times, and then
    aligned by the messages between them (`rrfp.trace.clocks`): `Timeline.clocks` has the error.

    Args:
        calls: only these calls (default: all).

    Raises:
        ConfigurationError: no trace there, a file that is not one, or two files that claim the same stage.
    """
    directory = Path(directory)
    if not any(directory.glob("rank*.jsonl")) and any(directory.glob("trace/rank*.jsonl")):
        directory /= "trace"  # a run's folder as the demo lays it out
    matches = {path: re.fullmatch(r"rank(\d+)\.jsonl", path.name) for path in directory.glob("rank*.jsonl")}
    named = {int(match[1]): path for path, match in matches.items() if match}
    if not named:
        below = sorted({path.parent.name for path in directory.glob("*/rank*.jsonl")})
        way_out = f"name one of the directories in it: {', '.join(below)}" if below else "pass what --rrfp-trace was given"
        raise ConfigurationError(f"{directory} holds no trace: no file rank*.jsonl in it; {way_out}")
    contents = {rank: _lines(path) for rank, path in sorted(named.items())}
    notes = [f"{named[rank].name} ends in the middle of a line: rank {rank} was killed while writing" for rank, (_, cut) in contents.items() if cut]
    timeline = assemble({rank: lines for rank, (lines, _) in contents.items()}, calls=calls, name=lambda rank: named[rank])
    return replace(timeline, notes=(*notes, *timeline.notes))


def assemble(
    records: Mapping[int, list], *, calls: Iterable[int] | None = None, name: Callable[[int], object] = lambda rank: f"what rank {rank} recorded",
) -> Timeline:
    """The run whose ranks wrote these lines, as JSON values, each rank's header first (`rrfp.trace.recorder`).

    Args:
        calls: only these calls (default: all).
        name: what errors call a rank's lines.

    Raises:
        ConfigurationError: lines that are no trace, or two ranks that claim the same stage.
    """
    wanted = None if calls is None else set(calls)
    headers, traces, notes = {}, {}, []
    for rank, lines in sorted(records.items()):
        path = name(rank)
        if not lines:
            continue
        headers[rank] = header = _header(path, lines[0])
        reference = next(iter(headers.values()))
        shift = 0.0 if header["boot"] and header["boot"] == reference["boot"] else _epoch(header) - _epoch(reference)
        trace = RankTrace(rank, tuple(header["stages"]), {}, header.get("host", ""), header["boot"], _epoch(header))
        try:
            for line in lines[1:]:
                _add(trace, line, shift, wanted)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigurationError(f"{path} is not a trace: {error!r} in {line!r}") from error
        traces[rank] = trace
        notes += [f"rank {rank} did not finish call {n}" for n, call in trace.calls.items() if not call.complete]

    # The newest file says how many ranks there were: files beyond that are of an earlier, larger run.
    newest = max(headers.values(), key=lambda header: header["wall"], default=None)
    expected = (newest or {}).get("ranks") or max(records) + 1
    for rank in [rank for rank in traces if rank >= expected]:
        notes.append(f"rank{rank}.jsonl is left over from an earlier run of more than {expected} ranks: not used")
        del traces[rank]
    owners: dict[int, int] = {}
    for trace in traces.values():
        for stage in trace.stages:
            if stage in owners:
                both = f"rank{owners[stage]}.jsonl and rank{trace.rank}.jsonl"
                raise ConfigurationError(f"stage {stage} is in both {both}: trace each pipeline into a directory of its own")
            owners[stage] = trace.rank
    missing = tuple(rank for rank in range(expected) if rank not in traces)
    clocks = _align(traces)
    notes += [describe(host, clock) for host, clock in list(clocks.items())[1:]]
    return Timeline(traces, missing, tuple(notes), clocks)


def _align(traces: dict[int, RankTrace]) -> dict[str, Clock]:
    """Puts all ranks on the first one's clock, in place. Returns what was learnt of each host's clock, first the first one's."""
    # Without a boot id no two ranks are known to share a clock.
    clock_of = {rank: trace.boot or f"rank {rank}" for rank, trace in traces.items()}
    first_of = {clock: rank for rank, clock in reversed(clock_of.items())}
    if len(first_of) < 2:
        return {}
    sent = {(number, message.edge, message.microbatch): (clock_of[rank], message.time)
            for rank, trace in traces.items() for number, call in trace.calls.items() for message in call.sent}
    crossings = []
    for rank, trace in traces.items():
        here = clock_of[rank]
        for number, call in trace.calls.items():
            for edge, microbatch, time in call.arrivals:
                source, left = sent.get((number, edge, microbatch), (here, 0.0))
                if source != here:
                    crossings.append(Crossing(number, source, here, left, time))
    clocks = align(crossings, dict.fromkeys(clock_of.values()))
    for rank, trace in traces.items():
        for call in trace.calls.values():
            call.shift(clocks[clock_of[rank]])
    hosts = [traces[rank].host for rank in first_of.values()]
    learnt = {}
    for clock, related in clocks.items():
        rank, host = first_of[clock], traces[first_of[clock]].host
        learnt[host if host and hosts.count(host) == 1 else f"{host} (rank {rank})".lstrip()] = related.summary()
    return learnt


def _lines(path: Path) -> tuple[list, bool]:
    """The values of a file, and whether its last line was cut off."""
    text = path.read_text(errors="replace")
    lines = text.split("\n")
    cut = lines.pop() != ""
    try:
        return [json.loads(line) for line in lines], cut
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a trace: {error}") from error


def _header(path: object, header) -> dict:
    if not isinstance(header, dict) or header.get("rrfp_trace") != 1:
        raise ConfigurationError(f"{path} is not a trace that this version reads: its first line is {str(header)[:80]!r}")
    return header


def _epoch(header: dict) -> float:
    """The wall time at which that host's monotonic clock stood at zero."""
    return header["wall"] - header["monotonic"]


def _add(trace: RankTrace, line: list, shift: float, wanted: set[int] | None) -> None:
    tag, number, *rest = line
    if wanted is not None and number not in wanted:
        return
    if tag == "begin":
        microbatches, forward_only, begin, *mode = rest
        trace.calls[number] = Call(number, microbatches, forward_only, begin + shift, begin + shift, mode=next(iter(mode), None))
        return
    call = trace.calls.get(number)
    if call is None:
        return  # something sent or received before the first call
    if tag == "action":
        text, start, end, in_flight, padded = rest
        call.actions.append(Ran(parse_action(text), start + shift, end + shift, in_flight, padded))
        call.end = max(call.end, end + shift)
    elif tag == "wait":
        cause, start, end = rest
        call.waits.append(Waited(cause, start + shift, end + shift))
        call.end = max(call.end, end + shift)
    elif tag in ("arrival", "sent"):
        edge, microbatch, time = rest
        (call.arrivals if tag == "arrival" else call.sent).append(Message(parse_edge(edge), microbatch, time + shift))
    elif tag == "moved":
        stream, what, start, end = rest
        call.moved.append(Moved(stream, what, start + shift, end + shift))
    elif tag == "end":
        call.end, call.complete = rest[0] + shift, True
    else:
        raise ValueError(f"unknown event {tag!r}")


def _span(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "none"
    every = len(numbers) == numbers[-1] - numbers[0] + 1
    return f"{numbers[0]}..{numbers[-1]}" if every else ", ".join(map(str, numbers))
