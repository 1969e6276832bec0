"""Real engines under injected faults, and what the merged report of their views makes of it. The words are asserted."""

import gc
import threading
import weakref
from collections import defaultdict

import pytest

from rrfp.action import Action
from rrfp.comm.scripted_transport import ScriptedNetwork
from rrfp.engine.watchdog import stacks
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.report.hang import Report, merge
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import chain
from rrfp.scheduler.hints import Strict

PAIR, CHAIN = Placement.looped(2), Placement.looped(3)


names = "stage {0} (rank {0})".format


def report(cluster, *, absent=()) -> Report:
    """What the ranks would have written, those of `absent` excepted."""
    ranks = sorted({member.rank for member in cluster.members})
    views = []
    for member in cluster.members:
        failure = member.engine.latch.failure
        views.append(member.engine.view() | {
            "run": "r", "world": len(ranks), "global_rank": member.rank, "pipeline": ranks, "names": list(map(names, ranks)),
            "host": "node", "pid": 100 + member.rank, "failure": failure and failure._asdict(), "stacks": f"stack of {member.rank}"})
    return merge(view for view in views if view["rank"] not in absent)


def test_an_action_that_does_not_return(virtual):
    cluster = virtual.Cluster.of(CHAIN, timeout=10.0, duration=lambda action, _: 1e5 if str(action) == "2F1" else 1.0)
    cluster.run(virtual.Call.chain(CHAIN, 6), only=[0, 1, 2], strict=False)
    found = report(cluster)
    assert (found.cause, found.culprit) == ("running", 2)
    assert found.verdict == "stage 1 (rank 1) waits for the gradient 2>1 microbatch 1, which stage 2 (rank 2) owes: stage 2 (rank 2) " \
                            f"runs 2F1 for {cluster[1].engine.last_progress + 30.0 - 5.0:.1f} s"
    assert found.states[2].startswith("runs 2F1 for ") and found.states[0] == "waits for gradient 1>0 microbatch 1"
    assert "--- stacks of stage 2 (rank 2) ---\nstack of 2\n" in found.text() and "stack of 1" not in found.text()


def test_a_message_that_is_lost_on_the_way(virtual):
    """The last one of its edge: no later message shows the gap."""
    cluster = virtual.Cluster.of(PAIR, timeout=10.0, losses=lambda edge, microbatch: str(edge) == "0>1" and microbatch == 3)
    cluster.run(virtual.Call.chain(PAIR, 4), strict=False)
    found = report(cluster)
    assert (found.cause, found.culprit) == ("lost message", 0)
    assert found.verdict == "stage 1 (rank 1) waits for the activation 0>1 microbatch 3, which stage 0 (rank 0) owes: stage 0 (rank 0) has " \
                            "sent it, as message 4 of 0>1, and it did not arrive: lost on the way (3 of 4 came)"


def test_a_message_that_is_known_to_be_missing(virtual):
    """A gap is a failure at once, and needs no search."""
    cluster = virtual.Cluster.of(PAIR, timeout=10.0, losses=lambda edge, microbatch: str(edge) == "0>1" and microbatch == 1)
    cluster.run(virtual.Call.chain(PAIR, 6, Policy(hint="announced", limit="4")), strict=False)
    found = report(cluster)
    assert (found.cause, found.culprit) == ("failed", 1)
    assert found.verdict.startswith("stage 1 (rank 1) failed (0>1): from rank 0: message 3 of lane 0 after 1: a message was lost; stage 0 "
                                    "(rank 0) waits for the gradient 1>0 microbatch ")


class CreditsLost(ScriptedNetwork):
    """Credits from rank 1 to rank 0 are lost."""

    def tell(self, source, rank, action):
        if (source, rank) != (1, 0) or action.__name__ != "credit":
            super().tell(source, rank, action)


