"""A list as text: its figures per rank, and who does what when."""

from rrfp.policy import UNIT_DURATIONS
from rrfp.schedule.plan import Plan
from rrfp.scheduler import lists

_GOES_ON = "|"


def figures(plan: Plan) -> list[str]:
    """A line per rank: its stages, its last end, the units in which it does nothing, its peaks."""
    peaks, pending = plan.peaks
    head = ["rank", "stages", "ends", "idle", "in flight", "pending W"]
    body = [[str(rank), " ".join(map(str, plan.placement.stages_of(rank))), f"{plan.result.spans[row[-1]].end:g}", f"{plan.idle[rank]:g}",
             str(peaks[rank]), str(pending[rank]) if plan.split else "-"] for rank, row in enumerate(plan.result.rows)]
    return _aligned([head, *body])


def timetable(plan: Plan) -> list[str]:
    """Time goes down, ranks across: what a rank starts, `|` while it goes on, nothing while it is idle. Ties stand in parentheses."""
    tokens = {}
    for row in plan.rows:
        for group in row:
            tied = len(group) > 1
            for index, action in enumerate(sorted(group, key=lambda action: plan.result.spans[action].start)):
                tokens[action] = ("(" if tied and not index else "") + str(action) + (")" if tied and index == len(group) - 1 else "")
    cells = [[""] * len(plan.rows) for _ in range(round(plan.result.makespan))]
    for rank, row in enumerate(plan.result.rows):
        for action in row:
            start = round(plan.result.spans[action].start)
            for unit in range(round(UNIT_DURATIONS[action.kind])):
                cells[start + unit][rank] = tokens[action] if unit == 0 else _GOES_ON
    return _aligned([["time", *(f"rank {rank}" for rank in range(len(plan.rows)))], *([str(time), *row] for time, row in enumerate(cells))])


def steps(plan: Plan) -> list[str]:
    """A list that cannot run has no times: its entries by position."""
    rows = plan.rows
    longest = max(map(len, rows))
    body = [[str(step), *(lists.token(row[step]) if step < len(row) else "" for row in rows)] for step in range(longest)]
    return _aligned([["step", *(f"rank {rank}" for rank in range(len(rows)))], *body])


def _aligned(cells: list[list[str]]) -> list[str]:
    """The first column flush right, numbers too, the rest flush left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].rjust(widths[0]), *(cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in cells]
