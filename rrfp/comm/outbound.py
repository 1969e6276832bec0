"""One outgoing edge, and the thread that serves all of them.

Who owns what: the send thread owns the outlets' queues, credits and mappings, and the data sockets. Others reach it only through
its one queue: the caller with jobs and with credits to return, the receive thread with credits. It blocks on that queue alone, never on a credit: a job that
finds none waits in its outlet. An error in it is handed to `fail` and ends it.
"""

import heapq
import itertools
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from rrfp.action import Edge
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.memory import Grant, Mappings
from rrfp.comm.message import INLINE, MAX_FRAME, Header, Kind, Malformed, encode, encode_parts, offsets
from rrfp.comm.transport import Payload
from rrfp.errors import PipelineError

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    call: int
    microbatch: int
    lane: int
    nbytes: int
    payload: Payload
    tell: bool = False


class Outlet:
    """The sender's end of an edge. Invariant: a message leaves only with a credit, and each lane in order of `send`."""

    def __init__(self, edge: Edge, peer: int, sockets: list[zmq.Socket], mappings: Mappings | None, *, most_credits: int):
        self.edge, self.peer, self.sockets, self.mappings, self.most_credits = edge, peer, sockets, mappings, most_credits
        self.credits: deque[Grant] = deque()
        self.waiting: deque[Job] = deque()
        self.sequence = [0] * len(sockets)
        self.lane_due = [0.0] * len(sockets)
        self.queued = 0  # by the caller
        self.sent = 0  # by the send thread
        self.granted = 0  # credits, by the receive thread
        self.spent = 0  # credits, by the send thread

    def grant(self) -> None:
        """Count a credit that has come. Raises Malformed if there is one too many: each is kept until it is spent."""
        if self.granted - self.spent >= self.most_credits:
            raise Malformed(f"a credit of edge {self.edge} beyond the {self.most_credits} that it has")
        self.granted += 1

    def state(self) -> dict:
        return {
            "direction": "out",
            "peer": self.peer,
            "credits": len(self.credits),
            "sent": self.sent,
            "waiting": self.queued - self.sent,
        }


class Sender:
    """The send thread. `need(outlet, slot, nbytes)` asks for a bigger slot; `fail(where, text, traceback)` reports an error;
    `left(call, edge)` tells of a message that has left, if its job says so; `enter` is what the thread does first.
    """

    def __init__(
        self,
        outlets: list[Outlet],
        *,
        delay: Callable[[Edge, int], float] | None,
        need: Callable[[Outlet, int, int], None],
        fail: Callable[[str, str, str], None],
        name: str,
        left: Callable[[int, Edge], None] = lambda call, edge: None,
        enter: Callable[[], None] = lambda: None,
    ):
        self._outlets, self._delay, self._need, self._fail, self._tell_left, self._enter = outlets, delay, need, fail, left, enter
        self._queue = Mailbox()
        self._flights: list = []  # heap of (due, order, outlet, job, grant): emulated delays only
        self._order = itertools.count()
        self._left = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, outlet: Outlet, item: Job | Grant) -> None:
        if isinstance(item, Job):
            outlet.queued += 1
        self._queue.put((outlet, item))

    def later(self, what: Callable[[], None]) -> None:
        """Run `what` on the send thread, behind what is queued: for what nobody waits for at this moment."""
        self._queue.put(what)

    def stop(self, *, until: float) -> bool:
        """Whether the thread ended in time. Jobs that wait for a credit are dropped."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def interrupt(self) -> None:
        """Wake whoever waits in `flush`: nothing will leave any more."""
        with self._left:
            self._stopped = True
            self._left.notify_all()

    def flush(self, *, until: float) -> None:
        with self._left:
            while stuck := [outlet for outlet in self._outlets if outlet.sent < outlet.queued]:
                remaining = until - time.monotonic()
                if self._stopped or remaining <= 0:
                    raise PipelineError(
                        "messages did not leave: "
                        + ", ".join(f"edge {o.edge} has {o.queued - o.sent} waiting and {len(o.credits)} credits" for o in stuck)
                    )
                self._left.wait(remaining)

    def _run(self) -> None:
        try:
            self._enter()
            while True:
                timeout = max(0.0, self._flights[0][0] - time.monotonic()) if self._flights else None
                try:
                    item = self._queue.get(timeout=timeout)
                except queue.Empty:
                    self._depart()
                    continue
                if item is None:
                    return
                if callable(item):
                    item()
                    continue
                outlet, what = item
                (outlet.waiting if isinstance(what, Job) else outlet.credits).append(what)
                self._pump(outlet)
                self._depart()
                del item, what  # a message that has left is not kept alive until the next one
        except Exception as error:
            self._fail("the send thread", f"{type(error).__name__}: {error}", traceback.format_exc())

    def _pump(self, outlet: Outlet) -> None:
        while outlet.waiting and outlet.credits:
            job, grant = outlet.waiting[0], outlet.credits.popleft()
            outlet.spent += 1  # before anything tells the peer so
            _, extent = offsets(_sizes(job.payload))
            if outlet.mappings is not None and extent > grant.size:
                self._need(outlet, grant.slot, extent)  # a bigger one comes as a new credit
                continue
            outlet.waiting.popleft()
            if self._delay is None:
                self._transmit(outlet, job, grant)
                continue
            # A late message holds back those behind it in its lane: the lane is FIFO.
            due = max(time.monotonic() + self._delay(outlet.edge, job.microbatch), outlet.lane_due[job.lane])
            outlet.lane_due[job.lane] = due
            heapq.heappush(self._flights, (due, next(self._order), outlet, job, grant))

    def _depart(self) -> None:
        while self._flights and self._flights[0][0] <= time.monotonic():
            _, _, outlet, job, grant = heapq.heappop(self._flights)
            self._transmit(outlet, job, grant)

    def _transmit(self, outlet: Outlet, job: Job, grant: Grant) -> None:
        arrays = [part.data for part in job.payload if part.data is not None]
        inline = outlet.mappings is None or not self._write(outlet, grant, arrays)
        outlet.sequence[job.lane] += 1
        header = Header(
            kind=Kind.DATA,
            flags=INLINE if inline else 0,
            lane=job.lane,
            edge=outlet.edge,
            microbatch=job.microbatch,
            call=job.call,
            sequence=outlet.sequence[job.lane],
            slot=grant.slot,
            nbytes=job.nbytes,
            parts=len(job.payload),
        )
        # The library copies without the interpreter lock, so the payload is free once this returns.
        frames = [encode(header, encode_parts(job.payload))]
        if inline:
            frames += [array[start : start + MAX_FRAME] for array in arrays for start in range(0, len(array), MAX_FRAME)]
        outlet.sockets[job.lane].send_multipart(frames)
        if job.tell:
            self._tell_left(job.call, outlet.edge)
        with self._left:
            outlet.sent += 1
            self._left.notify_all()

    def _write(self, outlet: Outlet, grant: Grant, arrays: list) -> bool:
        sizes = [len(array) for array in arrays]
        if not any(sizes):
            return True
        try:
            outlet.mappings.write(grant, offsets(sizes)[0], arrays)
        except OSError as error:
            _log.warning(
                "edge %s sends its bytes through the socket, about three times slower: rank %d's memory is out of reach (%s)",
                outlet.edge, outlet.peer, error,
            )  # fmt: skip
            outlet.mappings = None
            return False
        return True


def _sizes(payload: Payload) -> list[int]:
    return [part.data.nbytes for part in payload if part.data is not None]
