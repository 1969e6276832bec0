"""Calls of forwards only: what waits to be sent is bounded, nothing stands still for it, and training knows nothing of it."""

import multiprocessing
import random
import time
import weakref
from collections import Counter

import numpy as np
import pytest

from rrfp.action import Action, Edge
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Part
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.engine.loop import Engine
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.arbiter import MOST_UNSENT, Scheduler
from rrfp.scheduler.dependencies import Dependencies, Task, chain
from rrfp.scheduler.hints import Prefer
from rrfp.tp_coord.agreement import Solo
from rrfp.trace.recorder import Recorder


class Watched:
    """Counts, per edge, the most messages that waited in their sender at any time."""

    def __init__(self, cluster):
        self.most: Counter = Counter()
        for network in cluster.networks:
            pump = network.pump

            def watch(link, pump=pump):
                pump(link)
                self.most[link.edge] = max(self.most[link.edge], len(link.waiting))

            network.pump = watch


def run(virtual, placement, *calls, **options) -> tuple[Watched, object]:
    cluster = virtual.Cluster.of(placement, **options)
    watched = Watched(cluster)
    cluster.run(*calls).check()
    return watched, cluster


def slow_last(placement):
    return lambda action, _: 10.0 if action.stage == placement.stages - 1 else 1.0


def test_what_waits_is_bounded_and_the_slow_stage_never_waits(virtual):
    placement = Placement.looped(4)
    call = virtual.Call.chain(placement, 40, forward_only=True)
    watched, cluster = run(virtual, placement, call, duration=slow_last(placement))
    assert 0 < max(watched.most.values()) <= MOST_UNSENT
    assert max(member.executor.ended[member.order[-1]] for member in cluster.members) == 3 + 40 * 10.0


def test_control_without_the_bound_everything_waits(virtual, monkeypatch):
    monkeypatch.setattr(Scheduler, "bound_unsent", lambda self, most: None)
    placement = Placement.looped(4)
    watched, _ = run(virtual, placement, virtual.Call.chain(placement, 40, forward_only=True), duration=slow_last(placement))
    assert max(watched.most.values()) > 25


def test_the_bound_is_above_the_credits():
    """Else messages on a slow network would wait for each other although the receiver has room."""
    assert MOST_UNSENT > ZmqTransport.__init__.__kwdefaults__["credits"]


def test_training_is_not_touched(virtual, monkeypatch):
    def fail(self, *arguments):
        raise AssertionError("in training")

    monkeypatch.setattr(Scheduler, "bound_unsent", fail)
    monkeypatch.setattr(Scheduler, "left", fail)
    placement = Placement.looped(3)
    run(virtual, placement, virtual.Call.chain(placement, 12), duration=slow_last(placement))


