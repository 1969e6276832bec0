"""What varies from microbatch to microbatch: the work (by its data, or by jitter), and messages that are late at times."""

from collections import defaultdict
from math import sqrt, tanh
from statistics import correlation, fmean, median, pstdev

from rrfp.report.case import Case, Finding, Judged
from rrfp.report.savings import Change
from rrfp.report.spread import spread
from rrfp.report.whatif import WhatIf
from rrfp.report.words import between, listed, ms
from rrfp.scheduler.sizes import organ_pipe

VARIES = 0.03
"""Varying work is worth a word from this share on: some variation is everywhere, and nobody can take it away at once."""
_HEAVIEST = 4
"""Microbatches named."""

Taken = dict[tuple[int, str], dict[int, float]]


def varying_work(case: Case) -> list[Judged]:
    """Microbatches that cost more than others: data (every action of them), or jitter (each for itself)."""
    if case.what_if is None:
        return []
    taken: Taken = defaultdict(dict)
    for step in case.graph.steps:
        if step.action.microbatch is not None:
            taken[step.action.stage, step.action.kind][step.action.microbatch] = step.end - step.start
    means = {key: fmean(values.values()) for key, values in taken.items()}
    varies = {key: pstdev(values.values()) / means[key] for key, values in taken.items() if len(values) > 1 and means[key] > 0}
    if not varies:
        return []

    def even(kind: str, stage: int, microbatch: int, seconds: float) -> float:
        mine = taken.get((stage, kind), {}).get(microbatch)
        return seconds if mine is None else max(0.0, seconds - mine + means[stage, kind])

    def alike(what_if: WhatIf) -> WhatIf:
        return what_if.with_durations(even)

    alone, after = case.gain(alike)
    if after < VARIES * case.graph.seconds:
        return []
    case.mend(alike)
    stages = sorted(case.graph.rank_of)
    of_stage = {stage: max((value for (s, _), value in varies.items() if s == stage), default=0.0) for stage in stages}
    wide = [stage for stage in stages if of_stage[stage] > max(of_stage.values()) / 2]
    by_data = [stage for stage in wide if _follows_data(taken, stage)]
    those = by_data or wide
    where = listed("stage", those) if those != stages else "all stages"
    stage, kind = max((key for key in varies if key[0] in those), key=varies.get)
    values = list(taken[stage, kind].values())
    evidence = [f"{stage}{kind} takes {between(values)} (5% to 95%), spread {spread('', stage, kind, values).variability:.0%} of its median"]
    evidence.append(f"were every microbatch alike, the call would take {case.instead(alone)}")
    changes = (Change("every microbatch alike", alike, alone, possible=False),)
    if not by_data:
        return [Judged(Finding("jitter", where, f"Durations jitter at {where}: {stage}{kind} takes {between(values)}.", tuple(evidence), alone,
                               "find what disturbs the ranks (clock changes, neighbours, garbage collection); a larger limit absorbs some of it.",
                               () if those == stages else tuple(those)), changes, after)]
    work: dict[int, float] = defaultdict(float)
    for (at, _), each in taken.items():
        if at in by_data:
            for microbatch, seconds in each.items():
                work[microbatch] += seconds
    middle, heavy = median(work.values()), sorted(work, key=work.get, reverse=True)[:_HEAVIEST]
    evidence.append(f"heaviest microbatches at {where}: {', '.join(map(str, heavy))} "
                    f"(up to {ms(work[heavy[0]])}, median {ms(middle)}, forward and backward of these stages together)")
    action = "feed microbatches by size (docs/scheduling.md, Feed by size)"
    order = organ_pipe([work[microbatch] for microbatch in sorted(work)], len(case.graph.rows))
    if sorted(work) == list(range(case.graph.microbatches)):

        def fed(what_if: WhatIf) -> WhatIf:
            return what_if.fed(order)

        gain, _ = case.gain(fed)
        if gain >= VARIES * case.graph.seconds:
            action += f": {case.instead(gain)}"
        else:
            action = "feeding microbatches by size gains nothing here by itself; with a larger limit it may (what if, together)"
        changes += (Change("fed by size", fed, gain),)
    text = f"Microbatches differ: at {where} some cost far more than others, forward and backward alike (lengths, images)."
    return [Judged(Finding("imbalance", where, text, tuple(evidence), alone, f"{action}.",
                           () if those == stages else tuple(those)), changes, after)]


def _follows_data(taken: Taken, stage: int) -> bool:
    """Whether a stage's backwards are long for the microbatches whose forwards are: then the data make them so."""
    forward = taken.get((stage, "F"), {})
    backward = taken.get((stage, "B")) or taken.get((stage, "I"), {})
    common = sorted(set(forward) & set(backward))
    x, y = [forward[m] for m in common], [backward[m] for m in common]
    if len(common) < 5 or min(pstdev(x), pstdev(y)) == 0:
        return False
    # Fisher's z: unrelated durations come above three standard deviations once in 700 times.
    return correlation(x, y) > max(0.5, tanh(3 / sqrt(len(common) - 3)))


def varying_messages(case: Case) -> list[Judged]:
    """Messages that are late now and then, on edges that usually are not."""
    graph = case.graph
    latencies = [each.latency for messages in graph.latencies.values() for each in messages]
    if not latencies or case.what_if is None:
        return []
    level = median(latencies)

    def prompt(what_if: WhatIf) -> WhatIf:
        return what_if.with_delays(lambda kind, stage, microbatch, late: min(late, level))

    alone, after = case.gain(prompt)
    if after < VARIES * graph.seconds:
        return []
    late = {edge: sum(case.explanation.late_since(each) is not None for each in messages) for edge, messages in graph.latencies.items()}
    edges = {str(edge): count for edge, count in late.items() if count}
    text = f"Messages are late now and then: {sum(edges.values())} of {len(latencies)}, on {len(edges)} of {len(graph.latencies)} edges."
    evidence = (
        f"all take {between(latencies)} (5% to 95%), the longest {ms(max(latencies))}",
        f"were none late, the call would take {case.instead(alone)}",
    )
    worst = max(edges, key=edges.get, default=None)
    action = "find what shares the network at those times" + (f"; edge {worst} has most of them ({edges[worst]})." if worst else ".")
    return [Judged(Finding("jitter", "messages", text, evidence, alone, action, (), (), "late message"),
                   (Change("no message late", prompt, alone, possible=False),), after)]
