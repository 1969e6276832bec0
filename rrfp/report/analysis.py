"""Explains one call of a trace. `analyse` returns plain data: `dataclasses.asdict` of it is JSON.

Times are seconds from the call's begin, on the timeline's clock; actions and edges are in their notation (`2F0`, `1>2`).
"""

from dataclasses import dataclass, field

CAUSES = (
    "warm-up", "drain", "late message", "slow upstream", "slow downstream", "memory limit", "fixed order", "announced wait", "runtime",
)
"""What a rank was idle for, in the order of reports. A rank that was lost inside the call has `lost` besides."""


@dataclass(frozen=True)
class ActionReport:
    """One action, and why it started when it did."""

    name: str
    kind: str
    stage: int
    rank: int
    microbatch: int | None
    start: float
    end: float
    in_flight: int
    """Activations that the rank held while it ran."""
    padded: float
    """Emulated seconds at its end."""
    reason: str
    """What happened last before it could start: "after 2F3 ended", "input 1F4 arrived", "2B0 freed its memory"..."""
    waited_for: str | None
    """The action or edge that the rank idled for just before, None if it did not idle."""
    critical: bool
    """On the critical path."""


@dataclass(frozen=True)
class Wait:
    """A piece of a rank's idle time. The waits of a rank and its actions tile the call."""

    rank: int
    cause: str
    """One of `CAUSES`, or `lost`."""
    start: float
    end: float
    culprit: str | None
    """Who owed what it waited for: an action (`1F4`), an edge (`1>2`), or None."""


@dataclass(frozen=True)
class Segment:
    """A piece of the critical path. Segments tile the call."""

    name: str
    """An action, `message 1>2 3` (edge and microbatch), or the cause of a pause."""
    start: float
    end: float
    what: str
    """`compute`, `message`, `announced wait` or `runtime`."""
    rank: int
    """Of a message: the receiver's."""
    stage: int | None


@dataclass(frozen=True)
class Spread:
    """Order statistics of durations or latencies, in seconds."""

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
    """(p95 - p5) / p50, as the paper measured; 0 where p50 is 0."""


@dataclass(frozen=True)
class Finding:
    """Something that costs time, in plain words."""

    cause: str
    """`straggler`, `late edge`, `limit`, `imbalance`, `jitter`, or `none` (the only finding then)."""
    where: str
    """`stage 3`, `edge 2>3`, `all ranks`..."""
    text: str
    """One sentence: what, where, how much."""
    evidence: tuple[str, ...]
    """The figures that it rests on, a line each."""
    seconds: float
    """What the call would gain without it, predicted; 0 for `none`."""


@dataclass(frozen=True)
class Suggestion:
    """A way of running that the simulator predicts to be faster."""

    text: str
    mode: str
    """In the notation of `rrfp.mode`."""
    predicted_speedup: float
    """Predicted seconds now over predicted seconds then."""
    seconds: float
    """Predicted seconds then."""


@dataclass(frozen=True)
class Analysis:
    """One call, explained."""

    call: int
    begin: float
    """On the timeline's clock; everything else counts from here."""
    seconds: float
    stages: int
    ranks: int
    microbatches: int
    mode: str | None
    """What it ran under, where the trace tells."""
    forward_only: bool
    rank_of: dict[str, int]
    """Stage -> rank. (Keys of every mapping are text, as JSON has them.)"""
    actions: list[ActionReport]
    """By start."""
    waits: list[Wait]
    """By rank, then start."""
    utilisation: dict[str, dict[str, float]]
    """Rank -> part -> seconds: `compute`, then what `bubbles` has; sums to `seconds`."""
    critical_path: list[Segment]
    critical_totals: dict[str, float]
    """`compute stage 3`, `message 2>3`, `runtime`... -> seconds on the critical path, largest first; sums to `seconds`."""
    bubbles: dict[str, dict[str, float]]
    """Rank -> cause -> seconds; sums to the rank's idle time."""
    in_flight: dict[str, list[tuple[float, int]]]
    """Stage -> steps (time, activations held from then on)."""
    peak_in_flight: dict[str, int]
    """Rank -> most activations held at once."""
    durations: list[Spread]
    """Per stage and kind."""
    latencies: list[Spread]
    """Per edge: from a message's sending to its arrival."""
    findings: list[Finding]
    """Worst first; never empty."""
    suggestion: Suggestion | None
    clocks: dict[str, float]
    """Host -> how wrong its clock may be against the first host's, seconds; empty for one host."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: missing ranks, cut-off files."""
