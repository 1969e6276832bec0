"""One rank under every environment: what holds here holds in every pipeline, however the other ranks behave."""

from collections import deque

from components import Rank
from explorer import Automaton, Report


def explore_alone(rank: Automaton, *, at_once: bool, most: int | None = None) -> Report:
    """All states of a rank whose messages and announcements come whenever the environment likes, or never.

    Args:
        rank: of one member and one call.
        at_once: all messages are here from the start. That is every environment if any admissible action may be chosen, since
            arrivals only allow more. Otherwise a message or announcement comes at any moment at which the scheduler can notice it.
        most: give up (`complete` False) beyond so many states.

    Raises:
        Violation: a bound does not hold, or a hint chose what is not admissible, or nothing where something was.
    """
    report, seen, pending = Report(), {0}, deque([0])
    while pending:
        state = pending.pop()
        component = rank.object(state)
        if (end := rank.first(state, 1)) is not None:
            # An action ends: what it was started with has been checked, and nothing is chosen before that.
            if end.state not in seen:
                seen.add(end.state)
                pending.append(end.state)
            continue
        messages = _noticed(component, everything=at_once)
        # At once: they come before anything else.
        moves = [rank.step(state, messages[0])] if at_once and messages else [
            *rank.moves(state), *(rank.step(state, message) for message in messages)]
        for move in moves:
            if move.state not in seen:
                seen.add(move.state)
                pending.append(move.state)
        if not moves:
            report.ends.add((state,))
        if most is not None and len(seen) > most:
            report.complete = False
            break
    report.states = len(seen)
    return report


def _noticed(rank: Rank, *, everything: bool) -> list[tuple]:
    """Messages not here yet; unless `everything`, only those that can matter to the next choice, and their announcements."""
    scheduler = rank.schedulers[0]
    found = []
    for queue in scheduler.queues:
        left = queue.actions[queue.position:]
        for action in left if everything or scheduler.order == "free" else left[:1]:
            for edge in scheduler.task(action).arrivals:
                if (edge, action.microbatch) in scheduler._waiters:
                    found.append(("arrive", 0, 0, edge, action.microbatch))
                    if rank.announces and (edge, action.microbatch) not in scheduler._announced:
                        found.append(("announce", 0, 0, edge, action.microbatch))
    return found