def test_a_credit_that_is_lost_on_the_way(virtual):
    cluster = virtual.Cluster.of(PAIR, timeout=10.0, credits=2, network=CreditsLost)
    cluster.run(virtual.Call.chain(PAIR, 5), strict=False)
    found = report(cluster)
    assert (found.cause, found.culprit) == ("lost credit", 0)
    assert found.verdict == "stage 1 (rank 1) waits for the activation 0>1 microbatch 2, which stage 0 (rank 0) owes: stage 0 (rank 0) waits " \
                            "for a credit, of which stage 1 (rank 1) has granted 2: lost on the way"


def test_a_rank_that_does_not_enter_the_call(virtual):
    cluster = virtual.Cluster.of(PAIR, timeout=10.0)
    cluster.run(*[virtual.Call.chain(PAIR, 3)] * 2)
    cluster.clock.advance(5.0)
    cluster.run(virtual.Call.chain(PAIR, 3), only=[0], strict=False)
    found = report(cluster)
    assert (found.cause, found.culprit) == ("elsewhere", 1)
    assert found.verdict.startswith("stage 0 (rank 0) waits for the gradient 1>0 microbatch 0, which stage 1 (rank 1) owes: stage 1 (rank 1) has "
                                    "not entered call 2; its last was call 1, ")
    assert "--- stacks of stage 1 (rank 1) ---" in found.text(), "where else it is"
    # It wrote no view, and nobody knows what it last said.
    found = report(cluster, absent=[1])
    assert (found.cause, found.culprit, found.absent) == ("silent", 1, (1,)) and "No view of rank 1" in found.text()


def test_messages_that_cannot_leave(virtual):
    """Evaluation: all has run here, and the next stage takes nothing."""
    cluster = virtual.Cluster.of(PAIR, timeout=10.0, credits=1)
    cluster.run(virtual.Call.chain(PAIR, 4, forward_only=True), only=[0], strict=False)
    found = report(cluster)
    assert found.verdict == "stage 0 (rank 0) waits for a credit of 0>1, which stage 1 (rank 1) owes: stage 1 (rank 1) has not entered call " \
                            "0; it has not begun any"


def test_a_lost_rank(virtual):
    cluster = virtual.Cluster.of(CHAIN, failures={1: 2.5})
    cluster.run(virtual.Call.chain(CHAIN, 4), only=[0, 2], strict=False)
    found = report(cluster, absent=[1])
    assert found.verdict == "stage 1 (rank 1) was lost (0>1, 1>0): rank 1 ended without saying goodbye; stage 2 (rank 2) waits for the " \
                            "activation 1>2 microbatch 0, which it owes"
    assert (found.cause, found.culprit, found.absent) == ("failed", 1, (1,))
    assert found.states[1].startswith("was lost (")


def test_an_exception(virtual):
    class Failing(virtual.Executor):
        def launch(self, task, inputs, done):
            if str(task.action) == "2F1":
                raise ValueError("bad token")
            super().launch(task, inputs, done)

    cluster = virtual.Cluster.of(CHAIN, executor=Failing)
    cluster.run(virtual.Call.chain(CHAIN, 4), strict=False)
    found = report(cluster)
    assert found.verdict.startswith("stage 2 (rank 2) failed (2F1): ValueError: bad token")
    assert "--- traceback of the first failure ---\nTraceback (most" in found.text() and 'raise ValueError("bad token")' in found.text()


def orders(*rows: str):
    """Schedulers of a chain of stages that obey these orders."""

    def make(rank: int) -> Scheduler:
        actions = [(Action(word[0], rank, int(word[1:])),) for word in rows[rank].split()]
        return Scheduler(chain(Placement.looped(len(rows)), rank, 2), Strict(actions), limit=2)

    return make


