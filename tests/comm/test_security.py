"""What strangers and peers can do to a rank: who is let in, what anybody can make it hold, and what it prints of it."""

import ast
import contextlib
import json
import os
import socket as sockets
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
import zmq.utils.monitor

from rrfp.action import Edge
from rrfp.comm import inbound, memory, rendezvous
from rrfp.comm.authentication import Keys
from rrfp.comm.connections import Connections
from rrfp.comm.memory import Buffer, Mappings
from rrfp.comm.message import (
    MAX_CONTROL,
    MAX_FRAME,
    Header,
    Kind,
    decode_failure,
    encode,
    encode_credit,
    encode_duration,
    encode_failure,
)
from rrfp.comm.transport import Announcement, Arrival, Failure, Part
from rrfp.errors import ConfigurationError

PAIR = ({0: 0, 1: 1}, [(0, 1), (1, 0)])
EDGE, BACK = Edge(0, 1), Edge(1, 0)
PART = Part("uint8", (3,), np.arange(3, dtype=np.uint8))
ROOT = Path(__file__).parents[2]


# -------------------------------------------------------------------------------------------------------------- who may speak


def verdict(endpoint: str, configure) -> str:
    """What the library says of a connection attempt: "accepted", or the event that ended it."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.reconnect_ivl = -1
        configure(socket)
        with socket.get_monitor_socket() as monitor:
            socket.connect(endpoint)
            while True:
                assert monitor.poll(10_000), "no verdict"
                event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    found = "accepted"
                elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED):
                    found = zmq.Event(event).name
                else:
                    continue
                socket.disable_monitor()
                return found


def key(public: bytes, pair: tuple[bytes, bytes]):
    def configure(socket):
        socket.curve_serverkey = public
        socket.curve_publickey, socket.curve_secretkey = pair

    return configure


@pytest.fixture(params=["ipc", "tcp"])
def house(network, request):
    """Ranks 0, 1, 2 in a row, and the endpoints of rank 1 as the store tells them."""
    net = network(request.param, {0: 0, 1: 1, 2: 2}, [(0, 1), (1, 2), (2, 1), (1, 0)])
    net.begin()
    net.endpoints = json.loads(net.store.get("rrfp/where/1"))
    net.keys = {rank: net[rank]._links.keys for rank in net.ranks}
    return net


def still_works(net):
    net[0].send(EDGE, 0, (PART,))
    assert isinstance(net.get(1), Arrival)  # and nobody else noticed
    assert net.empty(0) and net.empty(1)


def test_a_stranger_is_refused_everywhere(house):
    for endpoint in house.endpoints.values():
        assert verdict(endpoint, key(house.keys[1].public, zmq.curve_keypair())) == "HANDSHAKE_FAILED_AUTH"
    still_works(house)


def test_one_without_keys_is_refused_everywhere(house):
    for endpoint in house.endpoints.values():
        assert verdict(endpoint, lambda socket: None) != "accepted"
    still_works(house)


def test_one_who_does_not_know_the_servers_key_is_refused_everywhere(house):
    own = (house.keys[0].public, house.keys[0]._secret)  # an admitted key is not enough
    for endpoint in house.endpoints.values():
        assert verdict(endpoint, key(zmq.curve_keypair()[0], own)) != "accepted"
    still_works(house)


def test_a_peer_cannot_speak_on_anothers_edge(house):
    pair = (house.keys[2].public, house.keys[2]._secret)
    control = next(name for name in house.endpoints if name.startswith("control"))
    assert verdict(house.endpoints[control], key(house.keys[1].public, pair)) == "accepted"  # a neighbour: its own key is good
    assert verdict(house.endpoints["2>1/0"], key(house.keys[1].public, pair)) == "accepted"
    assert verdict(house.endpoints["0>1/0"], key(house.keys[1].public, pair)) == "HANDSHAKE_FAILED_AUTH"


def test_a_key_of_another_job_is_refused(house, network):
    other = network(house.kind, *PAIR)
    keys = other[0]._links.keys
    for endpoint in house.endpoints.values():
        assert verdict(endpoint, key(house.keys[1].public, (keys.public, keys._secret))) == "HANDSHAKE_FAILED_AUTH"
    still_works(house)


def test_a_peer_cannot_grant_credits_of_anothers_edge(house):
    house[2]._links.control[1].send(encode(Header(Kind.CREDIT, edge=BACK, slot=1), bytes(20)))
    failure = house.get(1, Failure)
    assert "from rank 2: a CREDIT for edge 1>0, which it has no part in" in failure.text


@pytest.mark.parametrize("enforced", [True, False])
def test_nobody_is_let_in_while_nobody_answers_for_keys(connections, enforced):
    """Before the receive thread runs, and after it ended. The library's own default lets everyone in then (the control)."""
    one = connections(None)
    socket = one.pull(one.control, "control")
    socket.zap_enforce_domain = enforced
    endpoint = one.bind(socket, shared=True)
    assert (verdict(endpoint, key(one.keys.public, zmq.curve_keypair())) == "accepted") is not enforced


