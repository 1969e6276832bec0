"""A rank as a state machine over the real objects: schedulers, call windows, agreement. `links` has the other kind of component.

A component knows which events it can do by itself (`events`), does one on a copy of itself (`fork`, `apply`), names its state (`key`),
and checks it (`check`). Whatever it does to others is an output, which the explorer hands on: (member, edge, operation, arguments...).
"""

import copy
from collections import Counter, deque
from types import FunctionType

import reduction

from rrfp.action import Action, Edge
from rrfp.comm.clock import VirtualClock
from rrfp.comm.transport import Announcement, Arrival
from rrfp.comm.window import CallWindow
from rrfp.scheduler import Scheduler
from rrfp.scheduler.hints import Announced
from rrfp.tp_coord.agreement import Solo
from rrfp.tp_coord.scripted_agreement import ScriptedDomain

BEFORE, AFTER = 0.0, 2.0  # when a wait for announced work is asked about: everything announced here is expected at 1.0
STATE = {"_lacking", "_running", "_announced", "_weights_in_order", "hint"}
FOLLOWS_FROM_IT = {
    "in_flight", "pending_w", "started", "done", "launched_count", "completed_count", "_promised_w", "_waiters", "_queues",
    "_by_direction", "_forward_position", "_finish_position", "durations"}
NEVER_CHANGES = {"dependencies", "limit", "order", "max_pending_w", "admission", "digest", "_tasks", "_forwards", "_finish_order"}
ONLY_REPORTED = {"peak_in_flight", "peak_pending_w"}
_FIXED_IN_A_HINT = {"_row", "_place", "_places", "_queues", "_free", "_skips", "_slack", "_probes", "_ways", "_target", "_alternate"}


