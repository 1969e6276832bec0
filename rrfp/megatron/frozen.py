"""Frozen stages at the beginning of a pipeline: they run no backward, hold no activation, and get no gradient messages."""

import time
from collections.abc import Callable, Sequence

import torch

from rrfp.comm import rendezvous
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement


class FrozenPrefix:
    """How many stages of a pipeline come before the first that trains: found in the first training call, alike on every rank.

    Args:
        store: the pipeline's part of the job's store.
        placement: of its stages.
        rank: this pipeline rank.
    """

    def __init__(self, store: rendezvous.Store, placement: Placement, rank: int):
        self._store, self._placement, self._rank = store, placement, rank
        self._first: int | None = None

    @property
    def stages(self) -> int:
        """How many there are, 0 as long as nobody has asked."""
        return self._first or 0

    def first_trainable(
        self, models: Sequence[torch.nn.Module], *, timeout: float, look: Callable[[], None], explain: Callable[[list[int], float], str],
    ) -> int:
        """The first stage with a parameter that requires a gradient, S if there is none.

        Args:
            models: this rank's chunks.
            timeout: seconds for the other ranks to come, in the first call. look, explain: as `rendezvous.collect`; ranks are the pipeline's.

        Raises:
            ConfigurationError: a stage of this rank that was frozen then has been unfrozen.
            PipelineError: some rank did not come; names it.
        """
        trains = [any(parameter.requires_grad for parameter in model.parameters()) for model in models]
        if self._first is None:
            self._first = self._agree(trains, timeout, look, explain)
        for stage, trained in zip(self._placement.stages_of(self._rank), trains, strict=True):
            if trained and stage < self._first:
                raise ConfigurationError(
                    f"stage {stage} was frozen in the first training call and trains now: which stages get gradients is agreed on once; save a "
                    "checkpoint and start again from it")
        return self._first

    def _agree(self, trains, timeout, look, explain) -> int:
        ranks = range(self._placement.ranks)
        rendezvous.publish(self._store, "frozen", "first training call", self._rank, {"trains": trains})
        records = rendezvous.collect(
            self._store, "frozen", "first training call", ranks, until=time.monotonic() + timeout, look=look, explain=explain)
        of_stage = {
            stage: trained for rank in ranks for stage, trained in zip(self._placement.stages_of(rank), records[rank]["trains"], strict=True)}
        return min((stage for stage, trained in of_stage.items() if trained), default=self._placement.stages)
