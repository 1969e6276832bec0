"""A link between the first and the last stage, which makes a ring of the chain of stages.

News of a failure travel from neighbour to neighbour. A stage that is stopped passes nothing on, and those behind it would blame whoever
ends next for the collective that breaks. The other way round they hear who it was. Nothing but signs of life, goodbyes and aborts is
ever sent here; threads are the transport's.
"""

from collections.abc import Callable

from rrfp.action import Edge
from rrfp.comm.rendezvous import Store
from rrfp.comm.transport import Failure
from rrfp.comm.zmq_transport import ZmqTransport


class Chord:
    """One end of it, on rank 0 or rank `ranks` - 1 of a pipeline.

    Args:
        hear: called with a failure that the other end tells of, from a thread of the transport; it must not block.
        store, interface, heartbeat_s: as for `ZmqTransport`.
        deadline: seconds in which the other end has to come.

    Raises:
        PipelineError: it did not.
    """

    def __init__(self, *, rank: int, ranks: int, store: Store, hear: Callable[[Failure], None], interface: str | None, heartbeat_s: float,
                 deadline: float):
        self._hear, self._other = hear, ranks - 1 - rank
        self._transport = ZmqTransport(
            rank=rank, edges_in=[Edge(self._other, rank)], edges_out=[Edge(rank, self._other)], owner={each: each for each in range(ranks)},
            store=store, credits=1, interface=interface, heartbeat_s=heartbeat_s, namespace="chord")
        self._transport.open(self._post, deadline=deadline)

    def tell(self, failure: Failure) -> None:
        """Tell the other end, unless it is who told of it."""
        self._transport.abort(failure)

    def close(self, *, deadline: float) -> None:
        """Say goodbye and join every thread. Raises PipelineError if one does not end."""
        self._transport.close(deadline=deadline)

    def _post(self, event) -> None:
        # That the other end is gone its neighbour says, and all hear it: it cuts nobody off.
        if type(event) is Failure and not (event.lost and event.rank == self._other):
            self._hear(event)
