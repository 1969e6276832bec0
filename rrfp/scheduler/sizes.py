"""The order in which to feed microbatches whose sizes are known from the data (tokens, images) before the call begins."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import TypeVar

Batch = TypeVar("Batch")

_WINDOW = 4  # times the ranks: long enough to fill and drain the pipeline, short enough to hold large and small ones alike


def organ_pipe(sizes: Sequence[float], ranks: int) -> list[int]:
    """Organ-pipe order: small microbatches at both ends, large ones in the middle, so that neighbours are of like size.

    A pipeline fills with its first microbatches and drains with its last: small ones there make both short. In between a stage
    keeps busy while its neighbours' actions take as long as its own, which the in-flight limit can even out only so far. A call
    of 8 microbatches per rank or more is cut into stretches of 4 to 8 per rank: where large microbatches load one stage more than
    the others, one long stretch of them would keep the others waiting.

    Args:
        sizes: of every microbatch of a call, anything that grows with what it costs.
        ranks: P, of the pipeline.

    Returns:
        The indices of the microbatches in the order in which to feed them. Microbatches of one size stay as they are.
    """
    count = max(1, len(sizes) // (_WINDOW * ranks))
    bounds = [part * len(sizes) // count for part in range(count + 1)]
    order: list[int] = []
    for begin, end in pairwise(bounds):
        ascending = sorted(range(begin, end), key=sizes.__getitem__)
        equal = not ascending or sizes[ascending[0]] == sizes[ascending[-1]]
        order += ascending if equal else ascending[1::2] + ascending[::2][::-1]
    return order


def feed_by_size(batches: Iterator[Batch], size: Callable[[Batch], float], *, microbatches: int, ranks: int) -> Iterator[Batch]:
    """The same microbatches, every call's in organ-pipe order.

    Wrap what the forward step reads with it, on every rank that reads data: the order must be the same on all of them. It reads
    one call's microbatches ahead; what is left at the end, fewer than `microbatches`, comes too.

    Args:
        batches: an iterator over microbatches.
        size: of a microbatch; a function of its content alone, so that all ranks agree.
        microbatches: how many one call runs.
        ranks: P, of the pipeline.
    """
    while call := list(islice(batches, microbatches)):
        for index in organ_pipe([size(batch) for batch in call], ranks):
            yield call[index]
