"""Lower bounds: what no schedule can beat, whatever it knows about the call in advance."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rrfp.simulate.costs import Costs

_ROUNDS = 8  # of sharpening: each is valid, the later ones gain little
_THRESHOLDS = 256  # per stage and round: any choice of them is valid, more are sharper


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
    Drain: its last B has to be followed by that microbatch's B on every stage below that trains. Message delays count in both. A frozen
    stage has forwards only, each followed by the rest of its microbatch's way.

    Args:
        split: the backward runs as I and W. Then only the last I has a drain (I down the chain, then a W); W itself has none.
    """
    windows = _Windows(costs, split=split)
    windows.propagate()
    stage = 0.0
    for rank in range(costs.placement.ranks):
        stages = list(costs.placement.stages_of(rank))
        fill = windows.head["F"][stages].min()
        # Any set of its actions is a bound: earliest start, their sum, the least that has to follow. With W, and without.
        for count in range(2, len(windows.kinds) + 1):
            work = sum(actions.sum() for actions in windows.of(windows.duration, stages, windows.kinds[:count]))
            drain = min(actions.min() for actions in windows.of(windows.tail, stages, windows.kinds[:count]))
            stage = max(stage, fill + work + drain)
    chain = (windows.head["F"] + windows.duration["F"] + windows.tail["F"]).max()
    return Bound(float(stage), float(chain))


def tight_bound(costs: Costs, *, split: bool, limits: Sequence[int], order: str = "microbatch") -> float:
    """Seconds that no schedule can beat that keeps the limits and, unless `order` is "free", microbatch order.

    Heads and tails of every action follow from data, message delays, microbatch order and the limit (F of microbatch m waits until
    that of m - limit is released), and from the actions that must run before or after it on its own stage, one at a time. The
    bound is the longest, over ranks, of the preemptive one-machine problem with these heads and tails (Jackson's schedule).

    With microbatch order it makes no difference how many lanes there are: a message that overtakes another waits for it all the same.
    In free order the limits are not looked at.

    Args:
        split: the backward runs as I and W.
        limits: activations in flight per rank, as `Policy.limits` gives them.
        order: "microbatch", "megatron" (taken as "microbatch") or "free".
    """
    windows = _Windows(costs, split=split, limits=limits, order=order)
    before = 0.0
    for _ in range(_ROUNDS):
        windows.propagate()
        if order != "free":
            windows.sharpen()
        after = windows.total()
        if after <= before * (1 + 1e-9):
            break
        before = after
    windows.propagate()
    kinds, head, duration, tail = windows.kinds, windows.head, windows.duration, windows.tail
    longest = max(float((head[kind] + duration[kind] + tail[kind]).max()) for kind in kinds)
    for rank in range(costs.placement.ranks):
        stages = list(costs.placement.stages_of(rank))
        jobs = [np.concatenate([actions.ravel() for actions in windows.of(table, stages, kinds)]).tolist() for table in (head, duration, tail)]
        longest = max(longest, _preemptive(*jobs))
    return max(longest, lower_bound(costs, split=split).seconds)


