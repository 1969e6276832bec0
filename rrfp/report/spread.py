"""Order statistics of durations and latencies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Spread:
    """How much a duration or a latency varies, in seconds."""

    where: str
    """A stage and kind like `2F`, or an edge like `1>2`."""
    stage: int
    """Of an edge: the source."""
    kind: str
    """`F`, `B`, ..., or `message`."""
    n: int
    p5: float
    p50: float
    p95: float
    variability: float
    """(p95 - p5) / p50, the RRFP paper's measure (arXiv 2605.18750); 0 where p50 is 0."""
    others: float | None = None
    """The median of the medians of the other rows of its kind; None if there is no other."""


def beside(rows: Sequence[Spread]) -> list[Spread]:
    """The same rows, each with what is usual for the others of its kind."""
    return [replace(row, others=usual(other for other in rows if other.kind == row.kind and other is not row)) for row in rows]


def usual(rows: Iterable[Spread]) -> float | None:
    """The median of some rows' medians, None of none."""
    medians = sorted(row.p50 for row in rows)
    return percentile(medians, 0.5) if medians else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, linear between two (numpy's default). Raises IndexError for none."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(where: str, stage: int, kind: str, values: Sequence[float]) -> Spread:
    """The spread of some values, at least one."""
    ordered = sorted(values)
    p5, p50, p95 = (percentile(ordered, share) for share in (0.05, 0.5, 0.95))
    return Spread(where, stage, kind, len(ordered), p5, p50, p95, (p95 - p5) / p50 if p50 else 0.0)
