"""Tables as plain text."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines: the first column to the left, the last as it is, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return ["  ".join(
        cell.ljust(width) if index == 0 else cell if index == last else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