def test_the_secret_key_stays_here(house):
    told = [house.store.get(f"rrfp/{phase}/{rank}") for phase in ("who", "where") for rank in house.ranks]
    for keys in house.keys.values():
        assert not any(keys._secret in record for record in told)
    assert any(house.keys[1].public in record for record in told)


# ------------------------------------------------------------------------------------------------------- where a rank listens


@pytest.fixture
def connections():
    made = []

    def make(interface):
        made.append(Connections(keys=Keys(), interface=interface, heartbeat_s=1.0, most_sockets=50))
        made[-1].keys = made[-1]._keys
        return made[-1]

    yield make
    for one in made:
        one.close(linger_ms=0, abandoned=())


def test_no_port_is_open_inside_a_host_and_no_file_is_left(network):
    net = network("ipc", *PAIR)
    for rank in (0, 1):
        assert all(endpoint.startswith("ipc://@") for endpoint in json.loads(net.store.get(f"rrfp/where/{rank}")).values())


def test_ports_are_open_on_one_address_only(network):
    """What the kernel says of this process, before and after."""

    def listening():
        return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    before = listening()
    net = network("tcp", *PAIR, lanes=2)
    opened = listening() - before
    told = {endpoint for rank in (0, 1) for endpoint in json.loads(net.store.get(f"rrfp/where/{rank}")).values()}
    assert {f"tcp://{ip}:{port}" for ip, port in opened} == told and len(told) == 6
    assert {ip for ip, _ in opened} == {"127.0.0.1"}


@pytest.mark.parametrize("interface", ["*", "0.0.0.0", "0", "::", "0:0::0"])
def test_every_network_at_once_is_refused(connections, interface):
    one = connections(interface)
    with pytest.raises(ConfigurationError, match=r"--rrfp-interface .* is every network of this host: name one"):
        one.bind(one.pull(one.control, "control"), shared=False)


@pytest.mark.parametrize("interface", ["no-such-network", "192.0.2.1", "not an address"])
def test_a_network_that_is_not_here_names_the_option(connections, interface):
    one = connections(interface)
    with pytest.raises(ConfigurationError, match=f"--rrfp-interface {interface}: nothing can listen there"):
        one.bind(one.pull(one.control, "control"), shared=False)


