"""Communication streams: collectives that run beside the actions, each stream one after another.

Threads. The engine's thread issues operations, in the order of the agreed actions, and waits for them; a stream's own thread runs them
in that order (invariant 8: it only moves bytes). Every stream has communicators of its own, so what one stream waits for never holds
another. Since all members issue in one order, no two of them wait for each other's collectives.

Errors. What an operation raises, and a wait that takes too long, is the process' failure: it is told to the engine, and every later
operation ends with it. A thread that stands in a collective whose peer is gone returns when that peer's connection closes, or at the
deadline.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch

from rrfp.comm.transport import Failure
from rrfp.engine.failure import FailureLatch
from rrfp.errors import PipelineError

LOOK = 0.1
"""Seconds after which who waits looks whether something has failed elsewhere."""
MOMENT = 2.0
"""Seconds for which an operation that breaks lets others say first what is behind it."""


class Operation:
    """One collective, under way or done."""

    __slots__ = ("name", "run", "after", "then", "inputs", "done", "failed")

    def __init__(self, name: str, run: Callable[[], None], after: tuple["Operation", ...] = (), then: Callable[[], None] | None = None):
        self.name, self.run, self.after, self.then = name, run, after, then
        self.inputs: torch.cuda.Event | None = None
        """On a GPU: when what it reads has been made."""
        self.done = threading.Event()
        self.failed = False


class Streams:
    """The streams of one process.

    Args:
        rank: names this process in failures.
        latch: where failures are known; nothing is waited for once one is.
        fail: takes a `Failure` of a stream's thread.
        deadline: seconds that one operation, or the wait for one, may take; asked each time.
        device: where the tensors are.
        record: record(stream, name, start, end) when an operation ran.
        seconds: emulated durations, for tests and benchmarks only: an operation takes at least so long.
    """

    def __init__(self, *, rank: int, device: torch.device, latch: FailureLatch, fail: Callable[[Failure], None], deadline: Callable[[], float],
                 record: Callable[[str, str, float, float], None], seconds: Callable[[str], float] = lambda name: 0.0):
        self._device = device if device.type == "cuda" else None
        self._rank, self._latch, self._fail, self._deadline = rank, latch, fail, deadline
        self._record, self._seconds = record, seconds
        self._queues: dict[str, queue.SimpleQueue[Operation | None]] = {}
        self._threads: dict[str, threading.Thread] = {}

    def issue(self, stream: str, name: str, run: Callable[[], None], *, after: Iterable[Operation] = (),
              then: Callable[[], None] | None = None) -> Operation:
        """Put an operation behind what the stream has. Never blocks.

        Args:
            run: issues the collective and waits for it (`finish`).
            after: operations, of other streams too, that must be done before.
            then: called on the stream's thread when it is done.
        """
        operation = Operation(name, run, tuple(after), then)
        self.put(stream, operation)
        return operation

    def put(self, stream: str, operation: Operation) -> None:
        """The same, for one that was made before its turn."""
        if self._device is not None:
            operation.inputs = torch.cuda.current_stream(self._device).record_event()
        if stream not in self._queues:
            todo = self._queues[stream] = queue.SimpleQueue()
            self._threads[stream] = threading.Thread(target=self._serve, args=(stream, todo), name=f"rrfp-stream-{stream}", daemon=True)
            self._threads[stream].start()
        self._queues[stream].put(operation)

    def finish(self, work) -> None:
        """On a stream's thread: wait for a `torch.distributed.Work`, at most the deadline. Raises torch's error."""
        work.wait(timedelta(seconds=self._deadline()))
        if self._device is not None:  # NCCL's `wait` only puts it before what the device does next
            torch.cuda.current_stream(self._device).synchronize()

    def wait(self, operation: Operation) -> None:
        """Wait until it is done. Raises PipelineError: it failed, something else did, or it took too long."""
        until = time.monotonic() + self._deadline()
        while not operation.done.wait(LOOK):
            self._latch.raise_if_set()
            if time.monotonic() > until:
                raise PipelineError(f"{operation.name} is not done after {self._deadline():.0f} s: another rank has not come to it")
        if operation.failed:
            self._latch.raise_if_set()
            raise PipelineError(f"{operation.name} failed")

    def end(self) -> None:
        """No more operations: the threads end behind those that they have."""
        for each in self._queues.values():
            each.put(None)
        self._queues = {}

    def busy(self, *, deadline: float) -> set[str]:
        """After `end`: the streams whose threads have not ended by the deadline. They stand in a collective."""
        until = time.monotonic() + deadline
        for thread in self._threads.values():
            thread.join(max(0.0, until - time.monotonic()))
        return {stream for stream, thread in self._threads.items() if thread.is_alive()}

    # ------------------------------------------------------------------ a stream's thread
    def _serve(self, stream: str, todo: "queue.SimpleQueue[Operation | None]") -> None:
        while (operation := todo.get()) is not None:
            start = time.monotonic()
            try:
                self._run(stream, operation)
            except BaseException as error:
                operation.failed = True
                deadline = self._deadline()
                # A process that ends breaks the collectives it is in: which one it was, those who watch it say in a moment. What ends at
                # its deadline has no such reason.
                broken = time.monotonic() - start < deadline
                if not self._latch.set_event.wait(min(MOMENT, deadline / 4) if broken else 0):
                    lines = str(error).strip().splitlines()
                    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
                    self._fail(Failure(self._rank, operation.name, text, traceback.format_exc()))
            finally:
                operation.done.set()

    def _run(self, stream: str, operation: Operation) -> None:
        for before in operation.after:
            self.wait(before)
        if operation.inputs is not None:
            operation.inputs.synchronize()
        self._latch.raise_if_set()
        start = time.monotonic()
        operation.run()
        time.sleep(max(0.0, start + self._seconds(operation.name) - time.monotonic()))
        self._record(stream, operation.name, start, time.monotonic())
        if operation.then is not None:
            operation.then()
