"""One clock for several hosts, from the messages between them: none arrives before it was sent.

A message sent at s by the clock of host a that arrived at t by the clock of host b says s + x <= t + y of what has to be added to
either clock. All messages of a call together leave every host an interval relative to the first one (shortest paths in the graph
of these differences: Duda et al., "Estimating global time in distributed systems", ICDCS 1987). Its middle is taken, and half
its width is the error: between two hosts half of what the quickest message took one way plus the quickest the other way, as in NTP.

Clocks also drift apart, by up to 100 microseconds per second where nothing disciplines them. So every call has an offset of its
own, and a rate is estimated over the whole trace where no constant explains it; how wrong that may be in a call is in the error.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

INFINITY = float("inf")
UNDISCIPLINED = 1e-4
"""Seconds per second by which two clocks may drift apart at worst: the tolerance of two quartz crystals."""


class Crossing(NamedTuple):
    """A message between two hosts: when it was sent and when it arrived, each by its own host's clock, in seconds."""

    call: int
    source: str
    destination: str
    sent: float
    arrived: float


class Clock(NamedTuple):
    """What was learnt of a host's clock. Seconds.

    offset: what was added to its times, in the middle of the trace.
    error: how wrong that may be, at worst. None: nothing bounds it, the host's time of day was taken as it is.
    """

    offset: float
    error: float | None


@dataclass
class HostClock:
    """How a host's times turn into the first host's."""

    rate: float = 0.0
    origin: float = 0.0
    """`offsets` hold at this time by the host's clock; from there on they change by `rate`."""
    offsets: dict[int, float] = field(default_factory=dict)
    """By call; only those whose messages bound it."""
    error: float | None = None

    def offset(self, call: int, time: float) -> float:
        """What to add to `time`, read on this host during `call`. Calls without messages both ways take the nearest one's."""
        if not self.offsets:
            return 0.0
        nearest = call if call in self.offsets else min(self.offsets, key=lambda other: abs(other - call))
        return self.offsets[nearest] + self.rate * (time - self.origin)

    def summary(self) -> Clock:
        middle = sorted(self.offsets)[len(self.offsets) // 2] if self.offsets else 0
        return Clock(self.offset(middle, self.origin), self.error)


def align(crossings: Iterable[Crossing], hosts: Iterable[str]) -> dict[str, HostClock]:
    """The clock of every host, relative to the first of `hosts`."""
    hosts, crossings = list(hosts), list(crossings)
    clocks = {host: HostClock() for host in hosts}
    clocks[hosts[0]].error = 0.0
    times: dict[str, list[float]] = {host: [] for host in hosts}
    for crossing in crossings:
        times[crossing.source].append(crossing.sent)
        times[crossing.destination].append(crossing.arrived)
    for host, seen in times.items():
        clocks[host].origin = (min(seen) + max(seen)) / 2 if seen else 0.0
    # So that times of all hosts can be compared at all, however wrong their time of day is.
    rough = dict.fromkeys(hosts, 0.0) | {host: sum(interval) / 2 for host, interval in _intervals(crossings, hosts).items()}
    for _ in range(2):  # the second time without what drift within a window did to the first
        rates = _rates(_straight(crossings, clocks, rough), hosts)
        for host, (extra, _) in rates.items():
            clocks[host].rate += extra
    calls: dict[int, list[Crossing]] = defaultdict(list)
    for crossing in _straight(crossings, clocks, rough):
        calls[crossing.call].append(crossing)
    for number, messages in calls.items():
        seconds = max(crossing.arrived for crossing in messages) - min(crossing.sent for crossing in messages)
        for host, (low, high) in _intervals(messages, hosts).items():
            clock = clocks[host]
            clock.offsets[number] = rough[host] + (low + high) / 2
            drifted = rates[host][1] * seconds / 2 if host in rates else 0.0
            clock.error = max(clock.error or 0.0, abs(high - low) / 2 + drifted)
    return clocks


def describe(host: str, clock: Clock) -> str:
    """One line for a reader of the trace."""
    if clock.error is None:
        return f"the clock of {host} is set by its time of day only, by an unknown error: no messages both ways bound it"
    corrected = f"its time of day was corrected by {1e3 * clock.offset:+.3f} ms"
    return f"the clock of {host} is aligned by its messages, to within {1e6 * clock.error:.0f} us ({corrected})"


def _straight(crossings: list[Crossing], clocks: Mapping[str, HostClock], rough: Mapping[str, float]) -> list[Crossing]:
    """The same by clocks that are roughly right and have the right rate."""

    def corrected(host: str, time: float) -> float:
        return time + rough[host] + clocks[host].rate * (time - clocks[host].origin)

    return [c._replace(sent=corrected(c.source, c.sent), arrived=corrected(c.destination, c.arrived)) for c in crossings]


def _intervals(messages: Iterable[Crossing], hosts: list[str]) -> dict[str, tuple[float, float]]:
    """Host -> the least and most that may be added to its clock. Only hosts that messages bound on both sides."""
    least: dict[tuple[str, str], float] = {}
    for _, source, destination, sent, arrived in messages:
        pair = source, destination
        least[pair] = min(least.get(pair, INFINITY), arrived - sent)
    first = hosts[0]
    low, high = {first: 0.0}, {first: 0.0}
    for _ in range(len(hosts) - 1):
        for (source, destination), took in least.items():
            if destination in high and source != first:
                high[source] = min(high.get(source, INFINITY), high[destination] + took)
            if source in low and destination != first:
                low[destination] = max(low.get(destination, -INFINITY), low[source] - took)
    return {host: (low[host], high[host]) for host in hosts if host in low and host in high}


def _rates(crossings: list[Crossing], hosts: list[str]) -> dict[str, tuple[float, float]]:
    """Host -> seconds by which its offset grows per second, and how wrong that may be.

    A least-squares line through the offsets of windows, each half a call; 0 where a constant explains the whole trace.
    """
    calls: dict[int, list[Crossing]] = defaultdict(list)
    for crossing in crossings:
        calls[crossing.call].append(crossing)
    seen: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for messages in calls.values():
        messages.sort(key=lambda crossing: crossing.sent)
        half = len(messages) // 2
        for window in filter(None, (messages[:half], messages[half:])):
            when = (window[0].sent + window[-1].sent) / 2
            for host, interval in _intervals(window, hosts).items():
                if host != hosts[0]:
                    seen[host].append((when, *interval))
    rates = {}
    for host, windows in seen.items():
        mean = sum(when for when, _, _ in windows) / len(windows)
        square = sum((when - mean) ** 2 for when, _, _ in windows)
        if square == 0:
            rates[host] = 0.0, UNDISCIPLINED
            continue
        rate = sum((when - mean) * (low + high) / 2 for when, low, high in windows) / square
        # Each middle may be off by half its interval; where a constant was taken, so may the line from it.
        wrong = sum(abs(when - mean) * abs(high - low) for when, low, high in windows) / square
        constant = max(low for _, low, _ in windows) <= min(high for _, _, high in windows)
        rates[host] = 0.0 if constant else rate, min(wrong, UNDISCIPLINED)
    return rates
