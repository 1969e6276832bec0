"""Sets the clocks of several hosts by the messages between them, which cannot arrive before they were sent.

Between two hosts let m be the least that a message took by their two clocks, and n the same the other way. If the quickest
messages take equally long both ways, one clock is (m - n) / 2 ahead; whatever they take, that is wrong by at most (m + n) / 2.
(NTP's rule, RFC 5905 section 8, over all messages of a run.)
"""

from collections import defaultdict, deque
from dataclasses import replace

from rrfp.trace.files import Call, Message, Ran, RankTrace, Timeline, Waited


def align(timeline: Timeline) -> tuple[Timeline, dict[str, float | None]]:
    """The timeline on the clock of its first rank's host, and by host name how wrong its clock may still be, in seconds.

    A host that exchanged no messages both ways with others keeps the time of day, and its error is None. For one host the
    timeline comes back as it is, with no errors.
    """
    hosts = {trace.boot: trace.host or trace.boot for trace in timeline.ranks.values()}
    if len(hosts) < 2:
        return timeline, {}
    least = _least(timeline)
    first = next(iter(hosts))
    offsets, errors = {first: 0.0}, {first: 0.0}
    queue = deque([first])
    while queue:
        here = queue.popleft()
        # The neighbour that is known best comes first.
        near = [(least[here, there] + least[there, here], there) for there in hosts if (here, there) in least and (there, here) in least]
        for both, there in sorted(near):
            if there not in offsets:
                offsets[there] = offsets[here] + (least[here, there] - least[there, here]) / 2
                errors[there] = errors[here] + both / 2
                queue.append(there)
    shifted = {rank: _shift(trace, offsets.get(trace.boot, 0.0)) for rank, trace in timeline.ranks.items()}
    names = {boot: name if list(hosts.values()).count(name) == 1 else f"{name} ({boot[:8]})" for boot, name in hosts.items()}
    return replace(timeline, ranks=shifted), {name: errors.get(boot) for boot, name in names.items() if boot != first}


def _least(timeline: Timeline) -> dict[tuple[str, str], float]:
    """(from host, to host) -> the least that a message between them took, by their own clocks: it may be negative."""
    boot_of = {stage: timeline.ranks[rank].boot for stage, rank in timeline.rank_of.items()}
    sent = {(number, each.edge, each.microbatch): each.time
            for trace in timeline.ranks.values() for number, call in trace.calls.items() for each in call.sent}
    least: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
    for trace in timeline.ranks.values():
        for number, call in trace.calls.items():
            for edge, microbatch, time in call.arrivals:
                left, source = sent.get((number, edge, microbatch)), boot_of.get(edge.source)
                if left is not None and source not in (None, trace.boot):
                    least[source, trace.boot] = min(least[source, trace.boot], time - left)
    return dict(least)


def _shift(trace: RankTrace, ahead: float) -> RankTrace:
    return replace(trace, calls={number: _shift_call(call, ahead) for number, call in trace.calls.items()}) if ahead else trace


def _shift_call(call: Call, ahead: float) -> Call:
    return replace(
        call,
        begin=call.begin - ahead,
        end=call.end - ahead,
        actions=[Ran(a.action, a.start - ahead, a.end - ahead, a.in_flight, a.padded) for a in call.actions],
        waits=[Waited(w.cause, w.start - ahead, w.end - ahead) for w in call.waits],
        arrivals=[Message(m.edge, m.microbatch, m.time - ahead) for m in call.arrivals],
        sent=[Message(m.edge, m.microbatch, m.time - ahead) for m in call.sent],
    )
