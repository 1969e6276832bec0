"""Which limits to run with, once it is known what an activation holds, what memory is idle, and what actions and messages take."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.limits import SHAPES, descending, holding, limit_of, listed
from rrfp.simulate.bounds import lower_bound
from rrfp.simulate.costs import Costs

MARGIN = 0.1
"""An activation beyond 1F1B's is taken for so much larger than the largest that was measured: allocators round up and fragment."""
NEAR = 0.01
"""How much slower than the best the chosen limits may be, if they hold less."""
_FIRSTS, _SLOPES, _DRAWS = 8, 4, 3


class Room(NamedTuple):
    """What was measured of a rank under 1F1B, in bytes.

    activation: the most that one microbatch in flight holds, of any chunk; 0 where all stages are frozen, so that nothing is held.
    idle: memory that nothing ever used and that may be used.
    """

    activation: float
    idle: float


@dataclass(frozen=True)
class Choice:
    """The limits that were chosen, one per rank.

    seconds, before: of the measured call in simulation, under them and at 1F1B's.
    tried: how many limits were simulated; whole: whether that was all of them.
    """

    limits: tuple[int, ...]
    seconds: float
    before: float
    tried: int
    whole: bool = True


def fitting(placement: Placement, microbatches: int, rooms: Sequence[Room]) -> list[int]:
    """The most activations that each rank can hold: 1F1B's, which did fit, and those that idle memory takes."""
    own, most = _own(placement, microbatches), []
    for rank, (number, room) in enumerate(zip(own, rooms, strict=True)):
        more = int(max(0.0, room.idle) / ((1 + MARGIN) * room.activation)) if room.activation > 0 else 0
        most.append(min(number + more, _ever(placement, rank, microbatches)))
    return _level(most, own, [room.activation > 0 for room in rooms])


def within(placement: Placement, microbatches: int, activations: Sequence[float], memory: float) -> list[int]:
    """The most activations that each rank can hold in `memory` bytes, be it fewer than 1F1B's; 0 where not even one fits.

    activations: bytes that one holds, per rank; 0 where nothing is held.
    """
    own = _own(placement, microbatches)
    most = [int(memory / held) if held > 0 else number for number, held in zip(own, activations, strict=True)]
    most = [min(number, _ever(placement, rank, microbatches)) for rank, number in enumerate(most)]
    return _level(most, own, [held > 0 for held in activations])


def choose(policy: Policy, costs: Costs, most: Sequence[int], *, seconds: float) -> Choice:
    """The smallest limits, between 1F1B's and `most`, whose simulated time is within `NEAR` of the best.

    All are tried on the call as measured. Those that come near the best there must also come near their best in the median over it and over
    the same microbatches in other orders, so that none is chosen for its luck with one order.

    Args:
        policy: what the limits are for.
        costs: of a call, as measured.
        most: what fits, per rank; never growing along the pipeline, nowhere below 1F1B's.
        seconds: time to spend; then the best of what was tried is taken.
    """
    start = time.monotonic()
    holds = holding(costs.placement, costs.first_trainable)
    candidates = list(_candidates(costs.placement, costs.microbatches, most, holds))
    own = candidates[0]

    def memory(limits: tuple[int, ...]) -> int:
        return sum(number for number, held in zip(limits, holds, strict=True) if held)

    def run(limits: tuple[int, ...], draw: Costs = costs) -> float:
        return draw.simulate(replace(policy, limit=listed(limits))).makespan

    measured = {own: run(own)}
    if measured[own] <= (1 + NEAR) * lower_bound(costs, split=policy.split).seconds:
        return Choice(own, measured[own], measured[own], 1)
    for limits in candidates[1:]:
        if len(measured) > 1 and time.monotonic() >= start + seconds / 2:
            break
        measured[limits] = run(limits)
    best = min(measured.values())
    near = [limits for limits in measured if measured[limits] <= (1 + NEAR) * best]
    near.sort(key=lambda limits: (measured[limits] > best, memory(limits)))
    draws = [_reordered(costs, seed) for seed in range(1, _DRAWS)]
    times: dict[tuple[int, ...], float] = {}
    for limits in near:  # the best on the call as measured, then from the least memory up
        if times and time.monotonic() >= start + seconds:
            break
        times[limits] = median([measured[limits], *(run(limits, draw) for draw in draws)])
    least = (1 + NEAR) * min(times.values())
    chosen = min((limits for limits, taken in times.items() if taken <= least), key=lambda limits: (memory(limits), times[limits]))
    return Choice(chosen, measured[chosen], measured[own], len(measured), len(measured) == len(candidates))


def _candidates(placement: Placement, microbatches: int, most: Sequence[int], holds: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """1F1B's limits, the most that fits, then shapes and slopes cut to what lies between. Slopes begin at the first rank that holds anything."""
    own, top = tuple(_own(placement, microbatches)), tuple(most)
    begin = holds.index(True)
    low, high = own[begin], top[begin]
    # The widest steps first: time may not be enough for all.
    firsts = dict.fromkeys(low + (high - low) * part // _FIRSTS for step in (8, 4, 2, 1) for part in range(step, _FIRSTS + 1, step))
    slopes = [f"{first}-{max(1, first * part // _SLOPES)}" for first in firsts for part in range(_SLOPES + 1)]
    wanted = [[limit_of(name, placement, rank, microbatches) for rank in range(placement.ranks)] for name in SHAPES]
    sloping = Placement.looped(placement.ranks - begin)
    wanted += [[*own[:begin], *(limit_of(name, sloping, rank, max(top)) for rank in range(sloping.ranks))] for name in slopes]
    yield from dict.fromkeys([own, top, *(
        tuple(_level([min(highest, max(lowest, number)) for lowest, number, highest in zip(own, limits, top, strict=True)], own, holds))
        for limits in wanted)])


def _level(limits: Sequence[int], own: Sequence[int], holds: Sequence[bool]) -> list[int]:
    """The same, not growing along the pipeline. A rank that holds nothing bounds nobody: it keeps 1F1B's, or the next rank's if that is more."""
    level = descending([limit if held else math.inf for limit, held in zip(limits, holds, strict=True)])
    following = 0
    for rank in reversed(range(len(level))):
        if not holds[rank]:
            level[rank] = max(own[rank], following)
        following = level[rank]
    return descending(level)


def _own(placement: Placement, microbatches: int) -> list[int]:
    return [limit_of("1f1b", placement, rank, microbatches) for rank in range(placement.ranks)]


def _ever(placement: Placement, rank: int, microbatches: int) -> int:
    return microbatches * len(placement.stages_of(rank))


def _reordered(costs: Costs, seed: int) -> Costs:
    """The same microbatches, fed in another order: each keeps what it costs at every stage."""
    order = list(range(costs.microbatches))
    random.Random(seed).shuffle(order)

    def fed(values):
        return {(kind, stage, m): values[kind, stage, order[m]] for kind, stage, m in values}

    return replace(costs, durations=fed(costs.durations), delays=fed(costs.delays))
