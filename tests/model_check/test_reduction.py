"""The reduction is not taken on trust: it gives what the unreduced exploration gives, and what it takes to commute does commute."""

from collections import Counter

import pytest
from cells import ANY, Cell
from components import Rank
from explorer import Automaton, System
from reduction import stands_for
from test_controls import build, pipeline

from rrfp.placement import Placement

SMALL = [
    Cell((2, 2, 1, 1), ANY), Cell((2, 2, 1, 1), ANY, credits=1, lanes=2, order="free"), Cell((2, 2, 1, 1), "announced", limit="2p"),
    Cell((2, 2, 1, 1), "fill-r", split=True), Cell((2, 2, 1, 1), ANY, split=True, max_pending_w=1, credits=1),
    Cell((2, 3, 1, 1), "announced", credits=1), Cell((2, 3, 1, 1), "1f1b", mode="strict"), Cell((3, 2, 1, 1), ANY, credits=1),
    Cell((2, 2, 1, 1), "bf", calls=2, credits=1), Cell((2, 1, 2, 1), ANY, credits=1), Cell((2, 1, 1, 2), ANY),
    Cell((2, 1, 2, 1), ANY, limit="paper:1", credits=1), Cell((2, 3, 1, 1), ANY, order="free", limit="2", lanes=2),
    Cell((2, 2, 1, 1), "gpipe", mode="strict", limit="2p", lanes=2), Cell((2, 1, 1, 2), "1f1b", mode="strict"),
]
MORE = [
    Cell((2, 2, 2, 1), ANY, credits=1), Cell((2, 2, 1, 2), "bf", credits=1), Cell((2, 2, 2, 1), ANY, limit="2", placement="v"),
    Cell((2, 2, 2, 1), ANY, order="free", credits=1), Cell((2, 1, 2, 1), ANY, split=True, max_pending_w=1),
    Cell((2, 3, 1, 1), ANY, order="free", credits=1, lanes=2, split=True), Cell((3, 2, 1, 1), "announced", limit="2p"),
    Cell((2, 1, 1, 2), ANY, split=True, lanes=2), Cell((2, 2, 2, 1), ANY, limit="paper:2"),
]
LARGER = [
    Cell((4, 4, 1, 1), ANY, limit="2p"), Cell((3, 3, 2, 1), ANY), Cell((3, 3, 2, 1), ANY, order="free", credits=1, lanes=2),
    Cell((4, 3, 1, 2), ANY, limit="2p"), Cell((2, 3, 2, 2), ANY, limit="2"), Cell((3, 3, 2, 1), ANY, limit="2", split=True),
]


@pytest.mark.timeout(3000)
def test_the_reduction_changes_no_verdict(full):
    for cell in SMALL + (MORE if full else []):
        system = cell.system()
        every, first, both = (system.explore(level=level) for level in range(3))
        assert every.ends == first.ends == both.ends and every.deadlock is first.deadlock is both.deadlock is None, str(cell)
        assert both.states <= first.states < every.states
        print(f"{cell}: {every.states:,} states, {first.states:,} at level 1, {both.states:,} at level 2")


@pytest.mark.timeout(3000)
def test_both_levels_agree_at_larger_sizes(full):
    for cell in LARGER if full else LARGER[1:2]:
        system = cell.system()
        first, both = system.explore(level=1), system.explore(level=2)
        assert first.ends == both.ends and first.deadlock is both.deadlock is None, str(cell)
        print(f"{cell}: {first.states:,} states at level 1, {both.states:,} at level 2")


# Deadlocks: chunks without reserved slots, in order and free (where microbatches are renamed), with a bound of W, on one credit.
STUCK = [
    {"parts": pipeline(Placement.looped(2, 2), 2), "limits": [1, 1], "admission": "plain"},
    {"parts": pipeline(Placement.looped(2, 2), 3), "limits": [2, 2], "admission": "plain"},
    {"parts": pipeline(Placement.looped(2, 2), 3), "limits": [2, 2], "admission": "plain", "order": "free"},
    {"parts": pipeline(Placement.looped(2, 2), 3), "limits": [2, 3], "admission": "plain", "credits": 1, "lanes": 2},
    {"parts": pipeline(Placement.v(2, 2), 2), "limits": [1, 1], "admission": "plain"},
]


