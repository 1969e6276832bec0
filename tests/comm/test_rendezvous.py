"""Finding each other, with names for who is missing."""

import os
import subprocess
import time

import pytest

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.authentication import Keys
from rrfp.comm.connections import Connections
from rrfp.comm.rendezvous import FileStore
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.errors import ConfigurationError, PipelineError


def test_a_record_comes_back(tmp_path):
    store = FileStore(tmp_path)
    rendezvous.publish(store, "a/b", "who", 3, {"x": 1})
    assert rendezvous.collect(store, "a/b", "who", [3], until=time.monotonic() + 5) == {3: {"x": 1}}
    assert not store.check(["a/b/who/4"])


def test_who_is_missing_is_named(tmp_path):
    store = FileStore(tmp_path)
    rendezvous.publish(store, "n", "who", 1, {})
    with pytest.raises(PipelineError, match="ranks 2, 7 did not come"):
        rendezvous.collect(store, "n", "who", [7, 1, 2], until=time.monotonic() + 0.02)


def test_a_transport_alone_names_its_neighbour_and_leaves_nothing(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    transport = ZmqTransport(rank=0, edges_in=[], edges_out=[Edge(0, 1)], owner={0: 0, 1: 1}, store=FileStore(tmp_path))
    with pytest.raises(PipelineError, match="ranks 1 did not come within 0 s"):
        transport.open(lambda event: None, deadline=0.05)
    transport.close(deadline=1.0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_that_says_who_it_is_and_stops_is_named(tmp_path):
    store, own = FileStore(tmp_path), os.getpid()
    record = {"host": rendezvous.host_identity(), "pid": own, "started": rendezvous.started_at(own), "key": "0" * 40,
              "in": [(0, 1)], "out": [], "lanes": 1, "max_message_bytes": 4 << 30}  # fmt: skip
    rendezvous.publish(store, "rrfp", "who", 1, record)
    transport = ZmqTransport(rank=0, edges_in=[], edges_out=[Edge(0, 1)], owner={0: 0, 1: 1}, store=store)
    with pytest.raises(PipelineError, match=r"ranks 1 did not come within 0 s \(where\)"):
        transport.open(lambda event: None, deadline=0.05)


@pytest.mark.parametrize("started", [1, None])
def test_a_neighbour_that_has_ended_is_named_at_once(tmp_path, started):
    child = subprocess.Popen(["sleep", "60"])
    if started is None:
        started = rendezvous.started_at(child.pid)
        child.kill()
        child.wait()
    record = {"host": rendezvous.host_identity(), "pid": child.pid, "started": started, "key": "0" * 40,
              "in": [(0, 1)], "out": [], "lanes": 1, "max_message_bytes": 4 << 30}  # fmt: skip
    store = FileStore(tmp_path)
    rendezvous.publish(store, "rrfp", "who", 1, record)
    transport = ZmqTransport(rank=0, edges_in=[], edges_out=[Edge(0, 1)], owner={0: 0, 1: 1}, store=store)
    try:
        with pytest.raises(PipelineError, match=f"rank 1 .process {child.pid}. ended during start-up"):
            transport.open(lambda event: None, deadline=30)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("difference", [{"in": []}, {"out": [(1, 0)]}, {"lanes": 2}, {"max_message_bytes": 5}])
def test_two_ranks_that_disagree_are_refused(difference):
    mine = {"in": [], "out": [Edge(0, 1)], "lanes": 1, "max_message_bytes": 9}
    theirs = {"in": [[0, 1]], "out": [], "lanes": 1, "max_message_bytes": 9}
    rendezvous.check_match(0, mine, 1, theirs, {0: 0, 1: 1}.__getitem__)
    with pytest.raises(ConfigurationError, match="rank 0 and rank 1 disagree on"):
        rendezvous.check_match(0, mine, 1, theirs | difference, {0: 0, 1: 1}.__getitem__)


@pytest.fixture
def connections():
    made = []

    def make(interface):
        made.append(Connections(keys=Keys(), interface=interface, heartbeat_s=1.0, most_sockets=10))
        return made[-1], made[-1].pull(made[-1].control, "control")

    yield make
    for one in made:
        one.close(linger_ms=0, abandoned=())


@pytest.mark.parametrize("interface", ["*", "0.0.0.0", "::"])
def test_every_network_at_once_is_refused(connections, interface):
    one, socket = connections(interface)
    with pytest.raises(ConfigurationError, match="--rrfp-interface .* is every network of this host"):
        one.bind(socket, shared=False)


def test_an_interface_by_name(connections):
    one, socket = connections("lo")
    assert one.bind(socket, shared=False).startswith("tcp://127.0.0.1:")


def test_a_master_that_is_nowhere_names_the_option(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(ConfigurationError, match="--rrfp-interface"):
        rendezvous.own_address(None)
