"""What goes wrong on the wire, and who may not speak on it. Every frame here passes through real sockets."""

import contextlib
import errno
import gc
import logging
import os
import re
import resource
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from rrfp.action import Edge
from rrfp.comm import memory
from rrfp.comm.clock import VirtualClock
from rrfp.comm.message import INLINE, Header, Kind, encode, encode_parts
from rrfp.comm.scripted_transport import ScriptedNetwork
from rrfp.comm.transport import Arrival, Departure, Failure, Part
from rrfp.errors import PipelineError

PAIR = ({0: 0, 1: 1}, [(0, 1), (1, 0)])
EDGE = Edge(0, 1)
PART = Part("uint8", (3,), np.arange(3, dtype=np.uint8))


@pytest.fixture(params=["ipc", "tcp"])
def wire(network, request):
    """A pair, and a way for rank 0 to put any frames on its channel to rank 1. One good message has gone through."""
    net = network(request.param, *PAIR)
    net.begin(0)
    net[0].send(EDGE, 0, (PART,))
    net.take(1, 1)
    net.settle(lambda: net[0].state()["edges"]["0>1"]["credits"] == 4)
    outlet = net[0]._links.outlets[EDGE]
    good = Header(Kind.DATA, INLINE, 0, EDGE, 1, 0, 2, outlet.credits[0].slot, 3, 1)

    def put(header=good, body=encode_parts((PART,)), data=(b"abc",), frame=None, **changes):
        outlet.sockets[0].send_multipart([frame or encode(header._replace(**changes), body), *data])

    net.put = put
    return net


def test_the_good_frame_is_good(wire):
    wire.put()
    assert bytes(wire.take(1, 1, consume=False)[0].payload[0].data) == b"abc"


CORRUPTED = encode(Header(Kind.DATA, edge=EDGE))[:-1] + b"x"

