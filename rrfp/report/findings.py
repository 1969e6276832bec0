"""What costs time, in the order of what to do about it: stragglers, late edges, a limit that is too small, work that differs."""

from collections import Counter

from rrfp.report.case import SHARE, Case, Finding, Judged
from rrfp.report.causes import Explanation
from rrfp.report.critical_path import Segment
from rrfp.report.faults import MOST, late_edges, slow_ranks
from rrfp.report.savings import DEFAULT, Change
from rrfp.report.steps import Graph
from rrfp.report.variation import varying_messages, varying_work
from rrfp.report.whatif import WhatIf, best_of, larger_limits
from rrfp.report.words import counts, listed, ms

__all__ = ["Finding", "find"]


def find(graph: Graph, explanation: Explanation, path: list[Segment], what_if: WhatIf | None,
         hosts: dict[int, str]) -> tuple[list[Finding], list[Change]]:
    """All findings of a call, never none, and what they would change.

    First the faults (a straggler, a late edge) and the limit, which can be changed at once and is judged with the faults mended, by
    what they are worth; then, with the faults mended too, the variation that the limit is too small for, which is of the work
    itself. Jitter that is worth less than a fault is left out.

    hosts: rank -> the host it ran on, where known.
    """
    if graph.lost:
        who = listed("rank", list(graph.lost))
        text = f"{who.capitalize()} did not finish call {graph.number}: nothing is judged by a part of it."
        return [Finding("none", who, text, (), 0.0)], []
    case = Case(graph, explanation, path, what_if, hosts)
    faults = sorted([*slow_ranks(case), *late_edges(case)], key=lambda each: -each.weight)
    limit = _Limit.of(case)
    worst = max((each.weight for each in faults), default=0.0)
    variation = [each for each in [*varying_work(case), *varying_messages(case)] if each.finding.cause != "jitter" or each.weight > worst]
    variation.sort(key=lambda each: -each.weight)
    judged = sorted([*faults, *([] if limit is None else [limit.judged(faults, variation)])], key=lambda each: -each.weight) + variation
    changes = [change for each in judged for change in each.changes]
    return [each.finding for each in judged] or [_nothing(graph, explanation)], changes


class _Limit:
    """A limit that is too small: the smallest named one within 1% of the best, with the faults mended."""

    @classmethod
    def of(cls, case: Case) -> "_Limit | None":
        now = case.mended
        if now is None:
            return None
        if now.rendezvous:
            # How much the limit alone is worth is seen without the rendezvous, under RRFP's default.
            now = now.with_policy(DEFAULT)
        best = best_of([now, *(now.with_policy(each) for each in larger_limits(now.policy, now.costs.placement, now.costs.microbatches))])
        if best is None or case.scale * (now.seconds - best.seconds) < SHARE * case.graph.seconds:
            return None
        return cls(case, now, best)

    def __init__(self, case: Case, now: WhatIf, best: WhatIf):
        self.case, self.now, self.best = case, now, best
        self.alone, self.after = case.gain(self.apply)

    def apply(self, what_if: WhatIf) -> WhatIf:
        return what_if.with_policy(self.best.policy)

    def judged(self, faults: list[Judged], variation: list[Judged]) -> Judged:
        case, now, best, alone, after = self.case, self.now, self.best, self.alone, self.after
        graph, faults = case.graph, [each for each in faults if each.weight >= self.after]
        idle = Counter({rank: held for rank, held in case.held("memory limit").items() if held > SHARE * graph.seconds})
        name, shape = f"limit {now.policy.limit}", f"limit {best.policy.limit}"
        what = name
        if case.what_if.rendezvous:
            what, shape = "the limit of Megatron's own 1F1B", f"RRFP with {shape}"
        gain = f"{shape} would take {ms(graph.seconds - alone)} instead of {ms(graph.seconds).removesuffix(' ms')}"
        if faults:
            mended = faults[0].finding.where if len(faults) == 1 else "these"
            text = (f"{what} is small as well: {gain}, and {ms(case.scale * best.seconds)} instead of "
                    f"{ms(case.scale * best.seconds + after).removesuffix(' ms')} with {mended} mended (predicted).")
        else:
            gain += f" ({graph.seconds / (graph.seconds - alone):.2f}x, predicted)"
            if variation:
                text = f"{variation[0].finding.text.rstrip('.')}, and {what} is too small to absorb it: {gain}."
                if (known := _brief(variation[0])) is not None:
                    text = f"{known} and {what} is too small to absorb it: {gain}."
            elif idle:
                text = f"{what} is too small: ready forwards were held back while later stages had nothing to do; {gain}."
            else:
                text = f"{what} is too small, it leaves no slack for what varies; {gain}."
        evidence = [f"rank {rank} was idle with a ready forward at hand for {held / graph.seconds:.0%} of the call"
                    + ("; the stages after it then starve (slow upstream)" if not index else "")
                    for index, (rank, held) in enumerate(idle.most_common(MOST))]
        peaks = [max((step.in_flight for step in row), default=0) for row in graph.rows.values()]
        evidence.append(f"at most {counts(peaks)} activations in flight per rank")
        if case.what_if.rendezvous and not faults:
            evidence.append(f"RRFP with {name} would take {ms(case.scale * now.seconds)} (predicted)")
        then = max(best.costs.simulate(best.policy).peak_in_flight)
        action = (f"{'run RRFP with ' if case.what_if.rendezvous else ''}--rrfp-limit {best.policy.limit}, if memory allows: at most {then} "
                  f"activations on a rank instead of {max(peaks)} (what one takes in bytes is not in the trace).")
        if faults and faults[0].finding.cause == "late edge":
            action = f"mend the link first; until then, as a stopgap that hides the delay: {action}"
        elif faults:
            action = f"mend {faults[0].finding.where} first; then {action}"
        elif any(change.possible and change.gain > alone for each in variation for change in each.changes):
            action = f"feed microbatches by size first (see below): it gains more, and costs no memory; then {action}"
        finding = Finding("limit", name, text[0].upper() + text[1:], tuple(evidence), alone, action, case.stages(idle), (), "memory limit")
        return Judged(finding, (Change(shape, self.apply, alone),), after)


def _brief(varies: Judged) -> str | None:
    """What varies, as a clause with its figure."""
    finding = varies.finding
    if finding.where == "messages":
        return None
    what = "Microbatches differ" if finding.cause == "imbalance" else "Durations jitter"
    return f"{what} ({finding.where}: {finding.evidence[0].split(' (5%')[0]})"


def _nothing(graph: Graph, explanation: Explanation) -> Finding:
    sums: Counter = Counter()
    for wait in explanation.waits:
        sums[wait.cause] += wait.end - wait.start
    whole = graph.seconds * len(graph.rows)
    computing = 1 - sum(sums.values()) / whole if whole else 0.0
    bubble = (sums["warm-up"] + sums["drain"]) / whole if whole else 0.0
    text = (f"Nothing stands out: {computing:.0%} of the time is computing, {bubble:.0%} is the filling and draining of "
            f"{len(graph.rank_of)} stages by {graph.microbatches} microbatches.")
    return Finding("none", "all ranks", text, (), 0.0)