def test_a_deadlock_is_named_as_one(virtual):
    """Rank 0 wants the gradient of microbatch 0 before it runs forward 1; rank 1 wants forward 1 before it makes that gradient."""
    cluster = virtual.Cluster.of(PAIR, timeout=10.0)
    cluster.run(virtual.Call(orders("F0 B0 F1 B1", "F0 F1 B0 B1")), strict=False)
    found = report(cluster)
    assert (found.cause, found.culprit) == ("deadlock", None)
    assert found.verdict == "a deadlock: stage 0 (rank 0) -> stage 1 (rank 1) -> stage 0 (rank 0), each waits for the next and none has a " \
                            "reason of its own"
    assert found.further == (
        "stage 0 (rank 0) waits for the gradient 1>0 microbatch 0, which stage 1 (rank 1) owes: 1B0 is held by the fixed order (next is 1F1); "
        "1F1 lacks 0>1 microbatch 1",
        "stage 1 (rank 1) waits for the activation 0>1 microbatch 1, which stage 0 (rank 0) owes: 0B0 lacks 1>0 microbatch 0; 0F1 is held by "
        "the fixed order (next is 0B0)",
    )


def test_orders_that_fit_run(virtual):
    """The control of the deadlock."""
    virtual.Cluster.of(PAIR, timeout=10.0).run(virtual.Call(orders("F0 F1 B0 B1", "F0 F1 B0 B1"), limits=(2, 2))).check()


def test_a_random_rank_that_stops_is_the_one_found(virtual, seed, full):
    """Whichever action never ends, on whichever rank, under whichever hint: the chain of waits ends at it."""
    import random

    rng = random.Random(seed)
    causes = defaultdict(int)
    for _ in range(200 if full else 25):
        ranks, microbatches = rng.randint(2, 5), rng.randint(2, 6)
        placement = Placement.looped(ranks)
        culprit, kind, microbatch = rng.randrange(ranks), rng.choice("FB"), rng.randrange(microbatches)
        stuck = str(Action(kind, culprit, microbatch))
        cluster = virtual.Cluster.of(placement, timeout=20.0, duration=lambda action, _, stuck=stuck: 1e5 if str(action) == stuck else 1.0)
        policy = Policy(hint=rng.choice(["announced", "alt", "bf"]), limit=rng.choice(["1f1b", "2p"]))
        cluster.run(virtual.Call.chain(placement, microbatches, policy), strict=False)
        found = report(cluster)
        assert (found.cause, found.culprit) == ("running", culprit), found.text()
        assert f"{names(culprit)} runs {stuck} for" in found.verdict
        causes[found.missing and found.missing.what] += 1
    assert set(causes) >= {"activation", "gradient"}


@pytest.mark.parametrize("broken", ["handed", "due"])
def test_without_what_a_view_says_the_verdict_is_another(virtual, monkeypatch, broken):
    """Negative control: the report is no better than the views."""
    if broken == "handed":
        cluster = virtual.Cluster.of(PAIR, timeout=10.0, losses=lambda edge, microbatch: str(edge) == "0>1" and microbatch == 3)
        cluster.run(virtual.Call.chain(PAIR, 4), strict=False)
        cluster[0].engine._handed.clear()
        assert report(cluster).cause != "lost message"
    else:
        cluster = virtual.Cluster.of(PAIR, timeout=10.0)
        cluster.run(virtual.Call(orders("F0 B0 F1 B1", "F0 F1 B0 B1")), strict=False)
        monkeypatch.setattr(Strict, "due", ())
        assert report(cluster).cause != "deadlock"


def test_what_threads_use_is_not_kept_alive_by_their_stacks():
    """Memory that another process shares can only be unmapped once nothing of this one looks into it."""
    begun, end, used = threading.Event(), threading.Event(), []

    def work():
        local = threading.Event()
        used.append(weakref.ref(local))
        begun.set()
        assert end.wait(60)

    thread = threading.Thread(target=work, name="a worker")
    gc.disable()
    try:
        thread.start()
        assert begun.wait(60) and "--- thread a worker ---" in stacks()
        end.set()
        thread.join(60)
        assert not thread.is_alive() and used[0]() is None
    finally:
        gc.enable()
