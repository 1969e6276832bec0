"""What the explorer takes for granted: that a state's key holds all that matters, and that a copy is a copy."""

import random

import pytest
from cells import ANY, Cell
from components import (
    AFTER,
    BEFORE,
    FOLLOWS_FROM_IT,
    NEVER_CHANGES,
    ONLY_REPORTED,
    STATE,
    Rank,
    scheduler_key,
)

from rrfp.action import Edge
from rrfp.mode import parse_mode
from rrfp.placement import Placement

MODES = ["ready:announced", "ready:bf:2p", "ready:fill-r:2p-1", "ready:alt:2p:free", "strict:1f1b:1f1b", "ready:bfw:2"]


def test_every_attribute_of_a_scheduler_is_accounted_for():
    """One more attribute must be put where it belongs: a key without it would merge states that differ."""
    for mode in MODES:
        scheduler = parse_mode(mode).scheduler(Placement.looped(2), 0, 2)
        assert set(vars(scheduler)) == STATE | FOLLOWS_FROM_IT | NEVER_CHANGES | ONLY_REPORTED


def walk(rank: Rank, rng: random.Random, other: Rank) -> None:
    """The same random events on two objects whose keys are equal: they stay equal."""
    edges = {edge for members in rank.calls for s in members for t in s._tasks.values() for edge in t.arrivals}
    waiting = [(edge, microbatch) for microbatch in range(3) for edge in sorted(edges)]
    for _ in range(60):
        events = rank.events()
        assert events == other.events()
        if waiting and rng.random() < 0.5:
            edge, microbatch = waiting.pop(0)
            event = ("arrive", 0, 0, edge, microbatch)
        elif events:
            event = rng.choice(events)
        else:
            break
        before = rank.key()
        ahead = rank.fork()
        done = ahead.apply(event)
        assert rank.key() == before, "a fork must leave its original as it was"
        if done is None:
            assert other.fork().apply(event) is None
            continue
        rank, twin = ahead, other.fork()
        assert twin.apply(event) == done and twin.key() == rank.key()
        other = twin


@pytest.mark.parametrize("hint", [ANY, "announced", "bf", "fill-alt", "1f1b"])
def test_a_copy_goes_its_own_way(hint, seed):
    for start in range(20):
        calls = Cell((3, 3, 1, 1), hint, limit="2p").schedulers()[1]
        rank = Rank(calls, announces=hint == "announced", any_choice=hint == ANY)
        walk(rank, random.Random(seed + start), rank.fork())


def test_an_announcement_after_its_message_changes_nothing():
    scheduler = parse_mode("ready:announced").scheduler(Placement.looped(2), 1, 2)
    scheduler.arrived(Edge(0, 1), 0)
    before = scheduler_key(scheduler), scheduler.choose(BEFORE), scheduler.choose(AFTER)
    scheduler.announced(Edge(0, 1), 0, 0.0, 1.0)
    assert (scheduler_key(scheduler), scheduler.choose(BEFORE), scheduler.choose(AFTER)) == before
    scheduler.announced(Edge(0, 1), 1, 0.0, 1.0)
    assert scheduler_key(scheduler) != before[0], "control: one before its message is part of the state"


def test_the_timer_of_an_announced_wait_is_an_event():
    system = Cell((3, 3, 1, 1), "announced", limit="2p").system()
    system.explore()
    labels = {step.label for part in system._parts for step in part._steps.values() if step is not None}
    fired = {label.removeprefix("the timer fires, ") for label in labels if label.startswith("the timer fires")}
    assert fired and fired <= labels, "what a timer lets start can also start without it"
