"""From a domain to open channels: who the members are, whether they share a host, and which way they speak."""

import json
import os
import time
from collections.abc import Callable, Iterable

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.authentication import Keys
from rrfp.comm.connections import Connections
from rrfp.errors import ConfigurationError
from rrfp.tp_coord.agreement import COLLECTIVE, KINDS, Agreement, Solo
from rrfp.tp_coord.channel import Peer
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.member import Member
from rrfp.tp_coord.messages import MessageChannel
from rrfp.tp_coord.receipts import Receipts
from rrfp.tp_coord.shared_memory import Bell, Doors, Page, SharedMemoryChannel


def open_agreement(
    kind: str,
    *,
    domain: Domain,
    rank: int,
    store: rendezvous.Store,
    edges: Iterable[Edge],
    lanes: int = 1,
    lane_of: Callable[[Edge, int], int] | None = None,
    deadline: float,
    heartbeat_s: float = 2.0,
    silence_s: float = 60.0,
    spin_s: float = 2e-4,
    interface: str | None = None,
    namespace: str = "rrfp-agreement",
    host: str | None = None,
) -> Agreement:
    """Connect to the other members of a domain. Give the result to an `Engine`, then `open(engine.wake, engine.hear)` it.

    Args:
        kind: "auto" is "shared-memory" where every member can open the leader's page, else "messages". "broadcast" and
            "all-gather" run the decisions through a process group of torch (`rrfp.tp_coord.process_group`), and the rest as
            "auto".
        domain: the members, as ranks of the job. A domain of one needs no channel and gets `Solo`.
        rank: this rank of the job. Failures name members so: give the transport the ranks of the job too, as `rank`, `owner` and
            `told_of`.
        store: where members find each other, as the transport's. "broadcast" and "all-gather" need a store of torch.
        edges: edges that come in from other ranks.
        lanes, lane_of: as the transport's.
        deadline: seconds for the members to come.
        heartbeat_s: seconds between signs of life.
        silence_s: seconds without one after which a member counts as lost.
        spin_s: shared memory: seconds for which a member that only waits for the others looks again before it goes to sleep.
            Being woken costs more than most of these waits last; a core is not held for longer than that.
        interface: network name or address for members on other hosts.
        namespace: prefix of the keys in the store. Each opening in one store needs its own.
        host: who shares a host; by default the kernel's own answer.

    Raises:
        ConfigurationError: an unknown kind; members that disagree; shared memory where members share none.
        PipelineError: a member that did not come in time, or ended; named.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"--rrfp-agreement {kind}: one of {', '.join(KINDS)}")
    if rank not in domain.members:
        raise ConfigurationError(f"rank {rank} is no member of the domain {', '.join(map(str, domain.members))}")
    if lanes < 1:
        raise ConfigurationError(f"lanes={lanes}: an edge needs at least one")
    if len(domain.members) == 1:
        return Solo()
    opening = _Opening(kind, domain, rank, store, Receipts(edges, lanes, lane_of), time.monotonic() + deadline,
                       f"{namespace}/{domain.leader}", host or rendezvous.host_identity(), interface, heartbeat_s, silence_s,
                       spin_s)
    try:
        return opening.run()
    except BaseException:
        opening.abandon()
        raise


class _Opening:
    """The rounds through the store, and what has been opened on the way."""

    def __init__(self, kind, domain, rank, store, receipts, until, namespace, host, interface, heartbeat_s, silence_s, spin_s):
        self.kind, self.domain, self.rank, self.store, self.receipts = kind, domain, rank, store, receipts
        self.until, self.namespace, self.host, self.interface = until, namespace, host, interface
        self.life = {"heartbeat_s": heartbeat_s, "silence_s": silence_s}
        self.leads, self.spin_s = rank == domain.leader, spin_s
        self.keys = Keys()
        self.page: Page | None = None
        self.bells: dict[str, Bell] = {}
        self.doors: dict[int, Doors] = {}
        self.connections: Connections | None = None
        self.peers: dict[int, Peer] = {}

    def run(self) -> Member:
        members = self.domain.members
        if self.kind != "messages":
            for name in ("news", "alarm"):
                self.bells[name] = Bell.make()
            if self.leads:
                self.page = Page.create(len(members), len(self.receipts.lanes))
        records = self._exchange("who", {
            "host": self.host, "pid": os.getpid(), "started": rendezvous.started_at(os.getpid()),
            "key": self.keys.public.decode(), "kind": self.kind, "members": members,
            "lanes": [[str(edge), lane] for edge, lane in self.receipts.lanes],
            "bells": {name: bell.door for name, bell in self.bells.items()},
            "page": [self.page.fd, self.page.nonce.hex()] if self.page is not None else None,
        })  # fmt: skip
        for rank, theirs in records.items():
            _check_match(self.rank, records[self.rank], rank, theirs)
            if rank != self.rank:
                here = theirs["host"] == self.host
                peer = self.peers[rank] = Peer(rank, theirs["pid"] if here else 0, theirs["started"])
                peer.watch()
        if self.bells and self._share(records):
            channel = self._speak_by_memory()
        else:
            channel = self._speak_by_messages(records)
        make, spin_s = Member, self.spin_s if isinstance(channel, SharedMemoryChannel) else 0.0
        if self.kind in COLLECTIVE:
            from rrfp.tp_coord import process_group  # needs torch

            spin_s = 0.0
            make, channel = process_group.over(
                self.kind, channel, self.store, namespace=self.namespace, domain=self.domain, rank=self.rank,
                timeout=2 * self.life["silence_s"])
        return make(channel, domain=self.domain, rank=self.rank, receipts=self.receipts, spin_s=spin_s)

    def abandon(self) -> None:
        """What no channel has taken over is let go of."""
        for peer in self.peers.values():
            if peer.descriptor is not None:
                os.close(peer.descriptor)
        self._forget_memory()
        if self.connections is not None:
            self.connections.close(linger_ms=0, abandoned=())

    def _exchange(self, phase: str, record: dict) -> dict[int, dict]:
        """Every member's record, this one's too."""
        rendezvous.publish(self.store, self.namespace, phase, self.rank, record)
        others = rendezvous.collect(self.store, self.namespace, phase, self.domain.others(self.rank), until=self.until)
        return {self.rank: json.loads(json.dumps(record)), **others}

    # ------------------------------------------------------------------ shared memory
    def _share(self, records: dict[int, dict]) -> bool:
        """Whether every member has reached the leader's page and all bells: then they share a host."""
        why = self._reach(records)
        answers = self._exchange("reached", {"why_not": why})
        failed = {rank: answer["why_not"] for rank, answer in answers.items() if answer["why_not"] is not None}
        if failed and self.kind == "shared-memory":
            rank, why = min(failed.items())
            raise ConfigurationError(
                f"--rrfp-agreement shared-memory: rank {rank} shares no memory with rank {self.domain.leader} ({why}): "
                "take messages, or auto")
        return not failed

    def _reach(self, records: dict[int, dict]) -> str | None:
        """None, or why not."""
        leader = records[self.domain.leader]
        try:
            for rank, peer in self.peers.items():
                if not peer.pid:
                    return f"rank {rank} is on another host"
                self.doors[rank] = Doors.open(peer.pid, **records[rank]["bells"])
            if self.page is None:
                fd, nonce = leader["page"]
                self.page = Page.open(leader["pid"], fd, bytes.fromhex(nonce), len(self.domain.members), len(self.receipts.lanes))
        except OSError as error:
            return str(error)
        return None

    def _speak_by_memory(self) -> SharedMemoryChannel:
        channel = SharedMemoryChannel(
            self.domain, self.rank, self.peers.values(), page=self.page, doors=self.doors, **self.bells, **self.life)
        self.peers, self.page, self.bells, self.doors = {}, None, {}, {}  # the channel's from here on
        return channel

    # ------------------------------------------------------------------ messages
    def _speak_by_messages(self, records: dict[int, dict]) -> MessageChannel:
        self._forget_memory()
        star = set(self.domain.others(self.rank)) if self.leads else {self.domain.leader}
        for rank in set(self.peers) - star:
            if (descriptor := self.peers.pop(rank).descriptor) is not None:
                os.close(descriptor)
        connections = self.connections = Connections(
            keys=self.keys, interface=self.interface, heartbeat_s=self.life["heartbeat_s"], most_sockets=64 + 3 * len(star))
        authenticators = connections.authenticators()
        inbox = connections.pull(connections.control, "agreement")
        for rank in star:
            self.keys.admit("agreement", records[rank]["key"], rank)
        ways = {bool(peer.pid) for peer in self.peers.values()}
        far = any(rendezvous.network_of(records[rank]["host"]) != rendezvous.network_of(self.host) for rank in star)
        endpoints = {str(shared): connections.bind(inbox, shared=shared, far=far) for shared in ways}
        where = self._exchange("where", endpoints)
        channel = MessageChannel(
            self.rank, self.peers.values(), keys=self.keys, connections=connections, inbox=inbox, authenticators=authenticators,
            connect={rank: lambda socket, rank=rank, peer=peer: connections.connect(
                socket, where[rank][str(bool(peer.pid))], records[rank]["key"]) for rank, peer in self.peers.items()},
            leads=self.leads, **self.life)
        self.peers, self.connections = {}, None  # the channel's from here on
        try:
            channel.greet(until=self.until)
        except BaseException:
            channel.close()
            raise
        return channel

    def _forget_memory(self) -> None:
        if self.page is not None:
            self.page.close()
            self.page = None
        for each in (*self.bells.values(), *self.doors.values()):
            each.close()
        self.bells, self.doors = {}, {}


def _check_match(rank: int, mine: dict, peer: int, theirs: dict) -> None:
    for name in ("kind", "members", "lanes"):
        if mine[name] != theirs[name]:
            raise ConfigurationError(
                f"ranks {rank} and {peer} of one domain disagree on {name}: {mine[name]} here, {theirs[name]} there")
