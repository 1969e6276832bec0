"""Schedules as lists: generators for any number of ranks and microbatches, and torch's CSV notation.

A list has one row per rank. Every generator takes the rank's limit where its shape depends on it and works for M < P too.
"""

import csv
from collections.abc import Iterable, Sequence
from itertools import chain as joined
from itertools import zip_longest
from pathlib import Path

from rrfp.action import Action, parse_action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler.hints import Row
from rrfp.scheduler.limits import interleaved_warm_up

LISTS = ("1f1b", "gpipe", "zb-h1", "zb-h2")


def actions_of(row: Row) -> list[Action]:
    """The actions of a row, ties in the order in which they are written."""
    return [action for group in row for action in group]


def as_row(entries: Iterable) -> Row:
    """A row from actions, tokens like `2F0`, and tuples or lists of either, which are ties."""
    def one(entry) -> Action:
        return parse_action(entry) if isinstance(entry, str) else entry

    return tuple((one(e),) if isinstance(e, (str, Action)) else tuple(one(each) for each in e) for e in entries)


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


def read(path: str | Path) -> list[Row]:
    """A hint file in torch's CSV notation: one row per rank, tokens like `2F0`; empty cells say nothing.

    A group `(0F7;7B3)OVERLAP_F_B` is a tie. Raises ConfigurationError naming rank, position and token.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            cells = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--rrfp-hint {path}: cannot be read ({error}); give a built-in hint or a CSV file") from None
    rows = []
    for rank, line in enumerate(row for row in cells if row):
        row = []
        for position, cell in enumerate(line):
            if not (token := cell.strip()):
                continue
            inner, grouped, _ = token.removeprefix("(").partition(")")
            try:
                row.append(tuple(map(parse_action, inner.split(";"))) if grouped and token[0] == "(" else (parse_action(token),))
            except ValueError as error:
                raise ConfigurationError(f"--rrfp-hint {path}: rank {rank}, position {position}: {error}") from None
        rows.append(tuple(row))
    return rows


def write(rows: Sequence[Row], path: str | Path) -> None:
    """The reverse of `read`: ties are written as OVERLAP_F_B groups."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([token(group) for group in row] for row in rows)


def token(group: Sequence[Action]) -> str:
    """One cell: an action, or a tie."""
    return str(group[0]) if len(group) == 1 else f"({';'.join(map(str, group))})OVERLAP_F_B"


def every_action(rows: Sequence[Row]) -> Iterable[Action]:
    return joined.from_iterable(actions_of(row) for row in rows)
