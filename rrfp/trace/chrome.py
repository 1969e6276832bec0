"""A timeline as Chrome trace events, the JSON that https://ui.perfetto.dev and chrome://tracing open.

Groups of tracks: the stages (one track each, actions in the notation, arrows from an action to the one that uses its
result), the ranks (calls, and inside them the waits with their cause), a counter per stage of activations in flight, and, where
collectives ran beside the actions, their streams.
Format: "Trace Event Format", Google, times in microseconds.
"""

import bisect
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rrfp.trace.files import Ran, Timeline

_STAGES, _RANKS, _COUNTERS, _STREAMS = 1, 2, 3, 4  # process ids: Perfetto shows a group per process, in this order


def chrome_events(timeline: Timeline, *, calls: Iterable[int] | None = None) -> list[dict]:
    """The trace events of these calls (default: all), time 0 at the earliest begin."""
    chosen = [timeline.of_call(number) for number in (timeline.calls if calls is None else calls)]
    zero = min((call.begin for ranks in chosen for call in ranks.values()), default=0.0)

    def us(seconds: float) -> float:
        return round((seconds - zero) * 1e6, 3)

    events = [
        _named("process", _STAGES, 0, "stages"),
        _named("process", _RANKS, 0, "ranks: calls and waits"),
        _named("process", _COUNTERS, 0, "activations in flight"),
    ]
    for index, pid in enumerate((_STAGES, _RANKS, _COUNTERS)):
        events.append({"ph": "M", "name": "process_sort_index", "ts": 0, "pid": pid, "tid": 0, "args": {"sort_index": index}})
    for stage, rank in timeline.rank_of.items():
        events.append(_named("thread", _STAGES, stage, f"stage {stage} (rank {rank})"))
    for rank in sorted(timeline.ranks):
        events.append(_named("thread", _RANKS, rank, f"rank {rank}"))

    streams = {key: number for number, key in enumerate(sorted(
        {(rank, moved.stream) for ranks in chosen for rank, call in ranks.items() for moved in call.moved}))}
    if streams:
        events.append(_named("process", _STREAMS, 0, "streams: collectives"))
    for (rank, stream), number in streams.items():
        events.append(_named("thread", _STREAMS, number, f"{stream} (rank {rank})"))

    flows = 0
    for ranks in chosen:
        for rank, call in ranks.items():
            name = f"call {call.number}" + (" (forward only)" if call.forward_only else "")
            events.append(_slice(name, "call", us(call.begin), us(call.end), _RANKS, rank, {"microbatches": call.microbatches}))
            for cause, start, end in call.waits:
                events.append(_slice(f"wait {cause}", "wait", us(start), us(end), _RANKS, rank, {"call": call.number}))
            for stream, what, start, end in call.moved:
                events.append(_slice(what, what.partition(":")[0], us(start), us(end), _STREAMS, streams[rank, stream], {"call": call.number}))
            for ran in call.actions:
                arguments = {"call": call.number, "microbatch": ran.action.microbatch, "in flight": ran.in_flight}
                if ran.padded:
                    arguments["emulated ms"] = round(ran.padded * 1e3, 3)
                kind, stage, _ = ran.action
                events.append(_slice(str(ran.action), kind, us(ran.start), us(ran.end), _STAGES, stage, arguments))
                events.append(_count(stage, us(ran.start), ran.in_flight))
            events += [_count(stage, us(call.end), 0) for stage in sorted({ran.action.stage for ran in call.actions})]
        for source, destination, edge in arrows(ranks.values()):
            flows += 1
            common = {"name": str(edge), "cat": "message", "id": flows, "pid": _STAGES}
            # An arrow binds to the slice around its end points: leave just inside the producer's end.
            inside = max(us(source.start), us(source.end) - 1)
            events.append(common | {"ph": "s", "ts": inside, "tid": source.action.stage})
            events.append(common | {"ph": "f", "bp": "e", "ts": us(destination.start), "tid": destination.action.stage})
    return events


def write_chrome(timeline: Timeline, path: Path, *, calls: Iterable[int] | None = None) -> None:
    """Writes the trace as a JSON object. Raises ConfigurationError for a call that is not there."""
    # Event by event: a long run's trace need not exist as one string.
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for index, event in enumerate(chrome_events(timeline, calls=calls)):
            file.write((",\n" if index else "") + json.dumps(event))
        file.write("\n]}\n")


def arrows(calls) -> Iterable[tuple[Ran, Ran, object]]:
    """(producer, consumer, edge) for every message of one call, from what was sent and what arrived.

    The producer is the last action of its microbatch at the edge's source that had ended when the message was sent, the consumer
    the first one at its destination that started after it arrived: no knowledge of who neighbours whom, or of kinds.
    """
    ran, sent, arrived = defaultdict(list), {}, {}
    for call in calls:
        for each in call.actions:
            ran[each.action.stage, each.action.microbatch].append(each)
        sent.update({(message.edge, message.microbatch): message.time for message in call.sent})
        arrived.update({(message.edge, message.microbatch): message.time for message in call.arrivals})
    for each in ran.values():
        each.sort(key=lambda one: one.start)
    for (edge, microbatch), left in sorted(sent.items()):
        came = arrived.get((edge, microbatch))
        sources, targets = ran[edge.source, microbatch], ran[edge.destination, microbatch]
        before = bisect.bisect_right(sources, left + 1e-9, key=lambda one: one.end) - 1
        after = None if came is None else bisect.bisect_left(targets, came - 1e-9, key=lambda one: one.start)
        if before >= 0 and after is not None and after < len(targets):
            yield sources[before], targets[after], edge


def _named(what: str, pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": f"{what}_name", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, category: str, start: float, end: float, pid: int, tid: int, arguments: dict) -> dict:
    duration = max(0.0, round(end - start, 3))
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "pid": pid, "tid": tid, "args": arguments}


def _count(stage: int, at: float, value: int) -> dict:
    return {"ph": "C", "name": f"stage {stage}", "ts": at, "pid": _COUNTERS, "tid": 0, "args": {"in flight": value}}
