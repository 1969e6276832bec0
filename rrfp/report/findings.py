"""What costs time, worst first, and what the simulator says would help."""

from dataclasses import dataclass

from rrfp.report.causes import Explanation
from rrfp.report.critical_path import Segment
from rrfp.report.steps import Graph


@dataclass(frozen=True)
class Finding:
    """Something that costs time, in plain words."""

    cause: str
    """`straggler`, `late edge`, `limit`, `imbalance`, `jitter`, or `none` (then the only one)."""
    where: str
    """`stage 3`, `edge 2>3`, `all ranks`..."""
    text: str
    """One sentence: what, where, how much."""
    evidence: tuple[str, ...]
    """The figures that it rests on, a line each."""
    seconds: float
    """What the call would gain without it, predicted; 0 for `none`."""


@dataclass(frozen=True)
class Suggestion:
    """A way of running that the simulator predicts to be faster."""

    text: str
    mode: str
    """In the notation of `rrfp.mode`."""
    predicted_speedup: float
    """Predicted seconds now over predicted seconds then."""
    seconds: float
    """Predicted seconds then."""


def find(graph: Graph, explanation: Explanation, path: list[Segment]) -> list[Finding]:
    return [Finding("none", "all ranks", "Nothing stands out.", (), 0.0)]


def suggest(graph: Graph) -> Suggestion | None:
    return None
