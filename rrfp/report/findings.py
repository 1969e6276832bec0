"""What costs time, worst first: stragglers, late edges, a limit that is too small, work that differs.

What a finding is worth is asked of the simulator: the call again, without that one thing. Where a call can't be simulated (an
evaluation, a rank is missing...), its share of the critical path stands in.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt, tanh
from statistics import correlation, fmean, median, pstdev

from rrfp.report.causes import Explanation
from rrfp.report.critical_path import Segment, totals
from rrfp.report.spread import spread
from rrfp.report.steps import Graph
from rrfp.report.whatif import WhatIf, best_of, larger_limits

SLOWER = 1.15
"""A rank is a straggler from this ratio to the others on: ranks of one model differ by a few percent, by more only where a layer
more, the embedding or the output layer lies."""
SHARE = 0.02
"""A fault or a limit is worth a word from this share of the call on: what a prediction is good to."""
VARIES = 0.03
"""Varying work is worth a word from this share on: some variation is everywhere, and nobody can take it away at once."""
STEADY = 0.5
"""A straggler is slow in every microbatch: the quartiles of its ratio to the others are closer than this. Else its work differs."""
LATER = 2.0
"""An edge is late from this ratio of its median latency to the other edges' on."""
MOST = 3
"""Findings of one kind at most."""


@dataclass(frozen=True)
class Finding:
    """Something that costs time, in plain words."""

    cause: str
    """`straggler`, `late edge`, `limit`, `imbalance`, `jitter`, or `none` (then the only one)."""
    where: str
    """`stage 3`, `edge 2>3`, `limit 1f1b`..."""
    text: str
    """One sentence: what, where, how much."""
    evidence: tuple[str, ...]
    """The figures that it rests on, a line each."""
    seconds: float
    """What the call would gain without it, predicted; 0 for `none`."""


def find(graph: Graph, explanation: Explanation, path: list[Segment], what_if: WhatIf | None) -> list[Finding]:
    """All findings of a call, worst first; never empty.

    Faults (a straggler, a late edge, a small limit) come before variation, which is of the work itself: a limit is judged with
    the other faults mended, variation with those mended too.
    """
    return _Finder(graph, explanation, path, what_if).all()


