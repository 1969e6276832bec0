"""Which rank owns which virtual stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The map virtual stage -> pipeline rank. The chunks of a rank are its stages in ascending order.

    Args:
        owners: `owners[stage]` is the pipeline rank of that stage, for stages 0..S-1.

    Raises:
        ValueError: if the ranks are not 0..P-1, each owning at least one stage.
    """

    owners: tuple[int, ...]

    def __post_init__(self):
        if sorted(set(self.owners)) != list(range(len(set(self.owners)))):
            raise ValueError(f"a placement needs every rank 0..P-1 to own a stage, got owners {self.owners}")

    @classmethod
    def looped(cls, ranks: int, chunks: int = 1) -> "Placement":
        """Megatron's interleaving: stage s lives on rank s mod P."""
        return cls(tuple(stage % ranks for stage in range(ranks * chunks)))

    @classmethod
    def v(cls, ranks: int, chunks: int = 2) -> "Placement":
        """ZB-V and DualPipeV: chunks run down the ranks and back up, turn by turn."""
        down = list(range(ranks))
        return cls(tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1])))

    @classmethod
    def of(cls, owners: Sequence[int]) -> "Placement":
        """A placement from any list of owners."""
        return cls(tuple(owners))

    @property
    def stages(self) -> int:
        return len(self.owners)

    @cached_property
    def ranks(self) -> int:
        return max(self.owners) + 1

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s for s, owner in enumerate(self.owners) if owner == rank) for rank in range(self.ranks))

    def rank_of(self, stage: int) -> int:
        return self.owners[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in chunk order."""
        return self._stages_of[rank]

    def chunk_of(self, stage: int) -> int:
        return self._stages_of[self.owners[stage]].index(stage)