def shape_of(system: System, state: tuple[int, ...]) -> tuple:
    """How many of each (stage, kind) have begun, and what each edge holds: an end up to the names of microbatches."""
    ranks = [part.object(number) for part, number in zip(system._parts[:system._ranks], state, strict=False)]
    begun = [Counter((a.stage, a.kind) for a, lacking in s._lacking.items() if lacking < 0) for r in ranks for s in r.schedulers]
    links = [part.object(number) for part, number in zip(system._parts[system._ranks:], state[system._ranks:], strict=True)]
    return tuple(tuple(sorted(each.items())) for each in begun), tuple(
        (len(link.held), len(link.outlet.waiting), len(link.outlet.credits)) for link in links)


@pytest.mark.parametrize("options", STUCK, ids=["limit 1", "limit 2", "free order", "one credit", "v"])
def test_the_reduction_keeps_every_deadlock(options):
    system = build(**options)
    first, both = (system.explore(level=level) for level in (1, 2))
    assert first.deadlock is not None and both.deadlock is not None and both.states <= first.states
    assert {shape_of(system, end) for end in first.ends} == {shape_of(system, end) for end in both.ends}
    if options.get("order") != "free":
        assert first.ends == both.ends


# -- what goes first commutes ---------------------------------------------------------------------------------------------


def then(part: Automaton, state: int, *events: tuple) -> tuple[int, list] | None:
    """Where the events lead, one after the other, and what each gives out. None if one can't happen.

    A start is taken with its end. The event `leave` sends all that may leave; one message at a time, it is over when nothing may.
    """
    given = []
    for event in events:
        if event[0] == "start" and event not in part.object(state).events():
            return None
        move = part.step(state, event)
        if move is None:
            return None
        state = move.state
        given.append(move.outputs)
        if event[0] == "start":
            move = part.step(state, ("end", event[1]))
            state = move.state
            given[-1] = [*given[-1], *move.outputs]
    while (move := part.step(state, ("leave",)) if ("leave",) in part.object(state).events() else None) is not None:
        state = move.state
    return state, given


def commute(part: Automaton, state: int, one: tuple, other: tuple) -> bool:
    """Whether both orders can happen, lead to the same state, and give out the same."""
    there, back = then(part, state, one, other), then(part, state, other, one)
    return there is not None and back is not None and there[0] == back[0] and there[1] == back[1][::-1]


def check_commuting(system: System) -> int:
    """Every event that goes first, in every state seen, against everything else that was seen to happen there. How many pairs."""
    pairs = 0
    for part in system._parts:
        seen: dict[int, set[tuple]] = {}
        for (state, event), move in part._steps.items():
            if move is not None and part._matters(state, move):
                seen.setdefault(state, set()).add(event)
        for state, events in seen.items():
            if isinstance(part.object(state), Rank):
                events = {event for event in events if stands_for(part.object(state), event)}  # the others are the same by other names
            for event in events:
                if (move := part.step(state, event)).level:
                    for other in events - {event}:
                        assert commute(part, state, event, other), f"{move.label}; {part.step(state, other).label or other}"
                        pairs += 1
    return pairs


@pytest.mark.timeout(3000)
def test_what_goes_first_commutes_with_all_that_could_go_before(full):
    pairs = 0
    for cell in SMALL + (MORE if full else []):
        system = cell.system()
        system.explore(level=0)
        try:
            pairs += check_commuting(system)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from None
    print(f"{pairs:,} pairs of events commute")
    assert pairs > 1000


def test_a_wrong_claim_is_noticed(monkeypatch):
    """Control: forwards of two chunks that compete for the last slot do not commute."""
    import reduction

    monkeypatch.setattr(reduction, "rivals", lambda rank, action: iter(()))
    system = build(pipeline(Placement.looped(2, 2), 3), [2, 2], admission="plain")
    system.explore(level=0)
    with pytest.raises(AssertionError):
        check_commuting(system)
