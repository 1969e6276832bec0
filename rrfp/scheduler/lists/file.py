"""Lists in files: PyTorch's CSV notation for pipeline schedules, read and written.

One line per rank, one cell per step: an action (`2F0`, `2B0`, `2I0`, `2W0`), a group of them (`(0F7;7B3)OVERLAP_F_B`), or nothing, an
idle step. What PyTorch adds when it lowers a list for its own runtime (sends, receives, unsharding, ...) is read and left out: here
messages and collectives follow from the actions. Lines that begin with `#` are ours: PyTorch does not read them.
"""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rrfp.action import Action, parse_action
from rrfp.errors import ConfigurationError
from rrfp.scheduler.hints import Row
from rrfp.scheduler.lists.rows import every_action, without_idle

COMPUTE = ("F", "B", "I", "W")
LEFT_OUT = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
"""PyTorch's other kinds, which its lowering adds and the runtime here does by itself."""
PAIR = "OVERLAP_F_B"
_HEADER = re.compile(r"#\s*rrfp\s*:(.*)")


@dataclass(frozen=True)
class ListFile:
    """What a file says.

    steps: one row per rank, idle steps included: an idle step is an empty group.
    generator: the hint that makes the list for other numbers of microbatches; None: there is none.
    lines: the line of every row, counted from 1.
    columns: per row the cell, counted from 1, of each of its actions.
    left_out: how many cells were read and left out, by kind.
    """

    steps: list[Row]
    generator: str | None = None
    lines: list[int] = field(default_factory=list)
    columns: list[list[int]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @cached_property
    def rows(self) -> list[Row]:
        """The list: no idle steps."""
        return without_idle(self.steps)

    @cached_property
    def microbatches(self) -> int:
        """The number that the list is for."""
        return max((action.microbatch + 1 for action in every_action(self.steps)), default=0)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is in two parts, I and W."""
        return any(action.kind in ("I", "W") for action in every_action(self.steps))

    def where(self, rank: int, position: int) -> str:
        """An action's place as a person finds it; `position` counts the row's actions from 0, one more is its end."""
        columns = self.columns[rank]
        column = columns[position] if position < len(columns) else columns[-1] + 1 if columns else 1
        return _place(self.lines[rank], column, rank, position)


def _place(line: int, column: int, rank: int, position: int) -> str:
    return f"line {line}, column {column}, rank {rank}, position {position}"


def read(path: str | Path) -> list[Row]:
    """The rows of `read_file`, which says what is refused."""
    return read_file(path).rows


def read_file(path: str | Path, *, source: str | None = None) -> ListFile:
    """A file in PyTorch's CSV notation, of compute actions only or of what PyTorch lowered it to.

    A line `# rrfp: generator=NAME` names the hint that makes the list for other numbers of microbatches; other lines that begin with `#`,
    and empty ones, say nothing.

    source: what to call the file in a refusal; default: the flag that names it.

    Raises:
        ConfigurationError: naming file, line, column (the cell, counted from 1) and token, and the rule.
    """
    source = source or f"--rrfp-hint {path}"
    try:
        # Spreadsheets write a mark before the first character.
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: cannot be read ({error}); give a built-in hint or a CSV file") from None
    steps, lines, all_columns, left_out, generator = [], [], [], Counter(), None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            generator = _header(source, number, line.strip()) or generator
            continue
        if not line.strip():
            continue
        row, columns = [], []
        for column, cell in enumerate(_cells(source, number, line), 1):
            try:
                group = parse_cell(cell.strip())
            except ValueError as error:
                raise ConfigurationError(f"{source}: {_place(number, column, len(steps), len(columns))}: {error}") from None
            if isinstance(group, str):
                left_out[group] += 1
                continue
            row.append(group)
            columns += [column] * len(group)
        steps.append(tuple(row))
        lines.append(number)
        all_columns.append(columns)
    if not any(map(any, steps)):
        raise ConfigurationError(f"{source}: holds no action; write one line per rank, like 0F0,0F1,0B0,0B1")
    return ListFile(steps, generator, lines, all_columns, left_out)


def _header(source: str, number: int, line: str) -> str | None:
    """The generator that a line beginning with `#` names, if it is one of ours."""
    if (found := _HEADER.fullmatch(line)) is None:
        return None
    key, equals, value = (part.strip() for part in found[1].strip().rstrip(",").partition("="))
    if key != "generator" or not equals or not value:
        raise ConfigurationError(f"{source}: line {number}: {line!r} says nothing that is known; write # rrfp: generator=NAME")
    return value


def _cells(source: str, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ConfigurationError(f"{source}: line {number}: is no line of a CSV file ({error}); separate cells by commas") from None


def parse_cell(token: str) -> tuple[Action, ...] | str:
    """A cell: its actions, none for an idle step, or the kind of what is left out. Raises ValueError with the token and the rule."""
    if not token:
        return ()
    if token[0] != "(":
        action = parse_action(token)
        return action.kind if action.kind in LEFT_OUT else (_computing(action),)
    inside, closed, pair = token[1:].partition(")")
    group = tuple(_computing(parse_action(part)) for part in inside.split(";")) if closed and pair == PAIR else ()
    if len(group) < 2:
        raise ValueError(f"{token!r} is no group of two actions or more: write it like (0F7;7B3){PAIR}")
    return group


def _computing(action: Action) -> Action:
    if action.kind not in COMPUTE:
        raise ValueError(f"'{action}': there is no kind {action.kind}; use F, B, I or W")
    if action.microbatch is None:
        raise ValueError(f"'{action}' names no microbatch: write it like {action}0")
    return action


def write(rows: Sequence[Row], path: str | Path, *, generator: str | None = None) -> None:
    """The reverse of `read_file`: ties are written as OVERLAP_F_B groups, empty groups (idle steps) as empty cells.

    generator: named in a first line, which PyTorch's own reader does not take.
    """
    Path(path).write_text(text_of(rows, generator=generator), encoding="utf-8")


def text_of(rows: Sequence[Row], *, generator: str | None = None) -> str:
    """What `write` writes."""
    header = [] if generator is None else [f"# rrfp: generator={generator}"]
    return "".join(line + "\n" for line in (*header, *(",".join(map(token, row)) for row in rows)))


def token(group: Sequence[Action]) -> str:
    """One cell: an action, a tie, or an idle step."""
    return str(group[0]) if len(group) == 1 else f"({';'.join(map(str, group))}){PAIR}" if group else ""
