"""A call under judgement: what findings are, and what one is worth.

What a finding is worth is asked of the simulator: the call again, without that one thing. Where a call can't be simulated (an
evaluation, a rank is missing...), its share of the critical path stands in.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rrfp.report.causes import Explanation
from rrfp.report.critical_path import Segment, totals
from rrfp.report.savings import Change
from rrfp.report.steps import Graph
from rrfp.report.whatif import WhatIf
from rrfp.report.words import listed, ms

SHARE = 0.02
"""A fault or a limit is worth a word from this share of the call on: what a prediction is good to."""


@dataclass(frozen=True)
class Finding:
    """Something that costs time, in plain words."""

    cause: str
    """`straggler`, `late edge`, `limit`, `imbalance`, `jitter`, or `none` (then the only one)."""
    where: str
    """`stage 3`, `edge 2>3`, `limit 1f1b`..."""
    text: str
    """One sentence: what, where, how much."""
    evidence: tuple[str, ...]
    """The figures that it rests on, a line each."""
    seconds: float
    """What the call would gain without it alone, predicted; 0 for `none`."""
    action: str = ""
    """The next step, "" if there is none."""
    stages: tuple[int, ...] = ()
    """Where to look in the timeline."""
    edges: tuple[str, ...] = ()
    idle: str | None = None
    """The cause of idle time that it shows itself by."""


@dataclass(frozen=True)
class Judged:
    finding: Finding
    changes: tuple[Change, ...] = ()
    weight: float = 0.0
    """Seconds that it is ranked by: its gain once what comes before it is mended."""


class Case:
    """The call, and the call without what was found so far."""

    def __init__(self, graph: Graph, explanation: Explanation, path: list[Segment], what_if: WhatIf | None, hosts: dict[int, str]):
        self.graph, self.explanation, self.what_if, self.hosts = graph, explanation, what_if, hosts
        self.on_path = totals(path)
        self.mended = what_if
        self.scale = graph.seconds / what_if.seconds if what_if is not None and what_if.seconds > 0 else 1.0

    def gain(self, change: Callable[[WhatIf], WhatIf]) -> tuple[float, float]:
        """Seconds gained by a change alone, and with the faults found so far mended. Needs a simulation."""
        alone = self.what_if.seconds - change(self.what_if).seconds
        after = alone if self.mended is self.what_if else self.mended.seconds - change(self.mended).seconds
        return self.scale * alone, self.scale * after

    def mend(self, change: Callable[[WhatIf], WhatIf]) -> None:
        if self.mended is not None:
            self.mended = change(self.mended)

    def instead(self, gain: float) -> str:
        """`2487 ms instead of 3259 (predicted)`."""
        source = "predicted" if self.what_if is not None else "estimated by the critical path"
        return f"{ms(self.graph.seconds - gain)} instead of {ms(self.graph.seconds).removesuffix(' ms')} ({source})"

    def rank(self, rank: int) -> str:
        """`rank 5 (on node7)`."""
        host = self.hosts.get(rank)
        return f"rank {rank} (on {host})" if host else f"rank {rank}"

    def link(self, source: int, target: int) -> str:
        """`rank 2 (on node1) to rank 3 (on node2)`."""
        host = self.hosts.get(source)
        if host and host == self.hosts.get(target):
            return f"rank {source} to rank {target} (both on {host})"
        return f"{self.rank(source)} to {self.rank(target)}"

    def held(self, cause: str) -> Counter[int]:
        """Rank -> seconds that it was idle for a cause."""
        sums: Counter[int] = Counter()
        for wait in self.explanation.waits:
            if wait.cause == cause:
                sums[wait.rank] += wait.end - wait.start
        return sums

    def stages(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(stage for rank in ranks for stage in self.graph.stages_of(rank)))

    def named(self, ranks: Iterable[int]) -> str:
        return listed("stage", self.stages(ranks))