POLICIES = {
    "default": Policy(),
    "alt": Policy(hint="alt", limit="40"),
    "strict": Policy(hint="1f1b", mode="strict"),
    "megatron": Policy(order="megatron"),
    "free": Policy(order="free", limit="40"),
    "paper": Policy(hint="bf", limit="paper:6"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_policy_comes_to_its_end(virtual, name, chunks, seed, full):
    """Chunks, domains, lanes, credits, slow receivers and late messages, evaluation between training calls."""
    rng, policy = random.Random(seed), POLICIES[name]
    for _ in range(40 if full else 8):
        ranks, members = rng.randint(1, 4), rng.choice((1, 1, 2))
        placement = Placement.looped(ranks, chunks)
        microbatches = ranks * rng.randint(1, 10)
        slow = {stage: rng.choice((1.0, 1.0, 5.0, 30.0)) for stage in range(placement.stages)}
        late = {edge: rng.choice((0.0, 0.0, 8.0)) for edge in range(placement.stages)}
        noise = {(stage, member): rng.random() for stage in range(placement.stages) for member in range(members)}
        order = [rng.random() < 0.7 for _ in range(3)]
        calls = [virtual.Call.chain(placement, microbatches, policy, forward_only=forward_only) for forward_only in order]
        print(f"{name}: {ranks} ranks, {chunks} chunks, {members} members, {microbatches} microbatches, {order}, {slow}, {late}")
        watched, cluster = run(
            virtual, placement, *calls, members=members, credits=rng.choice((1, 2, 4)), lanes=rng.choice((1, 1, 2)),
            capacity=rng.choice((1, 2)), news=lambda member: rng.choice((0.0, 0.5)),
            duration=lambda action, member, noise=noise, slow=slow: slow[action.stage] + noise[action.stage, member],
            delay=lambda edge, microbatch, member, late=late: late[edge.source] * ((microbatch + member) % 2),
        )  # fmt: skip
        bounded = chunks == 1 or not (cluster[0].schedulers[0].hint.strict or cluster[0].schedulers[0]._forwards)
        if bounded and all(order):
            assert max(watched.most.values(), default=0) <= MOST_UNSENT


def test_control_a_fixed_order_across_chunks_would_deadlock_under_the_bound(virtual, monkeypatch):
    """Two long queues, each of which waits for the other to be taken: why such orders go without the bound."""
    placement = Placement.looped(2, 2)
    rows = [[stage for stage in placement.stages_of(rank) for _ in range(40)] for rank in range(2)]

    def schedulers(rank):
        dependencies = chain(placement, rank, 40, forward_only=True)
        forwards = [action for stage in dict.fromkeys(rows[rank]) for action in dependencies.tasks if action.stage == stage]
        return Scheduler(dependencies, Prefer("F"), limit=2, admission="plain", forwards=forwards)

    call = virtual.Call(schedulers, forward_only=True)
    watched, _ = run(virtual, placement, call)
    assert max(watched.most.values()) > 25

    def always(self, most):
        self._most_unsent, self._unsent = most, Counter()

    monkeypatch.setattr(Scheduler, "bound_unsent", always)
    with pytest.raises(Exception, match="messages have not left"):
        run(virtual, placement, call, timeout=1000.0)


def test_a_skip_connection_and_a_join(virtual):
    """Stage 0 feeds 1 and 3, 1 feeds 2, 2 feeds 3, which needs both of a microbatch: the short way fills up."""
    edges = [Edge(0, 1), Edge(0, 3), Edge(1, 2), Edge(2, 3)]
    def dependencies(rank):
        into, out = tuple(e for e in edges if e.destination == rank), tuple(e for e in edges if e.source == rank)
        actions = [Action("F", rank, m) for m in range(30)]
        return Dependencies(rank, (rank,), {action: Task(action, arrivals=into, sends=out) for action in actions})

    for slow in range(4):
        cluster = virtual.Cluster.of_dependencies(
            [dependencies(rank) for rank in range(4)], credits=2,
            duration=lambda action, _, slow=slow: 9.0 if action.stage == slow else 1.0)  # fmt: skip
        watched = Watched(cluster)
        cluster.run(virtual.Call(lambda rank: Scheduler(dependencies(rank), Prefer("F"), limit=1), forward_only=True)).check()
        assert max(watched.most.values()) <= MOST_UNSENT


def test_a_held_forward_says_so_and_its_wait_is_one_for_sending(virtual):
    placement, waits = Placement.looped(2), set()
    cluster = virtual.Cluster.of(placement, duration=lambda action, _: 1.0 if action.stage == 0 else 50.0, credits=1)
    cluster[0].engine.recorder.waited = lambda reason, start, end: waits.add(reason)
    said = []
    cluster.clock.call_at(30.0, lambda: said.extend(cluster[0].schedulers[0].explain()))
    cluster.run(virtual.Call.chain(placement, 20, forward_only=True)).check()
    assert said == ["0F8 is held by edge 0>1: 6 messages have not left"] and waits == {"send"}


def test_a_receiver_that_leaves_is_named(virtual):
    """A rank that waits for its messages to leave learns that nobody will take them."""
    placement = Placement.looped(2)
    cluster = virtual.Cluster.of(placement, credits=1)
    cluster.clock.call_at(20.0, lambda: cluster[1].engine.transport.close())
    cluster.run(virtual.Call.chain(placement, 20, forward_only=True), only=[0], strict=False)
    assert "rank 1 left before the end of call 0: 6 messages of edge 0>1 cannot be delivered" in str(cluster[0].error)


# ------------------------------------------------------------------------------------------------------------- real processes

SIZE = 1 << 20


class Work:
    """An executor on real time: a forward sends one new array; the stages of rank 1 are slow."""

    capacity, padded = 1, 0.0

    def __init__(self, rank: int, release):
        self._seconds, self._release = 0.01 * rank, release
        self.alive = self.most = 0

    def launch(self, task, inputs, done):
        time.sleep(self._seconds)
        for arrival in inputs:
            self._release(arrival)
        outputs = {}
        for edge in task.sends:
            array = np.full(SIZE, 1, np.uint8)
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(array, self._forget)
            outputs[edge] = (Part("uint8", (SIZE,), array),)
        done(outputs)

    def _forget(self):
        self.alive -= 1


def _rank(rank: int, directory: str, host: str | None, microbatches: int, bounded: bool, pipe) -> None:
    if not bounded:
        Scheduler.bound_unsent = lambda self, most: None
    forward = [Edge(0, 1)]
    transport = ZmqTransport(rank=rank, edges_in=forward if rank else [], edges_out=[] if rank else forward, owner={0: 0, 1: 1},
                             store=FileStore(directory), interface="127.0.0.1", host=host)  # fmt: skip
    engine = Engine(rank=rank, owner=lambda stage: stage, transport=transport, agreement=Solo(), timeout=60.0,
                    recorder=Recorder(rank=rank, stages=(rank,), directory=None))  # fmt: skip
    transport.open(engine.post, deadline=60.0)
    work = Work(rank, transport.release)
    for _ in range(2):
        engine.run(Policy().scheduler(Placement.looped(2), rank, microbatches, forward_only=True), work, forward_only=True)
    pipe.send(work.most)
    transport.close(deadline=10.0)


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "control"])
def test_a_real_sender_keeps_a_bounded_number_of_outputs(tmp_path, wire, bounded):
    """Two processes, 30 messages of 1 MiB a call, a receiver that is slower than its sender."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    hosts = [f"host{rank}" if wire == "tcp" else None for rank in (0, 1)]
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), hosts[rank], 30, bounded, there)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        most = []
        for _ in ranks:
            assert here.poll(60)
            most.append(here.recv())
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
            process.join()
        here.close()
        there.close()
    assert [process.exitcode for process in ranks] == [0, 0]
    # What is being computed, and what the send thread has in its hands, come on top.
    assert max(most) <= MOST_UNSENT + 2 if bounded else max(most) > 2 * MOST_UNSENT
