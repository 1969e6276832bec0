"""What one call costs: how long every action takes and how late every message is."""

from dataclasses import dataclass
from statistics import fmean

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.limits import holding
from rrfp.scheduler.lists.names import PUBLISHED, check_placement
from rrfp.simulate.clock import Result, simulate
from rrfp.simulate.scenarios import Draws, check_scenario, draw

LAYOUTS = {"looped": Placement.looped, "v": Placement.v}


@dataclass(frozen=True)
class Costs:
    """What one call costs, on a chain of stages.

    Args:
        stages: S, counted along the model: ranks x chunks.
        chunks: stages per rank.
        microbatches: M.
        durations: seconds by (kind, stage, microbatch): F, B and, where a split backward is known, I and W. Stages at the start that have F only
            are frozen (`first_trainable`); a stage that has I and no W leaves nothing for one.
        delays: seconds by (kind, stage, microbatch), kind F or B (for I too), of the message that makes the action ready at `stage`.
        seconds: how long the measured call took, if it was measured.
        mode: what it ran under (`rrfp.mode`), if known.
        layout: `looped`, as Megatron interleaves chunks, or `v` (`Placement.v`).
    """

    stages: int
    chunks: int
    microbatches: int
    durations: Draws
    delays: Draws
    seconds: float | None = None
    mode: str | None = None
    layout: str = "looped"

    @property
    def placement(self) -> Placement:
        return LAYOUTS[self.layout](self.stages // self.chunks, self.chunks)

    @property
    def first_trainable(self) -> int:
        """The first stage with a backward. Those before it are frozen: they run forwards only and hold no activation."""
        return next((s for s in range(self.stages) if ("B", s, 0) in self.durations or ("I", s, 0) in self.durations), self.stages)

    @property
    def weightless(self) -> list[int]:
        """Stages whose I leaves nothing for a W: none of their weights that could wait is trained."""
        return [s for s in range(self.stages) if ("I", s, 0) in self.durations and ("W", s, 0) not in self.durations]

    @property
    def splits(self) -> bool:
        """Whether I and W are known, so that a split backward can be simulated."""
        return ("I", self.stages - 1, 0) in self.durations

    def limits(self, policy: Policy) -> list[int]:
        """Most activations that each rank can hold under `policy`: none where all its stages are frozen."""
        limits, holds = policy.limits(self.placement, self.microbatches), holding(self.placement, self.first_trainable)
        return [limit if held else 0 for limit, held in zip(limits, holds, strict=True)]

    def check(self, policy: Policy) -> None:
        """Raises ConfigurationError if the policy's list is for another placement, or it splits the backward and these costs know no I and W."""
        if policy.hint in PUBLISHED:
            check_placement(policy.hint, self.placement)
        if policy.split and not self.splits:
            raise ConfigurationError(f"hint {policy.hint}: splits the backward, but these costs know only the whole backward B;"
                                     " use a hint without W, or costs that give I and W")

    def simulate(self, policy: Policy, *, lanes: int | None = None, announce_delay: float = 0.0) -> Result:
        """The call under `policy`, in virtual seconds.

        Args:
            lanes: FIFO lanes per edge; default: the policy's.
            announce_delay: seconds that an announcement takes.

        Raises:
            ConfigurationError: as `check` does.
        """
        self.check(policy)
        return simulate(policy, self.placement, self.microbatches, self.durations, self.delays, lanes=lanes, announce_delay=announce_delay,
                        first_trainable=self.first_trainable, weightless=self.weightless)


def from_scenario(name: str, *, stages: int, microbatches: int, unit: float, seed: int, chunks: int = 1,
                  layout: str = "looped") -> Costs:
    """The costs of one call in a scenario.

    Args:
        name: one of `scenarios.SCENARIOS`, the same behind `organ-pipe:`, an injection level J0 to J3, or the path of a user's JSON file (docs/scenarios.md).
        stages: S = ranks x chunks.
        unit: mean seconds of F, I and W at one stage.
        seed: same name and seed, same costs.
        chunks: stages per rank.
        layout: which rank has which of them, a key of `LAYOUTS`.

    Raises:
        ConfigurationError: if there is no such scenario, a file does not give what it must, or `chunks` does not divide `stages`.
    """
    check_scenario(name)
    if stages % chunks:
        raise ConfigurationError(f"{stages} stages, {chunks} chunks: every rank holds the same number of stages; make stages a multiple")
    return Costs(stages, chunks, microbatches, *draw(name, stages, microbatches, unit, seed), layout=layout)


def unit_of(name: str, unit: float, costs: Costs) -> float:
    """Mean seconds of a rank's forward: `unit` as asked for, unless the scenario is a file, which says it by what it gives."""
    if not name.endswith(".json"):
        return unit
    return costs.chunks * fmean(seconds for (kind, *_), seconds in costs.durations.items() if kind == "F")
