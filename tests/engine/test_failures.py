"""The first failure wins, reaches everybody, and says what a person needs; silence ends in a report."""

import time

import pytest

from rrfp.action import Action, Edge
from rrfp.comm.transport import Failure
from rrfp.engine.failure import ELSEWHERE, FailureLatch, came_home, describe
from rrfp.engine.loop import Engine
from rrfp.errors import PipelineError
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import Dependencies, Task
from rrfp.scheduler.hints import Prefer
from rrfp.tp_coord.agreement import Solo
from rrfp.trace.recorder import Recorder

CHAIN = Placement.looped(3)
PAIR = Placement.looped(2)


def failing(virtual, where, error=ValueError("bad token"), rank=None):
    class Failing(virtual.Executor):
        def launch(self, task, inputs, done):
            if str(task.action) == where:
                raise error
            super().launch(task, inputs, done)

    return Failing


# ---------------------------------------------------------------------- an action fails
def test_a_failure_in_launch_reaches_every_rank(virtual):
    cluster = virtual.Cluster.of(CHAIN, executor=failing(virtual, "2F1"), control_delay=0.1)
    cluster.run(virtual.Call.chain(CHAIN, 4), strict=False)
    assert isinstance(cluster[2].error, ValueError), "where it happened it is raised as it is"
    for rank in (0, 1):
        text = str(cluster[rank].error)
        assert type(cluster[rank].error) is PipelineError
        assert text.startswith("rank 2 failed (2F1): ValueError: bad token\n")
        assert "in launch\n    raise error" in text, "the remote traceback"
    assert cluster[1].engine.latch.failure == cluster[0].engine.latch.failure == cluster[2].engine.latch.failure


def test_of_two_failures_the_first_wins(virtual):
    """Rank 0 fails at 1.0, rank 2 while that news is on its way; each tells its own first."""
    both = failing(virtual, "0F1", ValueError("first"))
    cluster = virtual.Cluster.of(CHAIN, executor=both, control_delay=0.5)
    second = Failure(2, "2F0", "RuntimeError: follows")
    cluster.clock.call_at(3.0, lambda: cluster[2].engine.post(second))
    cluster.run(virtual.Call.chain(CHAIN, 4), strict=False)
    assert [member.engine.latch.failure.text for member in cluster.members] == ["ValueError: first"] * 3
    assert "follows" not in str(cluster[2].error)


def test_nothing_runs_after_a_failure(virtual):
    cluster = virtual.Cluster.of(PAIR, executor=failing(virtual, "1F0"))
    cluster.run(virtual.Call.chain(PAIR, 4), strict=False)
    with pytest.raises(PipelineError, match="rank 1 failed"):
        cluster[0].engine.begin(None, None)
    assert not any(start > 1.0 for _, start in cluster[0].executor.log)


def test_a_lost_rank_is_named(virtual):
    cluster = virtual.Cluster.of(CHAIN, failures={1: 2.5})
    cluster.run(virtual.Call.chain(CHAIN, 4), only=[0, 2], strict=False)
    for rank in (0, 2):
        assert "rank 1 was lost" in str(cluster[rank].error)


class Quiet:
    """A transport that notes what it is told. `flushes`: what each flush does, None for nothing."""

    def __init__(self, *flushes):
        self.aborted, self._flushes = [], list(flushes)

    def begin(self, call, facts):
        pass

    def abort(self, failure):
        self.aborted.append(failure)

    def flush(self, *, deadline):
        if self._flushes and (action := self._flushes.pop(0)) is not None:
            action()

    def state(self):
        return {"edges": {}, "peers": {}}


class AtOnce:
    capacity, padded = 1, 0.0

    def __init__(self, action=lambda task: None):
        self._action = action

    def launch(self, task, inputs, done):
        self._action(task)
        done({})


def engine_of(transport=None, timeout=60.0, **options):
    return Engine(rank=0, owner=lambda stage: stage, transport=transport or Quiet(), agreement=Solo(), timeout=timeout,
                  recorder=Recorder(rank=0, stages=(0,), directory=None), **options)


def one_action(arrivals=()):
    action = Action("F", 0, 0)
    return Scheduler(Dependencies(0, (0,), {action: Task(action, arrivals=arrivals)}), Prefer("BF"), limit=1)


def raising(error):
    def action(*_):
        raise error

    return action