class _Finder:
    def __init__(self, graph: Graph, explanation: Explanation, path: list[Segment], what_if: WhatIf | None):
        self.graph, self.explanation, self.what_if = graph, explanation, what_if
        self.on_path = totals(path)
        self.mended = what_if
        """The call without the faults found so far."""
        self.work: dict[int, dict[int, float]] = {}
        """Rank -> microbatch -> seconds of compute."""
        for rank, row in graph.rows.items():
            sums: Counter = Counter()
            for step in row:
                if step.action.microbatch is not None:
                    sums[step.action.microbatch] += step.end - step.start
            self.work[rank] = dict(sums)

    def all(self) -> list[Finding]:
        if self.graph.lost:
            text = f"{_listed('Rank', list(self.graph.lost))} did not finish call {self.graph.number}: nothing is judged by a part of it."
            return [Finding("none", _listed("rank", list(self.graph.lost)), text, (), 0.0)]
        faults = [*self.slow_ranks(), *self.late_edges()]
        faults += self.small_limit()
        variation = [*self.varying_work(), *self.varying_messages()]
        found = [*sorted(faults, key=lambda each: -each.seconds), *sorted(variation, key=lambda each: -each.seconds)]
        return found or [self.nothing()]

    # ------------------------------------------------------------------ ranks
    def slow_ranks(self) -> list[Finding]:
        """A straggler, or several ranks that hold more than their share."""
        ratios = self._ratios()
        slow = {rank: values for rank, values in ratios.items() if median(values) >= SLOWER}
        if not slow or len(slow) > len(ratios) / 2:
            return []
        factor = {rank: median(values) for rank, values in slow.items()}

        # What several heavy ranks hold too much has to go to the others; one slow rank is mended where it stands.
        level = fmean(factor.get(rank, 1.0) for rank in ratios) if len(slow) > 1 else 1.0

        def evened(kind: str, stage: int, microbatch: int, taken: float) -> float:
            return taken * level / factor.get(self.graph.rank_of[stage], 1.0)

        gain = self._gain_by_path(factor)
        seconds, mended = self._without(lambda what_if: what_if.with_durations(evened), gain)
        if seconds < SHARE * self.graph.seconds:
            return []
        self.mended = mended
        steady = all(_quartile_range(values) <= STEADY * median(values) for values in slow.values())
        where = _listed("stage", [stage for rank in slow for stage in self.graph.stages_of(rank)])
        evidence = [self._durations_of(rank) for rank in slow]
        share = self._share_of_path(slow)
        evidence.append(f"{share:.0%} of the critical path is {where}")
        evidence.append(f"evened out, the call would take {seconds * 1e3:.0f} ms less of {self.graph.seconds * 1e3:.0f} (predicted)")
        ratio = max(factor.values())
        if len(slow) == 1 and steady:
            rank, stages = next((rank, self.graph.stages_of(rank)) for rank in slow)
            who = where.capitalize() if len(stages) == 1 else f"Rank {rank} ({where})"
            text = f"{who} is a straggler: its work takes {ratio:.2f}x the other stages', in every microbatch, and is {share:.0%} of the critical path"
            if (ends := self._at_the_ends(slow)) is not None:
                text += f" (it also holds {ends}: if that is why, give it fewer layers)"
            return [Finding("straggler", where, f"{text}.", tuple(evidence), seconds)]
        text = f"{where.capitalize()} {'hold' if len(slow) > 1 else 'holds'} more work than the others: up to {ratio:.2f}x per microbatch"
        return [Finding("imbalance", where, f"{text}; move layers to the others.", tuple(evidence), seconds)]

    def _ratios(self) -> dict[int, list[float]]:
        """Rank -> per microbatch, its work over the other ranks' median."""
        ratios: dict[int, list[float]] = {}
        for rank, work in self.work.items():
            for microbatch, seconds in work.items():
                others = [each[microbatch] for other, each in self.work.items() if other != rank and microbatch in each]
                if others and (usual := median(others)) > 0:
                    ratios.setdefault(rank, []).append(seconds / usual)
        return ratios

    def _gain_by_path(self, ratios: dict[int, float]) -> float:
        return sum(self.on_path.get(f"compute stage {stage}", 0.0) * (1 - 1 / ratio)
                   for rank, ratio in ratios.items() for stage in self.graph.stages_of(rank))

    def _share_of_path(self, ranks) -> float:
        return sum(self.on_path.get(f"compute stage {stage}", 0.0) for rank in ranks
                   for stage in self.graph.stages_of(rank)) / self.graph.seconds

    def _durations_of(self, rank: int) -> str:
        """`stage 5: F 30.1 ms (others 20.0), B 60.3 ms (others 40.1)`, medians."""
        mine, others = defaultdict(list), defaultdict(list)
        for step in self.graph.steps:
            (mine if step.rank == rank else others)[step.action.kind].append(step.end - step.start)
        parts = [f"{kind} {median(mine[kind]) * 1e3:.3g} ms (others {median(others[kind]) * 1e3:.3g})" for kind in sorted(mine, key="FBIW".find)
                 if kind in others]
        return f"{_listed('stage', self.graph.stages_of(rank))}: {', '.join(parts)}, medians"

    def _at_the_ends(self, ranks) -> str | None:
        stages = {stage for rank in ranks for stage in self.graph.stages_of(rank)}
        if 0 in stages:
            return "the embedding"
        return "the output layer and the loss" if max(self.graph.rank_of) in stages else None

    # ------------------------------------------------------------------ edges
    def late_edges(self) -> list[Finding]:
        graph, found = self.graph, []
        latencies = {edge: sorted(each.latency for each in messages) for edge, messages in graph.latencies.items()}
        waited = Counter()
        for wait in self.explanation.waits:
            if wait.cause == "late message":
                waited[wait.culprit] += wait.end - wait.start
        suspects = []
        for edge, mine in latencies.items():
            others = [median(values) for other, values in latencies.items() if other != edge]
            if not others:
                continue
            usual, typical = median(others), median(mine)
            if typical > LATER * usual and typical - usual > self.explanation.notable:
                suspects.append(((typical - usual) * len(mine), edge, usual))
        for _, edge, usual in sorted(suspects, reverse=True)[:MOST]:
            kind = "F" if edge.source < edge.destination else "B"

            def prompt(k: str, stage: int, microbatch: int, late: float, kind=kind, edge=edge, usual=usual) -> float:
                return min(late, usual) if (k, stage) == (kind, edge.destination) else late

            on_path = self.on_path.get(f"message {edge}", 0.0)
            seconds, mended = self._without(lambda what_if, prompt=prompt: what_if.with_delays(prompt), on_path)
            if self.what_if is not None and self.what_if.rendezvous:
                # A message that waits for its receiver doesn't show how long it would have taken.
                seconds = max(seconds, on_path)
            if seconds < SHARE * graph.seconds:
                continue
            self.mended = mended
            typical = median(latencies[edge])
            text = (f"Messages on edge {edge} are late: {typical * 1e3:.3g} ms, where other edges take {usual * 1e3:.3g} ms (medians); "
                    f"look at the link from rank {graph.rank_of[edge.source]} to rank {graph.rank_of[edge.destination]}.")
            evidence = (
                f"{len(latencies[edge])} messages, 5% to 95%: {_range(latencies[edge])}",
                f"rank {graph.rank_of[edge.destination]} was idle for them {waited[str(edge)] / graph.seconds:.0%} of the call",
                f"{on_path / graph.seconds:.0%} of the critical path is spent on this edge",
                f"as fast as the others, the call would take {seconds * 1e3:.0f} ms less of {graph.seconds * 1e3:.0f} (predicted)",
            )
            found.append(Finding("late edge", f"edge {edge}", text, evidence, seconds))
        return found

    # ------------------------------------------------------------------ the limit
    def small_limit(self) -> list[Finding]:
        now = self.mended
        if now is None:
            return []
        if now.rendezvous:
            # How much the limit alone is worth is seen without the rendezvous.
            now = now.with_policy(now.policy)
        policy, costs = now.policy, now.costs
        best = best_of([now, *(now.with_policy(each) for each in larger_limits(policy, costs.placement, costs.microbatches))])
        seconds = 0.0 if best is None else now.seconds - best.seconds
        if seconds < SHARE * self.graph.seconds:
            return []
        idle = Counter()
        for wait in self.explanation.waits:
            if wait.cause == "memory limit":
                idle[wait.rank] += wait.end - wait.start
        idle = Counter({rank: held for rank, held in idle.items() if held > SHARE * self.graph.seconds})
        peaks = [max((step.in_flight for step in row), default=0) for row in self.graph.rows.values()]
        why = "ready forwards were held back while later stages had nothing to do" if idle else "it leaves no slack for what varies"
        what = "The limit of Megatron's own 1F1B" if self.what_if.rendezvous else f"The limit {policy.limit}"
        text = (f"{what} is too small: {why}; "
                f"limit {best.policy.limit} would make it {now.seconds / best.seconds:.2f}x as fast (predicted).")
        evidence = [f"at most {_counts(peaks)} activations in flight per rank"]
        evidence += [f"rank {rank} was idle with a ready forward at hand for {held / self.graph.seconds:.0%} of the call"
                     for rank, held in idle.most_common(MOST)]
        evidence.append(f"limit {best.policy.limit}: {best.seconds * 1e3:.0f} ms, limit {policy.limit}: {now.seconds * 1e3:.0f} ms (predicted)")
        return [Finding("limit", f"limit {policy.limit}", text, tuple(evidence), seconds)]

    # ------------------------------------------------------------------ variation
    def varying_work(self) -> list[Finding]:
        """Microbatches that cost more than others: data (every action of them), or jitter (each for itself)."""
        taken: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
        for step in self.graph.steps:
            if step.action.microbatch is not None:
                taken[step.action.stage, step.action.kind][step.action.microbatch] = step.end - step.start
        varies = {key: pstdev(values.values()) / fmean(values.values()) for key, values in taken.items()
                  if len(values) > 1 and fmean(values.values()) > 0}
        if not varies:
            return []
        means = {key: fmean(values.values()) for key, values in taken.items()}

        def even(kind: str, stage: int, microbatch: int, seconds: float) -> float:
            mine = taken.get((stage, kind), {}).get(microbatch)
            return seconds if mine is None else max(0.0, seconds - mine + means[stage, kind])

        seconds, mended = self._without(lambda what_if: what_if.with_durations(even), 0.0, of_mended=True)
        if seconds < VARIES * self.graph.seconds:
            return []
        self.mended = mended
        stages = sorted(self.graph.rank_of)
        of_stage = {stage: max((value for (s, _), value in varies.items() if s == stage), default=0.0) for stage in stages}
        by_data = [stage for stage in stages if of_stage[stage] > max(of_stage.values()) / 2 and _follows_data(taken, stage)]
        where = _listed("stage", by_data or [stage for stage in stages if of_stage[stage] > max(of_stage.values()) / 2])
        if (by_data or stages) == stages:
            where = "all stages"
        widest = max(varies, key=varies.get)
        spread_ = spread("", *widest, list(taken[widest].values()))
        evidence = (
            f"{widest[0]}{widest[1]}: {_range(sorted(taken[widest].values()))}, 5% to 95%; (p95 - p5) / p50 = {spread_.variability:.2f}",
            f"with every microbatch alike the call would take {seconds * 1e3:.0f} ms less of {self.graph.seconds * 1e3:.0f} (predicted)",
        )
        if by_data:
            text = f"Microbatches differ: at {where} some cost far more than others, forward and backward alike (lengths, images)."
            return [Finding("imbalance", where, text, evidence, seconds)]
        text = f"Durations jitter at {where}: the same action takes up to {(spread_.p95 / spread_.p50 - 1 if spread_.p50 else 0):.0%} longer at times."
        return [Finding("jitter", where, text, evidence, seconds)]

    def varying_messages(self) -> list[Finding]:
        latencies = sorted(each.latency for messages in self.graph.latencies.values() for each in messages)
        if not latencies or self.mended is None:
            return []
        usual = median(latencies)
        seconds, _ = self._without(
            lambda what_if: what_if.with_delays(lambda kind, stage, microbatch, late: min(late, usual)), 0.0, of_mended=True)
        if seconds < VARIES * self.graph.seconds:
            return []
        late = [edge for edge, messages in self.graph.latencies.items()
                if any(self.explanation.late_since(each) is not None for each in messages)]
        count = sum(self.explanation.late_since(each) is not None for messages in self.graph.latencies.values() for each in messages)
        text = f"Messages are late now and then, on {len(late)} of {len(self.graph.latencies)} edges: {count} of {len(latencies)} of them."
        evidence = (
            f"latencies, 5% to 95%: {_range(latencies)}; the longest {latencies[-1] * 1e3:.3g} ms",
            f"with none late the call would take {seconds * 1e3:.0f} ms less of {self.graph.seconds * 1e3:.0f} (predicted)",
        )
        return [Finding("jitter", "messages", text, evidence, seconds)]

    def nothing(self) -> Finding:
        sums: Counter = Counter()
        for wait in self.explanation.waits:
            sums[wait.cause] += wait.end - wait.start
        whole = self.graph.seconds * len(self.graph.rows)
        computing = 1 - sum(sums.values()) / whole if whole else 0.0
        bubble = (sums["warm-up"] + sums["drain"]) / whole if whole else 0.0
        text = (f"Nothing stands out: {computing:.0%} of the time is computing, {bubble:.0%} is the filling and draining of "
                f"{len(self.graph.rank_of)} stages by {self.graph.microbatches} microbatches.")
        return Finding("none", "all ranks", text, (), 0.0)

    # ------------------------------------------------------------------ worth
    def _without(self, change: Callable[[WhatIf], WhatIf], estimate: float, *, of_mended: bool = False) -> tuple[float, WhatIf | None]:
        """Seconds gained by a change, and the mended call with it; without a simulator `estimate`."""
        base = self.mended if of_mended else self.what_if
        if base is None:
            return estimate, None
        changed = change(base)
        return base.seconds - changed.seconds, changed if base is self.mended else change(self.mended)