class _Windows:
    """Heads and tails of all actions: by kind, arrays of (stage, microbatch).

    head: seconds from the begin of the call before which the action cannot start.
    tail: seconds that pass at least between its end and the end of the call.

    Without limits they follow from data and delays alone. What a stage doesn't have takes no time: a frozen one's backwards, which stand in
    the arrays and nowhere else; a W where I leaves nothing for it, which then ends with I.
    """

    def __init__(self, costs: Costs, *, split: bool, limits: Sequence[int] | None = None, order: str = "free"):
        self.kinds = "FIW" if split else "FB"
        shape = self.stages, self.microbatches = costs.stages, costs.microbatches
        self._first, weightless = costs.first_trainable, costs.weightless

        def array(table, kind: str) -> np.ndarray:
            absent = weightless if kind == "W" else ()
            begin = self._first if table is costs.durations and kind != "F" else 0
            return np.array([0.0 if s < begin or s in absent else table[kind, s, m] for s in range(shape[0]) for m in range(shape[1])],
                            float).reshape(shape)

        self.duration = {kind: array(costs.durations, kind) for kind in self.kinds}
        self.head = {kind: np.zeros(shape) for kind in self.kinds}
        self.tail = {kind: np.zeros(shape) for kind in self.kinds}
        owners = np.array(costs.placement.owners)
        apart = (owners[1:] != owners[:-1])[:, None]  # between two stages of one rank there is no message
        self._late_f = array(costs.delays, "F")[1:] * apart  # [s]: from stage s to s + 1
        self._late_b = array(costs.delays, "B")[:-1] * apart  # [s]: from stage s + 1 to s
        self._ordered = limits is not None and order != "free"
        self._starts = limits is not None and order == "free"
        self._limit = []
        if self._ordered:  # a frozen stage holds nothing that a limit could count
            self._limit = [min(limits[rank], self.microbatches) if s >= self._first else self.microbatches for s, rank in enumerate(owners)]

    def of(self, table: dict[str, np.ndarray], stages: Sequence[int], kinds: str) -> list[np.ndarray]:
        """What `table` says of the actions that these stages have: by kind, where there are any, an array of (stage, microbatch)."""
        own = [(kind, [s for s in stages if kind == "F" or s >= self._first]) for kind in kinds]
        return [table[kind][those] for kind, those in own if those]

    def total(self) -> float:
        return sum(float(side[kind].sum()) for side in (self.head, self.tail) for kind in self.kinds)

    def propagate(self) -> None:
        """Longest paths through the precedences, from both ends."""
        self._heads()
        self._tails()

    def _heads(self) -> None:
        stages, ordered, last = self.stages, self._ordered, self.kinds[-1]
        back = self.kinds[1]
        for m in range(self.microbatches):
            forward, backward = self.head["F"][:, m], self.head[back][:, m]
            if ordered and m:
                for kind in self.kinds:
                    np.maximum(self.head[kind][:, m], self.head[kind][:, m - 1] + self.duration[kind][:, m - 1],
                               out=self.head[kind][:, m])
                for s, limit in enumerate(self._limit):
                    if m >= limit:
                        forward[s] = max(forward[s], self.head[last][s, m - limit] + self.duration[last][s, m - limit])
            elif self._starts and m:
                # In free order, too, every stage starts with microbatch 0.
                np.maximum(forward, self.head["F"][:, 0] + self.duration["F"][:, 0], out=forward)
            up, took = forward.tolist(), self.duration["F"][:, m].tolist()
            late = self._late_f[:, m].tolist()
            for s in range(1, stages):
                up[s] = max(up[s], up[s - 1] + took[s - 1] + late[s - 1])
            forward[:] = up
            down, gave = np.maximum(backward, forward + self.duration["F"][:, m]).tolist(), self.duration[back][:, m].tolist()
            late = self._late_b[:, m].tolist()
            for s in range(stages - 2, self._first - 1, -1):
                down[s] = max(down[s], down[s + 1] + gave[s + 1] + late[s])
            backward[:] = down
            if last == "W":
                np.maximum(self.head["W"][:, m], backward + self.duration["I"][:, m], out=self.head["W"][:, m])

    def _tails(self) -> None:
        stages, ordered, last = self.stages, self._ordered, self.kinds[-1]
        back = self.kinds[1]
        for m in reversed(range(self.microbatches)):
            forward, backward, freed = (self.tail[kind][:, m] for kind in ("F", back, last))
            if ordered and m + 1 < self.microbatches:
                for kind in self.kinds:
                    np.maximum(self.tail[kind][:, m], self.tail[kind][:, m + 1] + self.duration[kind][:, m + 1],
                               out=self.tail[kind][:, m])
                for s, limit in enumerate(self._limit):
                    if m + limit < self.microbatches:
                        freed[s] = max(freed[s], self.tail["F"][s, m + limit] + self.duration["F"][s, m + limit])
            if last == "W":
                np.maximum(backward, self.tail["W"][:, m] + self.duration["W"][:, m], out=backward)
            down, gave = backward.tolist(), self.duration[back][:, m].tolist()
            late = self._late_b[:, m].tolist()
            for s in range(self._first + 1, stages):
                down[s] = max(down[s], down[s - 1] + gave[s - 1] + late[s - 1])
            backward[:] = down
            up, took = np.maximum(forward, backward + self.duration[back][:, m]).tolist(), self.duration["F"][:, m].tolist()
            late = self._late_f[:, m].tolist()
            for s in range(stages - 2, -1, -1):
                up[s] = max(up[s], up[s + 1] + took[s + 1] + late[s])
            forward[:] = up

    def sharpen(self) -> None:
        """What must run before an action on its own stage takes its time there, one at a time; likewise after it.

        In microbatch order the actions before F m are F 0..m-1 and all that was done to microbatches 0..m-limit, those before B m are
        F 0..m, B 0..m-1, and so on; seen from the end it is the same with the kinds reversed.
        """
        for s, limit in enumerate(self._limit):
            kinds = self.kinds if s >= self._first else "F"
            _push([self.head[k][s] for k in kinds], [self.duration[k][s] for k in kinds], limit)
            ends = [self.tail[k][s][::-1] for k in reversed(kinds)]
            _push(ends, [self.duration[k][s][::-1] for k in reversed(kinds)], limit)


