"""What the time of a call went on, per rank, in whole nanoseconds so that the parts sum to the whole exactly.

A call's wall time is split into compute (with the emulated padding named as a part of it), one part per cause of waiting, and
the rest, `runtime`: choosing, bookkeeping, Megatron's own work around the actions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rrfp.action import Action

CAUSES = ("F", "B", "W", "agreement", "announced", "send")
"""What an engine says it waited for, in the order of reports: an activation, a gradient, a weight-gradient to be due, the
domain's agreement, announced work that is worth waiting for, a send."""


@dataclass(frozen=True)
class Breakdown:
    """One call of one rank. Times are integer nanoseconds; `compute + sum(blocked.values()) + runtime == total`, exactly."""

    rank: int
    call: int
    total: int
    compute: int
    emulated: int
    """The part of `compute` that was emulated padding."""
    blocked: Mapping[str, int]
    """Cause -> time waited for it; only causes that occurred."""
    runtime: int
    counts: Mapping[str, int] = field(default_factory=dict)
    """Kind -> actions run."""
    peak_in_flight: Mapping[int, int] = field(default_factory=dict)
    """Stage -> most activations held at once."""
    overlaps: int = 0
    """Reported spans that had to be clipped: more than zero means that whoever recorded was wrong."""
    microbatches: int = 0
    forward_only: bool = False

    def parts(self) -> dict[str, int]:
        """Part -> nanoseconds, in the order of reports: compute, F, B, agreement and other causes that occurred, runtime."""
        known = [cause for cause in CAUSES if cause in ("F", "B", "agreement") or cause in self.blocked]
        other = sorted(set(self.blocked) - set(CAUSES))
        return {"compute": self.compute} | {cause: self.blocked.get(cause, 0) for cause in known + other} | {"runtime": self.runtime}


def break_down(
    actions: Iterable[tuple[Action, float, float, int, float]],
    waits: Iterable[tuple[str, float, float]],
    begin: float,
    end: float,
    *,
    rank: int,
    call: int,
    microbatches: int = 0,
    forward_only: bool = False,
    debug: bool = False,
) -> Breakdown:
    """Splits [begin, end] into compute, waits and the rest.

    Args:
        actions: (action, start, end, in flight at its stage, emulated seconds at its end), times in seconds, in any order.
        waits: (cause, start, end). Where a wait overlaps an action, the time counts as compute.
        begin, end: the call, in seconds of the same clock. Spans are clipped to it.
        debug: refuse overlaps instead of clipping and counting them.

    Raises:
        ValueError: under `debug`, naming the two spans that overlap, or the span that leaves the call.
    """
    begin, end = _ns(begin), max(_ns(begin), _ns(end))
    counts, peaks, overlaps = Counter(), {}, 0
    ran = []
    for action, start, stop, in_flight, padded in actions:
        counts[action.kind] += 1
        peaks[action.stage] = max(peaks.get(action.stage, 0), in_flight)
        ran.append((_ns(start), _ns(stop), action, _ns(padded)))
    ran.sort(key=lambda span: span[:2])
    waited = sorted(((_ns(start), _ns(stop), cause) for cause, start, stop in waits), key=lambda span: span[:2])

    def clip(span, cursor, previous):
        nonlocal overlaps
        start, stop = max(span[0], cursor), min(span[1], end)
        if span[0] < cursor or span[1] > end:
            if debug:
                outside = span[1] > end or previous is None
                raise ValueError(f"{span[2]} overlaps {'the edge of the call' if outside else previous}: call {call}, rank {rank}")
            overlaps += 1
        return start, max(start, stop)

    compute = emulated = 0
    busy, cursor, previous = [], begin, None
    for span in ran:
        start, stop = clip(span, cursor, previous)
        compute += stop - start
        # Padding lies at the end of an action: what clipping cuts off the front is real work first.
        emulated += min(span[3], stop - start)
        busy.append((start, stop, span[2]))
        cursor, previous = stop, span[2]

    blocked = Counter()
    cursor, previous, first = begin, None, 0
    for span in waited:
        start, stop = clip(span, cursor, previous)
        cursor, previous = stop, span[2]
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        covered, index = 0, first
        while index < len(busy) and busy[index][0] < stop:
            covered += max(0, min(stop, busy[index][1]) - max(start, busy[index][0]))
            index += 1
        if covered:
            if debug:
                raise ValueError(f"the wait for {span[2]} overlaps {busy[first][2]}: call {call}, rank {rank}")
            overlaps += 1
        blocked[span[2]] += stop - start - covered

    total = end - begin
    return Breakdown(
        rank=rank,
        call=call,
        total=total,
        compute=compute,
        emulated=emulated,
        blocked=dict(blocked),
        runtime=total - compute - sum(blocked.values()),
        counts=dict(counts),
        peak_in_flight=peaks,
        overlaps=overlaps,
        microbatches=microbatches,
        forward_only=forward_only,
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
