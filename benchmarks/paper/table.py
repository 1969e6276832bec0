"""Markdown tables, as the page shows them, and progress."""

import sys
from collections.abc import Sequence


def render(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Numbers are written by the caller; None is an empty cell."""
    cells = [[str(cell) if cell is not None else "" for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]])


def times(value: float) -> str:
    """A factor."""
    return f"{value:.2f}"


def seconds(value: float) -> str:
    return f"{value:.2f}"


def say(line: object) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)
