"""Explains one call of a trace. `analyse` returns plain data: `dataclasses.asdict` of it is JSON.

Times are seconds from the call's begin; actions and edges are in their notation (`2F0`, `1>2`); keys of mappings are text.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rrfp.errors import ConfigurationError
from rrfp.report.causes import CAUSES, Explanation, Wait
from rrfp.report.critical_path import Segment, critical_path, totals
from rrfp.report.findings import Finding, find
from rrfp.report.savings import Saving, savings
from rrfp.report.spread import Spread, beside, spread
from rrfp.report.steps import Graph, graph
from rrfp.report.suggestion import Suggestion, suggest
from rrfp.report.whatif import WhatIf
from rrfp.trace.files import Timeline

__all__ = ["CAUSES", "ActionReport", "Analysis", "Finding", "Saving", "Segment", "Spread", "Suggestion", "Wait", "analyse"]


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
    """What happened last before it could start: "after 2F3 ended", "input 1F4 arrived", "2B0 ended and freed its memory"..."""
    waited_for: str | None
    """The action or edge that the rank idled for just before, None if it did not idle."""
    critical: bool
    """On the critical path."""


@dataclass(frozen=True)
class Analysis:
    """One call, explained."""

    call: int
    begin: float
    """On the timeline's clock; everything else counts from here."""
    wall: float | None
    """The wall time of the begin on the first rank's host, seconds since 1970, where the trace tells."""
    seconds: float
    stages: int
    ranks: int
    microbatches: int
    mode: str | None
    """What it ran under, where the trace tells."""
    forward_only: bool
    rank_of: dict[str, int]
    """Stage -> rank."""
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
    """Per edge: from when only the edge held a message (sent, and its receiver had room for it) to its arrival."""
    findings: list[Finding]
    """In the order of what to do about them; never empty."""
    savings: list[Saving]
    """The call with each of them mended, all from one base; empty where it can't be simulated."""
    suggestion: Suggestion | None
    hosts: dict[str, str]
    """Rank -> the host it ran on, where the trace tells."""
    clocks: dict[str, float]
    """Host -> how wrong its clock may be against the first one's, seconds, where that is known; empty for one host."""
    missing: list[int]
    """Ranks that wrote no trace."""
    notes: list[str]
    """What a reader should know: missing ranks, cut-off files."""


def analyse(timeline: Timeline, *, call: int | None = None, simulations: bool = True) -> Analysis:
    """Explains one call.

    Args:
        timeline: what `rrfp.trace.files.read` gives.
        call: which one; default: the last training call that every rank completed, else the last one that any rank began.
        simulations: False leaves out the suggestion and whatever else asks the simulator.

    Raises:
        ConfigurationError: no such call, or one in which no action ran.
    """
    number = _choose(timeline) if call is None else call
    g = graph(timeline, number)
    if not any(g.rows.values()):
        raise ConfigurationError(f"call {number}: no rank ran an action in it, there is nothing to explain; name another with --call"
                                 f" ({', '.join(map(str, timeline.calls))})")
    explanation = Explanation(g)
    path = critical_path(g)
    on_path = {(segment.name, segment.rank) for segment in path if segment.what == "compute"}
    bubbles = _bubbles(g, explanation.waits)
    durations, latencies = _durations(g), _latencies(g)
    what_if = WhatIf.of(timeline, g) if simulations else None
    hosts = {rank: trace.host for rank, trace in timeline.ranks.items() if trace.host}
    findings, changes = find(g, explanation, path, what_if, hosts)
    suggestion = None if what_if is None else suggest(what_if.costs, what_if.policy, mode=g.mode)
    return Analysis(
        call=number,
        begin=g.begin,
        wall=next((trace.epoch + g.begin for trace in timeline.ranks.values() if trace.epoch is not None), None),
        seconds=g.seconds,
        stages=len(g.rank_of),
        ranks=len(timeline.ranks),
        microbatches=g.microbatches,
        mode=g.mode,
        forward_only=g.forward_only,
        rank_of={str(stage): rank for stage, rank in g.rank_of.items()},
        actions=_actions(g, explanation, on_path),
        waits=explanation.waits,
        utilisation={rank: {"compute": _computing(g, int(rank))} | parts for rank, parts in bubbles.items()},
        critical_path=path,
        critical_totals=totals(path),
        bubbles=bubbles,
        in_flight=_in_flight(g),
        peak_in_flight={str(rank): max((step.in_flight for step in row), default=0) for rank, row in g.rows.items()},
        durations=durations,
        latencies=latencies,
        findings=findings,
        savings=savings(g.seconds, what_if, changes, suggestion),
        suggestion=suggestion,
        hosts={str(rank): host for rank, host in hosts.items()},
        clocks={host: clock.error for host, clock in list(timeline.clocks.items())[1:] if clock.error is not None},
        missing=list(timeline.missing),
        notes=_notes(timeline, g),
    )


def _choose(timeline: Timeline) -> int:
    try:
        return timeline.typical_call()
    except ConfigurationError:
        if not timeline.calls:
            raise ConfigurationError("the trace holds no call: the run ended before its first one began") from None
        return timeline.calls[-1]


def _actions(g: Graph, explanation: Explanation, on_path: set[tuple[str, int]]) -> list[ActionReport]:
    found = []
    for step in sorted(g.steps, key=lambda step: (step.start, step.rank)):
        name, (reason, waited_for) = str(step.action), explanation.reasons[step]
        found.append(ActionReport(name, *step.action[:2], step.rank, step.action.microbatch, step.start, step.end, step.in_flight,
                                  step.padded, reason, waited_for, (name, step.rank) in on_path))
    return found


def _computing(g: Graph, rank: int) -> float:
    return sum(step.end - step.start for step in g.rows[rank])


def _bubbles(g: Graph, waits: Iterable[Wait]) -> dict[str, dict[str, float]]:
    found = {str(rank): dict.fromkeys(CAUSES, 0.0) for rank in g.rows}
    for wait in waits:
        parts = found[str(wait.rank)]
        parts[wait.cause] = parts.get(wait.cause, 0.0) + wait.end - wait.start
    return found


def _in_flight(g: Graph) -> dict[str, list[tuple[float, int]]]:
    """A forward holds an activation from its start until its backward, or its weight gradient if that runs apart, has ended."""
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for step in g.steps:
        if step.action.kind == "F":
            changes[step.action.stage].append((step.start, 1))
        elif step.action.kind in ("B", "W"):
            changes[step.action.stage].append((step.end, -1))
    found = {}
    for stage in g.rank_of:
        held, steps = 0, [(0.0, 0)]
        # Frozen stages and evaluation have no backward and hold nothing.
        if any(change < 0 for _, change in changes[stage]):
            for time, change in sorted(changes[stage]):
                held += change
                steps.append((time, held))
        found[str(stage)] = steps
    return found


def _durations(g: Graph) -> list[Spread]:
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in g.steps:
        values[step.action.stage, step.action.kind].append(step.end - step.start)
    return beside([spread(f"{stage}{kind}", stage, kind, values[stage, kind]) for stage, kind in sorted(values)])


def _latencies(g: Graph) -> list[Spread]:
    return beside([spread(str(edge), edge.source, "message", [each.latency for each in messages])
                   for edge, messages in sorted(g.latencies.items())])


def _notes(timeline: Timeline, g: Graph) -> list[str]:
    notes = [f"rank {rank} is missing: it wrote no trace" for rank in timeline.missing]
    notes += [f"rank {rank} is not in call {g.number}" for rank in sorted(set(timeline.ranks) - set(g.rows))]
    return notes + list(timeline.notes)