def _follows_data(taken: dict[tuple[int, str], dict[int, float]], stage: int) -> bool:
    """Whether a stage's backwards are long for the microbatches whose forwards are: then the data make them so."""
    forward = taken.get((stage, "F"), {})
    backward = taken.get((stage, "B")) or taken.get((stage, "I"), {})
    common = sorted(set(forward) & set(backward))
    x, y = [forward[m] for m in common], [backward[m] for m in common]
    if len(common) < 5 or min(pstdev(x), pstdev(y)) == 0:
        return False
    # Fisher's z: unrelated durations come above three standard deviations once in 700 times.
    return correlation(x, y) > max(0.5, tanh(3 / sqrt(len(common) - 3)))


def _quartile_range(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4] if len(ordered) > 3 else 0.0


def _range(ordered: list[float]) -> str:
    at = [ordered[round(share * (len(ordered) - 1))] * 1e3 for share in (0.05, 0.95)]
    return f"{at[0]:.3g} to {at[1]:.3g} ms"


def _listed(word: str, numbers: list[int]) -> str:
    """`stage 3`, `stages 0-1`, `stages 2, 5`."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{word}s {numbers[0]}-{numbers[-1]}"
    return f"{word}s {', '.join(map(str, numbers))}"


def _counts(numbers: list[int]) -> str:
    return "/".join(map(str, numbers)) if len(numbers) <= 16 else f"{min(numbers)} to {max(numbers)}"
