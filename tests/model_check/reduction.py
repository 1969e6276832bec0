"""Which events of a rank may go first, alone or together with their rivals (docs/proof.md, the reduction).

Level 0 reduces nothing. Level 1 puts at once what leaves no choice whatever chooses. Level 2 also uses that more arrivals only allow more,
where any admissible action may be chosen or a list is obeyed, and branches only between actions that compete for a slot.
"""

from collections.abc import Iterator

from rrfp.action import Action
from rrfp.scheduler import Dependencies, Scheduler
from rrfp.scheduler.hints import Strict


def monotone(rank) -> bool:
    """Whether an arrival never takes a choice away: any admissible action may be chosen, or the only one that a list allows."""
    return not rank.blocking and (rank.any_choice or all(_fixed(s) for s in rank.calls[0]))


def _fixed(scheduler: Scheduler) -> bool:
    """A strict list without ties."""
    return type(scheduler.hint) is Strict and all(len(group) == 1 for group in scheduler.hint._row)


def level(rank, event: tuple) -> int:
    """From which level on `event` goes first alone; 0: never."""
    name, who = event[0], event[1]
    if name == "end" or (name == "ask" and who > 0) or (name == "hear" and who[1] > 0):
        return 1
    if name not in ("hear", "ask", "start") or not monotone(rank):
        return 0
    if name != "start":
        return 2
    return 0 if any(True for _ in rivals(rank, event[2])) else 2


def branches(rank) -> list[tuple] | None:
    """Starts that may go first together, all others left out, where nothing could join or disable them before one of them has started."""
    if not (rank.any_choice and monotone(rank)):
        return None
    admissible = {event[2] for event in rank.events() if event[0] == "start"}
    for action in admissible:
        together = {action, *rivals(rank, action)}
        if together <= admissible:
            return [("start", 0, other) for other in sorted(together)]
    return None


def stands_for(rank, event: tuple) -> bool:
    """Level 2, free order: what stage 0 starts first is called 0, and so on. False for the same run under other names."""
    return event[0] != "start" or not _renamed(rank.schedulers[0], event[2])


def rivals(rank, action: Action) -> Iterator[Action]:
    """Actions not started that could start before `action` does, and whose start or message it could matter to have before or after."""
    scheduler = rank.schedulers[0]
    task = scheduler.task(action)
    several = len(scheduler.dependencies.stages) > 1
    required = scheduler._required() if scheduler.admission == "paper" and several else None
    if required is not None:
        return
    everything = scheduler.admission == "paper" and several
    slots = task.in_flight > 0 and not scheduler._forwards and _scarce(scheduler)
    weights = task.backlog > 0 and scheduler.max_pending_w is not None
    lane = scheduler.order == "free" and task.sends and not rank.roomy
    if not (everything or slots or weights or lane):
        return
    for queue in scheduler.queues:
        same = (queue.stage, queue.kind) == (action.stage, action.kind)
        for other in queue.actions[queue.position:] if scheduler.order == "free" else [queue.head]:
            if other is None or other == action or scheduler._lacking[other] < 0 or _renamed(scheduler, other):
                continue
            its = scheduler.task(other)
            competes = (everything or (slots and its.in_flight > 0) or (weights and its.backlog > 0) or (lane and same))
            # What needs one of them first cannot start before them.
            if competes and not any(scheduler._lacking[before] >= 0 for before in its.after if everything or before.kind == other.kind):
                yield other


def _scarce(scheduler: Scheduler) -> bool:
    """Whether a forward could still be held by the limit."""
    left = [queue for queue in scheduler.queues if queue.kind == "F"]
    count = sum(len(queue.actions) - queue.launched for queue in left)
    return scheduler.limit - scheduler.in_flight < count + max(queue.need for queue in left) - 1


def _renamed(scheduler: Scheduler, action: Action) -> bool:
    if scheduler.order != "free" or action.kind != "F" or scheduler.task(action).arrivals or not _alike(scheduler.dependencies):
        return False
    first = scheduler.dependencies.stages[0]
    return action.stage == first == 0 and action != scheduler.queue(0, "F").head


_ALIKE: dict[int, tuple] = {}


def _alike(dependencies: Dependencies) -> bool:
    """Whether microbatches but 0 differ in nothing but their number."""
    known = _ALIKE.get(id(dependencies))
    if known is None or known[0] is not dependencies:
        shapes: dict[tuple, set] = {}
        for action, task in dependencies.tasks.items():
            if action.microbatch:
                after = tuple((b.kind, b.stage, b.microbatch - action.microbatch if b.microbatch else "first") for b in task.after)
                shapes.setdefault((action.kind, action.stage), set()).add(
                    (after, task.arrivals, task.sends, task.in_flight, task.backlog))
        known = _ALIKE[id(dependencies)] = dependencies, all(len(shape) == 1 and all(
            step in (0, "first") for after, *_ in shape for *_, step in after) for shape in shapes.values())
    return known[1]
