"""How many activations a rank may hold: the shapes and numbers that --rrfp-limit names."""

import re
from collections.abc import Sequence

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement

SHAPES = ("1f1b", "eager", "2p-1", "2p")


def check_limit(text: str) -> None:
    """Raises ConfigurationError unless `text` is a shape, a number, a slope <first>-<last>, a list n0,n1,..., paper:<number> or measured."""
    number = text.removeprefix("paper:")
    if text in SHAPES or text == "auto" or (number.isdecimal() and int(number) >= 1) or gibibytes(text):
        return
    if (listed := _listed(text)) is not None:
        if listed != descending(listed) or listed[-1] < 1:
            raise ConfigurationError(
                f"--rrfp-limit {text}: no rank can use more than the one before it, and each needs at least 1; write numbers that do not grow,"
                " like 7,5,3,1")
        return
    if (slope := _slope(text)) is None:
        raise ConfigurationError(
            f"--rrfp-limit {text}: must be one of auto, {', '.join(SHAPES)}, a number of at least 1, a slope like 23-9, a list like 7,5,3,1,"
            " memory:<GiB>, or paper:<number>")
    first, last = slope
    # A limit that grows along the pipeline is of no use, and a list made for it (`announced` waits over one) could deadlock.
    if not first >= last >= 1:
        raise ConfigurationError(
            f"--rrfp-limit {text}: the first rank's limit must be at least the last one's, and that at least 1; write 23-9, not 9-23")


def _slope(text: str) -> tuple[int, int] | None:
    """The limits of the first and the last rank that `23-9` names."""
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def _listed(text: str) -> list[int] | None:
    """The limits that `7,5,3,1` lists, one per rank."""
    return list(map(int, text.split(","))) if re.fullmatch(r"[0-9]+(,[0-9]+)+", text) else None


def listed(limits: Sequence[int]) -> str:
    """What --rrfp-limit calls these limits, one per rank."""
    return ",".join(map(str, limits)) if len(limits) > 1 else str(limits[0])


def descending(limits: Sequence[int]) -> list[int]:
    """The same, no rank above the one before it.

    A microbatch that a rank holds is held by all before it, so what a limit allows beyond theirs is never used; and a list made for it
    (`announced` waits over one) could deadlock.
    """
    return [min(limits[: rank + 1]) for rank in range(len(limits))]


def holding(placement: Placement, first_trainable: int) -> list[bool]:
    """By rank, whether it holds activations: not where all its stages are frozen, that is, come before the first that trains."""
    return [any(stage >= first_trainable for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]


def is_measured(text: str) -> bool:
    """Whether the limit depends on what an activation turns out to hold: `auto`, `memory:<GiB>`. Until that is known it is `1f1b`."""
    return text == "auto" or text.startswith("memory:")


def gibibytes(text: str) -> float | None:
    """What `memory:<GiB>` names; None if `text` is something else, or no number above 0."""
    found = re.fullmatch(r"memory:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)", text)
    return float(found[1]) or None if found else None


def is_paper(text: str) -> bool:
    """Whether the limit is the paper's backpressure (Appendix C)."""
    return text.startswith("paper:")


def interleaved_warm_up(ranks: int, rank: int, chunks: int) -> int:
    """Forwards that Megatron's schedule runs before its first backward (`get_pp_rank_microbatches`), not capped by M."""
    if chunks == 1:
        return ranks - rank - 1
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks


def limit_of(text: str, placement: Placement, rank: int, microbatches: int) -> int:
    """The number of activations that `rank` may hold, all its chunks together, capped by what it can ever hold.

    Raises ConfigurationError for a list of another length than the pipeline's.

    With several chunks `eager` equals `1f1b`: Megatron's interleaved warm-up already is eager.
    """
    ranks, chunks = placement.ranks, len(placement.stages_of(rank))
    if text == "1f1b" or is_measured(text):
        limit = interleaved_warm_up(ranks, rank, chunks) + 1
    elif text == "eager":
        limit = 2 * (ranks - rank) - 1 + (chunks - 1) * ranks
    elif text == "2p-1":
        limit = 2 * ranks - 1
    elif text == "2p":
        limit = 2 * ranks
    elif (slope := _slope(text)) is not None:
        # On a straight line between the two, to the nearest number.
        steps = max(ranks - 1, 1)
        limit = (2 * (slope[0] * (steps - rank) + slope[1] * rank) + steps) // (2 * steps)
    elif (numbers := _listed(text)) is not None:
        if len(numbers) != ranks:
            raise ConfigurationError(f"--rrfp-limit {text}: names {len(numbers)} ranks, but the pipeline has {ranks}; give one number per rank")
        limit = numbers[rank]
    else:
        limit = int(text.removeprefix("paper:"))
    return min(limit, microbatches * chunks)
