"""The best policy and limit under a memory bound, found by trying them under the virtual clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TextIO

from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name
from rrfp.policy import BUILT_IN, SPLIT_ONLY, Policy
from rrfp.scheduler.limits import SHAPES
from rrfp.simulate.bounds import lower_bound, tight_bound
from rrfp.simulate.costs import Costs

NUMBERS = 16
"""How many numbers are tried as limits, evenly spread up to the bound, besides the shapes."""


@dataclass(frozen=True)
class Candidate:
    """One way of running that keeps the memory bound.

    seconds: of one call; of several costs, their median.
    peaks: activations that each rank held at most, over all costs.
    limits: what each rank may hold.
    bound: seconds that no schedule with these limits (and this split) can beat.
    """

    policy: Policy
    seconds: float
    peaks: tuple[int, ...]
    limits: tuple[int, ...]
    bound: float


def search(
    costs: Costs | Sequence[Costs],
    *,
    memory: int | Sequence[int],
    total: int | None = None,
    hints: Sequence[str] | None = None,
    limits: Sequence[str] | None = None,
    mode: str = "ready",
    split: bool | None = None,
    lanes: int = 1,
    order: str = "microbatch",
    within: float = 0.0,
    progress: TextIO | None = None,
) -> list[Candidate]:
    """Tries hints x limits (x split) and returns what was tried, best first; of two equally fast ones the one with less memory.

    What cannot become the first of the list is left out, by lower bounds alone: the first is that of an exhaustive search (with
    `within`, at most so much slower).

    Args:
        costs: of one call, or of several (seeds, calls of a trace): then a candidate is judged by its median, so that none
            is chosen for its luck in one of them.
        memory: activations that a rank may hold: one number for all, or one per rank.
        total: activations that all ranks together may hold.
        hints: default: every built-in hint but `auto`, which is one of the others.
        limits: as --rrfp-limit; default: every named shape, numbers up to the bound and, where ranks may hold different numbers (`total`, or
            a `memory` that differs), slopes.
        mode: "ready" or "strict".
        split: only with, or only without a split backward; default: both, where I and W are known.
        lanes, order: see `Policy`.
        within: stop once the best is within this fraction of what no candidate can beat.
        progress: where to say how it goes, a line for each limit that can win; None: nowhere.

    Raises:
        ConfigurationError: if nothing can run within the memory bound.
    """
    draws = [costs] if isinstance(costs, Costs) else list(costs)
    groups = list(_groups(draws[0], memory, total, hints, limits, mode, split, lanes, order))
    if not groups:
        raise ConfigurationError(f"search under {_memory(memory, total)}: no hint runs within that; allow more activations, at least one "
                                 "per chunk of every rank, and check that the named hints and the split go together")
    found: list[Candidate] = []
    # The group with the most memory first, for a good time to beat; then from the least memory up.
    groups = [groups[-1], *groups[:-1]]
    bounds = [median(_bound(each, group[0], order) for each in draws) for group in groups]
    for number, (group, bound) in enumerate(zip(groups, bounds, strict=True), start=1):
        leader = min(found, key=_rank, default=None)
        if leader is not None and within and leader.seconds <= min(bounds) * (1 + within):
            break
        held = sum(draws[0].limits(group[0]))
        if leader is not None and (round(bound, 9), held) >= _rank(leader)[:2]:
            continue
        found += [_try(policy, draws, bound) for policy in group]
        if progress is not None:
            leader, limit = min(found, key=_rank), group[0].limit + (" split" if group[0].split else "")
            print(f"[search] {number}/{len(groups)} limits, {limit}: {len(group)} hints tried; best so far {mode_name(leader.policy)}, "
                  f"{leader.seconds:.4g} s", file=progress, flush=True)
    return sorted(found, key=_rank)


def render(candidates: Sequence[Candidate], *, most: int = 12) -> str:
    """A table of the best `most`, the times beside the fastest's and beside the bound of their limits."""
    rows = [("policy", "seconds", "x best", "x bound", "peak in flight", "may hold")]
    for each in candidates[:most]:
        rows.append((mode_name(each.policy), f"{each.seconds:.4f}", f"{each.seconds / candidates[0].seconds:.3f}",
                     f"{each.seconds / each.bound:.3f}", _counts(each.peaks), _counts(each.limits)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{row[0]:{widths[0]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
             for row in rows]
    if len(candidates) > most:
        lines.append(f"and {len(candidates) - most} slower ones")
    return "\n".join(lines)


def _groups(costs: Costs, memory, total, hints, limits, mode, split, lanes, order) -> Iterator[list[Policy]]:
    """Policies that share limits and split, in order of memory."""
    placement = costs.placement
    allowed = [memory] * placement.ranks if isinstance(memory, int) else list(memory)
    if len(allowed) != placement.ranks:
        raise ConfigurationError(f"search under {_memory(memory, total)}: {len(allowed)} numbers for {placement.ranks} ranks; give one "
                                 "for each, or one for all")
    top = max(allowed)
    numbers = sorted({-(-top * part // NUMBERS) for part in range(1, NUMBERS + 1)})
    ways = [way for way in ((False, True) if split is None else (split,)) if costs.splits or not way]
    groups: dict[tuple[tuple[int, ...], bool], list[Policy]] = {}
    slopes = []
    if total or len(set(allowed)) > 1:
        slopes = sorted({f"{first}-{max(1, first * part // 4)}" for first in numbers for part in range(4)})
    for limit in limits or [*SHAPES, *map(str, numbers), *slopes]:
        for way in ways:
            for hint in hints or (each for each in BUILT_IN if each != "auto"):
                if hint in SPLIT_ONLY and not way:
                    continue
                policy = Policy(hint=hint, mode=mode, limit=limit, order=order, lanes=lanes, split=way)
                held = tuple(costs.limits(policy))
                if any(most > bound for most, bound in zip(held, allowed, strict=True)) or sum(held) > (total or sum(held)):
                    continue
                if _runs(policy, costs) and all(other.hint != hint for other in groups.get((held, way), ())):
                    groups.setdefault((held, way), []).append(policy)
    yield from (groups[key] for key in sorted(groups, key=lambda key: (sum(key[0]), key)))


def _runs(policy: Policy, costs: Costs) -> bool:
    """Whether the policy goes with the pipeline at all: a strict list within its limits, enough memory for every chunk."""
    try:
        policy.scheduler(costs.placement, 0, costs.microbatches)
    except ConfigurationError:
        return False
    return True


def _bound(costs: Costs, policy: Policy, order: str) -> float:
    return max(lower_bound(costs, split=policy.split).seconds, tight_bound(costs, split=policy.split, limits=costs.limits(policy), order=order))


def _try(policy: Policy, draws: Sequence[Costs], bound: float) -> Candidate:
    results = [costs.simulate(policy) for costs in draws]
    peaks = tuple(max(held) for held in zip(*(result.peak_in_flight for result in results), strict=True))
    limits = tuple(draws[0].limits(policy))
    return Candidate(policy, median(result.makespan for result in results), peaks, limits, bound)


def _rank(candidate: Candidate) -> tuple:
    # Sums of the same durations in another order differ in the last digits: not a reason to prefer one.
    return round(candidate.seconds, 9), sum(candidate.limits), sum(candidate.peaks), mode_name(candidate.policy)


def _memory(memory: int | Sequence[int], total: int | None) -> str:
    each = f"{memory} activations a rank" if isinstance(memory, int) else f"{' '.join(map(str, memory))} activations"
    return each + (f" and {total} in all" if total else "")


def _counts(numbers: Sequence[int]) -> str:
    if len(set(numbers)) == 1:
        return f"{numbers[0]} each"
    return " ".join(map(str, numbers)) if len(numbers) <= 16 else f"{max(numbers)}..{min(numbers)}"
