"""The rank loop: take arrivals, choose, agree, run, send.

Who owns what: everything here belongs to the thread that calls `run` (or, in tests, `begin` and `advance`). Other threads only
`post` events into the inbox. The only call that blocks is the inbox's `get`, and it has a deadline.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from rrfp.action import Action, Edge
from rrfp.comm.transport import Announcement, Arrival, Departure, Failure, Transport
from rrfp.engine.executor import Executor, Outputs
from rrfp.engine.failure import FailureLatch
from rrfp.errors import PipelineError
from rrfp.scheduler.arbiter import Scheduler
from rrfp.tp_coord.agreement import Agreement

DEPARTURE_GRACE = 2.0
"""Seconds for which messages of a rank that said goodbye may still be on their way (goodbye overtakes payload)."""
LONGEST_WAIT = 1.0
"""Seconds after which a waiting loop looks at its deadlines again."""


class Completion(NamedTuple):
    action: Action
    outputs: Outputs
    time: float


class Wake(NamedTuple):
    """News elsewhere (an agreement): look again."""


class Engine:
    """Runs call after call of one rank.

    Args:
        rank: this rank in the pipeline.
        owner: which rank owns a stage (to name ranks in errors).
        transport: open already, posting to `post`.
        agreement: this member's end of its domain's agreement.
        recorder: a trace recorder.
        clock: seconds; `time.monotonic` unless time is virtual.
        timeout: seconds without progress inside a call after which the call fails (three times that in the first call, so that
            compiling or a first allocation is no hang).
        latch: the process' failure latch.
    """

    def __init__(
        self,
        *,
        rank: int,
        owner: Callable[[int], int],
        transport: Transport,
        agreement: Agreement,
        recorder,
        timeout: float,
        latch: FailureLatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rank = rank
        self.transport = transport
        self.recorder = recorder
        self.timeout = timeout
        self.latch = latch or FailureLatch()
        self.call = -1
        self.in_call = False
        self.last_progress = 0.0
        self.last_action = "nothing yet"
        self.running: Action | None = None
        self.scheduler: Scheduler | None = None
        self._owner = owner
        self._agreement = agreement
        self._clock = clock
        self._inbox: SimpleQueue = SimpleQueue()
        self._departed: dict[int, float] = {}
        self._first_call = True

    def post(self, event) -> None:
        """Hand the loop an event. From any thread; never blocks."""
        if type(event) is Failure:
            self.latch.set(event)
        self._inbox.put(event)

    def wake(self) -> None:
        self._inbox.put(Wake())

    # ------------------------------------------------------------------ one call
    def run(self, scheduler: Scheduler, executor: Executor, *, announce: bool = False, forward_only: bool = False,
            microbatches: int = 0) -> None:
        """Run every action of `scheduler` on `executor`; returns when all have completed and every message has left.

        Raises:
            PipelineError: a peer failed or was lost, or nothing moved for `timeout` seconds.
            BaseException: whatever an action raised here, after telling all peers.
        """
        self.begin(scheduler, executor, announce=announce, forward_only=forward_only, microbatches=microbatches)
        try:
            while (wake_at := self.advance()) is not None:
                self._wait(wake_at)
            self.transport.flush(deadline=self._patience)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.in_call = False
        self.recorder.end_call(self._clock())
        self._first_call = False

    def begin(self, scheduler: Scheduler, executor: Executor, *, announce: bool = False, forward_only: bool = False,
              microbatches: int = 0) -> None:
        """Start a call without running it (tests drive it with `advance` under a virtual clock)."""
        self.latch.raise_if_set()
        self.call += 1
        self.scheduler = scheduler
        self._executor = executor
        self._announce = announce
        self._arrivals: dict[tuple[Edge, int], Arrival] = {}
        self._launched: deque[tuple[Action, float, int]] = deque()
        self._completions: dict[Action, Completion] = {}
        self._waited_since: float | None = None
        self._patience = self.timeout * (3 if self._first_call else 1)
        now = self.last_progress = self._clock()
        self.in_call = True
        self.recorder.begin_call(self.call, microbatches=microbatches, forward_only=forward_only, now=now)
        self._agreement.begin(self.call)
        self.transport.begin(self.call)

    def advance(self) -> float | None:
        """Do all that can be done without waiting. Returns when to ask again at the latest (clock time), or None if the call is done."""
        while True:
            self._take_events()
            if self.scheduler.finished:
                return None
            if len(self._launched) >= self._executor.capacity:
                return self._clock() + LONGEST_WAIT
            decision = self.scheduler.choose(self._clock())
            action = self._agreement.decide(decision.action)
            if action is None:
                self._check_departed()
                latest = self._clock() + LONGEST_WAIT
                return latest if decision.wake_at is None else min(decision.wake_at, latest)
            self._launch(action)

    # ------------------------------------------------------------------ arrivals and completions
    def _take_events(self) -> None:
        inbox = self._inbox
        while True:
            try:
                event = inbox.get_nowait()
            except Empty:
                break
            self._take(event)
        for edge, microbatch in self._agreement.common():
            self.scheduler.arrived(edge, microbatch)
            self.last_progress = self._clock()

    def _take(self, event) -> None:
        kind = type(event)
        if kind is Completion:
            self._completions[event.action] = event
            # Invariant 1: completions are taken in launch order, so that every lane carries the dispatch order.
            while self._launched and (done := self._completions.pop(self._launched[0][0], None)) is not None:
                self._complete(done)
        elif kind is Arrival:
            self._arrivals[event.edge, event.microbatch] = event
            self.recorder.arrival(event.edge, event.microbatch, event.time)
            self._agreement.arrived(event.edge, event.microbatch)
        elif kind is Announcement:
            if event.call == self.call:
                self.scheduler.announced(event.edge, event.microbatch, event.time, event.duration)
        elif kind is Departure:
            self._departed[event.rank] = self._clock()
        elif kind is Failure:
            self.latch.set(event)
            self.latch.raise_if_set()

    def _complete(self, done: Completion) -> None:
        action, start, in_flight = self._launched.popleft()
        scheduler = self.scheduler
        scheduler.completed(action, done.time)
        self.recorder.action(action, start, done.time, in_flight, self._executor.padded)
        for edge in scheduler.task(action).sends:
            # Invariant 3: never blocks; what waits for a credit waits in the transport and is bounded by the in-flight limit.
            self.transport.send(edge, action.microbatch, done.outputs[edge])
            self.recorder.sent(edge, action.microbatch, done.time)
        self.last_progress = done.time
        self.last_action = f"{action}, {done.time - start:.3f} s"
        self.running = self._launched[0][0] if self._launched else None

    # ------------------------------------------------------------------ dispatch
    def _launch(self, action: Action) -> None:
        scheduler, transport = self.scheduler, self.transport
        task = scheduler.task(action)
        inputs = tuple(self._arrivals.pop((edge, action.microbatch)) for edge in task.arrivals)
        for arrival in inputs:
            # Invariant 5: the credit goes back on the agreed dispatch, backed by a fresh buffer; this one stays the action's.
            transport.consumed(arrival)
        if self._announce:
            duration = scheduler.duration_of(action.kind)
            for edge in task.sends:
                transport.announce(edge, action.microbatch, duration)
        now = self._clock()
        if self._waited_since is not None:
            self.recorder.waited(_cause(action.kind), self._waited_since, now)
            self._waited_since = None
        scheduler.launched(action, now)
        self._launched.append((action, now, scheduler.in_flight))
        self.running = action
        self.last_progress = now
        self.recorder.start_action(action)
        clock, inbox = self._clock, self._inbox
        self._executor.launch(task, inputs, lambda outputs: inbox.put(Completion(action, outputs, clock())))

    # ------------------------------------------------------------------ waiting and failing
    def _wait(self, wake_at: float) -> None:
        """Wait for an event until `wake_at`. Raises PipelineError when nothing has moved for too long."""
        start = self._clock()
        if self._waited_since is None and not self._launched:
            self._waited_since = start
        try:
            event = self._inbox.get(timeout=max(0.0, min(wake_at, self.last_progress + self._patience) - start))
        except Empty:
            if self._clock() - self.last_progress >= self._patience:
                raise PipelineError(self.hang_report()) from None
        else:
            self._take(event)

    def _check_departed(self) -> None:
        """A rank that left in good order is a failure only if this call still needs it."""
        if not self._departed:
            return
        now = self._clock()
        for edge in self.scheduler.lacking():
            left = self._departed.get(self._owner(edge.source))
            if left is not None and now - max(left, self.last_progress) > DEPARTURE_GRACE:
                raise PipelineError(
                    f"rank {self._owner(edge.source)} (stage {edge.source}) left before the end of call {self.call}: "
                    f"{'; '.join(self.scheduler.explain())}"
                )

    def fail(self, error: BaseException) -> None:
        """Latch `error` as this rank's failure and tell all peers, unless a failure is known already (then they know too)."""
        where = str(self.running) if self.running is not None else f"call {self.call}"
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        failure = Failure(self.rank, where, text, "".join(traceback.format_exception(error)))
        if self.latch.set(failure):
            self.transport.abort(failure)

    def hang_report(self) -> str:
        """What a person on call needs: last action, what is missing, credits, pending sends, and each peer's last sign of life."""
        idle = self._clock() - self.last_progress
        scheduler = self.scheduler
        lines = [f"rank {self.rank}: nothing has moved for {idle:.1f} s in call {self.call}",
                 f"  last action: {self.last_action}; running: {self.running or 'nothing'}"]
        if scheduler is not None:
            lines.append(f"  ready: {' '.join(map(str, scheduler.admissible())) or 'none'}; in flight {scheduler.in_flight}")
            lines += [f"  {line}" for line in scheduler.explain()]
        for key, value in self.transport.state().items():
            lines.append(f"  {key}: {value}")
        return "\n".join(lines)


def _cause(kind: str) -> str:
    """What a wait that ended with an action of `kind` was for: the message that made it ready."""
    return "B" if kind in ("B", "I") else kind
