"""From samples to a stage's microbatches, and what the next call's will cost before it begins."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from rrfp.multimodal.batch import Sample, collate
from rrfp.multimodal.costs import Load, Model
from rrfp.scheduler.sizes import feed_by_size


class Samples(Protocol):
    """Samples by index, the same on every rank."""

    def __getitem__(self, index: int) -> Sample: ...


class Microbatches:
    """Endless microbatches, whose loads can be seen before they are taken.

    Args:
        batches: `collate`d ones.
    """

    def __init__(self, batches: Iterator[dict]):
        self._batches, self._ahead = batches, deque()

    def __iter__(self):
        return self

    def __next__(self) -> dict:
        return self._ahead.popleft() if self._ahead else next(self._batches)

    def upcoming(self, count: int) -> list[Load]:
        """What the next `count` microbatches hold. It reads them."""
        while len(self._ahead) < count:
            self._ahead.append(next(self._batches))
        return [batch["load"] for batch in list(self._ahead)[:count]]


def microbatches(samples: Samples, *, size: int, replica: int, replicas: int, consumed: int = 0, **collating) -> Iterator[dict]:
    """A data-parallel replica's microbatches, endless, dealt as Megatron's `MegatronPretrainingSampler` deals samples.

    Args:
        size: samples in one.
        replica, replicas: data-parallel rank and size.
        consumed: samples that all replicas have taken already.
        collating: arguments of `collate`.
    """
    while True:
        begin = consumed + replica * size
        yield collate([samples[index] for index in range(begin, begin + size)], **collating)
        consumed += size * replicas


def fed(batches: Iterator[dict], *, by_size: bool, model: Model, microbatches: int, ranks: int) -> Microbatches:
    """Microbatches as they come, or every call's in organ-pipe order (`rrfp.scheduler.sizes`) of their operations in all stages together.

    microbatches: of a call. ranks: of the pipeline.
    """
    if by_size:
        batches = feed_by_size(batches, _operations(model), microbatches=microbatches, ranks=ranks)
    return Microbatches(batches)


def _operations(model: Model) -> Callable[[dict], float]:
    def operations(batch: dict) -> float:
        return sum(map(sum, model.layers_operations(batch["load"])))

    return operations