class Violation(AssertionError):
    """A property does not hold in a reachable state."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def scheduler_key(scheduler: Scheduler, *, leads: bool = True) -> tuple:
    """Everything that the future of a scheduler depends on; tests/model_check/test_components.py watches for new attributes.

    A member that follows launches what is agreed as soon as that is ready and admitted: what its own hint would say is nothing to it.
    """
    lacking = scheduler._lacking
    return (
        tuple(lacking.values()),
        tuple(scheduler._running),
        # What was announced for a message that is here already is never looked at again.
        frozenset(key for key in scheduler._announced if key in scheduler._waiters),
        tuple(action for action in scheduler._weights_in_order if lacking[action] == 0),
        tuple(value for name, value in vars(scheduler.hint).items() if name not in _FIXED_IN_A_HINT) if leads else (),
    )


def fork_scheduler(scheduler: Scheduler) -> Scheduler:
    """A copy of all that changes; tests/model_check/test_components.py walks a copy and its original apart."""
    new = copy.copy(scheduler)
    for name in ("durations", "started", "done", "_running", "_announced", "_lacking", "_waiters", "_weights_in_order"):
        setattr(new, name, copy.copy(getattr(scheduler, name)))
    queues = new._queues = {key: copy.copy(queue) for key, queue in scheduler._queues.items()}
    for queue in queues.values():
        queue.heap = None if queue.heap is None else list(queue.heap)
    new._by_direction = {
        way: [queues[queue.stage, queue.kind] for queue in found] for way, found in scheduler._by_direction.items()}
    hint = new.hint = copy.copy(scheduler.hint)
    if "_queues" in vars(hint):
        hint._queues = [queues[queue.stage, queue.kind] for queue in hint._queues]
    return new


class Domain(ScriptedDomain):
    """The real scripted agreement; its news comes when the explorer says so, in order per edge and lane only."""

    def __init__(self, members: int, *, lanes: int):
        super().__init__(members, clock=VirtualClock())
        self.lanes = lanes
        self.news: dict[tuple, deque[FunctionType]] = {}

    def tell(self, source, target, news):
        about = _captured(news)
        edge = next((value for value in about if isinstance(value, Edge)), None)
        lane = next((v for v in about[1:] if isinstance(v, int) and edge is not None), 0) % self.lanes
        self.news.setdefault((source, target, edge, lane), deque()).append(news)

    def fork(self) -> "Domain":
        new = copy.copy(self)
        new.news = {channel: deque(queue) for channel, queue in self.news.items() if queue}
        new._members = [copy.copy(member) for member in self._members]
        for member in new._members:
            member._domain, member._new, member._seen = new, list(member._new), member._seen.copy()
            member._sequence = {call: list(actions) for call, actions in member._sequence.items()}
        return new

    def key(self) -> tuple:
        members = tuple(
            (m._call, tuple(m._new), frozenset(m._seen.items()), tuple((c, tuple(s)) for c, s in m._sequence.items() if s))
            for m in self._members)
        return members, frozenset((channel, tuple(map(_captured, queue))) for channel, queue in self.news.items() if queue)


def _captured(news: FunctionType) -> tuple:
    """What a piece of news is about: the values that it closes over, in the order of their names (call, edge, microbatch)."""
    return tuple(cell.cell_contents for cell in news.__closure__)


class Rank:
    """One rank's members (one, or a domain's): their schedulers and agreements, and what the engine does with them.

    Args:
        calls: per call, one fresh scheduler per member.
        lanes: of every edge.
        announces: whether starts are announced.
        any_choice: whether every admissible action may be chosen, not only the hint's.
        blocking: a send blocks the rank until it has left (a control; the engine never does that).
        roomy: no edge's messages ever wait for a credit.
    """

    def __init__(self, calls, *, lanes=1, announces=False, any_choice=False, blocking=False, roomy=False):
        self.calls, self.announces, self.any_choice, self.blocking, self.roomy = calls, announces, any_choice, blocking, roomy
        members = len(calls[0])
        self.domain = Domain(members, lanes=lanes) if members > 1 else None
        self.agreements = [self.domain.agreement(k) for k in range(members)] if self.domain else [Solo()]
        self.call = [-1] * members
        self.schedulers: list[Scheduler] = [None] * members
        self.running: list[Action | None] = [None] * members
        self.agreed: list[Action | None] = [None] * members
        self.windows = [CallWindow(ahead=4) for _ in range(members)]
        self.behind: list[tuple] = [()] * members
        """Per member, what the leader has launched and it has not: the domain's one sequence."""
        for k in range(members):
            self._begin(k)

    # -- what the explorer asks ----------------------------------------------------------------------------------------
    def fork(self) -> "Rank":
        """A copy that goes its own way; what never changes is shared."""
        new = copy.copy(self)
        new.domain = self.domain and self.domain.fork()
        if self.domain:
            new.agreements = [new.domain.agreement(k) for k in range(len(self.agreements))]
        else:
            new.agreements = [copy.copy(self.agreements[0])]
            new.agreements[0]._new = list(self.agreements[0]._new)
        new.schedulers = [fork_scheduler(scheduler) for scheduler in self.schedulers]
        for name in ("call", "running", "agreed", "behind"):
            setattr(new, name, list(getattr(self, name)))
        new.windows = [copy.copy(window) for window in self.windows]
        for window in new.windows:
            window._early = list(window._early)
        return new

    def key(self) -> tuple:
        return (
            tuple(scheduler_key(s, leads=k == 0) for k, s in enumerate(self.schedulers)), tuple(self.call), tuple(self.agreed), tuple(self.behind),
            self.domain.key() if self.domain else (),
            tuple(tuple(sorted((type(e) is Arrival, e.call, e.edge, e.microbatch) for e in w._early)) for w in self.windows))

    def check(self) -> None:
        for scheduler in self.schedulers:
            rank, bound = scheduler.dependencies.rank, scheduler.limit
            chunks = len(scheduler.dependencies.stages)
            bound += chunks if scheduler.admission == "paper" and chunks > 1 else 0
            require(0 <= scheduler.in_flight <= bound, f"rank {rank} holds {scheduler.in_flight} activations, its limit is {bound}")
            for edge, kept in _kept(scheduler).items():
                require(kept <= bound, f"rank {rank} keeps {kept} buffers of edge {edge}, its limit is {bound}")
            most = scheduler.max_pending_w
            require(most is None or scheduler.pending_w <= most, f"rank {rank} has {scheduler.pending_w} W pending, above {most}")
            if scheduler.finished:
                ran = all(value == -2 for value in scheduler._lacking.values())
                require(ran and not scheduler.in_flight and not scheduler.pending_w, f"rank {rank} finished with something left")

    @property
    def finished(self) -> bool:
        last = len(self.calls) - 1
        return all(c == last and s.finished for c, s in zip(self.call, self.schedulers, strict=True))

    def events(self) -> list[tuple]:
        """(name, arguments...) of everything that this rank could try by itself."""
        found: list[tuple] = []
        for k, scheduler in enumerate(self.schedulers):
            if self.running[k] is not None:
                found.append(("end", k))
            elif scheduler.finished:
                if self.call[k] + 1 < len(self.calls):
                    found.append(("begin", k))
            elif k == 0 and self.any_choice:
                found += [("start", k, action) for action in scheduler.admissible()]
            else:
                found.append(("ask", k, BEFORE))
                if k == 0 and self.announces:
                    found.append(("ask", k, AFTER))
        if self.domain:
            found += [("hear", channel) for channel, queue in self.domain.news.items() if queue]
        return found

    def level(self, event: tuple) -> int:
        """From which level of the reduction on the event goes first alone; 0: never."""
        return reduction.level(self, event)

    # -- events --------------------------------------------------------------------------------------------------------
    def apply(self, event: tuple) -> tuple[str, list[tuple]] | None:
        """(what happened, outputs), or None if it cannot happen now. Call it on a fork."""
        return getattr(self, "_" + event[0])(*event[1:])

    def _begin(self, k: int):
        self.call[k] += 1
        self.schedulers[k] = fork_scheduler(self.calls[self.call[k]][k])
        self.agreements[k].begin(self.call[k])
        stray = self.windows[k].begin(self.call[k], lambda event: self._posted(k, event))
        require(stray is None, f"a message fits no call: {stray}")
        self._take(k)
        return f"begin call {self.call[k]} on rank {self._number}", [(k, edge, "flushed") for edge in self._edges_out(k)]

    def _arrive(self, k: int, call: int, edge: Edge, microbatch: int):
        require(self.windows[k].wrong(call) is None, f"message {microbatch} of {edge} came in the wrong call")
        self.windows[k].deliver(Arrival(call, edge, 0, microbatch, (), 0.0), lambda event: self._posted(k, event))
        self._take(k)
        return "", []

    def _announce(self, k: int, call: int, edge: Edge, microbatch: int):
        self.windows[k].deliver(Announcement(call, edge, microbatch, 0.0, 1.0), lambda event: self._posted(k, event))
        return "", []

    def _posted(self, k: int, event) -> None:
        if type(event) is Announcement:
            self.schedulers[k].announced(event.edge, event.microbatch, event.time, event.duration)
        else:
            self.agreements[k].arrived(event.edge, event.microbatch)

    def _take(self, k: int) -> None:
        """Like `Engine._take_events`."""
        for edge, microbatch in self.agreements[k].common():
            self.schedulers[k].arrived(edge, microbatch)

    def _hear(self, channel: tuple):
        source, target, *_ = channel
        news = self.domain.news[channel].popleft()
        about = " ".join(map(str, _captured(news)[1:]))
        self.domain.agreement(target).hear(news)
        self._take(target)
        return f"member {target} of rank {self._number} hears {about} from member {source}", []

    def _ask(self, k: int, now: float):
        """Like `Engine.advance`: choose, agree, launch."""
        scheduler = self.schedulers[k]
        decision = scheduler.choose(now)
        if k == 0 and not scheduler.hint.strict:
            # Else "any admissible choice" would not stand for it. `Announced` may also wait.
            admissible, chosen = scheduler.admissible(), decision.action
            waits = type(scheduler.hint) is Announced and (now == BEFORE or scheduler.hint._skips is not None)
            idle = not admissible or waits
            require(idle if chosen is None else chosen in admissible, f"{chosen} chosen where {admissible} are admissible")
        if now == AFTER and scheduler.choose(BEFORE).action == decision.action:
            return None  # no timer was running
        if self.agreed[k] is None:
            self.agreed[k] = self.agreements[k].decide(decision.action)
        action = self.agreed[k]
        if action is None:
            return f"rank {self._number} finds nothing to run", []
        may = action == decision.action or (
            scheduler.is_ready(action) and scheduler.admits(scheduler.queue(action.stage, action.kind), action))
        if not may:
            return None
        timer = "the timer fires, " if now == AFTER else ""
        return f"{timer}start {action}{self._member(k)}", self._launch(k, action)

    def _start(self, k: int, action: Action):
        self.agreed[k] = self.agreements[k].decide(action)
        return f"start {action}{self._member(k)}", self._launch(k, action)

    def _launch(self, k: int, action: Action) -> list[tuple]:
        scheduler = self.schedulers[k]
        self.agreed[k] = None
        if k == 0:
            self.behind = [(*queue, (self.call[0], action)) if j else () for j, queue in enumerate(self.behind)]
        else:
            expected, *rest = self.behind[k] or (None,)
            require(expected == (self.call[k], action), f"member {k} runs {action} where its leader ran {expected}")
            self.behind[k] = tuple(rest)
        task = scheduler.task(action)
        scheduler.launched(action, 0.0)
        self.running[k] = action
        outputs = [(edge, "flushed") for edge in self._edges_out(k)] if self.blocking else []
        outputs += [(edge, "consume", self.call[k], action.microbatch) for edge in task.arrivals]
        outputs += [(edge, "announce", self.call[k], action.microbatch) for edge in task.sends] if self.announces else []
        return [(k, *output) for output in outputs]

    def _end(self, k: int):
        action, self.running[k] = self.running[k], None
        scheduler = self.schedulers[k]
        task = scheduler.task(action)
        scheduler.completed(action, 0.0)
        outputs = [(edge, "send", self.call[k], action.microbatch) for edge in task.sends]
        # What an action read stays with its microbatch until the activation's slot is given back.
        backward = any(t.in_flight for t in scheduler._tasks.values())
        if task.in_flight < 0 or not backward:
            outputs += [(edge, "release", self.call[k], action.microbatch) for other in scheduler._tasks.values()
                        if (other.action.stage, other.action.microbatch) == (action.stage, action.microbatch) for edge in other.arrivals]
        return f"end {action}{self._member(k)}", [(k, *output) for output in outputs]

    def _edges_out(self, k: int) -> list[Edge]:
        return sorted({edge for task in self.schedulers[k]._tasks.values() for edge in task.sends})

    @property
    def _number(self) -> int:
        return self.schedulers[0].dependencies.rank

    def _member(self, k: int) -> str:
        return f" (member {k})" if self.domain else ""


def _kept(scheduler: Scheduler) -> Counter[Edge]:
    """Per incoming edge, messages of which an action was started and whose activation still has its slot."""
    lacking, tasks = scheduler._lacking, scheduler._tasks
    over = {(a.stage, a.microbatch) for a, task in tasks.items() if task.in_flight < 0 and lacking[a] == -2}
    trains = any(task.in_flight for task in tasks.values())
    return Counter(
        edge for action, task in tasks.items() if task.arrivals and lacking[action] < 0
        and ((action.stage, action.microbatch) not in over if trains else lacking[action] == -1) for edge in task.arrivals)
