"""What the engine asks of a transport, and what a transport posts back.

The engine owns one inbox; a transport calls `post(event)` on it from any thread. Everything else goes through the methods of
`Transport`, all of which return at once except `open`, `flush` and `close`, which have a deadline in seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rrfp.action import Action, Edge
from rrfp.comm.device import Memory


class Part(NamedTuple):
    """One tensor of a message, as bytes.

    dtype: torch's name without the prefix ("float32", "bfloat16", ...).
    shape: the tensor's shape.
    data: contiguous 1-D uint8 array, or memory of a GPU (`rrfp.comm.device.Memory`), prod(shape) x itemsize bytes long. None stands
        for a gradient that does not exist.
    """

    dtype: str
    shape: tuple[int, ...]
    data: "np.ndarray | Memory | None"


Payload = tuple[Part, ...]


@dataclass(slots=True, eq=False)
class Arrival:
    """A message is here. Its memory belongs to the receiver until `release`."""

    call: int
    edge: Edge
    lane: int
    microbatch: int
    payload: Payload
    time: float
    """time.monotonic() at arrival."""
    slot: object = None
    """The transport's own: which buffer backs the payload."""


class Announcement(NamedTuple):
    """The stage at `edge.source` has started the action whose result will come over `edge` for `microbatch`."""

    call: int
    edge: Edge
    microbatch: int
    time: float
    """time.monotonic() at which it came in here."""
    duration: float
    """The announcing stage's own moving average of such an action, in seconds."""


class Failure(NamedTuple):
    """Why the pipeline cannot go on. The first one that a rank sees wins and is told to all its neighbours."""

    rank: int
    """The pipeline rank at which it happened."""
    where: str
    """What that rank was doing: an action (`2F0`), an edge (`0>1`), or a phrase."""
    text: str
    """One line."""
    traceback: str = ""
    lost: bool = False
    """True if that rank no longer answers (killed, stopped, unreachable), False if it said so itself."""


class Departure(NamedTuple):
    """Rank `rank` said goodbye in good order; all its messages have been posted. Only a failure if more is expected of it."""

    rank: int


class Left(NamedTuple):
    """A message of this edge has left: the receiver has room for it, and it waits here no more."""

    call: int
    edge: Edge


class Issue(NamedTuple):
    """Something may be issued now: ask the `Issuer`."""


Event = Arrival | Announcement | Failure | Departure | Left | Issue


class Issuer(Protocol):
    """What of a transport must happen on the engine's thread, between two actions, in an order that the domain agrees on."""

    def due(self) -> Action | None:
        """Leader: what is to be issued next, as an action of kind `SEND>2` or `RECV>2` (the edge's destination) at the edge's source; None
        if nothing is, or for a follower."""

    def issue(self, transfer: Action) -> bool:
        """Issue it. False if this member lacks something for it, which will come."""

    def owes(self) -> bool:
        """Whether a message of this call has still to be issued."""

    def is_transfer(self, action: Action) -> bool:
        """Whether an agreed action is one of these."""


class Transport(Protocol):
    """Moves payloads between the stages of one pipeline. Every lane of every edge is FIFO in order of `send`.

    A message carries its call number. Messages of later calls are kept until `begin(call)`. Older ones are a Failure, and so are
    those of a call that is further ahead than an edge has credits: each call sends at least one message of every edge.
    """

    def open(self, post: Callable[[Event], None], *, deadline: float) -> None:
        """Connect to the peers. Raises PipelineError naming who did not come."""

    def begin(self, call: int, facts: Mapping[str, str] | None = None) -> None:
        """A new call starts: post what had arrived early for it, and tell the neighbours, without waiting for them.

        facts: what the call is, by name. A neighbour that enters the same call with others is a Failure, the same on both.
        Nothing of a call is posted before its sender's facts have been compared.
        """

    def send(self, edge: Edge, microbatch: int, payload: Payload, *, tell: bool = False) -> None:
        """Queue a message. Never blocks: it waits for a credit of its edge elsewhere. `payload` stays untouched until it left.

        tell: post `Left` when it has, at the latest before `flush` returns.
        """

    def announce(self, edge: Edge, microbatch: int, duration: float) -> None:
        """Tell the edge's destination that its producer has started. Never queues behind a payload."""

    def consumed(self, arrival: Arrival) -> None:
        """The action that uses it was dispatched (agreed): a credit goes back, backed by a fresh buffer."""

    def release(self, arrival: Arrival) -> None:
        """Nothing reads the arrival's memory any more: its buffer returns to the pool."""

    def flush(self, *, deadline: float) -> None:
        """Wait until every queued message has left. Raises PipelineError naming the edge that is stuck."""

    def abort(self, failure: Failure) -> None:
        """Tell every neighbour, once. They tell theirs."""

    def close(self, *, deadline: float) -> None:
        """Say goodbye, join every thread, free every buffer. Safe to call twice and after a failure."""

    def state(self) -> dict:
        """For a hang report: "call"; "edges", per edge credits and messages sent, received, waiting; "peers", rank -> seconds
        since its last sign of life; "calls", rank -> the last call that it entered."""
