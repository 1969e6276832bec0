"""A rank that agrees with itself."""

from rrfp.action import Action, Edge
from rrfp.tp_coord.agreement import Solo

EDGE = Edge(0, 1)


def test_every_arrival_counts_at_once_and_once():
    solo = Solo()
    solo.begin(0)
    solo.arrived(EDGE, 0)
    solo.arrived(EDGE, 1)
    assert list(solo.common()) == [(EDGE, 0), (EDGE, 1)]
    assert list(solo.common()) == []


def test_a_new_call_starts_empty():
    solo = Solo()
    solo.begin(0)
    solo.arrived(EDGE, 0)
    solo.begin(1)
    assert list(solo.common()) == []


def test_every_choice_is_agreed():
    solo = Solo()
    solo.open(lambda: None)
    assert solo.decide(Action("F", 1, 0)) == Action("F", 1, 0)
    assert solo.decide(None) is None
    solo.close()
    solo.close()
