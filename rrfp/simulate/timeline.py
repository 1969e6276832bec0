"""A simulated call in the form in which traces are read, so that what draws and explains traces works on it too."""

from collections import Counter
from itertools import pairwise

from rrfp.placement import Placement
from rrfp.simulate.clock import Result
from rrfp.trace.files import Call, Ran, RankTrace, Timeline, Waited


def waits_of(result: Result) -> list[list[Waited]]:
    """Per rank, when nothing ran until its last action; the cause is "F" or "B", whichever kind ended the wait."""
    found = []
    for row in result.rows:
        spans = [(0.0, 0.0), *(result.spans[action] for action in row)]
        causes = ("F" if action.kind == "F" else "B" for action in row)
        found.append([Waited(cause, before[1], after[0])
                      for cause, (before, after) in zip(causes, pairwise(spans), strict=True) if after[0] > before[1]])
    return found


def timeline_of(result: Result, placement: Placement, microbatches: int, *, mode: str | None = None) -> Timeline:
    """The call as a trace holds it: call 0 of every rank, begun at 0, ended with the rank's last action."""
    ranks = {}
    for rank, (row, waits) in enumerate(zip(result.rows, waits_of(result), strict=True)):
        call = Call(0, microbatches, False, 0.0, result.spans[row[-1]].end, complete=True, waits=waits, mode=mode)
        held: Counter[int] = Counter()
        kinds = {(action.stage, action.kind) for action in row}
        for action in row:
            stage, kind = action.stage, action.kind
            # A stage without a backward holds nothing; I gives the activation back where no W follows.
            held[stage] += kind == "F" and any((stage, each) in kinds for each in "BI")
            call.actions.append(Ran(action, *result.spans[action], held[stage], 0.0))
            held[stage] -= kind in ("B", "W") or (kind == "I" and (stage, "W") not in kinds)
        ranks[rank] = RankTrace(rank, placement.stages_of(rank), {0: call})
    return Timeline(ranks)
