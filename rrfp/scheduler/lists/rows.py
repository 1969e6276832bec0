"""Rows, whatever list they are of."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain as joined

from rrfp.action import Action, parse_action
from rrfp.scheduler.hints import Row


def actions_of(row: Row) -> list[Action]:
    """The actions of a row, ties in the order in which they are written."""
    return [action for group in row for action in group]


def every_action(rows: Sequence[Row]) -> Iterable[Action]:
    """The actions of all rows, rank by rank."""
    return joined.from_iterable(actions_of(row) for row in rows)


def as_row(entries: Iterable) -> Row:
    """A row from actions, tokens like `2F0`, and tuples or lists of either, which are ties."""
    def one(entry) -> Action:
        return parse_action(entry) if isinstance(entry, str) else entry

    return tuple((one(e),) if isinstance(e, (str, Action)) else tuple(one(each) for each in e) for e in entries)


def without_idle(rows: Sequence[Row]) -> list[Row]:
    """The rows without their idle steps, which are empty groups: a list says what comes next, not when."""
    return [tuple(group for group in row if group) for row in rows]


def whole_backwards(rows: Sequence[Row]) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of every backward that a list runs whole: beside I and W, DualPipeV has some."""
    return frozenset((action.stage, action.microbatch) for action in every_action(rows) if action.kind == "B")


def in_microbatch_order(rows: Sequence[Row]) -> list[Row]:
    """The rows with microbatches numbered anew: at each stage the n-th forward is that of microbatch n, and so is the n-th backward.

    A W keeps belonging to its I. Looped BFS, which goes back through the microbatches from the last to the first, is then one that
    goes from the first to the last.
    """
    numbers: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for kind, stage, microbatch in every_action(rows):
        if kind != "W":
            seen = numbers["F" if kind == "F" else "B", stage]
            seen.setdefault(microbatch, len(seen))
    names = {}
    for (kind, stage), seen in numbers.items():
        for microbatch, number in zip(seen, sorted(seen), strict=True):
            names[kind, stage, microbatch] = number

    def anew(action: Action) -> Action:
        kind, stage, microbatch = action
        return action._replace(microbatch=names["F" if kind == "F" else "B", stage, microbatch])

    return [tuple(tuple(anew(action) for action in group) for group in row) for row in rows]
