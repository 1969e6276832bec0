"""A transport inside one process whose every delay, loss and failure is written down beforehand. A test tool.

Ranks are plain objects: whoever drives them advances the clock, and the clock delivers. It keeps the rules of `ZmqTransport`:
credits bound what is outstanding, each lane is FIFO and lanes overtake each other, messages of the next call wait, a gap or a
repetition is a Failure, failures flood. Buffers are reused, and overwritten on release, so that reading one too long shows.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rrfp.action import Edge
from rrfp.comm.clock import VirtualClock
from rrfp.comm.message import check_payload
from rrfp.comm.transport import Announcement, Arrival, Departure, Event, Failure, Left, Payload
from rrfp.comm.window import CallWindow, Roll
from rrfp.errors import ConfigurationError, PipelineError

_POISON = 0xFF  # not a number in every floating-point format


class _Message(NamedTuple):
    call: int
    microbatch: int
    lane: int
    sequence: int
    payload: Payload
    tell: bool


@dataclass(slots=True, eq=False)
class _Lease:
    buffers: list[np.ndarray]
    consumed: bool = False
    released: bool = False


@dataclass(slots=True, eq=False)
class _Link:
    """Both ends of one edge."""

    edge: Edge
    credits: int
    waiting: deque[_Message] = field(default_factory=deque)
    queued: list[int] = field(default_factory=list)  # per lane
    received: list[int] = field(default_factory=list)
    lane_due: list[float] = field(default_factory=list)
    sent: int = 0
    outstanding: int = 0
    free: list[np.ndarray] = field(default_factory=list)


class ScriptedNetwork:
    """All ranks' transports.

    Args:
        owner: stage -> rank.
        edges: all edges that cross ranks.
        clock: delivers when it is advanced.
        delays: delays(edge, microbatch), seconds from the credit to the arrival.
        losses: losses(edge, microbatch), whether the message never arrives (the next one of its lane then shows the gap).
        duplicates: duplicates(edge, microbatch), whether it arrives twice.
        corruptions: corruptions(edge, microbatch), what its receiver finds wrong with it, None if nothing.
        failures: rank -> time at which the rank dies without a word.
        credits, lanes: as for `ZmqTransport`; microbatch % lanes is the lane.
        control_delay: seconds for what is told besides payloads: calls, announcements, aborts, goodbyes and credits.
    """

    def __init__(
        self,
        owner: Mapping[int, int],
        edges: Iterable[Edge],
        *,
        clock: VirtualClock,
        delays: Callable[[Edge, int], float] = lambda edge, microbatch: 0.0,
        losses: Callable[[Edge, int], bool] = lambda edge, microbatch: False,
        duplicates: Callable[[Edge, int], bool] = lambda edge, microbatch: False,
        corruptions: Callable[[Edge, int], str | None] = lambda edge, microbatch: None,
        failures: Mapping[int, float] | None = None,
        credits: int = 4,
        lanes: int = 1,
        control_delay: float = 0.0,
    ):
        if credits < 1 or lanes < 1:
            raise ConfigurationError(f"credits={credits}, lanes={lanes}: an edge needs at least one of each")
        self.clock, self.owner, self.lanes, self.credits, self.control_delay = clock, owner, lanes, credits, control_delay
        self._delays, self._losses, self._duplicates, self.corruptions = delays, losses, duplicates, corruptions
        self.links: dict[Edge, _Link] = {}
        for edge in edges:
            if owner[edge.source] == owner[edge.destination]:
                raise ConfigurationError(f"edge {edge} stays on rank {owner[edge.source]}: it needs no transport")
            self.links[edge] = _Link(edge, credits, queued=[0] * lanes, received=[0] * lanes, lane_due=[0.0] * lanes)
        ranks = {owner[stage] for edge in self.links for stage in edge}
        self._transports = {rank: ScriptedTransport(self, rank) for rank in sorted(ranks)}
        for rank, when in (failures or {}).items():
            clock.call_at(when, lambda rank=rank: self._die(rank))

    def transport(self, rank: int) -> "ScriptedTransport":
        return self._transports[rank]

    def neighbours(self, rank: int) -> list[int]:
        ends = [(self.owner[edge.source], self.owner[edge.destination]) for edge in self.links]
        return sorted({b for a, b in ends if a == rank} | {a for a, b in ends if b == rank})

    def tell(self, source: int, rank: int, action: Callable[["ScriptedTransport"], None]) -> None:
        """A control message: it never queues behind a payload, and nobody dead says or hears anything."""

        def deliver():
            if not self._transports[rank].dead:
                action(self._transports[rank])

        if not self._transports[source].dead:
            self.clock.call_at(self.clock.now() + self.control_delay, deliver)

    def pump(self, link: _Link) -> None:
        """Invariant: a message leaves only with a credit, and each lane in order of `send`."""
        while link.waiting and link.credits:
            message = link.waiting.popleft()
            link.credits -= 1
            link.outstanding += 1
            link.sent += 1
            if message.tell:
                self._transports[self.owner[link.edge.source]].hear_left(message.call, link.edge)
            due = max(self.clock.now() + self._delays(link.edge, message.microbatch), link.lane_due[message.lane])
            link.lane_due[message.lane] = due
            if self._losses(link.edge, message.microbatch):
                continue
            for _ in range(2 if self._duplicates(link.edge, message.microbatch) else 1):
                self.clock.call_at(due, lambda message=message: self._arrive(link, message))

    def _arrive(self, link: _Link, message: _Message) -> None:
        receiver = self._transports[self.owner[link.edge.destination]]
        if not receiver.dead:
            receiver.receive(link, message)

    def _die(self, rank: int) -> None:
        transport = self._transports[rank]
        if transport.dead or transport.closed:
            return
        transport.dead = True
        for neighbour in self.neighbours(rank):
            shared = [edge for edge in self.links if {self.owner[edge.source], self.owner[edge.destination]} == {rank, neighbour}]
            edges = ", ".join(map(str, shared))
            failure = Failure(rank, edges, f"rank {rank} ended without saying goodbye", lost=True)
            other = self._transports[neighbour]
            if not other.dead and rank not in other.departed:
                other.fail(failure)


class ScriptedTransport:
    """One rank's end of a `ScriptedNetwork`; a `Transport`."""

    def __init__(self, network: ScriptedNetwork, rank: int):
        self._network, self._rank = network, rank
        self._post: Callable[[Event], None] | None = None
        self._roll = Roll(rank, network.neighbours(rank), ahead=network.credits)
        self._window = CallWindow(
            ahead=network.credits, entered=lambda edge, call: self._roll.entered(network.owner[edge.source], call))
        self._failure: Failure | None = None
        self._seen: dict[int, float] = {}
        self.departed: set[int] = set()
        self.dead = False
        self.closed = False

    def open(self, post: Callable[[Event], None], *, deadline: float = 0.0) -> None:
        self._post = post

    def begin(self, call: int, facts: Mapping[str, str] | None = None) -> None:
        facts = dict(facts or {})
        if (different := self._roll.enter(call, facts)) is not None:
            self.fail(different)
        elif (stray := self._window.begin(call, self._post)) is not None:
            self.fail(Failure(self._rank, str(stray[0].edge), stray[1]))
        for rank in self._network.neighbours(self._rank):
            self._network.tell(self._rank, rank, lambda other: other._hear_call(self._rank, call, facts))

    def _hear_call(self, rank: int, call: int, facts: Mapping[str, str]) -> None:
        wrong = self._roll.hear(rank, call, facts)
        if isinstance(wrong, str):
            wrong = Failure(self._rank, "control", f"from rank {rank}: {wrong}")
        if wrong is not None:
            self.fail(wrong)
        elif not self.closed:
            self._window.look_again(self._post)

    def send(self, edge: Edge, microbatch: int, payload: Payload, *, tell: bool = False) -> None:
        check_payload(payload)
        if self._window.call is None:
            raise PipelineError("send before the first begin(call)")
        if self.dead or self.closed:
            return
        link = self._network.links[edge]
        lane = microbatch % self._network.lanes
        link.queued[lane] += 1
        link.waiting.append(_Message(self._window.call, microbatch, lane, link.queued[lane], payload, tell))
        self._network.pump(link)

    def announce(self, edge: Edge, microbatch: int, duration: float) -> None:
        call = self._window.call

        def deliver(receiver: ScriptedTransport) -> None:
            receiver.hear(Announcement(call, edge, microbatch, self._network.clock.now(), duration))

        self._network.tell(self._rank, self._network.owner[edge.destination], deliver)

    def receive(self, link: _Link, message: _Message) -> None:
        """The network's side: a payload is here."""
        now = self._network.clock.now()
        self._seen[self._network.owner[link.edge.source]] = now
        if self._failure is not None or self.closed:
            return
        expected = link.received[message.lane] + 1
        if (wrong := self._network.corruptions(link.edge, message.microbatch)) is not None:
            pass
        elif message.sequence != expected:
            what = "lost" if message.sequence > expected else "duplicated"
            wrong = f"message {message.sequence} of lane {message.lane} after {expected - 1}: a message was {what}"
        else:
            wrong = self._window.wrong(message.call)
        if wrong is not None:
            self.fail(Failure(self._rank, str(link.edge), f"from rank {self._network.owner[link.edge.source]}: {wrong}"))
            return
        link.received[message.lane] += 1
        buffers = []
        payload = tuple(
            part if part.data is None else part._replace(data=_copy(link, part.data, buffers)) for part in message.payload
        )
        self.hear(Arrival(message.call, link.edge, message.lane, message.microbatch, payload, now, _Lease(buffers)))

    def hear(self, event: Arrival | Announcement) -> None:
        self._window.deliver(event, self._post)

    def hear_left(self, call: int, edge: Edge) -> None:
        """The network's side: a message that was to be told of has left."""
        if not self.dead and not self.closed:
            self._post(Left(call, edge))

    def consumed(self, arrival: Arrival) -> None:
        lease, link = arrival.slot, self._network.links[arrival.edge]
        if lease.consumed:
            raise PipelineError(f"an arrival of edge {arrival.edge} was consumed twice")
        lease.consumed = True
        link.outstanding -= 1

        def credit(_: ScriptedTransport) -> None:
            link.credits += 1
            self._network.pump(link)

        self._network.tell(self._rank, self._network.owner[arrival.edge.source], credit)

    def release(self, arrival: Arrival) -> None:
        lease, link = arrival.slot, self._network.links[arrival.edge]
        if lease.released:
            raise PipelineError(f"an arrival of edge {arrival.edge} was released twice")
        lease.released = True
        for buffer in lease.buffers:
            buffer.fill(_POISON)
            link.free.append(buffer)

    def flush(self, *, deadline: float = 0.0) -> None:
        """Advances the clock, as far as `deadline` (virtual seconds) allows, until everything has left."""
        clock, until = self._network.clock, self._network.clock.now() + deadline
        while stuck := [link for link in self._outgoing() if link.waiting]:
            due = clock.next_event_time()
            if due is None or due > until or self._failure is not None:
                raise PipelineError(
                    "messages did not leave: "
                    + ", ".join(f"edge {link.edge} has {len(link.waiting)} waiting and {link.credits} credits" for link in stuck)
                )
            clock.advance_to(due)

    def fail(self, failure: Failure, *, source: int | None = None, post: bool = True) -> None:
        """The first failure wins, and is told to every neighbour, once."""
        if self._failure is not None or self.closed or self.dead:
            return
        self._failure = failure
        if post and self._post is not None:
            self._post(failure)
        for rank in self._network.neighbours(self._rank):
            if rank != source:
                self._network.tell(self._rank, rank, lambda other: other.fail(failure, source=self._rank))

    def abort(self, failure: Failure) -> None:
        self.fail(failure, post=False)

    def close(self, *, deadline: float = 0.0) -> None:
        """Say goodbye. A neighbour hears it after every payload that has left."""
        if self.closed:
            return
        self.closed = True
        for rank in self._network.neighbours(self._rank):
            self._network.tell(self._rank, rank, lambda other: other._hear_goodbye(self._rank))

    def _hear_goodbye(self, rank: int) -> None:
        clock, owner = self._network.clock, self._network.owner
        links = [
            link
            for link in self._network.links.values()
            if owner[link.edge.source] == rank and owner[link.edge.destination] == self._rank
        ]
        last = max((due for link in links for due in link.lane_due), default=0.0)
        if last > clock.now():
            clock.call_at(last, lambda: self._hear_goodbye(rank))
            return
        self.departed.add(rank)
        if not self.closed and self._post is not None:
            self._post(Departure(rank))

    def _outgoing(self) -> list[_Link]:
        return [link for edge, link in self._network.links.items() if self._network.owner[edge.source] == self._rank]

    def state(self) -> dict:
        """As `ZmqTransport.state`."""
        now, edges = self._network.clock.now(), {}
        for edge, link in self._network.links.items():
            source, destination = self._network.owner[edge.source], self._network.owner[edge.destination]
            if source == self._rank:
                edges[str(edge)] = {
                    "direction": "out",
                    "peer": destination,
                    "credits": link.credits,
                    "sent": link.sent,
                    "waiting": len(link.waiting),
                }
            elif destination == self._rank:
                edges[str(edge)] = {
                    "direction": "in",
                    "peer": source,
                    "credits": self._network.credits - link.outstanding,
                    "received": sum(link.received),
                    "waiting": link.outstanding,
                }
        return {
            "call": self._window.call,
            "edges": edges,
            "peers": {rank: now - seen for rank, seen in self._seen.items()},
            "calls": dict(self._roll.last),
        }


def _copy(link: _Link, data: np.ndarray, buffers: list[np.ndarray]) -> np.ndarray:
    """Into a free buffer of the edge if one is large enough, so that a released one is soon overwritten."""
    for index, buffer in enumerate(link.free):
        if len(buffer) >= len(data):
            buffer = link.free.pop(index)
            break
    else:
        buffer = np.empty(len(data), np.uint8)
    buffers.append(buffer)
    view = buffer[: len(data)]
    np.copyto(view, data)
    return view
