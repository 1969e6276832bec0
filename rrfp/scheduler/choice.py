"""What a policy settles on for one case: the hint that `auto` stands for, and the list that `announced` waits over.

Both follow from numbers that all ranks share, so that all ranks settle alike. Every threshold here was measured
(docs/scheduling.md, "What auto picks"); nothing else depends on them.
"""

from itertools import accumulate
from typing import NamedTuple

from rrfp.placement import Placement
from rrfp.scheduler.limits import limit_of


class Case(NamedTuple):
    """What a choice may look at.

    limits: activations that each rank may hold, as far as this call can fill them.
    fits: whether interleaved 1F1B exists for this call and runs within the limits; looked at with several chunks only.
    """

    placement: Placement
    microbatches: int
    limits: tuple[int, ...]
    split: bool = False
    order: str = "microbatch"
    fits: bool = True

    @property
    def one_chunk(self) -> bool:
        return self.placement.stages == self.placement.ranks

    def shape(self, name: str) -> list[int]:
        """A named shape of limits in this call."""
        return [limit_of(name, self.placement, rank, self.microbatches) for rank in range(self.placement.ranks)]

    def reaches(self, name: str) -> bool:
        """Whether every rank may hold at least what the shape says."""
        return all(limit >= least for limit, least in zip(self.limits, self.shape(name), strict=True))


class Over(NamedTuple):
    """The list that `announced` waits over.

    name: a list; or a rule: the list that it yields at unit durations within the limits.
    limits: what the list is made for, by rank.
    skips, slack: see `hints.Announced`; skips by rank.
    """

    name: str
    limits: tuple[int, ...]
    skips: tuple[int | None, ...]
    slack: float


def announced_over(case: Case) -> Over:
    """The list that `announced` waits over: the best one that fits the limits.

    Skips may be bounded over a 1F1B whose warm-ups w fit the limits and never grow from rank to rank. Say that nothing moves, and
    take the deepest rank that holds something. It has all its gradients, so it can only be waiting for a forward, and holds fewer
    than w. Then each rank before it holds those few as well, no more, and also waits for a forward; but rank 0 may start one.
    """
    ranks, microbatches = case.placement.ranks, case.microbatches
    anything = (None,) * ranks
    if not case.one_chunk:
        return Over("1f1b", case.limits, skips=anything, slack=3.0)
    if case.split:
        most = min(ranks, microbatches)
        if set(case.limits) == {most}:
            return Over("zb-h1", case.limits, skips=anything, slack=3.0)
        # ZB-H2 is the better list only from M = 2P - 1 on, where it can fill its warm-up.
        if microbatches >= 2 * ranks - 1 and case.reaches("2p-1"):
            return Over("zb-h2", case.limits, skips=anything, slack=3.0)
        return Over("fill-r", case.limits, skips=anything, slack=3.0)
    if case.reaches("eager"):
        return Over("1f1b", tuple(case.shape("eager")), skips=(2,) * ranks, slack=2.0)
    # A warm-up that does not shrink from rank to rank makes a rank wait for more forwards than the ones before it may start.
    first, last = min(case.limits[0], case.shape("eager")[0]), max(ranks - 1, 1)
    line = [1 + (2 * (first - 1) * (ranks - 1 - rank) + last) // (2 * last) for rank in range(ranks)]
    if case.reaches("1f1b"):
        line = list(map(max, line, case.shape("1f1b")))  # calls of few microbatches
    limits = tuple(accumulate(map(min, case.limits, line), min))
    # With no more than 1F1B's warm-up, a rank that holds few would run dry by skipping two, and wait where 1F1B does not.
    few = 6 if limits[0] <= ranks else 0
    return Over("1f1b", limits, skips=tuple(2 if limit >= few else 1 for limit in limits), slack=3.0)


def choose(case: Case) -> tuple[str, str]:
    """The hint and the order that `auto` stands for.

    `announced` where its list uses the memory there is: then it does not lose to that list in fixed order. Greedy rules where
    there is more, or too little for 1F1B.
    """
    if not case.one_chunk:
        return _choose_for_chunks(case)
    over = announced_over(case)
    if case.split:
        shape = {"zb-h1": None, "zb-h2": "2p-1"}.get(over.name, "1f1b")
        exact = shape is None or list(case.limits) == case.shape(shape)
        return "announced" if exact else "fill-r", case.order
    little_more = case.limits[0] <= case.placement.ranks + case.placement.ranks // 4
    waits = case.reaches("1f1b") and (little_more or case.limits == over.limits)
    return "announced" if waits else "fill-alt", case.order


def _choose_for_chunks(case: Case) -> tuple[str, str]:
    """Forwards in the order of interleaved 1F1B wherever that fits: rules that take them from any chunk as they come lose a fifth.

    The order "megatron" keeps all that "microbatch" asks for.
    """
    more = case.fits and list(case.limits) != case.shape("1f1b")
    if case.fits and case.order != "free" and (case.split or more):
        return "alt" if case.split else "fill-alt", "megatron"
    return "1f1b" if case.split or more else "announced", case.order
