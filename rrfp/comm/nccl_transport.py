"""Payloads between GPUs by NCCL: matched sends and receives, each posted when both ends are known to post it. Experimental.

NCCL has no tags, may be called from one thread only, and an operation that is posted holds its stream, and a place on the device, until
its counterpart is: so nothing is posted that the other end may not be about to post, and every device posts in one order that contradicts
nobody else's. A message takes three words of the inner transport, on whose credits it waits, and then a place in that order:

    sender    READY   what comes; with a credit, as any message                         (the edge)
    receiver  COMMIT  its buffer is there, and a time that is later than all it knows   (the answering edge)
    sender    GO      a time that is later than that one, and than all the sender knows (the answering edge's reverse)

Both post the transfer at an action boundary, in order of these times (Skeen's total order: clocks of Lamport, ties by edge). The receiver
posts nothing that is later than a COMMIT whose GO is on its way, which depends on no action of anybody. So the transfers of all ranks are
posted in the order of one clock, and the earliest that has not ended is never held up by another: no cycle, even where a device runs one
operation at a time. One communicator per directed edge, made in one order of all edges before the first message.

A domain of several ranks must post in one order between its collectives too: there its leader alone takes part in the above, what it
posts is an entry of the agreed sequence (`Issuer`), and followers post what the leader did, each with its own counterpart. So all ranks
of a pipeline need the same place in domains of the same size.

Threads. `due`, `issue` and `send` run on the engine's thread; the inner transport's receive thread does the handshake; a worker per edge
waits for what was posted. `_lock` guards clock, order and tables, and is never held while the inner transport is called.
"""

import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rrfp.action import Action, Edge
from rrfp.comm.device import Device, Memory, Stream, Worker
from rrfp.comm.device_transport import DeviceTransport, Landed
from rrfp.comm.message import Spec, check_payload, decode_parts, encode_parts, offsets
from rrfp.comm.transport import Arrival, Departure, Event, Failure, Issue, Left, Part, Payload, Transport
from rrfp.errors import PipelineError

_READY = struct.Struct("<QH")  # bytes, parts; what is known of them follows
_WORD = struct.Struct("<BQ")  # which word, time
_COMMIT, _GO = 1, 2
SEND, RECV = "SEND", "RECV"


class Nccl(Protocol):
    """One rank's end of NCCL. `rrfp.comm.nccl` answers with torch's; all calls but `abort` come from one thread."""

    def connect(self, edge: Edge, ranks: tuple[int, int]) -> None:
        """Make the communicator of an edge; returns when both ranks have. All ranks connect their edges in one order."""

    def send(self, edge: Edge, memory: Memory, peer: int, stream: Stream) -> None: ...

    def recv(self, edge: Edge, memory: Memory, peer: int, stream: Stream) -> None: ...

    def finish(self, edge: Edge, stream: Stream) -> Callable[[], None]:
        """What blocks until all that was posted on the edge has ended. Raises RuntimeError if NCCL failed. For any thread."""

    def abort(self) -> None:
        """End whatever is posted."""


def answering(edge: Edge, stages: int) -> Edge:
    """The edge of the inner transport that words about `edge` take back to its source. Its stages lie above all others."""
    return Edge(edge.destination + stages, edge.source + stages)


@dataclass(eq=False, slots=True)
class Transfer:
    """One end of a message that is to be posted. final: whether `time` is agreed; until then it is a lower bound."""

    kind: str
    call: int
    edge: Edge
    microbatch: int
    specs: tuple[Spec, ...]
    pieces: list[Memory]
    time: int = 0
    final: bool = False
    payload: Payload = ()
    tell: bool = False
    lane: int = 0
    landed: Landed | None = None

    @property
    def action(self) -> Action:
        return Action(f"{self.kind}>{self.edge.destination}", self.edge.source, self.microbatch)