def test_a_default_that_other_hosts_cannot_reach_is_refused(connections, monkeypatch):
    """A host whose own name leads to a loopback address, as Debian has it, is the master of a job of two hosts."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    one = connections(None)
    with pytest.raises(ConfigurationError, match=r"faces the master is 127.*, which no other host reaches: .* --rrfp-interface"):
        one.bind(one.pull(one.control, "control"), shared=False, far=True)
    assert one.bind(one.pull(one.control, "control"), shared=False).startswith("tcp://127.")  # containers of one network
    named = connections("lo")  # a tunnel, perhaps: whoever names it knows
    assert named.bind(named.pull(named.control, "control"), shared=False, far=True).startswith("tcp://127.0.0.1:")


def test_which_hosts_a_loopback_address_joins():
    """Same kernel and network, other process ids (two containers of a pod): yes. Another network or kernel: no."""
    here = rendezvous.host_identity()
    boot, net, pid = here.split(":", 1)[0], os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")
    assert here == f"{boot}:{net}:{pid}" and rendezvous.network_of(here) == f"{boot}:{net}:pid"
    assert rendezvous.network_of(f"{boot}:{net}:pid:[1]") == rendezvous.network_of(here)
    assert rendezvous.network_of(f"{boot}:net:[1]:{pid}") != rendezvous.network_of(here)
    assert rendezvous.network_of(f"x{boot}:{net}:{pid}") != rendezvous.network_of(here)


# --------------------------------------------------------------------------------------------- what a stranger can make us hold


def dial(endpoint: str) -> sockets.socket:
    """A plain connection, no ZeroMQ on this end."""
    if endpoint.startswith("ipc://@"):
        plain = sockets.socket(sockets.AF_UNIX)
        plain.settimeout(10)
        plain.connect("\0" + endpoint.removeprefix("ipc://@"))
        return plain
    host, port = endpoint.removeprefix("tcp://").split(":")
    return sockets.create_connection((host, int(port)), timeout=10)


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)


def read_to_end(plain: sockets.socket) -> bool:
    """Whether the other end closed, having said no more than a greeting and a word."""
    with contextlib.suppress(ConnectionError):
        while plain.recv(1 << 16):
            pass
    return True


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10, os.urandom(200), GREETING + b"\x06" + (4 << 30).to_bytes(8, "big"),
        GREETING + b"\x06" + (2 << 20).to_bytes(8, "big") + bytes(1000), GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
        GREETING + b"\x04\x10\x05ERROR" + bytes(10),
    ],
    ids=["http", "noise", "a frame of 4 GiB", "a frame of 2 MiB", "a hello that means nothing", "an error"],
)  # fmt: skip
def test_what_is_no_handshake_ends_the_connection_unread(house, words):
    for endpoint in house.endpoints.values():
        with dial(endpoint) as plain:
            with contextlib.suppress(ConnectionError):
                plain.sendall(words)
            assert read_to_end(plain)
    still_works(house)


def test_before_its_key_is_known_a_connection_holds_one_frame_at_most(house):
    """A stranger says that a frame of 900 kB comes and sends all but its last byte: that is held. More is not let in."""
    before, held = resident(), []
    for size in (900 << 10, MAX_FRAME * 2):
        for _ in range(20):
            held.append(dial(house.endpoints["0>1/0"]))
            with contextlib.suppress(ConnectionError):
                held[-1].sendall(GREETING + b"\x06" + size.to_bytes(8, "big") + bytes(size - 1))
    still_works(house)
    assert resident() - before < 30 << 20
    for plain in held:
        plain.close()


def test_half_open_connections_keep_nobody_out(house):
    """They end after the time that the handshake may take, which every socket has."""
    crowd = [dial(endpoint) for endpoint in house.endpoints.values() for _ in range(60)]
    still_works(house)
    for endpoint in house.endpoints.values():
        assert verdict(endpoint, key(house.keys[1].public, zmq.curve_keypair())) == "HANDSHAKE_FAILED_AUTH"
    for plain in crowd:
        plain.close()


def test_half_open_connections_are_ended(connections, monkeypatch):
    monkeypatch.setattr("rrfp.comm.connections._HANDSHAKE_MS", 50)
    one = connections(None)
    for authenticator in one.authenticators():
        assert authenticator.handshake_ivl == 50
    with dial(one.bind(one.pull(one.control, "control"), shared=True)) as plain:
        plain.sendall(GREETING)
        assert read_to_end(plain)


def test_every_socket_has_its_bounds(house):
    """None is left at the library's defaults, which have no bound."""
    inside = {zmq.REP, zmq.PAIR}  # authentication and monitors: between threads of this process
    found = [socket for socket in house[1]._links.connections._sockets if socket.type not in inside]
    assert sorted({socket.type for socket in found}) == sorted([zmq.PULL, zmq.PUSH])
    for socket in found:
        assert 0 < socket.maxmsgsize <= MAX_FRAME + 1024 and 0 < socket.rcvhwm <= 256 and 0 < socket.handshake_ivl <= 30_000
        assert socket.mechanism == zmq.CURVE
        if socket.type == zmq.PULL:
            assert socket.curve_server and socket.zap_enforce_domain and socket.zap_domain


# ------------------------------------------------------------------------------------------------- what a peer can make us hold


@pytest.mark.parametrize(("credits", "bounded"), [(4, True), (0, True), (0, False)], ids=["payloads", "control", "control group"])
def test_a_flood_stays_with_its_sender(connections, credits, bounded):
    """Nobody reads. The library takes what its bound says and leaves the rest; without a bound it takes everything."""
    one = connections(None)
    authenticator, _ = one.authenticators()
    answer = threading.Thread(target=_answer_once, args=(one, authenticator))
    answer.start()
    one.keys.admit("flood", one.keys.public.decode(), 0)
    socket = one.pull(one.control, "flood", credits=credits)
    if not bounded:
        socket.rcvhwm = 0
    endpoint = one.bind(socket, shared=True)
    sender = one.push(one.control)
    sender.sndhwm = 1
    one.connect(sender, endpoint, one.keys.public.decode())
    answer.join()
    frame, sent = bytes(MAX_FRAME if credits else 64 << 10), 0
    most = 2 * credits + 2 if credits else 256
    while sent < 3 * most and sender.poll(2000, zmq.POLLOUT):
        sender.send(frame, zmq.DONTWAIT)
        sent += 1
    assert most <= sent <= most + 12 if bounded else sent == 3 * most  # a few more in the kernel and at the sender


