"""What the engine asks of whatever runs the actions."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from rrfp.action import Edge
from rrfp.comm.transport import Arrival, Payload
from rrfp.scheduler.dependencies import Task

Outputs = Mapping[Edge, Payload]


class Span(NamedTuple):
    """When an action ran, in seconds of the engine's clock. padded: by how much it was lengthened on purpose."""

    start: float
    end: float
    padded: float = 0.0


class Done(Protocol):
    """Told once when an action has completed, from any thread."""

    def __call__(self, outputs: Outputs, span: Span | None = None) -> None:
        """span: from an executor that knows better than the host when the action ran (a device's own clock)."""


class Executor(Protocol):
    """Runs actions. `launch` and completion are separate: on a CPU they coincide, on a GPU completion comes later.

    Invariant 8: `launch` is called on the thread that called `Engine.run`, never elsewhere.
    """

    capacity: int
    """How many actions may be launched and not completed (1: the next one is chosen when the last one is done)."""

    padded: float
    """Seconds by which the action that completed last was lengthened on purpose (an emulated duration), else 0."""

    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Done) -> None:
        """Start `task`. Call `done` once, from any thread, with a payload for every edge in `task.sends`.

        `inputs` are the messages on `task.arrivals`, in that order. They belong to the executor, which gives each back with
        `Transport.release` when nothing reads its memory any more (autograd saves stage inputs until their backward has run).
        """
