"""The order in which to feed microbatches whose sizes are known from the data (tokens, images) before the call begins."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

Batch = TypeVar("Batch")


def organ_pipe(sizes: Sequence[float]) -> list[int]:
    """Organ-pipe order: small microbatches at both ends, large ones in the middle, so that neighbours are of like size.

    A pipeline fills with its first microbatches and drains with its last: small ones there make both short. In between a stage
    keeps busy while its neighbours' actions take as long as its own, which the in-flight limit can even out only so far.

    Args:
        sizes: of every microbatch, anything that grows with what it costs.

    Returns:
        The indices of the microbatches in the order in which to feed them. Microbatches of one size stay as they are.
    """
    ascending = sorted(range(len(sizes)), key=sizes.__getitem__)
    if not ascending or sizes[ascending[0]] == sizes[ascending[-1]]:
        return ascending
    return ascending[1::2] + ascending[::2][::-1]


def feed_by_size(batches: Iterator[Batch], microbatches: int, size: Callable[[Batch], float]) -> Iterator[Batch]:
    """The same microbatches, every call's in organ-pipe order.

    Wrap what the forward step reads with it, on every rank that reads data: the order must be the same on all of them. It reads
    one call's microbatches ahead; what is left at the end, fewer than `microbatches`, comes too.

    Args:
        batches: an iterator over microbatches.
        microbatches: how many one call runs.
        size: of a microbatch; a function of its content alone, so that all ranks agree.
    """
    while call := list(islice(batches, microbatches)):
        for index in organ_pipe([size(batch) for batch in call]):
            yield call[index]
