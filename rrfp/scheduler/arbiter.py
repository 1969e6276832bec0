"""The scheduler of one rank in one call: which actions are ready, which are admitted, and which one the hint takes.

It only counts. Nothing here sleeps, locks, or knows what a schedule is; time is whatever the caller passes as `now`.
"""

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rrfp.action import Action, Edge
from rrfp.scheduler.dependencies import Dependencies, Task

MOST_UNSENT = 6
"""Messages of one edge that may wait in their sender in a call of forwards only: the transport's credits, and two."""

_SMOOTHING = 0.2  # weight of the newest duration in the moving average


class Decision(NamedTuple):
    """What to do now.

    action: launch it; None means wait for an arrival or a completion.
    wake_at: ask again at this time (same clock as `now`) though nothing happened. None: there is no need to.
    """

    action: Action | None
    wake_at: float | None = None


class Pending(NamedTuple):
    """The next action of one (stage, kind), and why it has not been launched."""

    action: Action
    after: tuple[Action, ...]
    """Actions of this rank that have not completed."""
    messages: tuple[Edge, ...]
    """Edges on which its message has not arrived."""
    holder: str | None
    """What holds it though it is ready: a limit or an order. None if nothing does."""

    def __str__(self) -> str:
        lacks = [*map(str, self.after), *(f"{edge} microbatch {self.action.microbatch}" for edge in self.messages)]
        if lacks:
            return f"{self.action} lacks {' and '.join(lacks)}"
        return f"{self.action} is held by {self.holder}" if self.holder else f"{self.action} is ready"


WAIT = Decision(None)
_BEGUN, _DONE = -1, -2


