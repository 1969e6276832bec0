"""Our own generators, for any number of ranks and microbatches, M < P too. Each takes the rank's limit where its shape depends on it."""

from collections.abc import Sequence
from itertools import zip_longest

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler.hints import Row
from rrfp.scheduler.limits import interleaved_warm_up
from rrfp.scheduler.lists.rows import as_row

LISTS = ("1f1b", "gpipe", "zb-h1", "zb-h2")


def one_f_one_b(stage: int, microbatches: int, *, warm_up: int, split: bool = False) -> list[Action]:
    """1F1B on one stage: `warm_up` forwards, then F and B in turn, then the rest of B. Split: every W follows its I."""
    forwards = [Action("F", stage, m) for m in range(microbatches)]
    return _steady(forwards, [_backward(stage, m, split) for m in range(microbatches)], warm_up)


def _backward(stage: int, microbatch: int, split: bool) -> list[Action]:
    return [Action(kind, stage, microbatch) for kind in ("IW" if split else "B")]


def _steady(forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], warm_up: int) -> list[Action]:
    """Warm-up, then one forward and one backward in turn, then what is left of the backwards."""
    row = list(forwards[:warm_up])
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        row += [forward] if forward is not None else []
        row += backward or []
    return row


def zero_bubble(stage: int, microbatches: int, *, out: int, hold: int) -> list[Action]:
    """ZB-H1 and ZB-H2 (arXiv 2401.10241) on one stage, by their two counts.

    Args:
        out: forwards whose I has not run: P - s in ZB-H1, 2(P - s) - 1 in ZB-H2.
        hold: activations held until their W: P in ZB-H1, 2P - 1 in ZB-H2. W starts only when they are all in use.
    """
    row = [Action("F", stage, m) for m in range(min(out - 1, microbatches))]
    late = hold - out  # so many I run before the first W
    for m in range(microbatches):
        if m + out - 1 < microbatches:
            row.append(Action("F", stage, m + out - 1))
        row.append(Action("I", stage, m))
        if m >= late:
            row.append(Action("W", stage, m - late))
    row += [Action("W", stage, m) for m in range(max(0, microbatches - late), microbatches)]
    return row


def interleaved_forwards(stages: Sequence[int], microbatches: int, ranks: int) -> list[Action]:
    """Megatron's order of forwards over the chunks of a rank (`get_schedule_table`): P microbatches of each chunk in turn."""
    groups = [range(low, min(low + ranks, microbatches)) for low in range(0, microbatches, ranks)]
    return [Action("F", stage, m) for group in groups for stage in stages for m in group]


def interleaved(stages: Sequence[int], rank: int, microbatches: int, ranks: int, *, split: bool = False) -> list[Action]:
    """Megatron's interleaved 1F1B on one rank."""
    forwards = interleaved_forwards(stages, microbatches, ranks)
    backwards = [_backward(f.stage, f.microbatch, split) for f in interleaved_forwards(stages[::-1], microbatches, ranks)]
    return _steady(forwards, backwards, interleaved_warm_up(ranks, rank, len(stages)))


def generate(name: str, placement: Placement, microbatches: int, limits: Sequence[int], *, split: bool) -> list[Row]:
    """The rows of a built-in list. Raises ConfigurationError where the list does not exist for this placement or split."""
    ranks, rows = placement.ranks, []
    for rank in range(ranks):
        stages = placement.stages_of(rank)
        if name.startswith("zb-"):
            if not split:
                raise ConfigurationError(
                    f"--rrfp-hint {name}: needs the backward split into I and W; use 1f1b, or split the backward")
            if len(stages) > 1:
                raise ConfigurationError(
                    f"--rrfp-hint {name}: is a list for one chunk per rank, rank {rank} has {len(stages)}; use 1f1b")
            left = ranks - rank
            out, hold = (left, ranks) if name == "zb-h1" else (2 * left - 1, 2 * ranks - 1)
            row = zero_bubble(stages[0], microbatches, out=out, hold=hold)
        elif name == "gpipe":
            forwards = [Action("F", stage, m) for stage in stages for m in range(microbatches)]
            row = forwards + [a for stage in stages[::-1] for m in range(microbatches) for a in _backward(stage, m, split)]
        elif len(stages) == 1:
            row = one_f_one_b(stages[0], microbatches, warm_up=limits[rank] - 1, split=split)
        else:
            row = interleaved(stages, rank, microbatches, ranks, split=split)
        rows.append(as_row(row))
    return rows
