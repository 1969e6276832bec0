"""A rank in a process of its own. `echo` does what it is told by message; `row` exchanges random messages with its neighbours.

    python peer.py echo DIRECTORY tcp|ipc
    python peer.py row DIRECTORY tcp|ipc RANK RANKS MESSAGES SEED
"""

import multiprocessing
import os
import random
import signal
import sys

import numpy as np

from rrfp.action import Edge
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.transport import Arrival, Departure, Failure, Part
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.errors import PipelineError

WAIT = 100.0


def text(words: str) -> tuple[Part, ...]:
    data = np.frombuffer(words.encode(), np.uint8)
    return (Part("uint8", data.shape, data),)


def make(rank, ranks, directory, wire, **options):
    edges = [Edge(a, b) for a in range(ranks) for b in (a - 1, a + 1) if 0 <= b < ranks]
    return ZmqTransport(
        rank=rank,
        edges_in=[edge for edge in edges if edge.destination == rank],
        edges_out=[edge for edge in edges if edge.source == rank],
        owner={stage: stage for stage in range(ranks)},
        store=FileStore(directory),
        interface="127.0.0.1",
        host=f"host{rank}" if wire == "tcp" else None,
        heartbeat_s=0.1,
        **options,
    )


def misuse(transport, arrival) -> str:
    """In a forked child: every method is refused or does nothing."""
    assert transport.state() == {}
    transport.abort(Failure(1, "a child", "must not be heard"))
    transport.close(deadline=1.0)
    transport.release(arrival)  # a finalizer of a tensor that the child lets go of
    calls = [
        lambda: transport.open(print, deadline=1.0), lambda: transport.begin(9), lambda: transport.send(Edge(1, 0), 0, ()),
        lambda: transport.announce(Edge(1, 0), 0, 1.0), lambda: transport.consumed(arrival),
        lambda: transport.flush(deadline=1.0),
    ]  # fmt: skip
    for call in calls:
        try:
            call()
        except PipelineError as error:
            assert "forked child must not use it" in str(error)
        else:
            raise AssertionError("a forked child was let in")
    return "refused"


def child(transport, arrival, how):
    misuse(transport, arrival)
    if how == "raise":
        raise SystemExit(3)


def fork(transport, arrival) -> str:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            misuse(transport, arrival)
            code = 0
        finally:
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    context = multiprocessing.get_context("fork")
    for how in ("return", "raise"):
        process = context.Process(target=child, args=(transport, arrival, how))
        process.start()
        process.join(WAIT)
        codes.append(process.exitcode)
    return f"children {codes}"


def echo(directory, wire):
    transport, box = make(1, 2, directory, wire), Mailbox()
    transport.open(box.put, deadline=WAIT)
    transport.begin(0)
    while True:
        event = box.get(timeout=WAIT)
        if isinstance(event, Departure | Failure):
            break
        words = bytes(event.payload[0].data).decode()
        answer = words
        if words == "exit":
            sys.exit(0)
        if words == "raise":
            raise RuntimeError("an error nobody catches")
        if words == "close":
            break
        if words == "abort":
            transport.abort(Failure(1, "1F0", "as told"))
            break
        if words == "fork":
            answer = fork(transport, event)
        if words == "leave a child":
            pid = os.fork()
            if pid == 0:
                signal.sigtimedwait({signal.SIGTERM}, WAIT)  # holds copies of every descriptor while its parent is killed
                os._exit(0)
            answer = str(pid)
        transport.send(Edge(1, 0), event.microbatch, text(answer))
        transport.consumed(event)
        transport.release(event)
    transport.close(deadline=5.0)


def row(directory, wire, rank, ranks, messages, seed):
    """Every edge carries the same pseudo-random messages; arrivals are consumed in a random order and checked."""
    rank, ranks, messages = int(rank), int(ranks), int(messages)
    rng, box = random.Random(int(seed) + rank), Mailbox()
    transport = make(rank, ranks, directory, wire, credits=random.Random(seed).randint(1, 4))
    transport.open(box.put, deadline=WAIT)
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]
    for call in range(2):
        transport.begin(call)
        held, counts = [], {}
        for microbatch in range(messages):
            for other in neighbours:
                size = random.Random(f"{rank}>{other} {call} {microbatch}").choice([0, 1, 1000, 70_000])
                data = np.full(size, (microbatch + rank) % 256, np.uint8)
                transport.send(Edge(rank, other), microbatch, (Part("uint8", (size,), data), Part("bfloat16", (2,), None)))
        while sum(counts.values()) < messages * len(neighbours) or held:
            if held and (len(held) > 2 or sum(counts.values()) == messages * len(neighbours) or box.empty()):
                arrival = held.pop(rng.randrange(len(held)))
                source = arrival.edge.source
                size = random.Random(f"{source}>{rank} {call} {arrival.microbatch}").choice([0, 1, 1000, 70_000])
                data = arrival.payload[0].data
                assert len(data) == size and (data == (arrival.microbatch + source) % 256).all()
                transport.consumed(arrival)
                transport.release(arrival)
                continue
            event = box.get(timeout=WAIT)
            if isinstance(event, Departure):
                continue  # a neighbour that has all it needs may leave: everything it sent is here
            assert isinstance(event, Arrival), event
            assert event.call == call and event.microbatch == counts.get(event.edge, 0)
            counts[event.edge] = event.microbatch + 1
            held.append(event)
        transport.flush(deadline=WAIT)
    transport.close(deadline=WAIT)
    print("done")


if __name__ == "__main__":
    {"echo": echo, "row": row}[sys.argv[1]](*sys.argv[2:])
