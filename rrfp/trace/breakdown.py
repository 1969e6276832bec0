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
        blocked = {cause: self.blocked.get(cause, 0) for cause in known + other}
        return {"compute": self.compute} | blocked | {"runtime": self.runtime}


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
                other = "the edge of the call" if outside else previous
                raise ValueError(f"{span[2]} overlaps {other}: call {call}, rank {rank}")
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


def combine(breakdowns: Iterable[Breakdown]) -> Breakdown:
    """The sum of several (calls of a rank, or ranks): times and counts add, peaks take the largest.

    The rank and call are those of the first. Raises ValueError for none.
    """
    breakdowns = list(breakdowns)
    if not breakdowns:
        raise ValueError("nothing to combine: no complete call")
    first = breakdowns[0]
    blocked, counts, peaks = Counter(), Counter(), {}
    for each in breakdowns:
        blocked.update(each.blocked)
        counts.update(each.counts)
        for stage, peak in each.peak_in_flight.items():
            peaks[stage] = max(peaks.get(stage, 0), peak)
    return Breakdown(
        rank=first.rank,
        call=first.call,
        total=sum(each.total for each in breakdowns),
        compute=sum(each.compute for each in breakdowns),
        emulated=sum(each.emulated for each in breakdowns),
        blocked=dict(blocked),
        runtime=sum(each.runtime for each in breakdowns),
        counts=dict(counts),
        peak_in_flight=dict(sorted(peaks.items())),
        overlaps=sum(each.overlaps for each in breakdowns),
        microbatches=first.microbatches,
        forward_only=first.forward_only,
    )


@dataclass(frozen=True)
class Summary:
    """A run's breakdown over its calls. The first call (connecting, compiling, warming up) is left out if there are others."""

    calls: int
    """How many calls were summed."""
    ranks: Mapping[int, Breakdown]
    mean: Breakdown
    """Over all ranks, each with the weight of its time."""
    worst: Breakdown
    """The rank that computes the smallest share of its time."""


def summarise(breakdowns: Iterable[Breakdown]) -> Summary:
    """Over calls and ranks. Evaluation (`forward_only`) counts only where there is no training call.

    Raises ValueError for no breakdown at all.
    """
    breakdowns = list(breakdowns)
    chosen = [each for each in breakdowns if not each.forward_only] or breakdowns
    calls = sorted({each.call for each in chosen})
    calls = set(calls[1:] or calls)
    per_rank: dict[int, list[Breakdown]] = {}
    for each in chosen:
        if each.call in calls:
            per_rank.setdefault(each.rank, []).append(each)
    ranks = {rank: combine(per_rank[rank]) for rank in sorted(per_rank)}
    worst = min(ranks.values(), key=lambda each: each.compute / max(each.total, 1), default=None)
    return Summary(len(calls), ranks, combine(ranks.values()), worst)


def tenths(parts: Mapping[str, int]) -> dict[str, int]:
    """Shares in tenths of a percent that sum to 1000 exactly (largest remainders round up); all 0 for an empty call."""
    total = sum(parts.values())
    if total <= 0:
        return dict.fromkeys(parts, 0)
    shares = {part: 1000 * value // total for part, value in parts.items()}
    by_remainder = sorted(parts, key=lambda part: 1000 * parts[part] % total, reverse=True)
    for part in by_remainder[: 1000 - sum(shares.values())]:
        shares[part] += 1
    return shares


_TITLES = {"F": "wait F", "B": "wait B", "W": "wait W", "announced": "announced", "send": "wait send"}


def table(summary: Summary) -> str:
    """Plain text: a row per rank, the mean, the worst rank again; shares of the time in percent, each row summing to 100.0."""
    columns = list(combine(summary.ranks.values()).parts())
    kinds = sorted({kind for each in summary.ranks.values() for kind in each.counts})
    emulated = summary.mean.emulated > 0
    head = ["rank", "s/call", "compute"] + ["emulated"] * emulated
    head += [_TITLES.get(part, part) for part in columns[1:]] + ["peak in flight"] + kinds
    rows = [head]
    named = [(str(rank), each) for rank, each in summary.ranks.items()]
    for name, each in named + [("mean", summary.mean), (f"worst: {summary.worst.rank}", summary.worst)]:
        several = len(summary.ranks) if name == "mean" else 1
        # The padding is a part of compute, so it takes no part in the sum.
        shares = tenths(dict.fromkeys(columns, 0) | each.parts())
        row = [name, f"{each.total / 1e9 / summary.calls / several:.3f}", f"{shares['compute'] / 10:.1f}"]
        row += [f"({100 * each.emulated / max(each.total, 1):.1f})"] * emulated
        row += [f"{shares[part] / 10:.1f}" for part in columns[1:]]
        peaks = each.peak_in_flight
        row += [str(max(peaks.values(), default=0)) if name == "mean" else "/".join(str(peaks[stage]) for stage in sorted(peaks))]
        row += [f"{each.counts.get(kind, 0) / summary.calls / several:g}" for kind in kinds]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append(f"percent of the time of {summary.calls} call(s); peak in flight per stage; actions per call by kind")
    if overlaps := summary.mean.overlaps:
        lines.append(f"{overlaps} recorded span(s) overlapped another and were clipped")
    return "\n".join(lines)
