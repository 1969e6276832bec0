"""The collectives of data parallelism that a schedule starts: gradient reductions and parameter gathers.

Invariant 7: they are issued in one fixed order, chunk descending for gradients and ascending for parameters, by *count* of executed
actions, never by microbatch index: replicas that dispatch differently still issue the same sequence. The order needs no agreement:
every backward of chunk c needs one of chunk c + 1, so whatever order they run in, chunk c + 1 has its last one first (and forwards
the other way round).

With a split backward a chunk's gradients are complete after its last W, and Ws of different chunks may run in any order. Then a chunk
is not reduced before the chunks after it, and always as a whole: in its last I, some of its buckets could be complete too early.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch


class GradientSync:
    """One call's collectives of data parallelism, as Megatron's schedules start them.

    Sources: `enable_grad_sync`, `disable_grad_sync`, `grad_sync_func` and `param_sync_func` in
    `schedules.forward_backward_pipelining_without_interleaving` and `..._with_interleaving`.

    Args:
        config: Megatron's.
        models: this rank's chunks, in order.
        microbatches: how many run in the call.
        rank: this pipeline rank.
        forward_only: nothing is reduced or gathered then.
        split: chunks whose backward ends with a W.
    """

    def __init__(self, config: Any, models: Sequence[torch.nn.Module], *, microbatches: int, rank: int, forward_only: bool,
                 split: Collection[int] = ()):
        self._split = split
        self._models, self._microbatches, self._rank = models, microbatches, rank
        self._no_sync_func = _together(config.no_sync_func)
        self._reduce = None if forward_only else _per_chunk(config.grad_sync_func, models)
        self._gather = None if forward_only or len(models) == 1 else _per_chunk(getattr(config, "param_sync_func", None), models)
        if split and len(models) > 1 and self._reduce is None and not forward_only and _overlaps(models[0]):
            self._reduce = [model.start_grad_sync for model in models]  # see above; it takes the parameters and ignores them
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._weights: Counter[int] = Counter()
        self._due: list[tuple[int, int]] = []
        """(count of finished backwards of the rank at which it starts, chunk): reductions that are aligned over the pipeline."""
        self._synced: set[int] = set()
        self._context: contextlib.AbstractContextManager | None = None
        self._disable()
        if self._gather is not None:
            self._start_gather(0)
            self._start_gather(1)

    def before_forward(self, chunk: int) -> None:
        """The next forward of `chunk` is about to run: its first one starts the gather of the parameters of the chunk after it."""
        self._forwards[chunk] += 1
        if self._gather is not None and self._forwards[chunk] == 1 and 1 < chunk + 1 < len(self._models):
            self._start_gather(chunk + 1)

    def before_backward(self, chunk: int) -> None:
        """The next backward (B or I) of `chunk` is about to run: in its last one gradients are reduced as they become ready."""
        self._backwards[chunk] += 1
        self._before(chunk, self._backwards)

    def before_weights(self, chunk: int) -> None:
        """The next W of `chunk` is about to run: in its last one too."""
        self._weights[chunk] += 1
        self._before(chunk, self._weights)

    def after_backward(self, chunk: int) -> None:
        """It has run."""
        if chunk in self._split:
            self._disable()
        else:
            self._after(chunk, self._backwards)

    def after_weights(self, chunk: int) -> None:
        """It has run."""
        self._after(chunk, self._weights)

    def _before(self, chunk: int, ran: Counter[int]) -> None:
        if ran[chunk] == self._microbatches and (self._reduce is None or len(self._models) == 1 and self._rank == 0):
            self._enable()
            self._synced.add(chunk)

    def _after(self, chunk: int, ran: Counter[int]) -> None:
        """Reductions that Megatron aligns over the pipeline start as many backwards later as there are ranks before this."""
        if len(self._models) == 1:
            return
        done = sum((self._weights if each in self._split else self._backwards)[each] for each in range(len(self._models)))
        if self._reduce is not None:
            if ran[chunk] == self._microbatches:
                self._due.append((done + self._rank, chunk))
            while (first := self._next_due(done)) is not None:
                self._start_reduce(first)
        self._disable()

    def _next_due(self, done: int) -> int | None:
        """The chunk to reduce now: it is its turn by count, and the chunks after it have been reduced."""
        for at, chunk in self._due:
            if at <= done and all(later in self._synced for later in range(chunk + 1, len(self._models))):
                self._due.remove((at, chunk))
                return chunk
        return None

    def finish(self) -> None:
        """After the last action: reductions that were kept for the end start now."""
        if self._context is not None:
            self._enable()
            if self._reduce is not None:
                for chunk in reversed(range(len(self._models))):
                    self._start_reduce(chunk)

    def abandon(self) -> None:
        """After a failure: leave `no_sync` as Megatron expects to find it."""
        self._enable()

    def _start_reduce(self, chunk: int) -> None:
        if chunk not in self._synced:
            self._synced.add(chunk)
            self._enable()
            self._reduce[chunk](self._models[chunk].parameters())

    def _start_gather(self, chunk: int) -> None:
        self._gather[chunk](self._models[chunk].parameters())

    def _disable(self) -> None:
        if self._context is None:
            self._context = self._no_sync_func()
            self._context.__enter__()

    def _enable(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def _together(no_sync: Callable | Sequence[Callable] | None) -> Callable:
    """One context of all chunks' `no_sync`."""
    if not isinstance(no_sync, (list, tuple)):
        return no_sync or contextlib.nullcontext

    def all_of_them() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for one in no_sync:
            stack.enter_context(one())
        return stack

    return all_of_them


def _overlaps(model: torch.nn.Module) -> bool:
    """Whether its DDP reduces gradients while backwards run."""
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))


def _per_chunk(function: Callable | Sequence[Callable] | None, models: Sequence) -> list[Callable] | None:
    if function is None:
        return None
    return list(function) if isinstance(function, (list, tuple)) else [function] * len(models)
