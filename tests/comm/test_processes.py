"""Ranks in processes of their own: traffic, death, forks, and many ranks on few cores."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrfp.action import Edge
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.transport import Arrival, Departure, Failure

PEER = Path(__file__).with_name("peer.py")
ROOT = str(PEER.parents[2])
EDGE = Edge(0, 1)

_spec = importlib.util.spec_from_file_location("rrfp_test_peer", PEER)
peer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer)


def start(*arguments) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(PEER), *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(params=["ipc", "tcp"])
def other(request, tmp_path):
    """Rank 1 in a process, rank 0 here: `say` sends words, `hear` gets the next event."""
    process = start("echo", tmp_path, request.param)
    transport, box = peer.make(0, 2, tmp_path, request.param), Mailbox()

    def hear(timeout=20.0):
        event = box.get(timeout=timeout)
        if isinstance(event, Arrival):
            words = bytes(event.payload[0].data).decode()
            transport.consumed(event)
            transport.release(event)
            return words
        return event

    try:
        transport.open(box.put, deadline=30.0)
        transport.begin(0)
        transport.process, transport.hear, transport.wire = process, hear, request.param
        transport.say = lambda words, microbatch=0: transport.send(EDGE, microbatch, peer.text(words))
        yield transport
    finally:
        process.kill()
        process.communicate()
        transport.close(deadline=5.0)


def test_words_come_back(other):
    for microbatch in range(20):
        other.say(f"number {microbatch}", microbatch)
    assert [other.hear() for _ in range(20)] == [f"number {microbatch}" for microbatch in range(20)]


def test_a_killed_peer_is_lost_at_once(other):
    other.process.kill()
    start = time.monotonic()
    failure = other.hear()
    assert isinstance(failure, Failure) and failure.lost and failure.rank == 1 and failure.where == "0>1, 1>0"
    assert "rank 1" in failure.text and time.monotonic() - start < 5.0
    other.abort(failure)


@pytest.mark.parametrize("words", ["exit", "raise"])
def test_a_peer_that_ends_without_goodbye_is_lost(other, words):
    other.say(words)
    failure = other.hear()
    assert isinstance(failure, Failure) and failure.lost and failure.rank == 1
    other.process.wait(timeout=20)  # an open transport does not keep a process alive
    assert other.process.returncode == (0 if words == "exit" else 1)


def test_a_peer_that_says_goodbye_has_departed(other):
    other.say("close")
    assert other.hear() == Departure(1)
    assert other.process.wait(timeout=20) == 0
    assert other._failure is None


def test_a_peer_that_aborts_and_ends_is_heard_as_what_it_said(other):
    other.say("abort")
    assert other.hear()[:3] == (1, "1F0", "as told")
    assert other.process.wait(timeout=20) == 0


def test_a_stopped_peer_shows_as_an_old_sign_of_life(activity, other):
    def age():
        return other.state()["peers"][1]

    os.kill(other.process.pid, signal.SIGSTOP)
    assert activity.wait_for(lambda: age() > 0.8)  # at the latest with this rank's next heartbeat
    assert other._failure is None  # it may come back
    os.kill(other.process.pid, signal.SIGCONT)
    assert activity.wait_for(lambda: age() < 0.5)
    other.say("still here")
    assert other.hear() == "still here"


def test_forked_children_touch_nothing(other):
    other.say("fork")
    assert other.hear() == "children [0, 0, 3]"
    other.say("after")
    assert other.hear() == "after"


def test_a_killed_peer_is_lost_though_its_child_lives(other):
    """The child holds every socket of its dead parent open: no connection breaks. The process descriptor tells all the same."""
    other.say("leave a child")
    child = int(other.hear())
    try:
        other.process.kill()
        failure = other.hear(timeout=10.0)
        assert isinstance(failure, Failure) and failure.lost
    finally:
        os.kill(child, signal.SIGKILL)


def run_row(directory, wire, ranks, messages, seed, timeout):
    processes = [start("row", directory, wire, rank, ranks, messages, seed) for rank in range(ranks)]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and out == "done\n" and err == "", f"rank {rank}: {err}"


@pytest.mark.parametrize("wire", ["ipc", "tcp"])
def test_random_traffic_in_a_row_of_three(tmp_path, wire, seed, full):
    run_row(tmp_path, wire, ranks=3, messages=200 if full else 40, seed=seed, timeout=60)


@pytest.mark.timeout(240)
def test_many_ranks_open_on_few_cores(tmp_path, seed, full):
    run_row(tmp_path, "ipc", ranks=64 if full else 8, messages=3, seed=seed, timeout=200)
