"""Every socket of one transport, and nothing about what goes through them.

Data and control have a context, hence an I/O thread, each. A queue of the library is never full: credits bound what is in it.
"""

import secrets
from collections.abc import Collection

import zmq

from rrfp.comm import rendezvous
from rrfp.comm.authentication import ZAP_ENDPOINT, Keys
from rrfp.errors import ConfigurationError

_QUIET_HEARTBEATS = 15  # across hosts: so many silent heartbeats mean that a peer is lost
_LONGEST_TTL_MS = 6_553_500  # 16 bits of tenths of a second on the wire
_SLACK_BYTES = 1 << 20  # room for headers, the cipher and an ABORT's traceback


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

    def pull(self, context: zmq.Context, domain: str, *, limit: int = 0) -> zmq.Socket:
        """A socket that only keys admitted to `domain` reach. Frames over `limit` bytes end the connection unread."""
        socket = self._socket(context, zmq.PULL)
        socket.maxmsgsize = limit + _SLACK_BYTES
        self._keys.serve(socket, domain)
        return socket

    def bind(self, socket: zmq.Socket, *, shared: bool) -> str:
        """Where to connect. Inside a host an abstract name, which leaves no file behind; else a port that the system picks."""
        if shared:
            socket.bind(f"ipc://@rrfp-{secrets.token_hex(16)}")
        else:
            address = rendezvous.own_address(self._interface)
            if address in ("*", "0.0.0.0", "::"):
                raise ConfigurationError(
                    f"--rrfp-interface {address} is every network of this host: name one, so that peers know where to connect"
                )
            socket.ipv6 = ":" in address
            socket.bind(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
        return socket.last_endpoint.rstrip(b"\0").decode()

    def push(self, context: zmq.Context) -> zmq.Socket:
        return self._socket(context, zmq.PUSH)

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
