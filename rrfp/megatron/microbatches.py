"""Each forward gets its own microbatch's items, whatever order the forwards run in.

Megatron's forward steps call `next(data_iterator)` themselves and rely on "the k-th forward on this stage is microbatch k". If
stage 0 ran microbatches 0, 2, 1 and the last stage 0, 1, 2, the tokens of one would meet the labels of another, silently.
"""

from collections.abc import Iterator
from typing import Any


class MicrobatchIterator:
    """Serves the items of the current microbatch, and pulls from the real iterator always in order and only when asked.

    How often one forward calls `next` is learned from microbatch 0, which is therefore the first forward of every stage. If
    forwards run in order this behaves exactly as the iterator itself, pull for pull; over a whole call it pulls exactly
    microbatches x calls items.

    Raises:
        RuntimeError: from `next` or `end`, if microbatches differ in how often they call `next`.
        StopIteration: from `next`, when the real iterator has ended.
    """

    def __init__(self, iterator: Iterator):
        self._iterator = iterator
        self._pulled = 0
        self._ahead: dict[int, Any] = {}
        self._microbatch = 0
        self._calls = 0
        self._calls_per_microbatch: int | None = None

    def begin(self, microbatch: int) -> None:
        """The forward of `microbatch` is about to run."""
        self._microbatch, self._calls = microbatch, 0

    def end(self) -> None:
        """It has run."""
        if self._calls_per_microbatch is None:
            self._calls_per_microbatch = self._calls
        elif self._calls != self._calls_per_microbatch:
            self._differs()

    def __next__(self):
        if self._calls_per_microbatch is None:
            index = self._calls
        elif self._calls < self._calls_per_microbatch:
            index = self._microbatch * self._calls_per_microbatch + self._calls
        else:
            self._calls += 1
            self._differs()
        while self._pulled <= index:
            self._ahead[self._pulled] = next(self._iterator)
            self._pulled += 1
        self._calls += 1
        return self._ahead.pop(index)

    def __iter__(self):
        return self

    def __getattr__(self, name: str):
        # Some forward steps read attributes of the iterator they were given.
        return getattr(self._iterator, name)

    def _differs(self):
        raise RuntimeError(
            f"the forward of microbatch {self._microbatch} called next(data_iterator) {self._calls} times, microbatch 0 "
            f"{self._calls_per_microbatch} times: items can't be matched to microbatches unless every forward takes the same number"
        )
