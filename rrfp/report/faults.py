"""What is wrong in one place: ranks that are slow or hold too much, edges whose messages are late."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median

from rrfp.action import Edge
from rrfp.report.case import SHARE, Case, Finding, Judged
from rrfp.report.savings import Change
from rrfp.report.spread import spread, usual
from rrfp.report.whatif import WhatIf
from rrfp.report.words import between, ms

SLOWER = 1.15
"""A rank is a straggler from this ratio to the others on: ranks of one model differ by a few percent, by more only where a layer
more, the embedding or the output layer lies."""
STEADY = 0.5
"""A straggler is slow in every microbatch: the quartiles of its ratio to the others are closer than this. Else its work differs."""
LATER = 2.0
"""An edge is late from this ratio of its median latency to the other edges' on."""
CONSTANT = 0.25
"""A latency whose spread is below this does not come and go."""
MOST = 3
"""Findings of one kind at most."""


# ---------------------------------------------------------------------- ranks
def slow_ranks(case: Case) -> list[Judged]:
    """A straggler, or several ranks that hold more than their share."""
    graph, ratios = case.graph, _ratios(case)
    slow = {rank: values for rank, values in ratios.items() if median(values) >= SLOWER}
    if not slow or len(slow) > len(ratios) / 2:
        return []
    factor = {rank: median(values) for rank, values in slow.items()}
    # What several heavy ranks hold too much has to go to the others; one slow rank is mended where it stands.
    level = fmean(factor.get(rank, 1.0) for rank in ratios) if len(slow) > 1 else 1.0

    def evened(kind: str, stage: int, microbatch: int, taken: float) -> float:
        return taken * level / factor.get(graph.rank_of[stage], 1.0)

    def mended(what_if: WhatIf) -> WhatIf:
        return what_if.with_durations(evened)

    if case.what_if is None:
        seconds = sum(case.on_path.get(f"compute stage {stage}", 0.0) * (1 - 1 / factor[rank])
                      for rank in slow for stage in graph.stages_of(rank))
    else:
        seconds, _ = case.gain(mended)
    if seconds < SHARE * graph.seconds:
        return []
    case.mend(mended)
    where, stages = case.named(slow), case.stages(slow)
    share = sum(case.on_path.get(f"compute stage {stage}", 0.0) for stage in stages) / graph.seconds
    medians = {rank: _medians(case, rank) for rank in slow}
    evidence = [_medians_text(case, rank, medians[rank]) for rank in slow]
    evidence.append(f"{share:.0%} of the critical path is {where}")
    even = "as fast as the others" if len(slow) == 1 else "evened out"
    evidence.append(f"{even}, the call would take {case.instead(seconds)}")
    change = Change(f"{where} {even}", mended, seconds)
    ratio = max(sum(mine for mine, _ in each.values()) / sum(others for _, others in each.values()) for each in medians.values())
    steady = all(_quartile_range(values) <= STEADY * median(values) for values in slow.values())
    if len(slow) == 1 and steady:
        rank = next(iter(slow))
        who = where.capitalize() if len(stages) == 1 else f"Rank {rank} ({where})"
        text = f"{who} is a straggler: its work takes {ratio:.2f}x the other stages', in every microbatch, and is {share:.0%} of the critical path"
        if (ends := _at_the_ends(case, stages)) is not None:
            text += f" (it also holds {ends}: if that is why, give it fewer layers)"
        action = (f"check the device of {case.rank(rank)}: clock, temperature, neighbours on its host; "
                  f"if it is as fast as the others, move layers from {where} to them.")
        finding = Finding("straggler", where, f"{text}.", tuple(evidence), seconds, action, stages)
    else:
        text = f"{where.capitalize()} {'hold' if len(slow) > 1 else 'holds'} more work than the others: up to {ratio:.2f}x per microbatch."
        finding = Finding("imbalance", where, text, tuple(evidence), seconds, f"move layers from {where} to the others.", stages)
    return [Judged(finding, (change,), seconds)]


def _ratios(case: Case) -> dict[int, list[float]]:
    """Rank -> per microbatch, its work over the other ranks' median."""
    work: dict[int, dict[int, float]] = {}
    for rank, row in case.graph.rows.items():
        sums: dict[int, float] = defaultdict(float)
        for step in row:
            if step.action.microbatch is not None:
                sums[step.action.microbatch] += step.end - step.start
        work[rank] = dict(sums)
    ratios: dict[int, list[float]] = {}
    for rank, mine in work.items():
        for microbatch, seconds in mine.items():
            others = [each[microbatch] for other, each in work.items() if other != rank and microbatch in each]
            if others and (middle := median(others)) > 0:
                ratios.setdefault(rank, []).append(seconds / middle)
    return ratios


