"""News of failures between the pipelines of a job (data-parallel replicas), which exchange no messages of the schedule.

Ranks of the same place in all pipelines form a ring over the same kind of transport that a pipeline has, on which nothing is ever sent but
signs of life, goodbyes and aborts. So a replica hears of a failure as a neighbour stage does: without the job's store, which dies with the
rank that keeps it, and without waiting for a collective to break. Every rank is in a ring, so that any survivor of a pipeline can tell.

Who owns what: one thread joins the ring, since others may come late or never, and ends; the transport's own threads serve it. Nothing
here blocks its caller but `close`.
"""

import json
import threading
from collections.abc import Callable, Iterable

from rrfp.action import Edge
from rrfp.comm.transport import Departure, Failure
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.engine.failure import ELSEWHERE, describe, is_hearsay

_LOOK = 0.2
"""Seconds between looks for the neighbours in the ring."""
_LONGEST_LOOK = 10.0
_OPEN_DEADLINE = 60.0


class Replicas:
    """This rank's place in its ring.

    Args:
        pipelines: how many there are, at least 2.
        rank: this process' place in its pipeline.
        name: how the others call it in errors.
        store: a part of the job's store that this ring shares and that no earlier one has used.
        post: called with each failure of another pipeline, from a thread of the transport; it must not block.
        interface, heartbeat_s: as for `ZmqTransport`.
    """

    def __init__(self, *, pipelines: int, rank: int, name: str, store, post: Callable[[Failure], None], interface: str | None, heartbeat_s: float):
        self._pipelines, self._rank, self._name, self._store, self._post = pipelines, rank, name, store, post
        self._interface, self._heartbeat_s = interface, heartbeat_s
        self._index = -1
        self._names: dict[int, str] = {}
        self._departed: set[int] = set()
        self._transport: ZmqTransport | None = None
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        """What was to be told, perhaps before the ring was joined."""
        self._stop = threading.Event()
        self.joined = threading.Event()
        self._thread = threading.Thread(target=self._join, name="rrfp-replicas", daemon=True)
        self._thread.start()

    def tell(self, failure: Failure, *, name: Callable[[int], str]) -> None:
        """Tell all other pipelines of the first failure that this one knows, be it another's: not all rings may have heard of it."""
        text = failure.text if is_hearsay(failure) else describe(failure._replace(traceback=""), name)
        with self._lock:
            self._failure = Failure(max(self._index, 0), "its pipeline", text, failure.traceback)
            transport = self._transport
        if transport is not None:
            transport.abort(self._failure)

    def silences(self) -> dict[str, float]:
        """Neighbour in the ring -> seconds since its last sign of life."""
        with self._lock:
            transport = self._transport
        peers = {} if transport is None else transport.state().get("peers", {})
        return {self._names[rank]: silence for rank, silence in peers.items() if rank not in self._departed}

    def close(self, *, deadline: float) -> None:
        """Say goodbye and join every thread. Raises PipelineError if one does not end."""
        self._stop.set()
        self._thread.join(deadline)
        with self._lock:
            transport = self._transport
        if transport is not None:
            transport.close(deadline=deadline)

    # ------------------------------------------------------------------ the thread
    def _join(self) -> None:
        try:
            self._index = self._store.add("members", 1) - 1
            if self._index >= self._pipelines:
                return
            self._store.set(f"member/{self._index}", json.dumps(self._name))
            neighbours = {(self._index + step) % self._pipelines for step in (1, -1)}
            while not self._store.check([f"member/{index}" for index in neighbours]):
                if self._stop.wait(_LOOK):
                    return
            self._names = self._read_names(neighbours)
            self._open()
            everybody, pause = range(self._pipelines), _LOOK
            while not self._store.check([f"member/{index}" for index in everybody]):
                if self._stop.wait(pause):
                    return
                pause = min(2 * pause, _LONGEST_LOOK)
            self._names = self._read_names(everybody)
        except Exception as error:  # without a ring a replica learns of a failure when a collective breaks, as it always did
            if not self._stop.is_set():
                print(f"[rrfp] {self._name}: no news from other pipelines: {type(error).__name__}: {error}", flush=True)

    def _read_names(self, members: Iterable[int]) -> dict[int, str]:
        return {index: json.loads(self._store.get(f"member/{index}")) for index in members}

    def _open(self) -> None:
        size, index = self._pipelines, self._index
        transport = ZmqTransport(
            rank=index,
            edges_in=[Edge((index - 1) % size, index)],
            edges_out=[Edge(index, (index + 1) % size)],
            owner={each: each for each in range(size)},
            store=self._store,
            credits=1,
            interface=self._interface,
            heartbeat_s=self._heartbeat_s,
            namespace="ring",
        )
        transport.open(self._hear, deadline=_OPEN_DEADLINE)
        with self._lock:
            self._transport = transport
            failure = self._failure
        if failure is not None:
            transport.abort(failure._replace(rank=index))
        self.joined.set()

    def _hear(self, event) -> None:
        if type(event) is Departure:
            self._departed.add(event.rank)
        elif type(event) is Failure:
            who = self._names.get(event.rank, "a rank")
            # The transport's own words have the ring's numbers.
            text = f"{who} was lost: {event.text.replace(f'rank {event.rank} ', 'it ', 1)}" if event.lost else event.text
            self._post(Failure(self._rank, ELSEWHERE, text, event.traceback))