def _answer_once(one, authenticator):
    assert authenticator.poll(20_000)
    authenticator.send_multipart(one.keys.answer(authenticator.recv_multipart()))


@pytest.fixture
def pair(network):
    net = network("ipc", *PAIR, credits=3)
    net.begin()
    net.settle(lambda: net[1].state()["edges"]["1>0"]["credits"] == 3)
    net.say = net[0]._links.control[1].send
    return net


def test_a_credit_too_many_is_refused(pair):
    pair.say(encode(Header(Kind.CREDIT, edge=BACK, slot=9), encode_credit(-1, bytes(16))))
    assert pair.get(1, Failure).text == "from rank 0: a credit of edge 1>0 beyond the 3 that it has"
    assert len(pair[1]._links.outlets[BACK].credits) == 3


def test_requests_for_larger_slots_replace_them(pair):
    """However often a peer asks, it has three slots; untouched pages cost nothing."""
    inlet, before = pair[1]._links.inlets[EDGE], resident()
    for nbytes in (1 << 20, 1 << 25, 1 << 32):
        for slot in list(inlet.granted):
            pair.say(encode(Header(Kind.NEED, edge=EDGE, slot=slot, nbytes=nbytes)))
            pair.settle(lambda slot=slot: slot not in inlet.granted and len(inlet.granted) == 3)
    assert inlet.pool.count == 3 and inlet.pool.nbytes == 3 << 32 and resident() - before < 50 << 20


def announce(call, microbatch):
    return encode(Header(Kind.ANNOUNCE, edge=EDGE, call=call, microbatch=microbatch), encode_duration(1.0))


def test_an_announcement_comes_once(pair):
    pair.say(announce(0, 5))
    assert pair.get(1).microbatch == 5
    pair.say(announce(0, 5))
    assert pair.get(1, Failure).text == "from rank 0: microbatch 5 of call 0 is announced twice on edge 0>1"


def test_an_announcement_is_of_the_call_that_its_sender_is_in(pair):
    pair[0].begin(1)
    pair.say(announce(1, 0))
    pair.say(announce(2, 0))
    assert pair.get(1).text == "from rank 0: microbatch 0 of call 2 is announced, its last call is 1"


def test_calls_far_ahead_are_refused(pair):
    for call in range(1, 6):
        pair[0].begin(call)
    assert pair.get(1).text == "from rank 0: call 5 is entered, 4 calls before this rank"


def test_announcements_are_counted(pair, monkeypatch):
    monkeypatch.setattr(inbound, "MAX_ANNOUNCED", 10)
    for microbatch in range(11):
        pair.say(announce(0, microbatch))
    assert [type(pair.get(1)) for _ in range(11)] == [Announcement] * 10 + [Failure]


def test_announcements_are_forgotten_with_their_call(pair):
    inlet = pair[1]._links.inlets[EDGE]
    for call in (0, 1, 2):
        if call:
            pair[0].begin(call)
        pair.say(announce(call, 7))
    pair.settle(lambda: len(inlet.announced) == 3)
    pair[1].begin(2)
    assert inlet.announced == {(2, 7)}
    pair[1].begin(3)
    pair.say(announce(2, 8))  # late: of no use, and no mistake
    pair[0].begin(3)
    pair.say(announce(3, 8))
    pair.settle(lambda: inlet.announced == {(3, 8)})
    assert pair[1]._failure is None


def test_an_abort_of_nobody_is_refused(pair):
    pair.say(encode(Header(Kind.ABORT), encode_failure(Failure(7, "0F0", "boo"))))
    failure = pair.get(1, Failure)
    assert failure.rank == 1 and failure.text == "from rank 0: an ABORT of rank 7, which this pipeline has not"


def test_only_the_first_abort_counts(pair):
    for number in range(1000):
        pair.say(encode(Header(Kind.ABORT), encode_failure(Failure(0, "0F0", f"abort {number}", "t" * (64 << 10)))))
    assert pair.get(1).text == "abort 0"
    pair[1].begin(1)
    assert pair.empty(1)


def test_repeated_greetings_and_goodbyes_change_nothing(pair):
    for _ in range(100):
        pair.say(encode(Header(Kind.HELLO), bytes(1000)))
        pair.say(encode(Header(Kind.HEARTBEAT)))
        pair.say(encode(Header(Kind.BYE_SEEN)))
    pair[0].send(EDGE, 0, (PART,))
    assert isinstance(pair.get(1), Arrival) and pair.empty(1)


