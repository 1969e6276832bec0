"""Lower bounds: what no schedule can beat, whatever it knows about the call in advance."""

from dataclasses import dataclass

from rrfp.simulate.costs import Costs


@dataclass(frozen=True)
class Bound:
    """Seconds that one call takes at least. Neither part knows of memory limits, lanes or orders.

    stage: the longest, over ranks, of unavoidable fill, all its work, and unavoidable drain.
    chain: the longest way of one microbatch up the chain of stages and back.
    """

    stage: float
    chain: float

    @property
    def seconds(self) -> float:
        return max(self.stage, self.chain)


def lower_bound(costs: Costs, *, split: bool) -> Bound:
    """Seconds that no schedule of one training call can beat.

    Fill: a rank's first action is a forward of its first stage, so it starts no earlier than the earliest microbatch arrives there.
    Drain: its last B has to be followed by that microbatch's B on every stage below. Message delays count in both.

    Args:
        split: the backward runs as I and W. Then only the last I has a drain (I down the chain, then a W); W itself has none.
    """
    times = Times(costs, split=split)
    stage = 0.0
    for stages in (costs.placement.stages_of(rank) for rank in range(costs.placement.ranks)):
        fill = min(times.head["F", stages[0], m] for m in range(costs.microbatches))
        # Every set of its actions is a bound: the earliest start, the sum, the least that has to follow. With W, and without.
        for kinds in times.kinds[1:]:
            counted = times.kinds[:times.kinds.index(kinds) + 1]
            work = sum(costs.durations[kind, s, m] for kind in counted for s in stages for m in range(costs.microbatches))
            drain = min(times.tail[kind, s, m] for kind in counted for s in stages for m in range(costs.microbatches))
            stage = max(stage, fill + work + drain)
    chain = max(times.head["F", 0, m] + costs.durations["F", 0, m] + times.tail["F", 0, m] for m in range(costs.microbatches))
    return Bound(stage, chain)


class Times:
    """Heads and tails of every action by data dependencies alone.

    head: seconds from the begin of the call before which the action cannot start.
    tail: seconds that pass at least between its end and the end of the call.
    """

    def __init__(self, costs: Costs, *, split: bool):
        self.kinds = "FIW" if split else "FB"
        self.head: dict[tuple[str, int, int], float] = {}
        self.tail: dict[tuple[str, int, int], float] = {}
        durations, delays, last = costs.durations, costs.delays, costs.stages - 1
        owner, back = costs.placement.owners, self.kinds[1]

        def late(kind: str, source: int, stage: int, m: int) -> float:
            # Between two stages of one rank there is no message.
            return delays[kind, stage, m] if owner[source] != owner[stage] else 0.0

        for m in range(costs.microbatches):
            now = 0.0
            for s in range(costs.stages):
                now += late("F", s - 1, s, m) if s else 0.0
                self.head["F", s, m] = now
                now += durations["F", s, m]
            for s in range(last, -1, -1):
                now += late("B", s + 1, s, m) if s < last else 0.0
                self.head[back, s, m] = now
                now += durations[back, s, m]
                if split:
                    self.head["W", s, m] = now
            left = 0.0
            for s in range(costs.stages):
                if s:
                    left += late("B", s, s - 1, m) + durations[back, s - 1, m]
                if split:
                    self.tail["W", s, m] = 0.0
                    left = max(left, durations["W", s, m])
                self.tail[back, s, m] = left
            left += durations[back, last, m]
            for s in range(last, -1, -1):
                self.tail["F", s, m] = left
                left += durations["F", s, m] + (late("F", s - 1, s, m) if s else 0.0)