def _push(heads: list[np.ndarray], durations: list[np.ndarray], limit: int) -> None:
    """Raise the heads of one stage's actions, in place: kinds in the order in which they run, each by microbatch.

    For a time t, all actions before a given one whose own head is at least t follow each other after t.
    """
    count = len(heads[0])
    every = np.concatenate(heads)
    times = np.unique(every)
    if len(times) > _THRESHOLDS:
        times = times[np.linspace(0, len(times) - 1, _THRESHOLDS).astype(int)]
    sums = [np.concatenate([[0.0], np.cumsum(taken)]) for taken in durations]
    # Heads of a kind ascend with the microbatch: those of at least t are all from the first such on.
    skipped = [total[np.searchsorted(own, times)] for own, total in zip(heads, sums, strict=True)]
    microbatch = np.arange(count)
    raised = []
    for target in range(len(heads)):
        ends = np.zeros((count, len(times)))
        for kind, (total, before) in enumerate(zip(sums, skipped, strict=True)):
            # How many of `kind` run before microbatch m of `target`.
            ahead = microbatch + (kind < target) if kind <= target else np.maximum(microbatch - limit + 1, 0)
            ends += np.maximum(total[ahead][:, None] - before[None, :], 0.0)
        # A time after which nothing has to run says nothing.
        raised.append(np.where(ends > 0, ends + times[None, :], 0.0).max(axis=1))
    for head, floor in zip(heads, raised, strict=True):
        np.maximum(head, floor, out=head)


def _preemptive(heads: list[float], durations: list[float], tails: list[float]) -> float:
    """Jackson's preemptive schedule: of what is released the job with the longest tail runs. No one-machine schedule is shorter."""
    release = sorted(range(len(heads)), key=heads.__getitem__)
    left, ready, now, longest, at = list(durations), [], 0.0, 0.0, 0
    while at < len(release) or ready:
        if not ready:
            now = max(now, heads[release[at]])
        while at < len(release) and heads[release[at]] <= now:
            heapq.heappush(ready, (-tails[release[at]], release[at]))
            at += 1
        tail, job = ready[0]
        until = heads[release[at]] if at < len(release) else float("inf")
        if now + left[job] <= until:
            now += left[job]
            heapq.heappop(ready)
            longest = max(longest, now - tail)
        else:
            left[job] -= until - now
            now = until
    return longest
