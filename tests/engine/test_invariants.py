"""Each invariant, broken on purpose: the checks that the other tests rely on must see it."""

import pytest

from rrfp.engine.loop import Completion, Engine
from rrfp.errors import PipelineError
from rrfp.placement import Placement
from rrfp.policy import Policy

PAIR = Placement.looped(2)


class Passing:
    """A transport that passes everything on."""

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)


class EarlyCredits(Passing):
    """Returns the credit when a message arrives, not when its action is dispatched (against invariant 5)."""

    def open(self, post, *, deadline):
        def posted(event):
            post(event)
            if hasattr(event, "payload"):
                self._transport.consumed(event)

        self._transport.open(posted, deadline=deadline)

    def consumed(self, arrival):
        pass


def slow_second(action, _):
    return 1.0 if action.stage == 0 else 10.0


def test_a_credit_returned_early_is_seen(virtual):
    call = virtual.Call.chain(PAIR, 8, forward_only=True)
    honest = virtual.Cluster.of(PAIR, duration=slow_second, credits=2).run(call).check()
    assert max(honest[1].most_waiting.values()) == 2
    with pytest.raises(AssertionError, match="more waiting than credits"):
        virtual.Cluster.of(PAIR, duration=slow_second, credits=2, transport=EarlyCredits).run(call).check()


def test_a_credit_returned_twice_is_refused(virtual):
    class Twice(Engine):
        def _launch(self, action):
            for edge in self.scheduler.task(action).arrivals:
                self.transport.consumed(self._arrivals[edge, action.microbatch])
            super()._launch(action)

    with pytest.raises(PipelineError, match="consumed twice"):
        virtual.Cluster.of(PAIR, engine=Twice).run(virtual.Call.chain(PAIR, 2))


@pytest.mark.parametrize("when", ["launch", "forward", "input gradient"])
def test_memory_given_back_early_is_seen(virtual, when):
    """The buffer belongs to the action until its backward, or W, has run: autograd saves stage inputs."""
    last = {"launch": (), "forward": ("F",), "input gradient": ("F", "I")}[when]

    class Early(virtual.Executor):
        def launch(self, task, inputs, done):
            if when == "launch":
                for arrival in inputs:
                    self._release(arrival)
            super().launch(task, inputs, done)

        def _end(self, task, inputs, done):
            release, self._release = self._release, (lambda arrival: None)
            super()._end(task, inputs, done)
            self._release = release
            if task.action.kind == last[-1:] or (task.action.kind,) == last[-1:]:
                for arrival in self._kept.get((task.action.stage, task.action.microbatch), ()):
                    self._release(arrival)

    policy = Policy(hint="zb-h1", split=True, limit="2p")
    virtual.Cluster.of(PAIR, credits=1).run(virtual.Call.chain(PAIR, 4, policy)).check()
    with pytest.raises(AssertionError, match="was written"):
        virtual.Cluster.of(PAIR, credits=1, executor=Early).run(virtual.Call.chain(PAIR, 4, policy))


def test_completions_taken_as_they_come_break_the_lanes(virtual):
    """Against invariant 1: sends leave in the order of completion, not of dispatch."""

    class AsTheyCome(Engine):
        def _take(self, event):
            if isinstance(event, Completion):
                self._launched.remove(next(one for one in self._launched if one.action == event.action))
                self._launched.appendleft(next(iter([one for one in self._seen if one.action == event.action])))
            super()._take(event)

        def _launch(self, action):
            super()._launch(action)
            self._seen = (*getattr(self, "_seen", ()), self._launched[-1])

    def duration(action, _):
        return 9.0 if str(action) == "0F0" else 1.0

    call = virtual.Call.chain(PAIR, 3, forward_only=True)
    virtual.Cluster.of(PAIR, capacity=2, duration=duration).run(call).check()
    with pytest.raises(AssertionError, match="0>1 lane 0"):
        virtual.Cluster.of(PAIR, capacity=2, duration=duration, engine=AsTheyCome).run(call).check()


def test_a_follower_that_does_not_wait_is_refused(virtual):
    class Hasty(Engine):
        def _may_launch(self, action, decision):
            return True

    def run(**options):
        return virtual.Cluster.of(PAIR, members=2, capacity=2, duration=lambda a, member: 5.0 if member else 1.0,
                                  **options).run(virtual.Call.chain(PAIR, 1))

    run().check()
    with pytest.raises(ValueError, match="not ready here"):
        run(engine=Hasty)


def test_a_send_that_waits_does_not_hold_up_compute(virtual):
    """Invariant 3. Stage 1 never takes anything: stage 0 runs all its forwards on time; then the report names the edge."""
    cluster = virtual.Cluster.of(PAIR, credits=2, timeout=50.0)
    cluster.run(virtual.Call.chain(PAIR, 6, forward_only=True), only=[0], strict=False)
    assert [start for _, start in cluster[0].executor.log] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    text = str(cluster[0].error)
    assert "messages did not leave: edge 0>1 has 4 waiting and 0 credits" in text
    assert "edge 0>1 to rank 1: 2 sent, 4 waiting, 0 credits" in text


def test_a_send_that_waits_holds_up_nothing_else(virtual):
    """Messages the other way keep flowing: every edge has its own credits."""
    cluster = virtual.Cluster.of(PAIR, credits=1, duration=lambda action, _: 1.0,
                                 delay=lambda edge, m, _: 5.0 if edge.source == 0 else 0.0)
    cluster.run(virtual.Call.chain(PAIR, 6, Policy(hint="f-first", limit="6"))).check()
    backwards = [(a.microbatch, start) for a, start in cluster[0].executor.log if a.kind == "B"]
    for microbatch, start in backwards[:-1]:
        (sent,) = (end for action, end in cluster[1].executor.ended.items() if str(action) == f"1B{microbatch}")
        assert start - sent <= 1.0


def test_limits_hold_however_late_completion_is(virtual):
    for capacity in (1, 2, 3):
        for limit in ("1", "2", "3"):
            cluster = virtual.Cluster.of(PAIR, capacity=capacity)
            cluster.run(virtual.Call.chain(PAIR, 6, Policy(hint="f-first", limit=limit))).check()
            assert cluster[0].executor.peak == int(limit)
