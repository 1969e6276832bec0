"""The product broken on purpose: random runs find each, and shrink it to a few actions."""

import subprocess
import sys
from pathlib import Path

import pytest
from search import Outcome, search

from rrfp import policy_rows
from rrfp.scheduler import Scheduler
from rrfp.scheduler.arbiter import Decision
from rrfp.scheduler.hints import Strict
from runs import Network, WatchedEngine

MOST = 3000
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def forget():
    """No list that a broken scheduler made is remembered, nor one from before that it would not make."""
    caches = [value for value in vars(policy_rows).values() if hasattr(value, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def found(seed: int, **options) -> Outcome:
    outcome = search(seed, MOST, **options)
    assert outcome.error is not None, f"not found in {outcome}"
    print(f"found after {outcome.counts['runs']} runs: {str(outcome.error).splitlines()[0]}\n{outcome.error.__notes__[-1]}")
    return outcome


def size(outcome: Outcome) -> tuple[int, int, int]:
    """Ranks, chunks, and microbatches of all calls."""
    case = outcome.case
    return case.ranks, case.chunks, sum(count for count, _ in case.calls)


def test_naive_admission_of_chunks(monkeypatch, seed):
    made = Scheduler.__init__

    def naive(self, *arguments, admission="reserve", **options):
        made(self, *arguments, admission="plain" if admission == "reserve" else admission, **options)

    monkeypatch.setattr(Scheduler, "__init__", naive)
    outcome = found(seed, fixed={"placement": "looped"})  # lists for other placements are made by a run of their own, which stops first
    assert outcome.case.ranks <= 2 and size(outcome)[1:] == (2, 2) and "nothing has moved" in str(outcome.error)
    assert "F0 is held by the limit" in str(outcome.error)


def test_backwards_in_microbatch_order_where_forwards_are_free(monkeypatch, seed):
    build, make_ready = Scheduler._build_queues, Scheduler._make_ready

    def half_free(self):
        build(self)
        for queue in self._queues.values():
            if queue.kind != "F":
                queue.heap = None

    def ready(self, action):
        if self.order != "free" or action.kind == "F":
            make_ready(self, action)
        elif action.kind == "W":
            self._weights_in_order.append(action)

    monkeypatch.setattr(Scheduler, "_build_queues", half_free)
    monkeypatch.setattr(Scheduler, "_make_ready", ready)
    outcome = found(seed, fixed={"order": "free", "mode": "ready", "limit": "1f1b", "chunks": 1, "hint": "bf"})
    assert size(outcome) == (2, 1, 3) and outcome.case.lanes == 2 and "nothing has moved" in str(outcome.error)
    assert "rank 1: 1F0 1B0 1F2\n" in outcome.error.__notes__[-1], "1F2 has the slot that 1F1 waits for, and 1B2 waits for 1B1"


class SharedCredits(Network):
    """One set of credits for all edges from one rank to another."""

    def pump(self, link):
        together = [other for other in self.links.values() if self._ends(other.edge) == self._ends(link.edge)]
        for one in together:
            if sum(self.credits - other.credits for other in together) < self.credits:
                super().pump(one)

    def _ends(self, edge):
        return self.owner[edge.source], self.owner[edge.destination]


def test_credits_shared_across_edges(seed):
    outcome = found(seed, network=SharedCredits, fixed={"credits": 1, "stalls": "none"})
    assert outcome.case.ranks == 2 and outcome.case.chunks == 2 and size(outcome)[2] <= 3
    assert "nothing has moved" in str(outcome.error)


class Overtaking(Network):
    """Messages of one lane overtake each other."""

    def pump(self, link):
        link.lane_due = [0.0] * self.lanes
        super().pump(link)


def test_lanes_that_are_no_fifo(seed):
    outcome = found(seed, network=Overtaking)
    assert size(outcome) == (2, 1, 2) and "a message was lost" in str(outcome.error)


def test_a_limit_off_by_one(monkeypatch, seed):
    def admits(self, queue, action):
        self.limit += 1
        try:
            return honest(self, queue, action)
        finally:
            self.limit -= 1

    honest = Scheduler.admits
    monkeypatch.setattr(Scheduler, "admits", admits)
    outcome = found(seed)
    assert outcome.case.ranks == 1 and size(outcome)[2] <= 3 and isinstance(outcome.error, AssertionError)


def test_members_that_do_not_agree(seed):
    outcome = found(seed, agree=False, fixed={"members": 2})
    assert outcome.case.ranks <= 3 and size(outcome)[2] <= 3 and isinstance(outcome.error, AssertionError)


class EarlyCredits:
    """Returns the credit when a message arrives, not when its action is dispatched."""

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def open(self, post, *, deadline):
        def posted(event):
            post(event)
            if hasattr(event, "payload"):
                self._transport.consumed(event)

        self._transport.open(posted, deadline=deadline)

    def consumed(self, arrival):
        pass


def test_credits_returned_on_arrival(seed):
    outcome = found(seed, transport=EarlyCredits)
    assert outcome.case.ranks == 2 and outcome.case.credits == 1 and size(outcome)[2] <= 3
    assert "more waiting than credits" in str(outcome.error) or "buffers of" in str(outcome.error)


class BlockingSends(WatchedEngine):
    """Launches nothing while a message of its own has not left."""

    def advance(self):
        if any(end["direction"] == "out" and end["waiting"] for end in self.transport.state()["edges"].values()):
            self._take_events()
            if not self.scheduler.finished:
                return self._until(Decision(None))
        return super().advance()


def test_compute_that_waits_for_sends(seed):
    outcome = found(seed, engine=BlockingSends)
    assert size(outcome) in ((2, 1, 2), (2, 1, 3)) and "idle, though" in str(outcome.error)


def test_microbatches_out_of_order(monkeypatch, seed):
    def any_ready(self, queue):
        return next((action for action in queue.actions if self.is_ready(action)), None)

    monkeypatch.setattr(Scheduler, "ready_in", any_ready)
    outcome = found(seed, fixed={"order": "microbatch"})
    assert size(outcome) == (2, 1, 2) and outcome.case.lanes == 2 and "ran in the order [1, 0]" in str(outcome.error)


def test_a_strict_list_that_is_not_obeyed(monkeypatch, seed):
    monkeypatch.setattr(Strict, "choose", lambda self, scheduler, now: Decision(next(iter(scheduler.admissible()), None)))
    outcome = found(seed, fixed={"mode": "strict", "chunks": 1})
    assert size(outcome)[0] <= 3 and size(outcome)[2] <= 3 and "where the list has" in str(outcome.error)


def test_the_printed_line_repeats_a_run():
    command = [sys.executable, Path(__file__).with_name("replay.py"), '{"ranks": 2, "calls": [[2, false]], "limit": "2p"}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "rank 0: 0F0 0F1 0B0 0B1" in done.stdout and "rank 1: 1F0 1B0 1F1 1B1" in done.stdout
