"""Strategies that ship: plain functions that return directives. None is known to anything below; copy one to make your own.

A model under them is tagged PP=0..S-1 by pipeline stage and, where experts lie, EP. Pipeline rank r holds `replicas` devices, from
r * replicas on.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.program.directives import Directive, Order, Place, Replicate, Shard, Split
from rrfp.scheduler.lists import as_row, interleaved_forwards

MICROBATCH = "MB"


def gpipe(ranks: int, microbatches: int, **parallel) -> list[Directive]:
    """All forwards, then all backwards."""
    rows = [[f"{rank}{kind}{m}" for kind in "FB" for m in range(microbatches)] for rank in range(ranks)]
    return pipeline(Placement.looped(ranks), rows, microbatches, **parallel)


def one_f_one_b(ranks: int, microbatches: int, **parallel) -> list[Directive]:
    """1F1B: P - 1 - r forwards, then a forward and a backward in turn, then the backwards that are left."""
    rows = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        row = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                row.append(f"{rank}F{warm_up + m}")
            row.append(f"{rank}B{m}")
        rows.append(row)
    return pipeline(Placement.looped(ranks), rows, microbatches, **parallel)


def interleaved(ranks: int, microbatches: int, *, chunks: int = 2, **parallel) -> list[Directive]:
    """Interleaved 1F1B: `chunks` stages per rank, P microbatches of each in turn. Microbatches must be a multiple of P."""
    if microbatches % ranks:
        raise ConfigurationError(f"interleaved: {microbatches} microbatches: must be a multiple of the {ranks} ranks")
    placement, rows = Placement.looped(ranks, chunks), []
    for rank in range(ranks):
        stages = placement.stages_of(rank)
        forwards = interleaved_forwards(stages, microbatches, ranks)
        backwards = [action._replace(kind="B") for action in interleaved_forwards(stages[::-1], microbatches, ranks)]
        warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forwards))
        row = forwards[:warm_up]
        for number, backward in enumerate(backwards):
            row += [*forwards[warm_up + number:warm_up + number + 1], backward]
        rows.append(row)
    return pipeline(placement, rows, microbatches, **parallel)


def zb_1(ranks: int, microbatches: int, **parallel) -> list[Directive]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose weight gradients come `rank` microbatches late, where 1F1B would wait."""
    rows = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        row = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches + rank):
            if warm_up + m < microbatches:
                row.append(f"{rank}F{warm_up + m}")
            if m < microbatches:
                row.append(f"{rank}I{m}")
            if m >= rank:
                row.append(f"{rank}W{m - rank}")
        rows.append(row)
    return pipeline(Placement.looped(ranks), rows, microbatches, **parallel)


def zb_v(ranks: int, microbatches: int, **parallel) -> list[Directive]:
    """ZB-V (arXiv 2401.10241, section 6): two stages per rank in a V, a backward's halves next to each other until the drain."""
    rows = []
    for rank in range(ranks):
        run = _Row(rank, 2 * ranks - 1 - rank, max(microbatches, 2 * ranks - 1))  # fewer do not fill its shape: they are left out of it
        down, up = run.stages
        run.add(2 * (ranks - rank) - 1, (down, "F"))
        run.add(rank, (up, "F"), (down, "F"))
        run.add(ranks - rank, (up, "F"), (up, "IW"))
        while run.left(up, "F") or run.left(down, "F"):
            run.add(1, (down, "F"), (down, "IW"), (up, "F"), (up, "IW"))
        run.add(rank, (down, "I"), (up, "I"))
        run.add(ranks - rank, (down, "I"), (down, "W"))
        run.add(2 * ranks, (up, "W"))
        run.add(2 * ranks, (down, "W"))
        rows.append([action for action in run.row if action.microbatch < microbatches])
    return pipeline(Placement.v(ranks), rows, microbatches, **parallel)