@pytest.mark.parametrize("error", [StopIteration(), ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_what_an_action_raises_is_told_and_raised(error):
    engine = engine_of()
    with pytest.raises(type(error)) as raised:
        engine.run(one_action(), AtOnce(raising(error)))
    assert raised.value is error and not engine.in_call
    (failure,) = engine.transport.aborted
    assert (failure.rank, failure.where) == (0, "0F0") and type(error).__name__ in failure.text
    assert type(error).__name__ in failure.traceback


def test_what_follows_from_a_remote_failure_gives_way_to_it():
    """A collective without its peer raises here, but the peer failed first, and that is what this rank reports."""
    engine = engine_of()

    def action(task):
        engine.post(Failure(1, "1B0", "ValueError: the cause"))
        raise RuntimeError("connection reset by peer")

    with pytest.raises(PipelineError, match="rank 1 failed .1B0.: ValueError: the cause") as raised:
        engine.run(one_action(), AtOnce(action))
    assert isinstance(raised.value.__context__, RuntimeError)
    assert engine.transport.aborted == [], "the transport floods what it heard itself"


def test_an_interrupt_is_never_replaced():
    engine = engine_of()

    def action(task):
        engine.post(Failure(1, "1B0", "ValueError: the cause"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(one_action(), AtOnce(action))


def test_a_failure_latched_elsewhere_ends_the_call():
    """The watcher latches what it sees without posting; the loop asks the latch before each action."""
    engine = engine_of()
    with pytest.raises(PipelineError, match="rank 0 failed .0F0.: too long"):
        engine.run(one_action(), AtOnce(lambda task: engine.latch.set(Failure(0, "0F0", "too long"))))


def test_a_failure_during_the_last_flush_is_raised_as_itself():
    """The flush is interrupted a moment before the news is posted."""
    def interrupted():
        import threading

        threading.Timer(0.05, engine.post, [Failure(1, "1F0", "ValueError: late")]).start()
        raise PipelineError("messages did not leave: edge 0>1")

    engine = engine_of(Quiet(interrupted))
    with pytest.raises(PipelineError, match="rank 1 failed .1F0.: ValueError: late"):
        engine.run(one_action(), AtOnce())


def test_a_transport_that_refuses_to_begin_ends_the_call():
    class Refusing(Quiet):
        def begin(self, call, facts):
            raise PipelineError("call 0 begins after call 3")

    engine = engine_of(Refusing())
    with pytest.raises(PipelineError, match="call 0 begins"):
        engine.run(one_action(), AtOnce())
    assert not engine.in_call and engine.transport.aborted[0].where == "call 0"


def test_the_latch_keeps_the_first():
    latch = FailureLatch()
    latch.raise_if_set()
    first, second = Failure(2, "2F3", "ValueError: a", "Traceback ...\nValueError: a\n"), Failure(1, "0>1", "gone", lost=True)
    assert latch.set(first) and not latch.set(second) and latch.failure is first and latch.set_event.is_set()
    assert describe(first) == "rank 2 failed (2F3): ValueError: a\n--- traceback of rank 2 ---\nTraceback ...\nValueError: a"
    assert describe(second) == "rank 1 was lost (0>1): gone"
    with pytest.raises(PipelineError, match="rank 2 failed"):
        latch.raise_if_set()


# ---------------------------------------------------------------------- silence
def test_a_hang_report_says_what_a_person_needs(virtual):
    """Stage 1 is never there. Stage 0 runs what memory allows, waits, and reports."""
    cluster = virtual.Cluster.of(PAIR, timeout=20.0, credits=1)
    cluster.run(virtual.Call.chain(PAIR, 6, Policy(hint="b-first", limit="3")), only=[0], strict=False)
    text = str(cluster[0].error)
    assert text.splitlines() == [
        "rank 0: nothing has moved for 60.0 s in call 0",
        "  last action: 0F2, 1.000 s; running: nothing",
        "  ready: none; in flight 3",
        "  0B0 lacks 1>0 microbatch 0",
        "  0F3 is held by the limit 3 (in flight 3)",
        "  edge 0>1 to rank 1: 1 sent, 2 waiting, 0 credits",
        "  edge 1>0 from rank 1: 0 received, 0 waiting, 1 credits",
    ]


def test_a_hang_report_names_signs_of_life_and_what_was_agreed(virtual, monkeypatch):
    """A follower that never counts what arrived: it knows what was decided, and waits for it."""
    cluster = virtual.Cluster.of(PAIR, members=2, timeout=20.0)
    follower = next(m for m in cluster.members if (m.rank, m.member) == (1, 1))
    monkeypatch.setattr(follower.engine._agreement, "common", lambda: ())
    cluster.run(virtual.Call.chain(PAIR, 2, forward_only=True), strict=False)
    lines = str(follower.error).splitlines()
    assert "  agreed, but not ready here: 1F0" in lines
    assert "  edge 0>1 from rank 0: 2 received, 2 waiting, 2 credits" in lines
    assert "  rank 0: last sign of life 58.0 s ago" in lines


@pytest.mark.parametrize("calls, patience", [(0, 60.0), (1, 20.0), (2, 20.0)])
def test_the_first_call_has_three_times_the_patience(virtual, calls, patience):
    cluster = virtual.Cluster.of(PAIR, timeout=20.0)
    cluster.run(*[virtual.Call.chain(PAIR, 2)] * calls)
    start = cluster.clock.now()
    cluster.run(virtual.Call.chain(PAIR, 1), only=[0], strict=False)
    assert f"nothing has moved for {patience:.1f} s in call {calls}" in str(cluster[0].error)
    assert cluster.clock.now() == start + 1.0 + patience
    assert cluster[0].engine.patience == patience


def test_progress_is_what_restarts_the_patience(virtual):
    """Every action is shorter than the patience, the call is much longer."""
    cluster = virtual.Cluster.of(PAIR, timeout=10.0, duration=lambda action, _: 25.0)
    cluster.run(virtual.Call.chain(PAIR, 8), strict=False).check()


def test_the_loop_waits_no_longer_than_its_patience():
    """In real time."""
    engine = engine_of(timeout=0.1)
    start = time.monotonic()
    with pytest.raises(PipelineError, match="nothing has moved for 0.3 s in call 0"):
        engine.run(one_action(arrivals=(Edge(1, 0),)), AtOnce())
    assert 0.3 <= time.monotonic() - start < 5.0
    (failure,) = engine.transport.aborted
    assert failure.text == "PipelineError: rank 0: nothing has moved for 0.3 s in call 0"
    assert "0F0 lacks 1>0 microbatch 0" in failure.traceback, "the others learn what this rank lacks"


# ---------------------------------------------------------------------- departures
def test_a_rank_that_is_still_needed_must_not_leave(virtual):
    cluster = virtual.Cluster.of(PAIR, timeout=1000.0)
    cluster.clock.call_at(3.0, cluster[1].engine.transport.close)
    cluster.run(virtual.Call.chain(PAIR, 4), only=[0], strict=False)
    assert cluster.clock.now() <= 5.0, "within seconds, not after the timeout"
    text = "rank 1 (stage 1) left before the end of call 0: 4 messages of edge 1>0 will not come; 0B0 lacks"
    assert str(cluster[0].error).startswith(text)


def test_a_rank_that_is_not_needed_any_more_may_leave(virtual):
    """Stage 0 has sent everything and says goodbye; stage 1 goes on for long."""
    cluster = virtual.Cluster.of(PAIR, duration=lambda action, _: 1.0 if action.stage == 0 else 50.0, timeout=60.0)
    cluster.clock.call_at(120.0, cluster[0].engine.transport.close)
    cluster.run(*[virtual.Call.chain(PAIR, 2, forward_only=True)] * 2)
    assert [len(executor.order) for executor in cluster[1].executors] == [2, 2]


def test_what_is_here_already_is_not_missed(virtual):
    """The rank left, its messages of this call and the next wait here for an action, or for the other member: no failure."""
    cluster = virtual.Cluster.of(PAIR, members=2, duration=lambda action, _: 1.0 if action.stage == 0 else 30.0,
                                 delay=lambda edge, m, member: 70.0 * member)
    first = next(m for m in cluster.members if (m.rank, m.member) == (0, 0))
    cluster.clock.call_at(10.0, first.engine.transport.close)
    cluster.run(*[virtual.Call.chain(PAIR, 2, forward_only=True)] * 2)
    assert all(len(m.executors) == 2 for m in cluster.members)


def test_nothing_can_be_sent_to_a_rank_that_left(virtual):
    """The receiver says goodbye while messages wait for its credits: named at the end of the call, at once."""
    cluster = virtual.Cluster.of(PAIR, credits=1, timeout=1000.0)
    cluster.clock.call_at(1.5, cluster[1].engine.transport.close)
    member = cluster[0]
    cluster._begin(member, virtual.Call.chain(PAIR, 3, forward_only=True))
    while member.engine.advance() is not None:
        cluster.clock.advance(1.0)
    with pytest.raises(PipelineError, match="rank 1 left before the end of call 0: 2 messages of edge 0>1 cannot be delivered"):
        member.engine.end()


def test_news_of_the_own_pipeline_that_went_round_reads_as_its_own():
    names = {0: "stage 0 (rank 0)", 1: "stage 1 (rank 2)"}
    lost = Failure(1, "heartbeat", "no sign of life for 3 s: stopped, or its machine hangs", "", lost=True)
    heard = Failure(0, ELSEWHERE, describe(lost, names.__getitem__), "")
    assert came_home(heard, names) == lost
    assert describe(came_home(heard, names), names.__getitem__) == describe(lost, names.__getitem__)
    # Controls: another pipeline's, and what is no hearsay, stay what they are.
    elsewhere = heard._replace(text="stage 1 (rank 3) failed (1F2): ValueError: x")
    assert came_home(elsewhere, names) is elsewhere and came_home(lost, names) is lost
