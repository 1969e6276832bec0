"""From a list of edges to open links: who the neighbours are, what to bind, where to connect.

Two rounds through the store. First everybody says who it is: host, process, public key, edges. Then each binds only what its
neighbours need (a rank whose neighbours all share its host opens no network port) and says where.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import zmq

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.authentication import Keys
from rrfp.comm.connections import Connections
from rrfp.comm.cuda_ipc import DeviceMappings, DeviceSlots
from rrfp.comm.device import Device
from rrfp.comm.inbound import Inlet
from rrfp.comm.memory import Buffer, Mappings
from rrfp.comm.outbound import Outlet
from rrfp.errors import ConfigurationError, PipelineError

_LINGER_MS = 500  # what was said last may take so long to leave


@dataclass(frozen=True)
class Settings:
    """The options of `ZmqTransport` that links depend on."""

    rank: int
    edges_in: tuple[Edge, ...]
    edges_out: tuple[Edge, ...]
    owner: Mapping[int, int]
    store: rendezvous.Store
    credits: int
    lanes: int
    interface: str | None
    slot_bytes: int
    max_message_bytes: int
    heartbeat_s: float
    namespace: str
    host: str
    device: Device | None = None
    device_edges: frozenset[Edge] = frozenset()

    def __post_init__(self):
        if self.credits < 1 or self.lanes < 1:
            raise ConfigurationError(f"credits={self.credits}, lanes={self.lanes}: an edge needs at least one of each")
        for edges, near, far in [(self.edges_in, 1, 0), (self.edges_out, 0, 1)]:
            for edge in edges:
                if self.owner[edge[near]] != self.rank or self.owner[edge[far]] == self.rank:
                    raise ConfigurationError(
                        f"edge {edge} runs from rank {self.owner[edge[0]]} to rank {self.owner[edge[1]]}: "
                        f"it does not {'enter' if near else 'leave'} rank {self.rank}"
                    )
        assert self.device is not None or not self.device_edges

    @property
    def neighbours(self) -> set[int]:
        return {self.owner[edge.source] for edge in self.edges_in} | {self.owner[edge.destination] for edge in self.edges_out}


@dataclass(slots=True, eq=False)
class Peer:
    """A neighbour, and what is known of its life. Changed under the transport's lock."""

    rank: int
    key: str
    shared: bool
    """Same host, network and process ids: abstract sockets, shared memory, a process descriptor."""
    far: bool
    """On another network stack: no loopback address leads there."""
    pid: int
    seen: float
    descriptor: int | None = None
    hello: bool = False
    connected: bool = False
    farewell: dict[Edge, int] | None = None
    """From its BYE: how many messages it sent us. It has departed once they are all here."""
    departed: bool = False
    answered: bool = False
    """It said goodbye first, and we told it that we saw that: it expects nothing more, not even our own BYE."""
    lost: bool = False
    released: bool = False
    """It has seen our BYE."""

    @property
    def met(self) -> bool:
        """Its words reach us and, where only a broken connection would tell of its end, ours reach it."""
        return self.departed or (self.hello and (self.connected or self.descriptor is not None))


@dataclass(eq=False)
class Links:
    """Everything that is open. The receive thread reads, the send thread owns the outlets' sockets, `control` is locked."""

    keys: Keys = field(default_factory=Keys)
    connections: Connections | None = None
    peers: dict[int, Peer] = field(default_factory=dict)
    inlets: dict[Edge, Inlet] = field(default_factory=dict)
    outlets: dict[Edge, Outlet] = field(default_factory=dict)
    authenticators: list[zmq.Socket] = field(default_factory=list)
    inbox: zmq.Socket | None = None
    lanes: list[tuple[zmq.Socket, Inlet, int]] = field(default_factory=list)
    control: dict[int, zmq.Socket] = field(default_factory=dict)
    monitors: list[tuple[zmq.Socket, Peer]] = field(default_factory=list)
    enter: Callable[[], None] = lambda: None
    """What every thread does first: it may touch a device."""

    def close(self) -> None:
        """No thread may use any of it any more. Returns within about half a second."""
        abandoned = [socket for rank, socket in self.control.items() if self.peers[rank].lost]
        abandoned += [socket for end in self.outlets.values() if self.peers[end.peer].lost for socket in end.sockets]
        self.control.clear()
        if self.connections is not None:
            self.connections.close(linger_ms=_LINGER_MS, abandoned=abandoned)
        for peer in self.peers.values():
            if peer.descriptor is not None:
                os.close(peer.descriptor)
        for inlet in self.inlets.values():
            inlet.pool.close()
        for outlet in self.outlets.values():
            if outlet.mappings is not None:
                outlet.mappings.close()


