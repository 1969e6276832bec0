"""The rank loop: take arrivals, choose, agree, run, send.

Who owns what: everything here belongs to the thread that calls `run` (or, in tests, `begin`, `advance` and `end`). Other threads
only `post` events into the inbox and read for a report. What blocks: the inbox's `get` and the transport's `flush`, each with a
deadline. On an error the failure is latched and told to all peers, then raised.
"""

import math
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from queue import Empty
from typing import NamedTuple

from rrfp.action import Action, Edge
from rrfp.comm.transport import Announcement, Arrival, Departure, Failure, Issuer, Left, Transport
from rrfp.engine.executor import Executor, Outputs, Span
from rrfp.engine.failure import FailureLatch
from rrfp.engine.inbox import Inbox
from rrfp.engine.view import text_of
from rrfp.errors import PipelineError
from rrfp.scheduler.arbiter import MOST_UNSENT, WAIT, Decision, Scheduler
from rrfp.tp_coord.agreement import Agreement

FIRST_CALL = 3
"""The first call of its kind has so many times the patience: compiling or a first allocation is no hang."""
STOPPED = 3.0
"""Seconds by which a wait ends too late only if this process itself was stopped (SIGSTOP, a suspended job)."""
LOOK = 1.0
"""Seconds after which a flush looks for news of its receivers."""
_TRIES = 10


class Completion(NamedTuple):
    action: Action
    outputs: Outputs
    time: float
    span: Span | None = None


class Wake(NamedTuple):
    """News elsewhere (an agreement): look again."""


class Launched(NamedTuple):
    action: Action
    time: float
    in_flight: int


