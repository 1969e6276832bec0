"""Every socket of one transport, and nothing about what goes through them.

Data and control have a context, hence an I/O thread, each. Outgoing queues of the library are never full: credits bound what is
in them. Incoming ones have bounds that no peer of this package reaches; one that floods is left unread.
"""

import secrets
from collections.abc import Collection
from ipaddress import ip_address

import zmq

from rrfp.comm import rendezvous
from rrfp.comm.authentication import ZAP_ENDPOINT, Keys
from rrfp.comm.message import MAX_CONTROL, MAX_FRAME
from rrfp.errors import ConfigurationError

_QUIET_HEARTBEATS = 15  # across hosts: so many silent heartbeats mean that a peer is lost
_LONGEST_TTL_MS = 6_553_500  # 16 bits of tenths of a second on the wire
_CIPHER_BYTES = 1 << 10  # what encryption adds to a frame, and more
_HANDSHAKE_MS = 30_000  # so long a connection may take to prove its key
_CONTROL_QUEUE = 256  # control messages of one peer that wait in the library


class Connections:
    def __init__(self, *, keys: Keys, interface: str | None, heartbeat_s: float, most_sockets: int):
        self._keys, self._interface, self._heartbeat_ms = keys, interface, max(1, int(1000 * heartbeat_s))
        self._sockets: list[zmq.Socket] = []
        self._monitored: list[zmq.Socket] = []
        self.control, self.data = zmq.Context(io_threads=1), zmq.Context(io_threads=1)
        for context in (self.control, self.data):
            context.set(zmq.MAX_SOCKETS, most_sockets)

    def _socket(self, context: zmq.Context, kind: int) -> zmq.Socket:
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.linger = 0
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.heartbeat_ivl = self._heartbeat_ms
        socket.heartbeat_timeout = socket.heartbeat_ttl = min(self._heartbeat_ms * _QUIET_HEARTBEATS, _LONGEST_TTL_MS)
        return socket

    def authenticators(self) -> list[zmq.Socket]:
        """One per context, to be answered with `Keys.answer`. They must exist before any other socket binds."""
        sockets = []
        for context in (self.control, self.data):
            sockets.append(self._socket(context, zmq.REP))
            sockets[-1].bind(ZAP_ENDPOINT)
        return sockets

    def pull(self, context: zmq.Context, domain: str, *, credits: int = 0) -> zmq.Socket:
        """A socket that only keys admitted to `domain` reach: of payloads if it has `credits`, of control messages if not.

        A longer frame ends its connection unread. That is also all that a connection can make us hold before its key is known.
        """
        socket = self._socket(context, zmq.PULL)
        socket.maxmsgsize = (MAX_FRAME if credits else MAX_CONTROL) + _CIPHER_BYTES
        # The library counts what was read late, in steps of half the bound: twice the credits never hold anything back.
        socket.rcvhwm = 2 * credits + 2 if credits else _CONTROL_QUEUE
        self._keys.serve(socket, domain)
        return socket

    def bind(self, socket: zmq.Socket, *, shared: bool, far: bool = False) -> str:
        """Where to connect. Inside a host an abstract name, which leaves no file behind; else a port that the system picks.

        far: a peer is on another network stack, which a loopback address does not reach.
        Raises ConfigurationError: no such network, every network, or a default that a peer cannot reach.
        """
        if shared:
            socket.bind(f"ipc://@rrfp-{secrets.token_hex(16)}")
            return socket.last_endpoint.rstrip(b"\0").decode()
        address = rendezvous.own_address(self._interface)
        socket.ipv6 = ":" in address
        try:
            socket.bind(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"--rrfp-interface {address}: nothing can listen there ({error.strerror}); "
                "name a network interface or an address of this host"
            ) from None
        endpoint = socket.last_endpoint.rstrip(b"\0").decode()
        bound = ip_address(endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
        if bound.is_unspecified:
            raise ConfigurationError(
                f"--rrfp-interface {address} is every network of this host: name one, so that peers know where to connect"
            )
        if far and bound.is_loopback and self._interface is None:
            raise ConfigurationError(
                f"the address of this host that faces the master is {bound}, which no other host reaches: "
                "name the network between the hosts with --rrfp-interface"
            )
        return endpoint

    def push(self, context: zmq.Context) -> zmq.Socket:
        """Nothing is ever read from it, so all that its peer can make us hold is one control message."""
        socket = self._socket(context, zmq.PUSH)
        socket.maxmsgsize = MAX_CONTROL
        socket.rcvhwm = 1
        return socket

    def connect(self, socket: zmq.Socket, endpoint: str, public: str) -> None:
        self._keys.approach(socket, public)
        socket.ipv6 = "[" in endpoint
        socket.connect(endpoint)

    def monitor(self, socket: zmq.Socket) -> zmq.Socket:
        """Tells when the connection is up and when it is gone. Before `connect`."""
        self._monitored.append(socket)
        self._sockets.append(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
        return self._sockets[-1]

    def close(self, *, linger_ms: int, abandoned: Collection[zmq.Socket]) -> None:
        """Returns within about `linger_ms`; what is queued for `abandoned` is dropped. No thread may use a socket any more."""
        for socket in self._monitored:
            socket.disable_monitor()
        for socket in self._sockets:
            socket.close(linger=0 if socket in abandoned else linger_ms)
        for context in (self.control, self.data):
            context.term()