class NcclTransport(DeviceTransport):
    """As `DeviceTransport`; also an `Issuer`.

    Args:
        inner: has, besides `edges`, their answering edges and those reversed, between the same ranks.
        stages: virtual stages of the pipeline.
        peers: edge -> rank at its other end, for the edges of this rank.
        order: all edges of the pipeline with the ranks at their ends, in the one order in which they are connected.
        nccl: this rank's end.
        leads: whether this rank leads its domain.
    """

    def __init__(
        self, inner: Transport, device: Device, *, rank: int, edges: Iterable[Edge], stages: int, peers: dict[Edge, int],
        order: Iterable[tuple[Edge, tuple[int, int]]], nccl: Nccl, leads: bool = True,
    ):
        super().__init__(inner, device, rank=rank, edges=edges)
        self._stages, self._peers, self._connect, self._nccl, self._leads = stages, peers, list(order), nccl, leads
        self._streams = {edge: device.stream() for edge in self._edges}
        self._workers = {edge: Worker(device, name=f"rrfp-rank{rank}-nccl-{edge}", fail=self._fail) for edge in self._edges}
        self._clock = 0
        self._order: list[Transfer] = []
        """Of a leader: transfers that have a time and have not been posted."""
        self._waiting: dict[Action, Transfer] = {}
        """Sends without a time, receives without a final one; of a follower all."""
        self._unsent = 0

    def open(self, post: Callable[[Event], None], *, deadline: float) -> None:
        self._post = post
        for worker in self._workers.values():
            worker.start()
        try:
            self._inner.open(self._hear, deadline=deadline)
            for edge, ranks in self._connect:
                if self._rank in ranks:
                    self._nccl.connect(edge, ranks)
        except BaseException:
            self._stop(time.monotonic() + 1.0)
            raise

    # ------------------------------------------------------------------ the engine's thread
    def send(self, edge: Edge, microbatch: int, payload: Payload, *, tell: bool = False) -> None:
        nbytes = check_payload(payload)
        specs = tuple(Spec(part.dtype, part.shape, part.data is None) for part in payload)
        pieces = [part.data for part in payload if part.data is not None and part.data.nbytes]
        transfer = Transfer(SEND, self._call, edge, microbatch, specs, pieces, payload=payload, tell=tell)
        with self._lock:
            self._waiting[transfer.action] = transfer
            self._unsent += 1
        self._inner.send(edge, microbatch, (_bytes(_READY.pack(nbytes, len(payload)) + encode_parts(payload)),))

    def due(self) -> Action | None:
        with self._lock:
            if not self._order or self._failed:
                return None
            # A time that is not final will become a later one: at equal times the final one is the first.
            first = min(self._order, key=lambda transfer: (transfer.time, not transfer.final, transfer.edge))
            return first.action if first.final else None

    def issue(self, transfer: Action) -> bool:
        with self._lock:
            if self._leads:
                found = next(one for one in self._order if one.action == transfer)
                self._order.remove(found)
            elif (found := self._waiting.pop(transfer, None)) is None:
                return False
        edge, stream = found.edge, self._streams[found.edge]
        operation = self._nccl.send if found.kind == SEND else self._nccl.recv
        for piece in found.pieces:
            operation(edge, piece, self._peers[edge], stream)
        finish = self._nccl.finish(edge, stream)
        self._workers[edge].put(lambda: self._finish(found, finish))
        if found.kind == SEND:
            with self._lock:
                self._unsent -= 1
        return True

    def owes(self) -> bool:
        return self._unsent > 0

    def is_transfer(self, action: Action) -> bool:
        return ">" in action.kind

    def flush(self, *, deadline: float) -> None:
        until = time.monotonic() + deadline
        for edge, worker in self._workers.items():
            if edge in self._outgoing and not worker.drain(until=until):
                raise PipelineError(f"messages did not leave: edge {edge} has {worker.pending} waiting for the GPU of its receiver")
        self._inner.flush(deadline=max(0.0, until - time.monotonic()))

    @property
    def _outgoing(self) -> set[Edge]:
        return {edge for edge, (source, _) in self._connect if source == self._rank}

    def close(self, *, deadline: float) -> None:
        if self._closed:
            return
        until = time.monotonic() + deadline
        if self._failed:
            self._nccl.abort()  # else nothing ends what is posted for a peer that is gone
        self._closed = True
        try:
            self._inner.close(deadline=max(0.0, until - time.monotonic()))
        finally:
            self._stop(max(until, time.monotonic() + 1.0))

    def _stop(self, until: float) -> None:
        ended = [worker.stop(until=until) for worker in self._workers.values()]
        self._close_pools()
        if not all(ended):
            raise PipelineError(f"rank {self._rank}: a transfer of NCCL did not end in time")

    def state(self) -> dict:
        state = self._inner.state()
        own = {str(edge) for edge in self._edges}
        if "edges" in state:
            state["edges"] = {edge: end for edge, end in state["edges"].items() if edge in own}
            with self._lock:
                unsent = [one.edge for one in (*self._waiting.values(), *self._order) if one.kind == SEND]
            for edge in set(unsent):
                # READY may have left: the message itself has not.
                end = state["edges"][str(edge)]
                end["waiting"] = max(end["waiting"], unsent.count(edge))
        return state

    def _hear_failure(self) -> None:
        super()._hear_failure()
        for worker in self._workers.values():
            worker.interrupt()

    # ------------------------------------------------------------------ the inner transport's receive thread
    def _hear(self, event: Event) -> None:
        if isinstance(event, Arrival):
            if event.edge in self._edges:
                self._hear_ready(event)
            else:
                self._hear_word(event)
        elif isinstance(event, Departure):
            # What it sent last may still be under way to the device: after that.
            self._after_all([edge for edge in self._edges if self._peers[edge] == event.rank], lambda: self._post(event))
        else:
            if isinstance(event, Failure):
                self._hear_failure()
            self._post(event)

    def _after_all(self, edges: list[Edge], what: Callable[[], None]) -> None:
        left = len(edges)

        def one() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                what()

        for edge in edges:
            self._workers[edge].put(one)

    def _hear_ready(self, ready: Arrival) -> None:
        body = bytes(ready.payload[0].data)
        nbytes, parts = _READY.unpack_from(body)
        specs = decode_parts(memoryview(body)[_READY.size :], parts, nbytes)
        self._inner.release(ready)
        starts, extent = offsets([spec.nbytes for spec in specs])
        buffer = self._take(ready.edge, extent)
        views = [buffer.view(start, spec.nbytes) if spec.nbytes else None for start, spec in zip(starts, specs, strict=True)]
        payload = tuple(Part(spec.dtype, spec.shape, None if spec.none else np.empty(0, np.uint8) if view is None else view)
                        for spec, view in zip(specs, views, strict=True))
        transfer = Transfer(RECV, ready.call, ready.edge, ready.microbatch, specs, [view for view in views if view is not None],
                            payload=payload, lane=ready.lane, landed=Landed(ready, buffer))
        with self._lock:
            self._waiting[transfer.action] = transfer
            if self._leads:
                self._clock += 1
                transfer.time = self._clock
                self._order.append(transfer)
        if self._leads:
            self._say(answering(ready.edge, self._stages), ready.microbatch, _COMMIT, transfer.time)
        else:
            self._post(Issue())

    def _hear_word(self, arrival: Arrival) -> None:
        word, time_ = _WORD.unpack(bytes(arrival.payload[0].data))
        self._inner.consumed(arrival)
        self._inner.release(arrival)
        # A COMMIT came back along the edge's answering edge, a GO along the reverse of that.
        source, destination = arrival.edge.source - self._stages, arrival.edge.destination - self._stages
        edge = Edge(destination, source) if word == _COMMIT else Edge(source, destination)
        action = Action(f"{SEND if word == _COMMIT else RECV}>{edge.destination}", edge.source, arrival.microbatch)
        with self._lock:
            transfer = self._waiting.pop(action)
            transfer.time = time_ if word == _GO else max(self._clock, time_) + 1
            transfer.final = True
            self._clock = max(self._clock, transfer.time)
            if word == _COMMIT:
                self._order.append(transfer)
        if word == _COMMIT:
            answer = answering(edge, self._stages)
            self._say(Edge(answer.destination, answer.source), arrival.microbatch, _GO, transfer.time)
        self._post(Issue())

    def _say(self, edge: Edge, microbatch: int, word: int, time_: int) -> None:
        self._inner.send(edge, microbatch, (_bytes(_WORD.pack(word, time_)),))

    # ------------------------------------------------------------------ an edge's worker
    def _finish(self, transfer: Transfer, finish: Callable[[], None]) -> None:
        finish()
        if transfer.kind == RECV:
            self._post(Arrival(transfer.call, transfer.edge, transfer.lane, transfer.microbatch, transfer.payload, time.monotonic(),
                               transfer.landed))
        elif transfer.tell:
            self._post(Left(transfer.call, transfer.edge))


def _bytes(data: bytes) -> Part:
    return Part("uint8", (len(data),), np.frombuffer(data, np.uint8))