# What rank 0 sends, and the whole of what every rank says of it (patterns, for numbers that differ between runs and wires).
WRONG = {
    "lost": ({"sequence": 3}, "message 3 of lane 0 after 1: a message was lost"),
    "duplicated": ({"sequence": 1}, "message 1 of lane 0 after 1: a message was duplicated"),
    "truncated header": ({"frame": b"RRFP" + bytes(20)}, "a frame of 24 bytes is shorter than a header of 64: truncated"),
    "truncated metadata": ({"body": encode_parts((PART,))[:-2]}, "the dimensions of part 0 of 1 are cut off: truncated"),
    "truncated payload": ({"data": (b"ab",)}, "2 bytes in 1 frames, the header promises 3 in 1: truncated"),
    "missing payload": ({"data": ()}, "0 bytes in 0 frames, the header promises 3 in 1: truncated"),
    "corrupted": ({"frame": CORRUPTED}, "checksum [0-9a-f]{8} of a frame, its header says [0-9a-f]{8}: corrupted"),
    "foreign": ({"frame": b"GET / HTTP/1.1\r\n" * 6}, "a frame starts with b'GET ' instead of b'RRFP': not a message of this package"),
    "oversized": ({"nbytes": 5 << 30}, f"a message of {5 << 30} bytes is over the limit of {4 << 30}: raise max_message_bytes"),
    "inconsistent": ({"nbytes": 4}, "the header promises 4 bytes, its parts hold 3"),
    "another edge": ({"edge": Edge(1, 0)}, "a message for edge 1>0 lane 0 came in on edge 0>1 lane 0"),
    "another lane": ({"lane": 1}, "a message for edge 0>1 lane 1 came in on edge 0>1 lane 0"),
    "a slot not granted": ({"slot": 99}, "slot 99 was not granted"),
    "a slot too small": ({"flags": 0, "data": ()}, r"a message of \d+ bytes in slot \d+ of \d+"),
    "slot and frames": ({"flags": 0}, r"1 frames follow a message whose bytes are in slot \d+"),
    "a later call": ({"call": 5}, "a message of call 5 during call 0"),
    "control": ({"header": Header(Kind.CREDIT, edge=EDGE)}, "a CREDIT on a data channel"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_frames(wire, name):
    changes, text = WRONG[name]
    if name == "a slot too small" and wire.kind == "ipc":
        size = wire[0]._links.outlets[EDGE].credits[0].size + 1
        part = Part("uint8", (size,), np.zeros(size, np.uint8))
        changes = changes | {"nbytes": size, "body": encode_parts((part,))}
    start = time.monotonic()
    wire.put(**changes)
    failure = wire.get(1)
    assert isinstance(failure, Failure), failure
    assert failure.rank == 1 and failure.where == "0>1" and not failure.lost
    assert re.fullmatch(f"from rank 0: {text}", failure.text)
    assert wire.get(0) == failure  # the culprit hears it too
    print(f"{time.monotonic() - start:.4f} s on {wire.kind}: {failure.text}")
    wire[0].send(EDGE, 1, (PART,))
    assert wire.empty(1)


CONTROL = {
    "foreign": (b"x" * 100, "a frame starts with b'xxxx' instead of b'RRFP': not a message of this package"),
    "payload": (encode(Header(Kind.DATA, edge=EDGE)), "a payload on the control channel"),
    "credit for another's edge": (encode(Header(Kind.CREDIT, edge=Edge(5, 6)), bytes(20)),
                                  "a CREDIT for edge 5>6, which it has no part in"),
    "short credit": (encode(Header(Kind.CREDIT, edge=Edge(1, 0)), b"x"), "a credit's body has 20 bytes, got 1"),
    "need without a slot": (encode(Header(Kind.NEED, edge=EDGE, slot=77)), "slot 77 is given back but was not granted"),
    "need too much": (encode(Header(Kind.NEED, edge=EDGE, nbytes=5 << 30)),
                      f"a message of {5 << 30} bytes is over the limit of {4 << 30}: raise max_message_bytes"),
    "abort": (encode(Header(Kind.ABORT), b"{"), "an ABORT that cannot be read: .*"),
    "goodbye": (encode(Header(Kind.BYE), b"[]"), "a BYE that cannot be read: 2 bytes, 16 per edge"),
    "call": (encode(Header(Kind.CALL, call=1), b"one"), "a CALL that cannot be read: 1 words"),
    "call in no alphabet": (encode(Header(Kind.CALL, call=1), b"\xff"), "a CALL that cannot be read: .*"),
    "call too long": (encode(Header(Kind.CALL, call=1), bytes(5000)), "a CALL of 5000 bytes: 4096 at most"),
    "call again": (encode(Header(Kind.CALL, call=0)), "call 0 is entered after call 0"),
    "corrupted": (CORRUPTED, "checksum [0-9a-f]{8} of a frame, its header says [0-9a-f]{8}: corrupted"),
}


@pytest.mark.parametrize("name", CONTROL)
def test_wrong_control_messages(wire, name):
    frame, text = CONTROL[name]
    start = time.monotonic()
    wire[0]._links.control[1].send(frame)
    failure = wire.get(1)
    assert isinstance(failure, Failure) and failure.rank == 1 and failure.where == "control", failure
    assert re.fullmatch(f"from rank 0: {text}", failure.text)
    assert wire.get(0) == failure
    print(f"{time.monotonic() - start:.4f} s on {wire.kind}: {failure.text}")


def test_a_control_message_of_several_frames(wire):
    wire[0]._links.control[1].send_multipart([encode(Header(Kind.HELLO)), b"more"])
    assert wire.get(1, Failure).text == "from rank 0: a control message of several frames"


# ----------------------------------------------------------------------------------------------------------- another call


ROW = ({rank: rank for rank in range(4)}, [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)])
DISAGREE = ("ranks 1 and 2 disagree on what call 7 is: microbatches 6 on rank 1, 8 on rank 2; "
            "every rank must make the same calls in the same order")


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("kind", ["scripted", "ipc", "tcp"])
def test_neighbours_in_another_call_say_the_same_on_every_rank(network, kind, first):
    net = network(kind, *ROW)
    facts = {0: {"microbatches": "6"}, 1: {"microbatches": "6"}, 2: {"microbatches": "8"}, 3: {"microbatches": "8"}}
    for rank in (first, 3 - first, 0, 3):
        net[rank].begin(7, facts[rank])
    for rank in range(4):
        assert net.get(rank) == Failure(1, "call 7", DISAGREE)


@pytest.mark.parametrize("kind", ["scripted", "ipc", "tcp"])
def test_a_call_is_not_compared_before_both_are_in_it(network, kind, part):
    """Nobody waits: rank 0 runs call 0 and enters call 1 before rank 1 has entered call 0."""
    net = network(kind, *PAIR)
    net[0].begin(0, {"microbatches": "1"})
    net[0].send(EDGE, 0, (part(8),))
    net[0].begin(1, {"microbatches": "2"})
    net.settle(lambda: net[1].state()["calls"] == {0: 1})
    assert net[0].state()["calls"] == {}
    net[1].begin(0, {"microbatches": "1"})
    assert net.take(1, 1)[0].call == 0
    net[1].begin(1, {"microbatches": "3"})
    assert "microbatches 2 on rank 0, 3 on rank 1" in net.get(1, Failure).text
    assert net.get(0, Failure).where == "call 1"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_nothing_of_a_call_is_posted_before_its_sender_has_told_of_it(network, kind, part):
    """A CALL and a payload travel apart. Here the word is held back: the payload waits for it."""
    net = network(kind, *PAIR)
    net[1].begin(0)
    told = []
    tell = net[0]._tell
    net[0]._tell = lambda rank, header, body=b"": (told.append if header.kind is Kind.CALL else lambda each: tell(*each))((rank, header, body))
    net[0].begin(0)
    net[0].send(EDGE, 0, (part(8),))
    net.settle(lambda: net[1].state()["edges"]["0>1"]["received"] == 1)
    assert net.empty(1)
    net[0]._tell = tell
    for each in told:
        tell(*each)
    assert net.take(1, 1)[0].microbatch == 0


# ----------------------------------------------------------------------------------------------------------- no memory


def _refuse(monkeypatch, number):
    def memfd_create(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(memory.os, "memfd_create", memfd_create)


NO_MEMORY = {
    errno.ENOMEM: "Cannot allocate memory; give this rank more memory, or a smaller --rrfp-limit",
    errno.ENOSPC: "No space left on device; give this rank more memory, or a smaller --rrfp-limit",
    errno.EMFILE: "Too many open files; every receive buffer is a descriptor: raise this process' limit (ulimit -n)",
    errno.ENFILE: "Too many open files in system; every receive buffer is a descriptor: raise the host's limit (fs.file-max)",
}


@pytest.mark.parametrize("number", NO_MEMORY, ids=errno.errorcode.get)
def test_a_buffer_that_cannot_be_had_is_named(network, part, monkeypatch, number):
    net = network("ipc", *PAIR)
    net.begin()
    _refuse(monkeypatch, number)
    net[0].send(EDGE, 0, (part(100_000),))  # asks for larger slots
    failure = net.get(1, Failure)
    assert (failure.rank, failure.where) == (1, "the receive thread")
    assert failure.text == f"PipelineError: no receive buffer of 106496 bytes can be had: {NO_MEMORY[number]}"
    assert net.get(0)[:3] == failure[:3]


def test_too_few_descriptors_are_named(network, part):
    """The real thing: no descriptor is left when a larger slot is asked for."""
    net = network("ipc", *PAIR)
    net.begin()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) - 8, hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        net[0].send(EDGE, 0, (part(100_000),))
        failure = net.get(1, Failure)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    assert failure.text == f"PipelineError: no receive buffer of 106496 bytes can be had: {NO_MEMORY[errno.EMFILE]}"


def test_a_full_dev_shm_does_not_matter(network, part):
    """Buffers are memory files that no file system holds: none of them is under /dev/shm, whose size is no limit."""
    net = network("ipc", *PAIR)
    net.begin()
    before = os.statvfs("/dev/shm").f_bfree
    size = 4 * os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    inlet = net[1]._links.inlets[EDGE]
    buffer = inlet.pool.take(size)  # four times what fits there; its pages come when they are touched
    assert os.readlink(f"/proc/self/fd/{buffer.fd}").startswith("/memfd:rrfp")
    buffer.view(size - 8, 8)[:] = 7
    assert abs(os.statvfs("/dev/shm").f_bfree - before) < 1000
    inlet.pool.drop(buffer)


def test_more_than_the_limit_is_refused_where_it_is_sent(network, part):
    net = network("ipc", *PAIR, max_message_bytes=1000)
    net.begin()
    with pytest.raises(PipelineError, match="edge 0>1, microbatch 7: a message of 1001 bytes is over the limit of 1000"):
        net[0].send(EDGE, 7, (part(1001),))
    net[0].send(EDGE, 7, (part(1000),))
    assert len(net.take(1, 1)[0].payload[0].data) == 1000


def test_many_parts_within_the_limit_fit(network, part):
    """In a slot parts are aligned, so it may be larger than the message."""
    net = network("ipc", *PAIR, max_message_bytes=1000)
    net.begin()
    net[0].send(EDGE, 0, (part(1, 7),) * 1000)
    assert len(net.take(1, 1)[0].payload) == 1000


def test_a_poller_that_breaks_is_a_failure(network):
    net = network("ipc", *PAIR, heartbeat_s=0.01)
    net[0]._loop._poller.poll = None
    assert net.get(0, Failure).where == "the receive thread"


def test_a_message_that_has_left_is_not_kept(network):
    net = network("tcp", *PAIR)
    net.begin()
    data = np.zeros(1000, np.uint8)
    left = threading.Event()
    weakref.finalize(data, left.set)
    net[0].send(EDGE, 0, (Part("uint8", (1000,), data),))
    del data
    net[0].flush(deadline=10.0)
    assert left.wait(20.0)


def test_memory_out_of_reach_is_replaced_by_the_socket_and_said_once(network, part, monkeypatch, caplog):
    real = os.pread
    monkeypatch.setattr(memory.os, "pread", lambda fd, count, at: bytes(count) if count == 16 else real(fd, count, at))
    net = network("ipc", *PAIR)
    net.begin()
    with caplog.at_level(logging.WARNING):
        for microbatch in range(6):
            net[0].send(EDGE, microbatch, (part(100_000, microbatch), part(5, microbatch)))
        for arrival in net.take(1, 6):
            assert all((p.data == arrival.microbatch).all() for p in arrival.payload)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "edge 0>1 sends its bytes through the socket, about three times slower"
    ]


