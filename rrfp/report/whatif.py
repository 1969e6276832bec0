"""What a call would take if one thing about it were different: its costs, changed, under the scheduler it ran with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rrfp.errors import ConfigurationError, RRFPError
from rrfp.mode import parse_mode
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.report.steps import Graph
from rrfp.scheduler.limits import SHAPES, limit_of
from rrfp.simulate.costs import Costs
from rrfp.simulate.measured import costs_of
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.trace.files import Timeline

MEGATRON = "megatron-1f1b"
LARGEST = 100_000
"""Actions of a call beyond which it is not simulated: about ten seconds each time."""


@dataclass(frozen=True)
class WhatIf:
    """The measured costs of a call and the policy it ran under. `seconds` is what the simulator makes of the two."""

    costs: Costs
    policy: Policy
    rendezvous: bool = False
    """It ran under Megatron's own schedule, whose sends and receives meet."""

    @classmethod
    def of(cls, timeline: Timeline, graph: Graph) -> "WhatIf | None":
        """None where the call cannot be simulated: an evaluation, missing ranks, an unknown way of running..."""
        if sum(len(row) for row in graph.rows.values()) > LARGEST:
            return None
        try:
            costs = costs_of(timeline, call=graph.number)
            policy = _policy(graph, costs.placement)
            if policy is None:
                return None
            what_if = cls(costs, policy, graph.mode == MEGATRON)
            what_if.seconds  # noqa: B018 - a policy that doesn't run here (its file is gone, say) is found out now
        except RRFPError:
            return None
        return what_if

    @cached_property
    def seconds(self) -> float:
        """Predicted."""
        if self.rendezvous:
            return simulate_megatron_1f1b(self.costs).makespan
        return self.costs.simulate(self.policy).makespan

    def with_policy(self, policy: Policy) -> "WhatIf":
        return replace(self, policy=policy, rendezvous=False)

    def with_durations(self, change: Callable[[str, int, int, float], float]) -> "WhatIf":
        """change(kind, stage, microbatch, seconds) -> seconds."""
        costs = self.costs
        return replace(self, costs=replace(costs, durations={key: change(*key, taken) for key, taken in costs.durations.items()}))

    def with_delays(self, change: Callable[[str, int, int, float], float]) -> "WhatIf":
        """change(kind, receiving stage, microbatch, seconds) -> seconds."""
        costs = self.costs
        return replace(self, costs=replace(costs, delays={key: change(*key, taken) for key, taken in costs.delays.items()}))

    def fed(self, order: Sequence[int]) -> "WhatIf":
        """With the microbatches fed in that order."""
        costs, at = self.costs, {old: new for new, old in enumerate(order)}

        def moved(draws):
            return {(kind, stage, at[microbatch]): taken for (kind, stage, microbatch), taken in draws.items()}

        return replace(self, costs=replace(costs, durations=moved(costs.durations), delays=moved(costs.delays)))


def _policy(graph: Graph, placement: Placement) -> Policy | None:
    if graph.mode is not None and graph.mode != MEGATRON:
        return parse_mode(graph.mode)
    if graph.mode == MEGATRON:
        return parse_mode("strict:1f1b:1f1b")
    # The trace does not say. What it held at most tells the limit; the order is then taken for the usual one.
    peaks = {rank: max(step.in_flight for step in row) for rank, row in graph.rows.items()}
    way = "ready:announced:{}:split" if any(step.action.kind == "W" for step in graph.steps) else "strict:1f1b:{}"
    for shape in SHAPES:
        if all(peaks[rank] == limit_of(shape, placement, rank, graph.microbatches) for rank in peaks):
            return parse_mode(way.format(shape))
    return None


def larger_limits(policy: Policy, placement: Placement, microbatches: int) -> list[Policy]:
    """The policy under every named limit that gives some rank more and none less; the least memory first."""
    found = []
    try:
        now = policy.limits(placement, microbatches)
    except ConfigurationError:
        return []
    for shape in SHAPES:
        bigger = replace(policy, limit=shape)
        then = bigger.limits(placement, microbatches)
        if then not in [each for _, each in found] and all(a <= b for a, b in zip(now, then, strict=True)) and then != now:
            found.append((bigger, then))
    found.sort(key=lambda pair: sum(pair[1]))
    return [each for each, _ in found]


def best_of(candidates: list[WhatIf], *, tolerance: float = 0.01) -> WhatIf | None:
    """The first that is within `tolerance` of the fastest: earlier ones cost less. Those that the policy refuses are left out."""
    seconds = {}
    for index, candidate in enumerate(candidates):
        try:
            seconds[index] = candidate.seconds
        except RRFPError:
            continue
    fastest = min(seconds.values(), default=0.0)
    return next((candidates[index] for index, taken in seconds.items() if taken <= (1 + tolerance) * fastest), None)