class Queue:
    """The actions of one (stage, kind): those not launched yet, and which of them is next."""

    __slots__ = ("stage", "kind", "actions", "position", "launched", "need", "heap", "keys")

    def __init__(self, stage: int, kind: str, actions: list[Action]):
        self.stage, self.kind, self.actions = stage, kind, actions
        self.position = 0
        """Index of the first action not launched."""
        self.launched = 0
        """How many were launched: equal to `position` unless the order is free."""
        self.need = 1
        """Free slots that a forward of this stage asks for."""
        self.heap: list[tuple[int, Action]] | None = None
        """Free order only: (key of the hint, action), ready ones; launched ones are dropped when they surface."""
        self.keys: Mapping[Action, int] | None = None

    @property
    def head(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None


def direction(kind: str) -> str:
    """What a rule takes a kind for: "F", "B" (also I), "W", or "other" (collectives and the like)."""
    return {"F": "F", "B": "B", "I": "B", "W": "W"}.get(kind, "other")


class Scheduler:
    """One rank, one call. Not thread-safe: the engine's loop owns it.

    Args:
        dependencies: the rank's tasks.
        hint: a fresh hint of `rrfp.scheduler.hints`. It ranks; only the limits and a strict list hold anything back.
        limit: activations that the rank may hold at once, at least the number of its chunks.
        order: "microbatch": within a (stage, kind) microbatches go in order. "megatron": forwards also follow `forwards` across
            chunks. "free": any ready microbatch.
        max_pending_w: weight gradients that may be pending; None: no bound.
        admission: "reserve" leaves a free slot for every deeper chunk, "plain" asks for one free slot (safe only where a list or
            the order of forwards is known to fit), "paper" finishes microbatches one by one at the limit (Appendix C).
        forwards: the order of forwards across chunks, for order "megatron".
        durations: start values of the moving averages, seconds by kind.

    Raises:
        ValueError: if an action is launched that is not ready, or completed without having been launched.
    """

    def __init__(
        self,
        dependencies: Dependencies,
        hint,
        *,
        limit: int,
        order: str = "microbatch",
        max_pending_w: int | None = None,
        admission: str = "reserve",
        forwards: Sequence[Action] = (),
        durations: Mapping[str, float] | None = None,
        digest: str = "",
    ):
        self.dependencies, self.hint, self.limit, self.order = dependencies, hint, limit, order
        self.max_pending_w, self.admission, self.digest = max_pending_w, admission, digest
        self.durations: dict[str, float] = dict(durations or {})
        """Moving average of each kind's duration in seconds: hand it to the next call's scheduler."""
        self.in_flight = self.peak_in_flight = 0
        self.pending_w = self.peak_pending_w = 0
        self.started: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.launched_count = self.completed_count = 0
        self._tasks = dependencies.tasks
        self._promised_w = 0  # launched actions that will leave a weight gradient pending
        self._running: dict[Action, float] = {}
        self._announced: dict[tuple[Edge, int | None], tuple[float, float]] = {}
        self._lacking: dict[Action, int] = {}
        """How many inputs an action still lacks: 0 is ready. Then `_BEGUN`, then `_DONE`."""
        self._waiters: dict[object, list[Action]] = {}
        """Who lacks an action or a message that is still to come."""
        self._weights_in_order: deque[Action] = deque()  # ready W, oldest first; launched ones are dropped when they surface
        self._forwards = tuple(forwards)
        self._forward_position = 0
        self._build_queues()
        self._finish_order = self._one_by_one() if admission == "paper" else ()
        self._finish_position = 0
        hint.bind(self)
        for queue in self._queues.values():
            queue.keys = hint.keys(queue) if order == "free" else None
        for action, task in self._tasks.items():
            for lack in (*task.after, *((edge, action.microbatch) for edge in task.arrivals)):
                self._waiters.setdefault(lack, []).append(action)
            self._lacking[action] = len(task.after) + len(task.arrivals)
            if not self._lacking[action]:
                self._make_ready(action)

    _most_unsent: int | None = None

    def bound_unsent(self, most: int) -> None:
        """From now on a forward waits while `most` messages of one of its edges have not left their sender; `left` tells.

        For forwards that hold no activation, in a call of forwards only or of a frozen stage: no limit holds them, and what a
        slower stage has not taken would pile up. Before the first launch.

        Nothing stands still for it. In a chain: say that nothing moves, and take the deepest stage with a ready forward. All
        stages after it have run what they got, so its messages have found credits and left: it is not held. In any graph, with
        microbatches in order: take the smallest microbatch that is not done and, along the graph, the first stage that has not
        run it. What was sent before it has been taken, so its inputs are here and its own edges are empty. Neither holds if
        other chunks must wait for the one that is held (two long queues, each of which waits for the other to be taken), so a
        fixed order across chunks goes without the bound.

        In a domain the leader's own edges decide. A follower whose edges are fuller launches later, in the same order: given
        the orders of all ranks, every wait is for an earlier action of some order (the k-th launch here, for launch
        k - most - credits there), the leaders have run them all under the very same rule, so the waits have no cycle.
        """
        fixed = self.hint.strict or bool(self._forwards)
        if not (fixed and len(self.dependencies.stages) > 1):
            self._most_unsent, self._unsent = most, Counter()

    def counts_unsent(self, task: Task) -> bool:
        """Whether `left` is to tell when the result of `task` has left."""
        return self._most_unsent is not None and task.in_flight == 0 and task.action.kind == "F"

    def _build_queues(self) -> None:
        stages = self.dependencies.stages
        chunk = {stage: index for index, stage in enumerate(stages)}
        by_queue: dict[tuple[int, str], list[Action]] = {}
        for action in sorted(self._tasks, key=lambda a: (chunk[a.stage], a.kind, -1 if a.microbatch is None else a.microbatch)):
            by_queue.setdefault((action.stage, action.kind), []).append(action)
        self._queues = {key: Queue(*key, actions) for key, actions in by_queue.items()}
        # Forwards of a deeper chunk never find the rank full: each chunk leaves one slot for every chunk after it, so the
        # deepest activation of the pipeline can always move on. One slot fewer deadlocks (tests/scheduler/test_deadlock.py).
        holding = [s for s in stages if any(self._tasks[a].in_flight > 0 for a in by_queue.get((s, "F"), ()))]
        if self.admission == "reserve":
            for index, stage in enumerate(holding):
                self._queues[stage, "F"].need = len(holding) - index
        queues = list(self._queues.values())
        # F takes the smallest chunk, B the largest (Algorithm 1); ties go to the smallest microbatch.
        self._by_direction = {
            "F": [q for q in queues if direction(q.kind) == "F"],
            "B": [q for q in reversed(queues) if direction(q.kind) == "B"],
            "W": [q for q in queues if direction(q.kind) == "W"],
            "other": [q for q in queues if direction(q.kind) == "other"],
        }
        if self.order == "free":
            for queue in queues:
                queue.heap = []

    def _one_by_one(self) -> tuple[Action, ...]:
        """Appendix C: microbatch by microbatch, F0..F(C-1), then B(C-1)..B0."""
        chunk = {stage: index for index, stage in enumerate(self.dependencies.stages)}

        def key(action: Action):
            down = action.kind != "F"
            return (action.microbatch or 0, down, -chunk[action.stage] if down else chunk[action.stage], action.kind)

        return tuple(sorted(self._tasks, key=key))

    # -- what happened -------------------------------------------------------------------------------------------------

    def arrived(self, edge: Edge, microbatch: int | None) -> None:
        """The message for `microbatch` is here. ValueError if it arrives twice, or nobody here waits for it."""
        if (edge, microbatch) not in self._waiters:
            if any(edge in task.arrivals and action.microbatch == microbatch for action, task in self._tasks.items()):
                raise ValueError(f"microbatch {microbatch} arrived twice on {edge}")
            rank = self.dependencies.rank
            raise ValueError(f"microbatch {microbatch} arrived on {edge}, but nothing on rank {rank} waits for it")
        self._satisfy((edge, microbatch))

    def announced(self, edge: Edge, microbatch: int | None, start: float, duration: float) -> None:
        """The producer of this message started at `start` (this clock) and takes about `duration` seconds."""
        if (edge, microbatch) in self._waiters:  # else it is here by now, or nobody waits for it
            self._announced[edge, microbatch] = (start, duration)

    def launched(self, action: Action, now: float) -> None:
        """`action` (chosen here, or agreed on in the domain) runs from now on."""
        if self._lacking.get(action, 1):
            raise ValueError(f"{action} cannot be launched: it is not ready here")
        task = self._tasks[action]
        self._running[action] = now
        self._lacking[action] = _BEGUN
        queue = self._queues[action.stage, action.kind]
        queue.launched += 1
        position, actions = queue.position, queue.actions
        while position < len(actions) and self._lacking[actions[position]] < 0:
            position += 1
        queue.position = position
        if self._forwards and action.kind == "F":
            self._forward_position += 1
        if self.counts_unsent(task):
            self._unsent.update(task.sends)
        if task.in_flight > 0:
            self.in_flight += task.in_flight
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        if task.backlog < 0:
            self.pending_w += task.backlog
        elif task.backlog:
            self._promised_w += task.backlog
        self.started[action.kind] += 1
        self.launched_count += 1
        self.hint.launched(action)

    def completed(self, action: Action, now: float) -> None:
        """`action` has run: its slot is free, and what waited for it may go."""
        if action not in self._running:
            raise ValueError(f"{action} cannot complete: it was not launched here")
        task = self._tasks[action]
        taken = now - self._running.pop(action)
        before = self.durations.get(action.kind)
        self.durations[action.kind] = taken if before is None else before + _SMOOTHING * (taken - before)
        self._lacking[action] = _DONE
        if task.in_flight < 0:
            self.in_flight += task.in_flight
        if task.backlog > 0:
            self._promised_w -= task.backlog
            self.pending_w += task.backlog
            self.peak_pending_w = max(self.peak_pending_w, self.pending_w)
        self.done[action.kind] += 1
        self.completed_count += 1
        self._satisfy(action)

    def left(self, edge: Edge) -> None:
        """A message of `edge` has left: a receiver has room for it. Only counted after `bound_unsent`."""
        if self._most_unsent is not None:
            self._unsent[edge] -= 1

    def _satisfy(self, lack: object) -> None:
        for action in self._waiters.pop(lack, ()):
            self._lacking[action] -= 1
            if not self._lacking[action]:
                self._make_ready(action)

    def _make_ready(self, action: Action) -> None:
        if self.order == "free":
            queue = self._queues[action.stage, action.kind]
            heapq.heappush(queue.heap, (queue.keys[action], action))
        if action.kind == "W":
            self._weights_in_order.append(action)

    def _begun(self, action: Action) -> bool:
        return self._lacking[action] < 0

    # -- what may run --------------------------------------------------------------------------------------------------

    def ready_in(self, queue: Queue) -> Action | None:
        """The action of a (stage, kind) that its order lets go next, if it is ready. Limits are not looked at."""
        heap = queue.heap
        if heap is None:
            position = queue.position
            if position < len(queue.actions) and not self._lacking[queue.actions[position]]:
                return queue.actions[position]
            return None
        while heap and self._begun(heap[0][1]):
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def admits(self, queue: Queue, action: Action) -> bool:
        """Whether the limits let a ready action of `queue` go now. Only forwards, and I at the bound of W, are ever held."""
        task = self._tasks[action]
        if task.in_flight > 0 and self.limit - self.in_flight < queue.need:
            return False
        if task.backlog > 0 and self._full_of_weights():
            return False
        if self._most_unsent is not None and self._full(task) is not None:
            return False
        if self._forwards and action.kind == "F":
            return self._forwards[self._forward_position] == action
        return True

    def _full_of_weights(self) -> bool:
        return self.max_pending_w is not None and self.pending_w + self._promised_w >= self.max_pending_w

    def _full(self, task: Task) -> Edge | None:
        """An edge on which the result of `task` would be one message too many."""
        if not self.counts_unsent(task):
            return None
        return next((edge for edge in task.sends if self._unsent[edge] >= self._most_unsent), None)

    @property
    def waits_to_send(self) -> bool:
        """Something is ready, and held only because messages have not left."""
        if self._most_unsent is None:
            return False
        ready = (self.ready_in(queue) for queue in self._queues.values())
        return any(action is not None and self._full(self._tasks[action]) is not None for action in ready)

    def candidate(self, queue: Queue) -> Action | None:
        """The action of a (stage, kind) that is ready, next in order, and admitted."""
        action = self.ready_in(queue)
        return action if action is not None and self.admits(queue, action) else None

    def best(self, way: str) -> Action | None:
        """The candidate that Algorithm 1 takes in one direction ("F", "B" or "other"), or the oldest pending W ("W")."""
        if way == "W":
            return self._oldest_weight()
        for queue in self._by_direction[way]:
            if (action := self.candidate(queue)) is not None:
                return action
        return None

    def _oldest_weight(self) -> Action | None:
        queues = self._by_direction["W"]
        if len(queues) == 1:
            return self.candidate(queues[0])
        pending = self._weights_in_order
        while pending and self._begun(pending[0]):
            pending.popleft()
        # The oldest is next in its (stage, kind) unless its inputs came out of order; then any candidate will do.
        if pending and self.ready_in(self._queues[pending[0].stage, "W"]) == pending[0]:
            return pending[0]
        return next((a for q in queues if (a := self.candidate(q)) is not None), None)

    def queue(self, stage: int, kind: str) -> Queue:
        return self._queues[stage, kind]

    @property
    def queues(self) -> tuple[Queue, ...]:
        return tuple(self._queues.values())

    def admissible(self) -> list[Action]:
        """Every action that order and limits let go now, whatever the hint says."""
        if (required := self._required()) is not None:
            return [required] if not self._lacking[required] else []
        ready = []
        for queue in self._queues.values():
            if queue.heap is None:
                found = [] if (action := self.ready_in(queue)) is None else [action]
            else:
                found = [action for _, action in sorted(queue.heap) if not self._begun(action)]
            ready += [action for action in found if self.admits(queue, action)]
        return ready

    def _required(self) -> Action | None:
        """At the paper's limit with several chunks: the one action that may go, ready or not. Otherwise None."""
        if not self._finish_order or len(self.dependencies.stages) == 1 or self.in_flight < self.limit:
            return None
        while self._begun(self._finish_order[self._finish_position]):
            self._finish_position += 1
            if self._finish_position == len(self._finish_order):
                self._finish_position -= 1
                return None
        return self._finish_order[self._finish_position]

    # -- the decision --------------------------------------------------------------------------------------------------

    def choose(self, now: float) -> Decision:
        """What to launch now. Asking again without news gives the same answer: a hint advances at `launched`."""
        if not self.hint.strict:
            if (required := self._required()) is not None:
                return WAIT if self._lacking[required] else Decision(required)
            if self._full_of_weights() and any(self.ready_in(q) is not None for q in self._by_direction["B"]):
                # A ready I is held by the bound, so the oldest W goes first: it is always admissible, hence no deadlock.
                if (weight := self._oldest_weight()) is not None:
                    return Decision(weight)
            if self._by_direction["other"] and (action := self.best("other")) is not None:
                return Decision(action)
        return self.hint.choose(self, now)

    def hold_until(self, action: Action, slack: float) -> float | None:
        """When to stop waiting for `action`, if all that it lacks has been announced. None: something it lacks has not."""
        task = self._tasks[action]
        missing = [key for edge in task.arrivals if (key := (edge, action.microbatch)) in self._waiters]
        if not missing or any(key not in self._announced for key in missing):
            return None
        if any(self._lacking[before] != _DONE for before in task.after):
            return None
        return max(sum(self._announced[key]) for key in missing) + slack * self.duration_of("F")

    # -- what can be read ----------------------------------------------------------------------------------------------

    def task(self, action: Action) -> Task:
        return self._tasks[action]

    @property
    def announces(self) -> bool:
        """Whether this call's stages tell their neighbours when they start an action: equal on all ranks, as the policy is."""
        return self.hint.listens

    @property
    def finished(self) -> bool:
        """Every action of the call has completed."""
        return self.completed_count == len(self._tasks)

    def duration_of(self, kind: str) -> float:
        """Moving average of this rank's own durations of `kind`, in seconds; 0.0 before the first."""
        return self.durations.get(kind, 0.0)

    def is_ready(self, action: Action) -> bool:
        """Every input is here and it has not been launched."""
        return self._lacking[action] == 0

    def pending(self) -> list[Pending]:
        """Per (stage, kind) its next action and what it lacks."""
        found = []
        for queue in self._queues.values():
            action = self.ready_in(queue) or queue.head
            if action is None:
                continue
            task = self._tasks[action]
            after = tuple(before for before in task.after if self._lacking[before] != _DONE)
            messages = tuple(edge for edge in task.arrivals if (edge, action.microbatch) in self._waiters)
            found.append(Pending(action, after, messages, self._holder(queue, action)))
        return found

    def explain(self) -> list[str]:
        """For a hang report: per (stage, kind) the next action and what holds it, one line each."""
        return [f"{action} is running" for action in self._running] + [str(each) for each in self.pending()]

    @property
    def due(self) -> tuple[Action, ...] | None:
        """The actions of which a fixed order wants one next; None where the order is no more than a hint."""
        return tuple(self.hint.due) if self.hint.strict else None

    def lacking(self) -> list[Edge]:
        """Edges whose message the next action of some (stage, kind) waits for."""
        heads = [queue.head for queue in self._queues.values() if queue.head is not None]
        return [edge for head in heads for edge in self._tasks[head].arrivals if (edge, head.microbatch) in self._waiters]

    def _holder(self, queue: Queue, action: Action) -> str | None:
        task = self._tasks[action]
        if task.in_flight > 0 and self.limit - self.in_flight < queue.need:
            return f"the limit {self.limit} (in flight {self.in_flight})"
        if task.backlog > 0 and self._full_of_weights():
            return f"the bound of {self.max_pending_w} pending weight gradients (pending {self.pending_w})"
        if self._most_unsent is not None and (edge := self._full(task)) is not None:
            return f"edge {edge}: {self._unsent[edge]} messages have not left"
        if not self.admits(queue, action):
            return f"the order of forwards (next is {self._forwards[self._forward_position]})"
        if self.due is not None and action not in self.due:
            return f"the fixed order (next is {' or '.join(map(str, self.due))})"
        return None
