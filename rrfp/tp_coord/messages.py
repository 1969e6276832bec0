"""The channel across hosts: the same words and records as messages, in a star around the leader.

Followers send their words up, the leader sends its decisions down. Sockets are pyzmq's with CURVE keys, as the transport's:
inside a host over abstract names, across hosts over TCP (`rrfp.comm.connections`). A message is one byte that says what it is,
and its body.

Who owns what: the channel's thread reads the one inbox; sends go out under `_sending`, non-blocking, from any thread. Failures
reach the leader, which passes them on. A follower sees only the leader; the leader sees everybody.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

import zmq
from zmq.utils.monitor import parse_monitor_message

from rrfp.comm.authentication import Keys
from rrfp.comm.connections import Connections
from rrfp.comm.message import Malformed, decode_failure, encode_failure
from rrfp.comm.transport import Failure
from rrfp.errors import PipelineError
from rrfp.tp_coord.channel import ListeningChannel, Peer
from rrfp.tp_coord.record import Decision, Receipt, decode, encode

_WORD = struct.Struct("<IQ")
_CALL = struct.Struct("<q")
_LINGER_MS = 500


class Kind(IntEnum):
    HELLO = 1
    WORDS = 2
    DECISION = 3
    HEARTBEAT = 4
    ABORT = 5
    BYE = 6
    BYE_SEEN = 7


class MessageChannel(ListeningChannel):
    """Args:
    keys: this member's; the peers' are admitted to the domain "agreement".
    connections: open; this channel closes it.
    inbox: bound.
    connect: per peer's rank, what connects a socket to it.
    authenticators: answered with `keys`.
    leads: whether this member leads.
    The rest is `ListeningChannel`'s: to the leader all followers, to a follower the leader.
    """

    def __init__(self, rank: int, peers: Iterable[Peer], *, keys: Keys, connections: Connections, inbox: zmq.Socket,
                 connect: Mapping[int, Callable[[zmq.Socket], None]], authenticators: Iterable[zmq.Socket], leads: bool,
                 heartbeat_s: float, silence_s: float):
        super().__init__(rank, peers, heartbeat_s=heartbeat_s, silence_s=silence_s, judges=lambda peer: True)
        self._connections, self._inbox, self._leads = connections, inbox, leads
        self._sending = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._hello: set[int] = set()
        self._connected: set[int] = set()
        self._released: set[int] = set()
        """Peers that have seen our goodbye."""
        self._answered: set[int] = set()
        """Peers whose goodbye we have seen: they listen no more."""
        self._words: dict[int, dict[int, int]] = {peer: {} for peer in self._peers}
        self._decisions: deque[Decision] = deque()
        self._sockets: dict[int, zmq.Socket] = {}
        for socket in authenticators:
            self._loop.add(socket, lambda socket=socket: socket.send_multipart(keys.answer(socket.recv_multipart())))
        self._loop.add(inbox, self._on_message)
        for peer in self._peers.values():
            socket = self._sockets[peer.rank] = connections.push(connections.control)
            if peer.descriptor is None:
                monitor = connections.monitor(socket)
                self._loop.add(monitor, lambda monitor=monitor, peer=peer: self._on_monitor(monitor, peer))
            connect[peer.rank](socket)
        self._loop.start()

    def greet(self, *, until: float) -> None:
        """Every connection is known to work, both ways, when this returns. Raises PipelineError that names who is silent."""
        if not self._leads:
            self._send_all(Kind.HELLO)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._hello >= set(self._peers),
                                   max(0.0, until - time.monotonic()))
            if self._failure is not None:
                raise PipelineError(f"start-up failed at rank {self._failure.rank}, {self._failure.where}: {self._failure.text}")
            silent = sorted(set(self._peers) - self._hello)
        if silent:
            raise PipelineError(f"ranks {', '.join(map(str, silent))} did not say hello in time: raise the start-up deadline")
        if self._leads:
            self._send_all(Kind.HELLO)

    # ------------------------------------------------------------------ the engine's thread
    def begin(self, call: int, words: Mapping[int, int]) -> None:
        self._begin(call)
        self._behind = Receipt(call - 1, 0, 0).word  # of a follower that has not said anything yet
        if not self._leads:
            self.publish(words)

    def publish(self, words: Mapping[int, int]) -> None:
        self._send_all(Kind.WORDS, b"".join(_WORD.pack(index, word) for index, word in words.items()))

    def words(self, index: int) -> Iterable[tuple[int, int]]:
        return [(rank, words.get(index, self._behind)) for rank, words in self._words.items()]

    def put(self, decision: Decision) -> bool:
        self._send_all(Kind.DECISION, encode(decision))
        return True

    def look(self, sequence: int) -> Decision | None:
        return self._decisions[0] if self._decisions else None

    def took(self, sequence: int) -> None:
        self._decisions.popleft()

    # ------------------------------------------------------------------ any thread
    def _send(self, rank: int, kind: Kind, body: bytes = b"") -> None:
        with self._sending:
            if (socket := self._sockets.get(rank)) is not None and rank not in self._answered:
                try:
                    socket.send(bytes((kind,)) + body, zmq.DONTWAIT)
                except zmq.Again:
                    pass  # no connection any more: its watch tells

    def _send_all(self, kind: Kind, body: bytes = b"") -> None:
        for rank in self._peers:
            self._send(rank, kind, body)

    def _spread(self, failure: Failure, source: int | None) -> None:
        data = encode_failure(failure)
        for rank in self._peers:
            if rank != source:
                self._send(rank, Kind.ABORT, data)

    # ------------------------------------------------------------------ the channel's thread
    def _on_message(self) -> None:
        frame = self._inbox.recv(zmq.DONTWAIT, copy=False)
        peer = self._peers[int(frame.get("User-Id"))]  # whose key it was
        peer.seen = time.monotonic()
        data = frame.bytes
        try:
            if frame.more or not data:
                raise Malformed(f"a message of {len(data)} bytes{', and more frames' if frame.more else ''}")
            self._take(peer, data[0], data[1:])
        except Malformed as error:
            while self._inbox.rcvmore:
                self._inbox.recv()
            self.fail(Failure(self.rank, "agreement", f"from rank {peer.rank}: {error}"))

    def _take(self, peer: Peer, kind: int, body: bytes) -> None:
        match kind:
            case Kind.HELLO:
                with self._changed:
                    self._hello.add(peer.rank)
                    self._changed.notify_all()
            case Kind.WORDS if self._leads and len(body) % _WORD.size == 0:
                self._words[peer.rank].update(_WORD.iter_unpack(body))
                self._news()
            case Kind.DECISION if not self._leads:
                self._decisions.append(decode(body))
                self._news()
            case Kind.HEARTBEAT:
                pass
            case Kind.ABORT:
                self.fail(decode_failure(body), source=peer.rank)
            case Kind.BYE if len(body) == _CALL.size:
                self._send(peer.rank, Kind.BYE_SEEN)
                self._answered.add(peer.rank)
                with self._changed:
                    self._changed.notify_all()
                self._left(peer, *_CALL.unpack(body))
            case Kind.BYE_SEEN:
                with self._changed:
                    self._released.add(peer.rank)
                    self._changed.notify_all()
            case _:
                raise Malformed(f"a message of kind {kind} and {len(body)} bytes, which it may not send")

    def _sign(self) -> None:
        self._send_all(Kind.HEARTBEAT)

    def _last_words(self, peer: Peer) -> None:
        try:
            while True:
                self._on_message()
        except zmq.Again:
            pass

    def _on_monitor(self, monitor: zmq.Socket, peer: Peer) -> None:
        if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected.add(peer.rank)
        elif peer.rank in self._connected:
            self._last_words(peer)
            self._on_loss(peer, f"the connection to rank {peer.rank} broke: it ended, or its host or network did")

    def _say_goodbye(self, until: float) -> None:
        self._send_all(Kind.BYE, _CALL.pack(self._call))
        with self._changed:  # what was said before it has been heard then, too
            self._changed.wait_for(
                lambda: all(peer.lost or peer.rank in self._released | self._answered for peer in self._peers.values()),
                max(0.0, until - time.monotonic()))

    def _free(self) -> None:
        with self._sending:
            abandoned = [self._sockets[peer.rank] for peer in self._peers.values() if peer.lost]
            self._sockets.clear()
            self._connections.close(linger_ms=_LINGER_MS, abandoned=abandoned)
