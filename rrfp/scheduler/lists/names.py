"""The published schedules that go by a name, as PyTorch ships them: what each needs. `rrfp.schedule.published` makes their rows."""

from dataclasses import dataclass

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement


@dataclass(frozen=True)
class Published:
    """One of PyTorch's schedules.

    Args:
        torch_class: its class in `torch.distributed.pipelining.schedules`.
        paper: where it was published.
        split: whether it has W actions, and so needs the backward in two parts.
        v: whether it is made for two chunks per rank laid out as a V (`Placement.v`); else for any number of looped ones.
    """

    torch_class: str
    paper: str
    split: bool = False
    v: bool = False

    def placement(self, ranks: int, chunks: int) -> Placement:
        return Placement.v(ranks, chunks) if self.v else Placement.looped(ranks, chunks)


PUBLISHED = {
    "interleaved-1f1b": Published("ScheduleInterleaved1F1B", "arXiv 2104.04473"),
    "looped-bfs": Published("ScheduleLoopedBFS", "arXiv 2211.05953"),
    "interleaved-zero-bubble": Published("ScheduleInterleavedZeroBubble", "arXiv 2401.10241", split=True),
    "zb-v": Published("ScheduleZBVZeroBubble", "arXiv 2401.10241, section 6", split=True, v=True),
    "dualpipe-v": Published("ScheduleDualPipeV", "arXiv 2412.19437, halved as by github.com/deepseek-ai/DualPipe", split=True, v=True),
}
"""By the name that --rrfp-hint takes. GPipe and 1F1B are our own generators', which give the same lists and more."""


def check_placement(name: str, placement: Placement) -> int:
    """How many chunks each rank has, if `placement` is one that the published list `name` is made for.

    Raises:
        ConfigurationError: naming the list, the placement it wants, and the way out.
    """
    published, chunks = PUBLISHED[name], placement.stages // placement.ranks
    if placement == published.placement(placement.ranks, 2 if published.v else chunks):
        return chunks
    if published.v:
        raise ConfigurationError(
            f"--rrfp-hint {name}: is a list with a V placement (two chunks per rank, stage s and stage 2P-1-s together), and this run's"
            f" is {_described(placement)}; use a list for this run's placement, for example --rrfp-hint 1f1b, or try it on emulated stages"
            f" (`rrfp simulate --placement v --modes strict:{name}:2p`)")
    raise ConfigurationError(
        f"--rrfp-hint {name}: is a list for looped chunks (stage s on rank s mod P), and this run's placement is {_described(placement)};"
        " use 1f1b, which exists for any placement")


def _described(placement: Placement) -> str:
    ranks, chunks = placement.ranks, placement.stages // placement.ranks
    if placement == Placement.looped(ranks, chunks):
        return f"looped: {chunks} chunk{'s' if chunks > 1 else ''} on each of {ranks} ranks"
    if placement == Placement.v(ranks, chunks):
        return f"a V of {chunks} chunks on each of {ranks} ranks"
    return f"stages on ranks {', '.join(map(str, placement.owners))}"