def test_a_handler_that_breaks_is_a_failure_with_its_traceback(network, part):
    net = network("ipc", *PAIR)
    net.begin()
    net[1]._links.inlets[EDGE].accept = None
    net[0].send(EDGE, 0, (part(8),))
    failure = net.get(1, Failure)
    assert failure.where == "the receive thread" and "NoneType" in failure.text and "Traceback" in failure.traceback


def test_a_send_thread_that_breaks_is_a_failure_with_its_traceback(network, part):
    def delay(edge, microbatch):
        raise ZeroDivisionError("no such delay")

    net = network("ipc", *PAIR, delays=delay)
    net.begin()
    net[0].send(EDGE, 0, (part(8),))
    failure = net.get(0, Failure)
    assert failure.where == "the send thread" and "no such delay" in failure.text and "Traceback" in failure.traceback
    assert net.get(1) == failure
    with pytest.raises(PipelineError, match="edge 0>1 has 1 waiting"):
        net[0].flush(deadline=10.0)


# ----------------------------------------------------------------------------------------------------------- nothing is left


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_nothing_is_left_after_close(network, part, kind):
    def things():
        gc.collect()  # earlier tests' arrivals, which hold memory
        natives = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
        return len(os.listdir("/proc/self/fd")), sum(name.startswith("ZMQ") for name in natives), threading.active_count()

    before = things()
    net = network(kind, *PAIR, lanes=2)
    net.begin()
    for microbatch in range(8):
        net[0].send(EDGE, microbatch, (part(100_000),))
    net.take(1, 4)
    net.take(1, 4, consume=False)
    inside = things()
    net.close()
    assert inside[0] > before[0] and inside[1] == 8 and inside[2] == before[2] + 4  # two threads of ours per rank
    until = time.monotonic() + 20.0
    while things() != (before[0], 0, 1):  # the kernel takes a moment to strike a joined thread off, and tells nobody
        assert time.monotonic() < until
    assert all(isinstance(net.get(rank), Departure) for rank in (0, 1) if not net.empty(rank))