def test_a_control_message_over_the_bound_ends_its_connection(pair):
    pair.say(encode(Header(Kind.HELLO), bytes(MAX_CONTROL)))
    pair.say(announce(0, 1))  # after the library has connected again
    assert pair.get(1) == Announcement(0, EDGE, 1, pytest.approx(time.monotonic(), abs=30), 1.0)


def test_the_longest_abort_is_within_the_bound():
    failure = Failure(0, "\0" * 100_000, "ü" * 100_000, "\n\"\\" * 100_000)
    assert len(encode(Header(Kind.ABORT), encode_failure(failure))) < MAX_CONTROL


# --------------------------------------------------------------------------------------------------------------- shared memory


def test_a_grant_that_is_no_sealed_memory_of_its_size_is_not_written(tmp_path):
    """Writing behind the end of a file kills the writer (SIGBUS), so what a peer names is looked at first."""
    buffer = Buffer(1, 8192)
    ones = [np.ones(8192, np.uint8)]
    with pytest.raises(OSError, match="too short, or could be cut"):
        Mappings(os.getpid()).write(buffer.grant()._replace(size=1 << 20), [0], ones)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    os.pwrite(unsealed, buffer.nonce, 0)
    with pytest.raises(OSError, match="too short, or could be cut"):
        Mappings(os.getpid()).write(buffer.grant()._replace(fd=unsealed), [0], ones)
    with (tmp_path / "file").open("wb+") as file:
        file.write(buffer.nonce + bytes(1 << 20))
        file.flush()
        with pytest.raises(OSError):  # the kernel: a file on a disk has no seals
            Mappings(os.getpid()).write(buffer.grant()._replace(fd=file.fileno()), [0], ones)
        file.seek(0)
        assert set(file.read()) <= set(buffer.nonce) | {0}
    os.close(unsealed)
    buffer.close()


def test_a_sender_keeps_a_bounded_number_of_slots_mapped(monkeypatch):
    monkeypatch.setattr(memory, "MAX_MAPPED", 3)
    mappings, buffers = Mappings(os.getpid()), [Buffer(slot, 100) for slot in range(10)]
    for _ in range(2):
        for buffer in buffers:
            mappings.write(buffer.grant(), [0], [np.full(100, buffer.slot, np.uint8)])
            assert len(mappings._views) <= 3
    for buffer in buffers:
        assert (buffer.view(0, 100) == buffer.slot).all()
        buffer.close()


# ------------------------------------------------------------------------------------------------------------------ what is said


def test_a_peers_words_cannot_draw_on_a_terminal(pair):
    text, traceback = "fine\n[rrfp] stage 3: lies \x1b[2J \u202e\x07\x9b31m", "line 1\n\tline 2\x1b]0;title\x07\r"
    evil = Failure(0, "0F0\x1b[1A", text, traceback, True)
    pair.say(encode(Header(Kind.ABORT), encode_failure(evil)))
    heard = pair.get(1, Failure)
    assert heard.where == r"0F0\x1b[1A"
    assert heard.text == r"fine\n[rrfp] stage 3: lies \x1b[2J \u202e\x07\x9b31m"
    assert heard.traceback == "line 1\n\tline 2" + r"\x1b]0;title\x07\r"
    assert decode_failure(memoryview(encode_failure(heard))) == heard  # told on, it stays as it is


def test_ordinary_words_are_left_alone():
    failure = Failure(3, "3F1", "größe 5 ≠ 4 — 日本", "Traceback\n  File \"x.py\"\n\tü", True)
    assert decode_failure(memoryview(encode_failure(failure))) == failure


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.save", "numpy.load", "np.load", "torch.jit.load"}
METHODS = ("_object", "_object_list", "recv_pyobj", "send_pyobj", "recv_serialized", "loads_pickle")


def evaluations(source: str) -> list[str]:
    """What in a module could run code that it read: imports and calls by name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            if name in CALLS or name.split(".")[-1] in CALLS - {"torch.load"} and "." not in name or name.endswith(METHODS):
                found.append(name)
    return found


def test_nothing_is_unpickled_or_evaluated():
    """In the whole package nothing is read but JSON, numbers and text. (multiprocessing, with which `rrfp compare` starts its own
    children, pickles between parent and child; nobody else can speak there.)"""
    found = {str(path.relative_to(ROOT)): evaluations(path.read_text()) for path in sorted((ROOT / "rrfp").rglob("*.py"))}
    assert len(found) > 50 and {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from cloudpickle import loads", "import torch\ntorch.load('x')", "eval('1')",
     "torch.distributed.all_gather_object(a, b)", "socket.recv_pyobj()", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_an_evaluation_would_be_found(source):
    assert evaluations(source)