def _medians(case: Case, rank: int) -> dict[str, tuple[float, float]]:
    """Kind -> a rank's median, and the median of the other ranks' stages' medians: what the table of durations shows."""
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in case.graph.steps:
        taken[step.action.stage, step.action.kind].append(step.end - step.start)
    rows = [spread("", stage, kind, values) for (stage, kind), values in taken.items()]
    own = set(case.graph.stages_of(rank))
    found = {}
    for kind in sorted({row.kind for row in rows}, key="FBIW".find):
        mine, others = (usual(row for row in rows if row.kind == kind and (row.stage in own) == inside) for inside in (True, False))
        if mine is not None and others:
            found[kind] = mine, others
    return found


def _medians_text(case: Case, rank: int, medians: dict[str, tuple[float, float]]) -> str:
    """`stage 5: F 30.1 ms (others 20.0), B 60.3 ms (others 40.1), medians`."""
    parts = [f"{kind} {ms(mine)} (others {ms(others).removesuffix(' ms')})" for kind, (mine, others) in medians.items()]
    return f"{case.named([rank])}: {', '.join(parts)}, medians"


def _at_the_ends(case: Case, stages: Iterable[int]) -> str | None:
    if 0 in stages:
        return "the embedding"
    return "the output layer and the loss" if max(case.graph.rank_of) in stages else None


def _quartile_range(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4] if len(ordered) > 3 else 0.0


# ---------------------------------------------------------------------- edges
def late_edges(case: Case) -> list[Judged]:
    """Edges whose messages take longer than other edges' by far, the worst first."""
    graph, found = case.graph, []
    latencies = {edge: [each.latency for each in messages] for edge, messages in graph.latencies.items()}
    waited = case.held("late message")
    suspects = []
    for edge, mine in latencies.items():
        others = [median(values) for other, values in latencies.items() if other != edge]
        if not others:
            continue
        level, typical = median(others), median(mine)
        if typical > LATER * level and typical - level > case.explanation.notable:
            suspects.append(((typical - level) * len(mine), edge, level))
    for _, edge, level in sorted(suspects, reverse=True)[:MOST]:
        kind = "F" if edge.source < edge.destination else "B"

        def prompt(k: str, stage: int, microbatch: int, late: float, kind=kind, edge=edge, level=level) -> float:
            return min(late, level) if (k, stage) == (kind, edge.destination) else late

        def mended(what_if: WhatIf, prompt=prompt) -> WhatIf:
            return what_if.with_delays(prompt)

        on_path = case.on_path.get(f"message {edge}", 0.0)
        seconds = on_path if case.what_if is None else case.gain(mended)[0]
        if case.what_if is not None and case.what_if.rendezvous:
            # A message that waits for its receiver doesn't show how long it would have taken.
            seconds = max(seconds, on_path)
        if seconds < SHARE * graph.seconds:
            continue
        case.mend(mended)
        source, target = (graph.rank_of[stage] for stage in edge)
        text = f"Messages on edge {edge} are late: {ms(median(latencies[edge]))}, where other edges take {ms(level)} (medians)."
        evidence = (
            f"{len(latencies[edge])} messages, {between(latencies[edge])}",
            f"rank {target} was idle for them {waited[target] / graph.seconds:.0%} of the call",
            f"{on_path / graph.seconds:.0%} of the critical path is spent on this edge",
            f"as fast as the others, the call would take {case.instead(seconds)}",
        )
        action = f"check the link from {case.link(source, target)}: {_manner(latencies, edge, level)}."
        finding = Finding("late edge", f"edge {edge}", text, evidence, seconds, action, (edge.destination,), (str(edge),), "late message")
        found.append(Judged(finding, (Change(f"edge {edge} as fast as the others", mended, seconds),), seconds))
    return found


def _manner(latencies: dict[Edge, list[float]], edge: Edge, level: float) -> str:
    """Whether the way back is late too, and whether it comes and goes."""
    back = Edge(edge.destination, edge.source)
    if back not in latencies:
        way = "the way back was not traced"
    elif median(latencies[back]) > LATER * max(level, 1e-6):
        way = f"the way back, {back}, is late as well ({ms(median(latencies[back]))})"
    else:
        way = f"one direction only, {back} takes {ms(median(latencies[back]))}"
    if spread("", 0, "message", latencies[edge]).variability < CONSTANT:
        return f"{way}; the delay is constant, so rather a slow route or little bandwidth than other traffic"
    return f"{way}; the delay comes and goes, so rather other traffic on it than a slow route"