def test_close_does_not_wait_for_a_stuck_message(network, part):
    net = network("tcp", *PAIR, credits=1)
    net.begin()
    for microbatch in range(3):
        net[0].send(EDGE, microbatch, (part(100_000),))
    net.settle(lambda: net[0].state()["edges"]["0>1"]["sent"] == 1)
    net.close()
    assert threading.active_count() == 1


# ----------------------------------------------------------------------------------------------------------- scripted faults


def _scripted(**options):
    clock, boxes = VirtualClock(), {0: [], 1: [], 2: []}
    net = ScriptedNetwork({0: 0, 1: 1, 2: 2}, [Edge(0, 1), Edge(1, 2), Edge(2, 1), Edge(1, 0)], clock=clock, **options)
    for rank, box in boxes.items():
        net.transport(rank).open(box.append)
        net.transport(rank).begin(0)
    for microbatch in range(3):
        net.transport(0).send(EDGE, microbatch, (PART,))
    return clock, net, boxes


def test_a_scripted_loss_shows_as_a_gap():
    clock, _, boxes = _scripted(losses=lambda edge, microbatch: microbatch == 1)
    clock.run_until_idle()
    assert [type(event) for event in boxes[1]] == [Arrival, Failure]
    assert boxes[1][1] == Failure(1, "0>1", "from rank 0: message 3 of lane 0 after 1: a message was lost")
    assert boxes[0] == boxes[2] == boxes[1][1:]


