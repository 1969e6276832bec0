"""Every reachable state of small pipelines: no deadlock, every action once, nothing beyond its bound (docs/proof.md)."""

from dataclasses import replace

import pytest
from cells import ANY, Cell, distinct, policies, with_transports

from rrfp.policy import BUILT_IN

ALL = (ANY, *BUILT_IN)
CORE = (ANY, "announced")
"""What every other hint that only ranks is a part of, and the one that also waits."""
BOTH = ((1, 1), (4, 2))
FOUR = ((1, 1), (1, 2), (4, 1), (4, 2))
"""(credits, lanes). 4 is what training grants; a microbatch count of at most 4 never waits for more."""

# (P, M, chunks, domain), hints, every n-th of their combinations with the other options, transports
REDUCED = [
    ((2, 2, 1, 1), ALL, 13, BOTH),
    ((2, 3, 1, 1), ALL, 83, FOUR),
    ((2, 3, 1, 1), (ANY,), 11, FOUR),
    ((3, 2, 1, 1), ALL, 83, BOTH),
    ((3, 2, 1, 1), CORE, 7, BOTH),
    ((2, 2, 2, 1), ALL, 109, BOTH),
    ((2, 2, 2, 1), CORE, 17, BOTH),
    ((2, 2, 1, 2), ALL, 83, BOTH),
    ((2, 2, 2, 2), CORE, 47, BOTH),
]
FULL = [
    ((2, 2, 1, 1), ALL, 1, FOUR),
    ((2, 3, 1, 1), ALL, 1, FOUR),
    ((3, 2, 1, 1), ALL, 1, FOUR),
    ((2, 2, 2, 1), ALL, 1, BOTH),
    ((2, 2, 1, 2), ALL, 5, BOTH),
    ((2, 2, 2, 2), CORE, 47, BOTH),
]


def check(cells: list[Cell], name: str) -> None:
    """Explores every system, bounds included, and prints one line of the table in docs/proof.md."""
    states = largest = 0
    for cell in cells:
        report = cell.system().explore(level=1)
        assert report.deadlock is None, f"{cell}: {report.deadlock}"
        assert len(report.ends) == 1, f"{cell}: {len(report.ends)} ends"
        states, largest = states + report.states, max(largest, report.states)
    print(f"{name}: {len(cells)} systems, {states:,} states (largest {largest:,}), 0 deadlocks", flush=True)


def grid(shape, hints, part, transports) -> list[Cell]:
    cells = distinct(policies(shape, hints, part))
    share = "all" if part == 1 else f"one in {part}"
    name = f"{shape} {'every hint' if hints == ALL else ', '.join(hints)}, {share}: {len(cells)} policies"
    systems = with_transports(cells, transports)
    check(systems, name)
    return systems


@pytest.mark.timeout(3000)
def test_every_policy_at_small_sizes(full):
    cells = [cell for row in (FULL if full else REDUCED) for cell in grid(*row)]
    # Nothing that the product offers may be missing from the reduced counts.
    for option, values in {
        "hint": ALL, "mode": ("ready", "strict"), "order": ("microbatch", "free", "megatron"), "split": (False, True),
        "max_pending_w": (None, 1), "placement": ("looped", "v"), "credits": (1, 4), "lanes": (1, 2),
    }.items():
        assert {getattr(cell, option) for cell in cells} == set(values), option
    assert any(cell.limit.startswith("paper:") for cell in cells)


NAMED = [
    Cell((4, 4, 1, 1), ANY, limit="2p"),
    Cell((4, 4, 1, 1), "announced"),
    Cell((3, 3, 2, 1), ANY),
]
NAMED_FULL = [
    *(replace(cell, credits=1, lanes=2) for cell in NAMED),
    Cell((4, 4, 1, 1), ANY, limit="2p", order="free"),
    Cell((4, 4, 1, 1), ANY, limit="2p", split=True),
    Cell((4, 4, 1, 1), "announced", limit="2p", split=True),
    Cell((3, 3, 2, 1), "announced"),
    Cell((3, 3, 2, 1), ANY, order="free"),
    Cell((3, 3, 2, 1), ANY, limit="2", split=True),
    Cell((4, 3, 1, 2), ANY, limit="2p"),
    Cell((4, 3, 1, 2), "announced", credits=1, lanes=2),
    Cell((2, 3, 2, 2), ANY, limit="2"),
]
NAMED_DEEP = [Cell((2, 3, 2, 2), ANY)] + [Cell(shape, ANY, limit="2p", **options) for shape in ((4, 3, 1, 2), (2, 3, 2, 2))
              for options in ({"split": True}, {"order": "free"})]


@pytest.mark.timeout(3000)
def test_named_sizes(full, deep):
    """Larger ones: any admissible choice, and announced waits."""
    for cell in NAMED + (NAMED_FULL if full else []) + (NAMED_DEEP if deep else []):
        check([cell], str(cell))


def test_calls_that_follow_each_other_and_evaluation(full):
    """Ranks are not in step between calls: what comes early waits, and its credits are not what the present call needs."""
    cells = [
        Cell((2, 2, 1, 1), ANY, calls=2), Cell((2, 2, 1, 1), ANY, calls=2, credits=1, lanes=2), Cell((2, 2, 1, 1), "announced", calls=2),
        Cell((2, 1, 2, 1), ANY, calls=2, credits=1), Cell((2, 2, 1, 2), "bf", calls=2, credits=1),
        Cell((3, 3, 1, 1), ANY, forward_only=True), Cell((2, 2, 2, 1), ANY, forward_only=True, credits=1),
        Cell((2, 2, 1, 1), ANY, forward_only=True, calls=3, credits=1), Cell((2, 2, 1, 2), ANY, forward_only=True, lanes=2, order="free"),
    ]
    if full:
        cells += [Cell((3, 3, 1, 1), ANY, calls=2, credits=1), Cell((2, 2, 2, 1), ANY, calls=2, credits=2), Cell((2, 2, 1, 2), ANY, calls=2)]
    check(cells, "calls in a row, evaluation")
