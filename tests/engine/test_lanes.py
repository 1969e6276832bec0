"""Negative control of invariant 1, on real processes: messages of one lane overtake, with the header's check and without it."""

import multiprocessing
import re

import pytest

from rrfp.action import Edge
from rrfp.comm.inbound import Inlet
from rrfp.comm.message import decode
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.compare.work import Sleep, WorkExecutor
from rrfp.engine.loop import Engine
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.tp_coord.agreement import Solo
from rrfp.trace.recorder import Recorder

PAIR = Placement.looped(2)
FORWARD, BACKWARD = Edge(0, 1), Edge(1, 0)
MICROBATCHES = 8


class Overtaken:
    """A lane's socket on which microbatch `late` lets the next `past` messages pass."""

    def __init__(self, socket, late: int, past: int):
        self._socket, self._late, self._left, self._held = socket, late, past, None

    def __getattr__(self, name):
        return getattr(self._socket, name)

    def send_multipart(self, frames):
        header, _ = decode(frames[0])
        if header.microbatch == self._late:
            self._held = frames
            return
        self._socket.send_multipart(frames)
        if self._held is not None:
            self._left -= 1
            if not self._left:
                self._socket.send_multipart(self._held)


def trust_every_sequence() -> None:
    """Whatever number a message has, it is the one that was expected."""
    check = Inlet._check

    def trusting(self, header, body, lane):
        self.received[lane] = header.sequence - 1
        return check(self, header, body, lane)

    Inlet._check = trusting


def work(rank, directory, pipe, *, lanes, checked, late, past, timeout):
    """In a process of its own: one call of a pipeline of two. Tells how it ended."""
    if not checked:
        trust_every_sequence()
    transport = ZmqTransport(
        rank=rank, edges_in=[BACKWARD if rank == 0 else FORWARD], edges_out=[FORWARD if rank == 0 else BACKWARD],
        owner={0: 0, 1: 1}, store=FileStore(directory), lanes=lanes)
    engine = Engine(rank=rank, owner=lambda stage: stage, transport=transport, agreement=Solo(), timeout=timeout,
                    recorder=Recorder(rank=rank, stages=(rank,), directory=None))
    transport.open(engine.post, deadline=60.0)
    if rank == 0:
        outlet, lane = transport._links.outlets[FORWARD], late % lanes
        outlet.sockets[lane] = Overtaken(outlet.sockets[lane], late, past)

    executor = WorkExecutor(lambda action: 0.001, work=Sleep(), release=transport.release, nbytes=16)
    try:
        engine.run(Policy(hint="f-first", limit=str(MICROBATCHES)).scheduler(PAIR, rank, MICROBATCHES), executor)
        pipe.send("it ran")
    except Exception as error:
        pipe.send(str(error))
    transport.close(deadline=10.0)


def run(directory, *, timeout: float = 30.0, **options) -> list[str]:
    """How the call ended on both ranks. timeout: the engine's."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=work, args=(rank, directory, pipes[rank][1]), kwargs=options | {"timeout": timeout},
                                 daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert all(ours.poll(90.0) for ours, _ in pipes), "a rank neither ended its call nor failed"
        said = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join(30.0)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for ours, theirs in pipes:
            ours.close()
            theirs.close()
    for rank, text in enumerate(said):
        print(f"rank {rank}: {text}")
    return said


@pytest.mark.parametrize("lanes, text", [(1, "message 3 of lane 0 after 1: a message was lost"),
                                         (2, "message 2 of lane 1 after 0: a message was lost")])
def test_an_overtaken_message_is_seen_by_its_number(tmp_path, lanes, text):
    """Edge, lane, the number that came and the one before the expected one, on both ranks, however soon the other follows."""
    for said in run(tmp_path, lanes=lanes, checked=True, late=1, past=1):
        assert said.splitlines()[0] == f"rank 1 failed (0>1): from rank 0: {text}"


def test_without_the_check_the_watchdog_names_the_edge(tmp_path):
    """Those that went past hold the edge's credits, the late one never leaves, and microbatch order takes nothing before it."""
    ends = run(tmp_path, lanes=1, checked=False, late=1, past=MICROBATCHES - 2, timeout=0.5)
    for said in ends:
        assert re.search(r"nothing has moved for \d\.\d s in call 0", said.splitlines()[0]), said
    assert any("0>1" in said and "microbatch 1" in said for said in ends)


def test_microbatches_are_told_by_their_index_and_not_by_their_place(tmp_path):
    """Control of the harness: without the check, and with room for those that went past, the same call runs to its end."""
    assert run(tmp_path, lanes=1, checked=False, late=1, past=1) == ["it ran"] * 2