def test_a_scripted_duplicate():
    clock, _, boxes = _scripted(duplicates=lambda edge, microbatch: microbatch == 0)
    clock.run_until_idle()
    assert boxes[1][1] == Failure(1, "0>1", "from rank 0: message 1 of lane 0 after 1: a message was duplicated")


@pytest.mark.parametrize("words", ["checksum 00000000 of a frame, its header says 00000001: corrupted", "the frame ends: truncated"])
def test_a_scripted_corruption(words):
    clock, _, boxes = _scripted(corruptions=lambda edge, microbatch: words if microbatch == 1 else None)
    clock.run_until_idle()
    assert boxes[1][1] == Failure(1, "0>1", f"from rank 0: {words}") and boxes[0] == boxes[2] == boxes[1][1:]


def test_a_scripted_death_is_heard_by_all_at_its_time():
    clock, net, boxes = _scripted(failures={2: 1.5}, delays=lambda edge, microbatch: 1.0)
    clock.advance(1.0)
    assert [type(event) for event in boxes[1]] == [Arrival] * 3
    clock.advance(1.0)
    assert boxes[1][3].lost and boxes[1][3].rank == 2 and boxes[0] == boxes[1][3:] and boxes[2] == []


def test_scripted_time_is_exact_and_events_are_asked_for():
    clock, net, boxes = _scripted(delays=lambda edge, microbatch: [2.0, 1.0, 0.5][microbatch])
    clock.advance()  # the calls are told
    assert clock.next_event_time() == 2.0
    clock.run_until_idle()
    assert [event.time for event in boxes[1]] == [2.0, 2.0, 2.0] and clock.now() == 2.0 and clock.next_event_time() is None


def test_a_scripted_buffer_read_after_release_shows():
    clock, net, boxes = _scripted()
    clock.run_until_idle()
    data = boxes[1][0].payload[0].data
    net.transport(1).release(boxes[1][0])
    assert (data == 0xFF).all()


def test_a_clock_that_never_rests_is_stopped():
    clock = VirtualClock()

    def again():
        clock.call_at(clock.now() + 1, again)

    again()
    with pytest.raises(PipelineError, match="not idle"):
        clock.run_until_idle(most=10)
