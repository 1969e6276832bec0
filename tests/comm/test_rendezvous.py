"""Finding each other, with names for who is missing."""

import os
import subprocess
import threading
import time

import pytest

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.authentication import Keys
from rrfp.comm.connections import Connections
from rrfp.comm.rendezvous import Fact, FileStore
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.errors import ConfigurationError, PipelineError, RRFPError


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
    with pytest.raises(PipelineError, match="rank 1 did not come within 0 s"):
        transport.open(lambda event: None, deadline=0.05)
    transport.close(deadline=1.0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_one_that_says_who_it_is_and_stops_is_named(tmp_path):
    store, own = FileStore(tmp_path), os.getpid()
    record = {"host": rendezvous.host_identity(), "pid": own, "started": rendezvous.started_at(own), "key": "0" * 40,
              "in": [(0, 1)], "out": [], "lanes": 1, "credits": 4, "max_message_bytes": 4 << 30}  # fmt: skip
    rendezvous.publish(store, "rrfp", "who", 1, record)
    transport = ZmqTransport(rank=0, edges_in=[], edges_out=[Edge(0, 1)], owner={0: 0, 1: 1}, store=store)
    with pytest.raises(PipelineError, match=r"rank 1 did not come within 0 s \(where\)"):
        transport.open(lambda event: None, deadline=0.05)


@pytest.mark.parametrize("started", [1, None])
def test_a_neighbour_that_has_ended_is_named_at_once(tmp_path, started):
    child = subprocess.Popen(["sleep", "60"])
    if started is None:
        started = rendezvous.started_at(child.pid)
        child.kill()
        child.wait()
    record = {"host": rendezvous.host_identity(), "pid": child.pid, "started": started, "key": "0" * 40,
              "in": [(0, 1)], "out": [], "lanes": 1, "credits": 4, "max_message_bytes": 4 << 30}  # fmt: skip
    store = FileStore(tmp_path)
    rendezvous.publish(store, "rrfp", "who", 1, record)
    transport = ZmqTransport(rank=0, edges_in=[], edges_out=[Edge(0, 1)], owner={0: 0, 1: 1}, store=store)
    try:
        with pytest.raises(PipelineError, match=f"rank 1 .process {child.pid}. ended during start-up"):
            transport.open(lambda event: None, deadline=30)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("difference", [{"in": []}, {"out": [(1, 0)]}, {"lanes": 2}, {"credits": 5}, {"max_message_bytes": 5}])
def test_two_ranks_that_disagree_are_refused(difference):
    mine = {"in": [], "out": [Edge(0, 1)], "lanes": 1, "credits": 4, "max_message_bytes": 9}
    theirs = {"in": [[0, 1]], "out": [], "lanes": 1, "credits": 4, "max_message_bytes": 9}
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


# ----------------------------------------------------------------------------------------------------------- facts


def _everywhere(tmp_path, states: dict[int, dict[str, Fact]], *, seconds: float = 10.0) -> dict[int, str]:
    """What `compare` raises on each rank, "" for nothing, with all ranks in threads."""
    store, said = FileStore(tmp_path), {}

    def enter(rank, facts):
        try:
            rendezvous.compare(store, "n", "hello", rank, range(4), facts, until=time.monotonic() + seconds)
            said[rank] = ""
        except RRFPError as error:
            said[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=enter, args=item) for item in states.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def _facts(**changes) -> dict[str, Fact]:
    values = {"rrfp": "1.0", "--rrfp-lanes": 1, "trace": None} | changes
    return {name: Fact(value, f"give every rank the same {name}") for name, value in values.items()}


def test_equal_facts_pass(tmp_path):
    assert _everywhere(tmp_path, dict.fromkeys(range(4), _facts())) == dict.fromkeys(range(4), "")


DIFFERENT = {
    "one rank": ({1: {"--rrfp-lanes": 4}},
                 "--rrfp-lanes must be the same on every rank of a pipeline: 1 on ranks 0, 2, 3; 4 on rank 1; give every rank the same --rrfp-lanes"),
    "two facts": ({0: {"rrfp": "0.9"}, 2: {"--rrfp-lanes": 4}},
                  "rrfp must be the same on every rank of a pipeline: 0.9 on rank 0; 1.0 on ranks 1, 2, 3 (also different: --rrfp-lanes); "
                  "give every rank the same rrfp"),
    "three values": ({1: {"--rrfp-lanes": 2}, 3: {"--rrfp-lanes": 3}},
                     "--rrfp-lanes must be the same on every rank of a pipeline: 1 on ranks 0, 2; 2 on rank 1; 3 on rank 3; "
                     "give every rank the same --rrfp-lanes"),
    "none or something": ({3: {"trace": "x"}},
                          "trace must be the same on every rank of a pipeline: None on ranks 0, 1, 2; x on rank 3; give every rank the same trace"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_rank_refuses_a_difference_in_the_same_words(tmp_path, name):
    changes, line = DIFFERENT[name]
    states = {rank: _facts(**changes.get(rank, {})) for rank in range(4)}
    assert _everywhere(tmp_path, states) == dict.fromkeys(range(4), f"ConfigurationError: {line}")


def test_a_fact_that_only_one_rank_states_is_a_difference(tmp_path):
    states = dict.fromkeys(range(3), _facts()) | {3: _facts(new=1)}
    said = _everywhere(tmp_path, states)
    line = "ConfigurationError: new must be the same on every rank of a pipeline: unknown on ranks 0, 1, 2; 1 on rank 3; "
    assert said == dict.fromkeys(range(3), line + "install the same release on every rank") | {3: line + "give every rank the same new"}


def test_who_states_nothing_is_named_by_all_others(tmp_path):
    said = _everywhere(tmp_path, dict.fromkeys([0, 3], _facts()), seconds=0.05)
    assert set(said.values()) == {"PipelineError: ranks 1, 2 did not come within 0 s (hello): look for their first error, "
                                  "or raise the start-up deadline"}


def test_what_is_seen_meanwhile_ends_the_wait(tmp_path):
    def look():
        raise PipelineError("rank 1 was lost")

    with pytest.raises(PipelineError, match="^rank 1 was lost$"):
        rendezvous.compare(FileStore(tmp_path), "n", "hello", 0, range(2), {}, until=time.monotonic() + 60, look=look)