def dualpipev(ranks: int, microbatches: int, *, overlap: bool = True, **parallel) -> list[Directive]:
    """DualPipeV (DeepSeek): ranks in a V, and in the steady state a forward and a backward side by side, so that the
    all-to-alls of one lie under the computation of the other. overlap=False: the same order, one after the other.
    """
    if microbatches < 2 * ranks:
        raise ConfigurationError(f"dualpipev: {microbatches} microbatches: must be at least twice the {ranks} ranks")
    rows = []
    for rank in range(ranks):
        run = _Row(rank, 2 * ranks - 1 - rank, microbatches)
        (down, up), after, own = run.stages, ranks - rank - 1, rank + 1
        run.add(2 * after, (down, "F"))
        run.add(own, (down, "F"), (up, "F"))
        run.add(after, (up, "I"), (None, "W"), (up, "F"))
        for step in range(microbatches - 2 * ranks + own):
            first = step == 0 and rank == ranks - 1  # the last rank's very first backward has nothing to wait for
            run.pair(down, up, overlap and not first)
            run.pair(up, down, overlap)
        for _ in range(after):
            run.add(1, (up, "B"))
            run.pair(up, down, overlap)
        # The second half of the drain splits its backwards: W waits for the bubbles at the end.
        for step in range(2 * own):
            run.add(1, ((up, down)[step % 2], "B" if step < own else "I"))
        run.add(after, (None, "W"), (down, "I"))
        run.add(own, (None, "W"))
        rows.append(run.row)
    return pipeline(Placement.v(ranks), rows, microbatches, **parallel)


class _Row:
    """A row in the making: the next microbatch of each stage and kind, and the weight gradients that wait."""

    def __init__(self, down: int, up: int, microbatches: int):
        self.stages, self.row = (down, up), []
        self._microbatches = microbatches
        self._next: Counter[tuple[int, str]] = Counter()
        self._weights: deque[Action] = deque()

    def left(self, stage: int, kind: str) -> int:
        return self._microbatches - self._next[stage, kind]

    def add(self, times: int, *steps: tuple[int | None, str]) -> None:
        """Each step `times` times over, as long as there are microbatches. `(None, "W")` is the oldest that waits, `IW` both halves."""
        for _ in range(times):
            for stage, kinds in steps:
                self.row += [action for kind in kinds if (action := self._take(stage, kind)) is not None]

    def pair(self, forward: int, backward: int, together: bool) -> None:
        """A forward and a backward, side by side or one after the other."""
        both = self._take(forward, "F"), self._take(backward, "B")
        self.row += [both] if together else both

    def _take(self, stage: int | None, kind: str) -> Action | None:
        if kind == "W":
            waiting = [action for action in self._weights if stage in (None, action.stage)]
            if not waiting:
                return None
            self._weights.remove(waiting[0])
            return waiting[0]
        way = "F" if kind == "F" else "B"  # B and I take turns over the same microbatches
        if not self.left(stage, way):
            return None
        action = Action(kind, stage, self._next[stage, way])
        self._next[stage, way] += 1
        if kind == "I":
            self._weights.append(action._replace(kind="W"))
        return action


def pipeline(
    placement: Placement, rows: Sequence[Iterable], microbatches: int, *, replicas: int = 1, zero: int = 0, experts: bool = False, **options
) -> list[Directive]:
    """Directives for rows of actions.

    Args:
        placement: which pipeline rank holds which stage (tag PP).
        rows: one per rank: actions, tokens like `2F0`, and tuples of them, which run interleaved.
        replicas: data parallelism. zero: its ZeRO stage, 0 to 3. options: further ones of `Replicate`, for example bucket_size.
        experts: segments tagged EP lie in pieces on the replicas.
    """
    found: list[Directive] = [Split({}, MICROBATCH, microbatches)]
    zeros = {"shard_optimizer": zero >= 1, "shard_grads": zero >= 2, "shard_params": zero >= 3}
    for stage, rank in enumerate(placement.owners):
        devices = tuple(range(rank * replicas, (rank + 1) * replicas))
        found.append(Place({"PP": stage}, devices))
        if replicas > 1:
            if experts:
                found.append(Shard({"PP": stage, "EP": "*"}, devices))
            found.append(Replicate({"PP": stage, **({"EP": "-"} if experts else {})}, devices, **zeros, **options))
    for row in rows:
        groups = (tuple({"PP": stage, MICROBATCH: m, "PASS": kind} for kind, stage, m in group) for group in as_row(row))
        found.append(Order(tuple(groups)))
    return found


BUILDERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-1": zb_1, "zb-v": zb_v, "dualpipev": dualpipev}
