"""Who may speak on which socket. Every socket, inside a host too, uses CURVE: keys are made for this opening and never stored.

Only public keys pass through the job's store. The receive thread answers the library's authentication requests (ZAP, ZeroMQ
RFC 27): a socket has a domain, a domain a list of public keys, and the answer names the rank of the key.
"""

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class Keys:
    """This rank's key pair, and the public keys that each domain admits (raw bytes -> rank)."""

    def __init__(self):
        self.public, self._secret = zmq.curve_keypair()
        self._admitted: dict[bytes, dict[bytes, int]] = {}

    def admit(self, domain: str, public: str, rank: int) -> None:
        self._admitted.setdefault(domain.encode(), {})[z85.decode(public.encode())] = rank

    def serve(self, socket: zmq.Socket, domain: str) -> None:
        """Before bind: only keys admitted to `domain` get through; none at all while nobody answers."""
        socket.curve_server = True
        socket.zap_enforce_domain = True
        socket.curve_secretkey, socket.curve_publickey = self._secret, self.public
        socket.zap_domain = domain.encode()

    def approach(self, socket: zmq.Socket, public: str) -> None:
        """Before connect: speak only to the holder of `public`."""
        socket.curve_serverkey = public.encode()
        socket.curve_secretkey, socket.curve_publickey = self._secret, self.public

    def answer(self, request: list[bytes]) -> list[bytes]:
        """A ZAP reply. Everything that is not an admitted key of the socket's own domain is refused."""
        version, identifier, domain, _, _, mechanism, *credentials = request
        rank = None
        if version == b"1.0" and mechanism == b"CURVE" and len(credentials) == 1:
            rank = self._admitted.get(domain, {}).get(credentials[0])
        if rank is None:
            return [b"1.0", identifier, b"400", b"unknown key", b"", b""]
        return [b"1.0", identifier, b"200", b"OK", str(rank).encode(), b""]