def open_links(settings: Settings, *, until: float) -> Links:
    """Raises PipelineError that names who is missing at `until` (time.monotonic()), ConfigurationError if two ranks disagree."""
    links = Links() if settings.device is None else Links(enter=settings.device.enter)
    try:
        mine = {
            "host": settings.host, "pid": os.getpid(), "started": rendezvous.started_at(os.getpid()),
            "key": links.keys.public.decode(), "in": settings.edges_in, "out": settings.edges_out,
            "lanes": settings.lanes, "credits": settings.credits, "max_message_bytes": settings.max_message_bytes,
        }  # fmt: skip
        for rank, theirs in _exchange(settings, "who", mine, until).items():
            rendezvous.check_match(settings.rank, mine, rank, theirs, settings.owner.__getitem__)
            links.peers[rank] = _meet(settings, rank, theirs)
            links.keys.admit("control", theirs["key"], rank)
        data_sockets = settings.lanes * (len(settings.edges_in) + len(settings.edges_out))
        links.connections = Connections(
            keys=links.keys,
            interface=settings.interface,
            heartbeat_s=settings.heartbeat_s,
            most_sockets=64 + data_sockets + 3 * len(links.peers),
        )
        for rank, theirs in _exchange(settings, "where", _listen(settings, links), until).items():
            _connect(settings, links, links.peers[rank], theirs)
    except BaseException:
        links.close()
        raise
    return links


def _exchange(settings: Settings, phase: str, record: dict, until: float) -> dict[int, dict]:
    store, namespace = settings.store, settings.namespace

    def explain(missing: list[int], seconds: float) -> str:
        # A neighbour may only be waiting for its own neighbours: who never came at all is why nobody gets on.
        never = [rank for rank in sorted(set(settings.owner.values())) if not store.check([f"{namespace}/who/{rank}"])]
        return rendezvous.absent(never or missing, seconds, "who" if never else phase)

    rendezvous.publish(store, namespace, phase, settings.rank, record)
    return rendezvous.collect(store, namespace, phase, settings.neighbours, until=until, explain=explain)


def _meet(settings: Settings, rank: int, record: dict) -> Peer:
    there, here = record["host"], settings.host
    far = rendezvous.network_of(there) != rendezvous.network_of(here)
    peer = Peer(rank, record["key"], shared=there == here, far=far, pid=record["pid"], seen=time.monotonic())
    if peer.shared:
        try:
            peer.descriptor = rendezvous.watch(peer.pid, record["started"])
        except ProcessLookupError:
            raise PipelineError(f"rank {rank} (process {peer.pid}) ended during start-up: look for its first error") from None
    return peer


def _listen(settings: Settings, links: Links) -> dict[str, str]:
    """Bind everything that this rank reads. Returns the endpoints by name."""
    connections = links.connections
    links.authenticators = connections.authenticators()
    links.inbox = connections.pull(connections.control, "control")
    kinds = {peer.shared for peer in links.peers.values()}
    far = any(peer.far for peer in links.peers.values())
    endpoints = {f"control {shared}": connections.bind(links.inbox, shared=shared, far=far) for shared in kinds}
    for edge in settings.edges_in:
        peer = links.peers[settings.owner[edge.source]]
        inlet = links.inlets[edge] = Inlet(
            edge,
            peer.rank,
            lanes=settings.lanes,
            credits=settings.credits,
            slot_bytes=settings.slot_bytes,
            limit=settings.max_message_bytes,
            shared=peer.shared,
            make=DeviceSlots(settings.device).make if edge in settings.device_edges else Buffer,
        )
        for lane in range(settings.lanes):
            domain = f"{edge}/{lane}"
            links.keys.admit(domain, peer.key, peer.rank)
            socket = connections.pull(connections.data, domain, credits=settings.credits)
            endpoints[domain] = connections.bind(socket, shared=peer.shared)
            links.lanes.append((socket, inlet, lane))
    return endpoints


def _connect(settings: Settings, links: Links, peer: Peer, endpoints: dict[str, str]) -> None:
    connections = links.connections
    control = links.control[peer.rank] = connections.push(connections.control)
    if peer.descriptor is None:
        links.monitors.append((connections.monitor(control), peer))
    connections.connect(control, endpoints[f"control {peer.shared}"], peer.key)
    for edge in settings.edges_out:
        if settings.owner[edge.destination] != peer.rank:
            continue
        sockets = [connections.push(connections.data) for _ in range(settings.lanes)]
        for lane, socket in enumerate(sockets):
            connections.connect(socket, endpoints[f"{edge}/{lane}"], peer.key)
        if edge in settings.device_edges:
            mappings = DeviceMappings(settings.device)
        else:
            mappings = Mappings(peer.pid) if peer.shared else None
        links.outlets[edge] = Outlet(edge, peer.rank, sockets, mappings, most_credits=settings.credits)