class Engine:
    """Runs call after call of one rank.

    Args:
        rank: this rank in the pipeline.
        owner: which rank owns a stage (to name ranks in errors).
        transport: whoever opens it gives it `post`.
        agreement: this member's end of its domain's agreement; whoever opens it gives it `wake` and `hear`.
        recorder: a trace recorder.
        clock: seconds; `time.monotonic` unless time is virtual.
        decide_ahead: a leader decides what its domain runs next before it runs an action, if something else can run then. Nobody
            waits for that decision; but what the action makes ready, and what arrives meanwhile, is not looked at. With a list in
            fixed order nothing is lost by that, so there it is always done.
        timeout: seconds without progress inside a call after which the call fails (three times that in the first call).
        latch: the process' failure latch.
        issuer: the transport's own actions, if it has any.
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
        decide_ahead: bool = False,
        latch: FailureLatch | None = None,
        issuer: Issuer | None = None,
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
        self.patience = timeout
        self.running: Action | None = None
        self.scheduler: Scheduler | None = None
        self._open = self._stuck = False
        """Whether a call has begun and not ended, though it may have failed; whether it failed because nothing moved."""
        self._owner = owner
        self._agreement = agreement
        self._decide_ahead = decide_ahead
        self._issuer = issuer
        self._clock = clock
        self._inbox = Inbox()
        if agreement.bell is not None:
            self._inbox.listen(agreement.bell)
        self._departed: set[int] = set()
        self._warm: set[bool] = set()
        """Whether a training call, and a call of forwards only, has ended yet."""

    def post(self, event) -> None:
        """Hand the loop an event. From any thread; never blocks."""
        if type(event) is Failure and self.latch.set(event):
            self._agreement.abort(event)  # the transport floods what it heard itself
        self._inbox.put(event)

    def hear(self, failure: Failure) -> None:
        """A member of the domain failed or was lost. From any thread; never blocks."""
        if self.latch.set(failure):
            self.transport.abort(failure)
        self._inbox.put(failure)

    def wake(self) -> None:
        """There is news that no event carries. From any thread; never blocks."""
        self._inbox.put(Wake())

    # ------------------------------------------------------------------ one call
    def run(self, scheduler: Scheduler, executor: Executor, *, announce: bool = False, forward_only: bool = False,
            microbatches: int = 0) -> None:
        """Run every action of `scheduler` on `executor`; returns when all have completed and every message has left.

        Raises:
            PipelineError: a peer failed or was lost, or nothing moved for `timeout` seconds.
            BaseException: whatever an action raised here, after telling all peers.
        """
        try:
            self.begin(scheduler, executor, announce=announce, forward_only=forward_only, microbatches=microbatches)
            while (wake_at := self.advance()) is not None:
                self._wait(wake_at)
            self.end()
        except BaseException as error:
            # Invariant 9: the first failure wins. What fails after it (a collective without its peer, a flush) follows from it.
            if not self.fail(error) and isinstance(error, Exception):
                raise PipelineError(self.latch.text) from (None if isinstance(error, PipelineError) else error)
            raise
        finally:
            self.in_call = False

    def begin(self, scheduler: Scheduler, executor: Executor, *, announce: bool = False, forward_only: bool = False,
              microbatches: int = 0) -> None:
        """Start a call without running it: `advance` it until that returns None, then `end` it."""
        self.latch.raise_if_set()
        self.call += 1
        self.scheduler = scheduler
        self._executor = executor
        self._announce = announce
        self._arrivals: dict[tuple[Edge, int | None], Arrival] = {}
        self._received: Counter[Edge] = Counter()
        self._handed: dict[Edge, list[int]] = defaultdict(list)
        """Microbatches whose messages went to the transport, in that order."""
        self._launched: deque[Launched] = deque()
        self._completions: dict[Action, Completion] = {}
        self._agreed: Action | None = None
        self._waits: list[tuple[str | None, float]] = []
        self._forward_only, self._microbatches = forward_only, microbatches
        self._ahead = self._agreement.size > 1 and (self._decide_ahead or scheduler.hint.strict)
        if forward_only:
            scheduler.bound_unsent(MOST_UNSENT)
        self.patience = self.timeout * (1 if forward_only in self._warm else FIRST_CALL)
        now = self.last_progress = self._last_end = self._clock()
        self.in_call = self._open = True
        self.recorder.begin_call(self.call, microbatches=microbatches, forward_only=forward_only, now=now)
        self._agreement.begin(self.call)
        self.transport.begin(self.call, {
            "forward_only": str(forward_only), "microbatches": str(microbatches), "hint rows": f"digest {scheduler.digest[:12]}"})

    def advance(self) -> float | None:
        """Do all that can be done without waiting.

        Returns the clock time at which to come again at the latest, or None if every action has completed.
        Raises PipelineError as `run` does.
        """
        while True:
            self.latch.raise_if_set()
            self._take_events()
            if self._issuer is not None and self._issue():
                continue
            if self.scheduler.finished:
                return None if self._issuer is None or not self._issuer.owes() else self._until(WAIT)
            decision = WAIT
            if len(self._launched) < self._executor.capacity:
                decision = self.scheduler.choose(self._clock())
                if self._agreed is None:
                    self._agreed = self._agreement.decide(decision.action)
                    if self._issuer is not None and self._issue():
                        continue  # what a follower was told is a transfer
                if self._agreed is not None and self._may_launch(self._agreed, decision):
                    action, self._agreed = self._agreed, None
                    self._launch(action)
                    continue
            return self._until(decision)

    def end(self) -> None:
        """After the last action: wait until every message has left, and close the call's books."""
        start = self._clock()
        self._flush()
        now = self._clock()
        if now > start:
            self.recorder.waited("send", start, now)
        self.in_call = self._open = False
        self._warm.add(self._forward_only)
        self.recorder.end_call(now)

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
            while self._launched and (done := self._completions.pop(self._launched[0].action, None)) is not None:
                self._complete(done)
        elif kind is Arrival:
            self._arrivals[event.edge, event.microbatch] = event
            self._received[event.edge] += 1
            self.recorder.arrival(event.edge, event.microbatch, event.time)
            self._agreement.arrived(event.edge, event.microbatch)
        elif kind is Announcement:
            if event.call == self.call:
                self.scheduler.announced(event.edge, event.microbatch, event.time, event.duration)
        elif kind is Left:
            if event.call == self.call:
                self.scheduler.left(event.edge)
                self.last_progress = self._clock()
        elif kind is Departure:
            self._departed.add(event.rank)
        elif kind is Failure:
            self.latch.set(event)
            self.latch.raise_if_set()

    def _complete(self, done: Completion) -> None:
        action, start, in_flight = self._launched.popleft()
        scheduler = self.scheduler
        # What is launched ahead runs after what was launched before it: spans never overlap.
        if done.span is None:
            ended, padded = done.time, self._executor.padded
        else:
            ran, ended, padded = done.span
            start = max(start, ran)  # two clocks never agree to the last microsecond
        start = max(start, self._last_end)
        end = self._last_end = max(start, ended)
        scheduler.completed(action, end)
        self.recorder.action(action, start, end, in_flight, padded)
        for edge in scheduler.task(action).sends:
            # Invariant 3: never blocks; what waits for a credit waits in the transport, and is bounded by the in-flight limit or,
            # in a call that holds no activations, by the bound of messages that have not left.
            tell = self._forward_only or scheduler.counts_unsent(scheduler.task(action))
            self.transport.send(edge, action.microbatch, done.outputs[edge], tell=tell)
            self._handed[edge].append(action.microbatch)
            self.recorder.sent(edge, action.microbatch, end)
        self.last_progress = end
        self.last_action = f"{action}, {end - start:.3f} s"
        self.running = self._launched[0].action if self._launched else None

    # ------------------------------------------------------------------ dispatch
    def _may_launch(self, action: Action, decision: Decision) -> bool:
        """A member that follows may be behind: inputs not here yet, or its limits not free yet. They will be; the order stays."""
        scheduler = self.scheduler
        if self._issuer is not None and self._issuer.is_transfer(action):
            return False
        return action == decision.action or (
            scheduler.is_ready(action) and scheduler.admits(scheduler.queue(action.stage, action.kind), action))

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
        self._record_waits(_cause(action.kind), now)
        scheduler.launched(action, now)
        self._launched.append(Launched(action, now, scheduler.in_flight))
        self.running = self._launched[0].action
        self.last_progress = now
        self.recorder.start_action(action)
        if self._ahead:
            self._look_ahead(now)
        clock, inbox = self._clock, self._inbox
        self._executor.launch(task, inputs, lambda outputs, span=None: inbox.put(Completion(action, outputs, clock(), span)))
        self.recorder.launched()

    def _issue(self) -> bool:
        """A transfer of the transport that is due, in its place in the agreed sequence. Whether one was issued."""
        issuer = self._issuer
        if self._agreed is None:
            due = issuer.due() if self._agreement.leads else None
            if due is not None or not self._agreement.leads:
                self._agreed = self._agreement.decide(due)
        if self._agreed is None or not issuer.is_transfer(self._agreed) or not issuer.issue(self._agreed):
            return False
        self._agreed = None
        self.last_progress = self._clock()
        return True

    def _look_ahead(self, now: float) -> None:
        """The domain's next action, as far as it can be known before the one that was just launched runs."""
        choice = self.scheduler.choose(now).action if self._agreement.leads else None
        if choice is not None or not self._agreement.leads:
            self._agreed = self._agreement.decide(choice)

    # ------------------------------------------------------------------ waiting
    def _until(self, decision: Decision) -> float:
        """Nothing can be launched now. When to look again; raises PipelineError when that has been so for too long."""
        now = self._clock()
        if self._departed:
            self._check_senders()
            if self.scheduler.waits_to_send:
                self._check_receivers()
        if now - self.last_progress >= self.patience:
            self._stuck = True
            raise PipelineError(self.hang_report())
        if not self._launched:
            reason = "agreement" if decision.action is not None else None if decision.wake_at is None else "announced"
            if reason is None and self.scheduler.waits_to_send:
                reason = "send"
            if not self._waits or self._waits[-1][0] != reason:
                self._waits.append((reason, now))
        until = self.last_progress + self.patience
        return until if decision.wake_at is None else min(until, decision.wake_at)

    def _wait(self, wake_at: float) -> None:
        try:
            event = self._inbox.get(timeout=max(0.0, wake_at - self._clock()))  # None: the agreement has news
        except Empty:
            event = None
        if (now := self._clock()) > wake_at + STOPPED:
            self.last_progress = now  # nobody owed us anything meanwhile: perhaps all were stopped
        if event is not None:
            self._take(event)

    def _record_waits(self, cause: str, now: float) -> None:
        """Waits without a reason of their own were for the message that made the next action ready."""
        for index, (reason, start) in enumerate(self._waits, start=1):
            end = self._waits[index][1] if index < len(self._waits) else now
            if end > start:
                self.recorder.waited(reason or cause, start, end)
        self._waits.clear()

    def _flush(self) -> None:
        looks = max(1, math.ceil(self.patience / LOOK))
        for left in reversed(range(looks)):
            until = self._clock() + self.patience / looks
            try:
                self.transport.flush(deadline=self.patience / looks)
                return
            except PipelineError as error:
                interrupted = self._clock() < until
                self.latch.raise_if_set()
                self._take_events()
                self._check_receivers()
                if interrupted:
                    # By a failure that is on its way to the latch.
                    self.latch.set_event.wait(LOOK)
                    self.latch.raise_if_set()
                if interrupted or not left:
                    self._stuck = True
                    raise PipelineError(f"{error}\n{self.hang_report()}") from None

    # ------------------------------------------------------------------ failing
    def _check_senders(self) -> None:
        """A rank that left in good order is a failure only if this call still needs a message of it."""
        # A goodbye comes after every message that its rank has sent, so what is not here now will never come.
        expected = Counter(edge for task in self.scheduler.dependencies.tasks.values() for edge in task.arrivals)
        for edge, count in expected.items():
            if (rank := self._owner(edge.source)) in self._departed and (missing := count - self._received[edge]) > 0:
                raise PipelineError(
                    f"rank {rank} (stage {edge.source}) left before the end of call {self.call}: {missing} messages of edge "
                    f"{edge} will not come; {'; '.join(self.scheduler.explain())}")

    def _check_receivers(self) -> None:
        """Nor does a rank that left take anything more."""
        for edge, end in self.transport.state().get("edges", {}).items():
            if end["direction"] == "out" and end["waiting"] and end["peer"] in self._departed:
                raise PipelineError(f"rank {end['peer']} left before the end of call {self.call}: {end['waiting']} messages "
                                    f"of edge {edge} cannot be delivered")

    def fail(self, error: BaseException) -> bool:
        """Latch `error` as this rank's failure and tell all peers. False if a failure is known already: then they know too."""
        where = str(self.running) if self.running is not None else f"call {self.call}" if self.call >= 0 else "before its first call"
        # One line; the rest of a long message, such as a hang report, is in the traceback.
        text = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        failure = Failure(self.rank, where, text, "".join(traceback.format_exception(error)))
        first = self.latch.set(failure)
        if first:
            self.abort(failure)
        return first

    def abort(self, failure: Failure) -> None:
        """Tell the neighbours in the pipeline and the members of the domain. From any thread; whoever knows it ignores it."""
        self.transport.abort(failure)
        self._agreement.abort(failure)

    def view(self) -> dict:
        """What this rank knows of its call, as JSON has it: docs/hang.md names the fields. Ranks are the pipeline's, times seconds.

        From any thread. `next` is None before the first call, or if the loop never stood still long enough to be read.
        """
        now, state = self._clock(), self.transport.state()
        view = {
            "rank": self.rank, "call": self.call, "in_call": self._open, "stuck": self._stuck, "idle": now - self.last_progress,
            "monotonic": now, "wall": time.time(), "patience": self.patience, "last_action": self.last_action,
            "running": None if self.running is None else str(self.running), "next": None,
            "peers": {str(rank): ago for rank, ago in state.get("peers", {}).items()},
            "calls": {str(rank): call for rank, call in state.get("calls", {}).items()},
            "departed": sorted(self._departed), "edges": {edge: dict(end) for edge, end in state.get("edges", {}).items()},
        }  # fmt: skip
        for _ in range(_TRIES if self.scheduler is not None else 0):
            try:
                return view | self._outlook(now, view["edges"])
            except RuntimeError:  # a container changed while it was read
                continue
        return view

    def _outlook(self, now: float, edges: dict) -> dict:
        """The part of a view that is the call's. Adds each edge's microbatches to `edges`."""
        scheduler, launched = self.scheduler, next(iter(self._launched), None)
        sent = {str(edge): list(microbatches) for edge, microbatches in self._handed.items()}
        here = {edge: [m for other, m in list(self._arrivals) if str(other) == edge] for edge in edges}
        for edge, end in edges.items():
            end |= {"handed": sent.get(edge, [])} if end["direction"] == "out" else {"here": here[edge]}
        return {
            "stages": list(scheduler.dependencies.stages), "forward_only": self._forward_only, "microbatches": self._microbatches,
            "running_for": None if launched is None else now - max(launched.time, self._last_end),
            "ready": list(map(str, scheduler.admissible())), "in_flight": scheduler.in_flight, "limit": scheduler.limit,
            "explained": scheduler.explain(), "agreed": None if self._agreed is None else str(self._agreed),
            "due": None if scheduler.due is None else list(map(str, scheduler.due)),
            "next": [{"action": str(each.action), "microbatch": each.action.microbatch, "after": list(map(str, each.after)),
                      "lacks": list(map(str, each.messages)), "held": each.holder} for each in scheduler.pending()],
        }  # fmt: skip

    def hang_report(self) -> str:
        """`view` as text."""
        return text_of(self.view())


def _cause(kind: str) -> str:
    """What a wait that ended with an action of `kind` was for: the message that made it ready."""
    return "B" if kind in ("B", "I") else kind
