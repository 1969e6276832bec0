"""The CPU transport: pyzmq for everything that is small, shared memory for payloads inside a host.

Threads. The caller's thread opens, closes, and queues; it sends control messages itself, under `_control_lock`, non-blocking. The
send thread (outbound.py) owns the data sockets that connect, and returns the credits. The receive thread (loop.py) owns every socket that is read and
posts events; nothing it does may block. Data and control live in two contexts, hence two I/O threads: control never queues behind
a payload. `_lock` guards inlets, peers, the call window and the latched failure; `_control_lock` may be taken inside it, never
the other way round.

Errors. The first failure is latched, posted, and told to every neighbour, who does the same; later ones are dropped.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.device import Device
from rrfp.comm.inbound import Inlet
from rrfp.comm.links import Links, Peer, Settings, open_links
from rrfp.comm.loop import Loop
from rrfp.comm.memory import Buffer, Grant
from rrfp.comm.message import (
    Header,
    Kind,
    Malformed,
    check_payload,
    decode,
    decode_call,
    decode_credit,
    decode_duration,
    decode_failure,
    decode_farewell,
    encode,
    encode_call,
    encode_credit,
    encode_duration,
    encode_failure,
    encode_farewell,
)
from rrfp.comm.outbound import Job, Outlet, Sender
from rrfp.comm.transport import Announcement, Arrival, Departure, Event, Failure, Left, Payload
from rrfp.comm.window import CallWindow, Roll
from rrfp.errors import PipelineError

LAST_WORDS = 1000  # control messages that are read before a dead peer is called lost, however much the others say
_AFTER_FAILURE_S = 1.0  # when things went wrong, so long we wait for others' answers to our goodbye


class ZmqTransport:
    """One rank's end of a pipeline. See `rrfp.comm.transport.Transport` for what the methods promise.

    Args:
        rank: this pipeline rank.
        edges_in, edges_out: edges from and to stages of other ranks.
        owner: stage -> rank.
        store: where ranks find each other: `set`, `get`, `check` of torch's TCPStore, or a `FileStore`.
        credits: messages of one edge that may be under way or not yet consumed.
        lanes: ordered channels per edge. lane_of(edge, microbatch) chooses one, by default microbatch % lanes.
        interface: network name or address for peers on other hosts; by default the address that faces MASTER_ADDR.
        slot_bytes: the usual size of a message, a hint that spares the first ones a round trip.
        max_message_bytes: what is larger is refused on both sides.
        delay: delay(edge, microbatch) seconds that a message is late, to emulate a slow network.
        heartbeat_s: seconds between signs of life.
        namespace: prefix of the keys in the store. Each opening in one store needs its own.
        host: who shares a host; by default the kernel's own answer. Ranks with different values use TCP.
        device: the GPU that payloads of `device_edges` stay on, from sender to receiver. These edges are inside a host.
        told_of: ranks besides those of `owner` whose failures may be told here: with domains of several ranks, the job's.

    Raises:
        ConfigurationError: an edge that does not cross ranks, or no credit or lane.
    """

    def __init__(
        self,
        *,
        rank: int,
        edges_in: Iterable[Edge],
        edges_out: Iterable[Edge],
        owner: Mapping[int, int],
        store: rendezvous.Store,
        credits: int = 4,
        lanes: int = 1,
        lane_of: Callable[[Edge, int], int] | None = None,
        interface: str | None = None,
        slot_bytes: int = 0,
        max_message_bytes: int = 4 << 30,
        delay: Callable[[Edge, int], float] | None = None,
        heartbeat_s: float = 2.0,
        namespace: str = "rrfp",
        host: str | None = None,
        told_of: Iterable[int] = (),
        device: Device | None = None,
        device_edges: Iterable[Edge] = (),
    ):
        self._settings = Settings(
            rank, tuple(edges_in), tuple(edges_out), owner, store, credits, lanes, interface, slot_bytes, max_message_bytes,
            heartbeat_s, namespace, host or rendezvous.host_identity(), device, frozenset(device_edges),
        )  # fmt: skip
        self._rank, self._limit, self._delay = rank, max_message_bytes, delay
        self._told_of = {*owner.values(), *told_of}
        self._lane_of = lane_of or (lambda edge, microbatch: microbatch % lanes)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._control_lock = threading.Lock()
        self._roll = Roll(rank, self._settings.neighbours, ahead=credits)
        self._window = CallWindow(ahead=credits, entered=lambda edge, call: self._roll.entered(owner[edge.source], call))
        self._failure: Failure | None = None
        self._closed = False
        self._links = Links()
        self._loop: Loop | None = None
        self._sender: Sender | None = None

    # ---------------------------------------------------------------------------------------------------------------- opening

    def open(self, post: Callable[[Event], None], *, deadline: float) -> None:
        self._check_process()
        self._post = post
        try:
            self._open(time.monotonic() + deadline)
        except BaseException:
            self._shut(until=time.monotonic() + _AFTER_FAILURE_S)
            raise

    def _open(self, until: float) -> None:
        links = self._links = open_links(self._settings, until=until)
        name = f"rrfp-rank{self._rank}"
        loop = self._loop = Loop(
            name=f"{name}-receive", interval=self._settings.heartbeat_s, tick=self._tick, fail=self._fail_here, enter=links.enter
        )
        for socket in links.authenticators:
            loop.add(socket, lambda socket=socket: socket.send_multipart(links.keys.answer(socket.recv_multipart())))
        loop.add(links.inbox, self._on_control)  # before the payloads: served first
        for socket, inlet, lane in links.lanes:
            loop.add(socket, lambda socket=socket, inlet=inlet, lane=lane: self._on_data(socket, inlet, lane))
        for monitor, peer in links.monitors:
            loop.add(monitor, lambda monitor=monitor, peer=peer: self._on_monitor(monitor, peer))
        for peer in links.peers.values():
            if peer.descriptor is not None:
                loop.add(peer.descriptor, lambda peer=peer: self._on_death(peer))
        self._sender = Sender(
            list(links.outlets.values()), delay=self._delay, need=self._need, fail=self._fail_here, name=f"{name}-send",
            left=lambda call, edge: self._post(Left(call, edge)), enter=links.enter,
        )  # fmt: skip
        loop.start()
        self._sender.start()
        self._greet(until)

    def _greet(self, until: float) -> None:
        """HELLO and the first credits. Once everybody's HELLO is here, every control channel is known to work both ways."""
        for rank in self._links.peers:
            self._tell(rank, Header(Kind.HELLO))
        for inlet in self._links.inlets.values():
            for _ in range(self._settings.credits):
                with self._lock:
                    buffer = inlet.grant()
                self._credit(inlet, buffer)
        peers = self._links.peers.values()
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(peer.met for peer in peers), max(0.0, until - time.monotonic())
            )
            if self._failure is not None:
                raise PipelineError(f"start-up failed at rank {self._failure.rank}, {self._failure.where}: {self._failure.text}")
            silent = sorted(rank for rank, peer in self._links.peers.items() if not peer.met)
        if silent:
            raise PipelineError(f"ranks {', '.join(map(str, silent))} did not say hello in time: raise the start-up deadline")

    # ------------------------------------------------------------------------------------------------------- the caller's thread

    def begin(self, call: int, facts: Mapping[str, str] | None = None) -> None:
        self._check_process()
        facts = facts or {}
        with self._lock:
            for inlet in self._links.inlets.values():
                inlet.begin(call)
            if (different := self._roll.enter(call, facts)) is not None:
                self._fail(different)
            elif (stray := self._window.begin(call, self._post)) is not None:
                self._fail(Failure(self._rank, str(stray[0].edge), stray[1]))
        body = encode_call(facts)
        for rank in self._links.peers:
            self._tell(rank, Header(Kind.CALL, call=call), body)

    def send(self, edge: Edge, microbatch: int, payload: Payload, *, tell: bool = False) -> None:
        self._check_process()
        nbytes = check_payload(payload)
        if nbytes > self._limit:
            raise PipelineError(
                f"edge {edge}, microbatch {microbatch}: a message of {nbytes} bytes is over the limit of {self._limit}: "
                "raise max_message_bytes"
            )
        if self._window.call is None:
            raise PipelineError("send before the first begin(call)")
        job = Job(self._window.call, microbatch, self._lane_of(edge, microbatch), nbytes, payload, tell)
        self._sender.put(self._links.outlets[edge], job)

    def announce(self, edge: Edge, microbatch: int, duration: float) -> None:
        self._check_process()
        header = Header(Kind.ANNOUNCE, edge=edge, microbatch=microbatch, call=self._window.call)
        self._tell(self._settings.owner[edge.destination], header, encode_duration(duration))

    def consumed(self, arrival: Arrival) -> None:
        self._check_process()
        with self._lock:
            if self._closed:
                return
            inlet = arrival.slot.inlet
            buffer = inlet.consume(arrival.slot)
        # Not here: the caller is about to launch an action, and the sender has other credits until this one is back.
        self._sender.later(lambda: self._credit(inlet, buffer))

    def release(self, arrival: Arrival) -> None:
        if os.getpid() != self._pid:
            return  # a forked child lets go of a tensor that its parent still has
        with self._lock:
            arrival.slot.inlet.release(arrival.slot)

    def flush(self, *, deadline: float) -> None:
        self._check_process()
        self._sender.flush(until=time.monotonic() + deadline)

    def abort(self, failure: Failure) -> None:
        if os.getpid() == self._pid:
            self._fail(failure, post=False)

    def state(self) -> dict:
        """{"call", "edges": {"0>1": {...}}, "peers": {rank: seconds since its last sign of life},
        "calls": {rank: the last call that it entered}}. Empty in a forked child."""
        if os.getpid() != self._pid:
            return {}
        with self._lock:
            ends = {**self._links.inlets, **self._links.outlets}
            now = time.monotonic()
            return {
                "call": self._window.call,
                "edges": {str(edge): end.state() for edge, end in sorted(ends.items())},
                "peers": {peer.rank: now - peer.seen for peer in self._links.peers.values()},
                "calls": dict(self._roll.last),
            }

    def close(self, *, deadline: float) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + deadline
        if self._sender is not None:
            self._part(until)
        self._shut(until)

    def _part(self, until: float) -> None:
        """Say goodbye, and wait until everybody has seen it and everything that left before it."""
        self._sender.stop(until=until)
        for peer in self._links.peers.values():
            if peer.answered or peer.lost:
                continue
            sent = {edge: outlet.sent for edge, outlet in self._links.outlets.items() if outlet.peer == peer.rank}
            self._tell(peer.rank, Header(Kind.BYE), encode_farewell(sent))
        if self._failure is not None:
            until = min(until, time.monotonic() + _AFTER_FAILURE_S)
        with self._changed:
            self._changed.wait_for(
                lambda: all(peer.released or peer.departed or peer.lost for peer in self._links.peers.values()),
                max(0.0, until - time.monotonic()),
            )

    def _shut(self, until: float) -> None:
        """Join the threads, then free what they used. Raises PipelineError if one does not end."""
        self._closed = True
        threads = [thread for thread in (self._sender, self._loop) if thread is not None]
        if stuck := [type(thread).__name__ for thread in threads if not thread.stop(until=max(until, time.monotonic() + 1.0))]:
            raise PipelineError(f"rank {self._rank}: {' and '.join(stuck)} did not end in time")
        if self._loop is not None:
            self._loop.close()
        with self._control_lock, self._lock:
            self._links.close()
            self._window.clear()

    def _check_process(self) -> None:
        # Threads, sockets and locks do not survive a fork: whatever a child did with them would hurt the parent.
        if os.getpid() != self._pid:
            raise PipelineError(f"this transport belongs to process {self._pid}; a forked child must not use it")

    # -------------------------------------------------------------------------------------------------------------- any thread

    def _tell(self, rank: int, header: Header, body: bytes = b"") -> None:
        frame = encode(header, body)
        with self._control_lock:
            socket = self._links.control.get(rank)
            if socket is not None and not self._links.peers[rank].answered:  # else there is nobody to hear it
                try:
                    socket.send(frame, zmq.DONTWAIT)
                except zmq.Again:
                    pass  # no connection any more: its watcher reports that

    def _credit(self, inlet: Inlet, buffer: Buffer) -> None:
        grant = buffer.grant()
        header = Header(Kind.CREDIT, edge=inlet.edge, slot=grant.slot, nbytes=grant.size)
        self._tell(inlet.peer, header, encode_credit(grant.fd, grant.nonce, grant.handle))

    def _need(self, outlet: Outlet, slot: int, nbytes: int) -> None:
        self._tell(outlet.peer, Header(Kind.NEED, edge=outlet.edge, slot=slot, nbytes=nbytes))

    def _fail_here(self, where: str, text: str, traceback: str) -> None:
        self._fail(Failure(self._rank, where, text, traceback))

    def _fail(self, failure: Failure, *, source: int | None = None, post: bool = True) -> None:
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = failure  # the first one wins
            self._changed.notify_all()
        if self._sender is not None:
            self._sender.interrupt()
        if post:
            self._post(failure)
        for peer in self._links.peers.values():
            if peer.rank != source and not peer.departed and not peer.lost:
                self._tell(peer.rank, Header(Kind.ABORT), encode_failure(failure))

    # ------------------------------------------------------------------------------------------------------ the receive thread

    def _tick(self) -> None:
        for peer in self._links.peers.values():
            if not peer.departed and not peer.lost:
                self._tell(peer.rank, Header(Kind.HEARTBEAT))

    def _on_data(self, socket: zmq.Socket, inlet: Inlet, lane: int) -> None:
        frame = socket.recv(zmq.DONTWAIT)
        frames = socket.recv_multipart(copy=False) if socket.rcvmore else []
        now = time.monotonic()
        peer = self._links.peers[inlet.peer]
        peer.seen = now
        try:
            header, body = decode(frame)
            if header.kind is not Kind.DATA:
                raise Malformed(f"a {header.kind.name} on a data channel")
            with self._lock:
                if self._failure is not None:
                    return
                if wrong := self._window.wrong(header.call):
                    raise Malformed(wrong)
                self._window.deliver(inlet.accept(header, body, frames, lane, now), self._post)
                self._depart(peer)
        except Malformed as error:
            self._fail(Failure(self._rank, str(inlet.edge), f"from rank {inlet.peer}: {error}"))

    def _on_control(self) -> None:
        frame = self._links.inbox.recv(zmq.DONTWAIT, copy=False)
        now = time.monotonic()
        peer = self._links.peers[int(frame.get("User-Id"))]  # whose key it was; the message itself does not say
        peer.seen = now
        if frame.more:
            self._links.inbox.recv_multipart()
            self._fail(Failure(self._rank, "control", f"from rank {peer.rank}: a control message of several frames"))
            return
        try:
            header, body = decode(frame.buffer)
            self._handle(peer, header, body, now)
        except Malformed as error:
            self._fail(Failure(self._rank, "control", f"from rank {peer.rank}: {error}"))

    def _handle(self, peer: Peer, header: Header, body: memoryview, now: float) -> None:
        match header.kind:
            case Kind.HELLO:
                with self._changed:
                    peer.hello = True
                    self._changed.notify_all()
            case Kind.CREDIT:
                fd, nonce, handle = decode_credit(body)
                outlet = self._end(self._links.outlets, header, peer)
                outlet.grant()
                self._sender.put(outlet, Grant(header.slot, header.nbytes, fd, nonce, handle))
            case Kind.NEED:
                inlet = self._end(self._links.inlets, header, peer)
                with self._lock:
                    if self._closed:
                        return
                    buffer = inlet.replace(header.slot, header.nbytes)
                self._credit(inlet, buffer)
            case Kind.ANNOUNCE:
                inlet = self._end(self._links.inlets, header, peer)
                event = Announcement(header.call, inlet.edge, header.microbatch, now, decode_duration(body))
                with self._lock:
                    if header.call != (last := self._roll.last.get(peer.rank)):  # its CALL came before, on this very channel
                        raise Malformed(f"microbatch {header.microbatch} of call {header.call} is announced, its last call is {last}")
                    if self._window.call is not None and header.call < self._window.call:
                        return  # it travels beside the payloads, so that is no mistake, and of no use
                    inlet.announce(header.call, header.microbatch)
                    self._window.deliver(event, self._post)
            case Kind.CALL:
                facts = decode_call(body)
                with self._lock:
                    wrong = self._roll.hear(peer.rank, header.call, facts)
                    if isinstance(wrong, str):
                        raise Malformed(wrong)
                    if wrong is None:
                        self._window.look_again(self._post)
                    else:
                        self._fail(wrong)
            case Kind.ABORT:
                failure = decode_failure(body)
                if failure.rank not in self._told_of:
                    raise Malformed(f"an ABORT of rank {failure.rank}, which this pipeline has not")
                self._fail(failure, source=peer.rank)
            case Kind.BYE:
                farewell = decode_farewell(body)
                with self._lock:
                    peer.farewell = farewell
                    self._depart(peer)
            case Kind.BYE_SEEN:
                with self._changed:
                    peer.released = True
                    self._changed.notify_all()
            case Kind.DATA:
                raise Malformed("a payload on the control channel")

    def _end(self, ends: dict, header: Header, peer: Peer):
        end = ends.get(header.edge)
        if end is None or end.peer != peer.rank:
            raise Malformed(f"a {header.kind.name} for edge {header.edge}, which it has no part in")
        return end

    def _depart(self, peer: Peer) -> None:
        """A BYE may overtake payloads on their other channel: the peer has gone once all that it sent is here."""
        if peer.farewell is None or peer.departed:
            return
        inlets = self._links.inlets
        complete = all(sum(inlets[edge].received) >= count for edge, count in peer.farewell.items() if edge in inlets)
        if complete or self._failure is not None:
            peer.departed = True
            self._changed.notify_all()
            self._post(Departure(peer.rank))
            if not self._closed:  # else our own BYE, which is on its way, tells as much
                self._tell(peer.rank, Header(Kind.BYE_SEEN))
                peer.answered = True

    def _on_death(self, peer: Peer) -> None:
        self._loop.remove(peer.descriptor)
        try:
            for _ in range(LAST_WORDS):  # what it said last explains its end
                self._on_control()
        except zmq.Again:
            pass
        self._on_loss(peer, f"rank {peer.rank} (process {peer.pid}) ended without saying goodbye")

    def _on_monitor(self, monitor: zmq.Socket, peer: Peer) -> None:
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            with self._changed:
                peer.connected = True
                self._changed.notify_all()
        elif peer.connected:
            self._on_loss(peer, f"the connection to rank {peer.rank} broke: it ended, or its host or network did")

    def _on_loss(self, peer: Peer, text: str) -> None:
        with self._changed:
            if peer.departed or peer.lost:
                return
            peer.lost = True
            self._changed.notify_all()
        self._fail(Failure(peer.rank, self._edges_of(peer), text, lost=True))

    def _edges_of(self, peer: Peer) -> str:
        ends = {**self._links.inlets, **self._links.outlets}
        return ", ".join(str(edge) for edge, end in sorted(ends.items()) if end.peer == peer.rank)
