"""What each action of a rank waits for, and what it hands on: the whole shape of a pipeline, as data.

The scheduler reads nothing else. `chain` builds it for a chain of stages; a program, or a test, may build any other graph.
"""

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace

from rrfp.action import Action, Edge
from rrfp.placement import Placement


@dataclass(frozen=True, slots=True)
class Task:
    """One action and everything that the scheduler knows about it."""

    action: Action
    after: tuple[Action, ...] = ()
    """Actions of the same rank that must have completed."""
    arrivals: tuple[Edge, ...] = ()
    """Edges on which the message for `action.microbatch` must have arrived."""
    sends: tuple[Edge, ...] = ()
    """Edges that carry the result."""
    in_flight: int = 0
    """+1: takes an activation slot of its rank at launch. -1: gives it back at completion."""
    backlog: int = 0
    """+1: leaves a weight gradient pending at completion. -1: takes one off at launch."""


@dataclass(frozen=True)
class Dependencies:
    """The tasks of one rank.

    Args:
        rank: the pipeline rank.
        stages: its stages in chunk order, which is also the order in which they share the limit.
        tasks: every action that the rank runs in one call.
    """

    rank: int
    stages: tuple[int, ...]
    tasks: Mapping[Action, Task]


def chain(
    placement: Placement,
    rank: int,
    microbatches: int,
    *,
    forward_only: bool = False,
    split: bool = False,
    whole: Container[tuple[int, int]] = (),
    first_trainable: int = 0,
) -> Dependencies:
    """The tasks of `rank` when stages form a chain: activations go up it, gradients come back down.

    Args:
        microbatches: how many run in the call, 0..M-1.
        forward_only: no backward at all, so no activation is held.
        split: the backward runs as I (input gradient, sends) and W (weight gradient, gives the slot back).
        whole: (stage, microbatch) of backwards that run as B although `split`.
        first_trainable: stages below it have no backward and hold no activation; no gradient is sent to them.
    """
    last = placement.stages - 1
    tasks: dict[Action, Task] = {}

    def link(source: int, destination: int) -> tuple[Edge, ...]:
        # A neighbour on the same rank is a local hand-off: a predecessor, not a message.
        exists = 0 <= min(source, destination) and max(source, destination) <= last
        return (Edge(source, destination),) if exists and placement.rank_of(source) != placement.rank_of(destination) else ()

    def splits(stage: int, microbatch: int) -> bool:
        return split and (stage, microbatch) not in whole

    def is_local(stage: int) -> bool:
        return 0 <= stage <= last and placement.rank_of(stage) == rank

    for s in placement.stages_of(rank):
        trains = not forward_only and s >= first_trainable
        below, above = is_local(s - 1), is_local(s + 1)
        # One tuple for all microbatches: there may be millions of tasks.
        from_below, to_above, from_above = link(s - 1, s), link(s, s + 1), link(s + 1, s)
        to_below = link(s, s - 1) if s > first_trainable else ()
        for m in range(microbatches):
            forward = Action("F", s, m)
            tasks[forward] = Task(forward, (Action("F", s - 1, m),) if below else (), from_below, to_above, 1 if trains else 0, 0)
            if not trains:
                continue
            parts = splits(s, m)
            gradient = Action("I" if parts else "B", s, m)
            after = (forward, Action("I" if splits(s + 1, m) else "B", s + 1, m)) if above else (forward,)
            tasks[gradient] = Task(gradient, after, from_above, to_below, 0 if parts else -1, 1 if parts else 0)
            if parts:
                weight = Action("W", s, m)
                tasks[weight] = Task(weight, (gradient,), (), (), -1, -1)
    return Dependencies(rank, placement.stages_of(rank), tasks)


def first_forward_first(dependencies: Dependencies) -> Dependencies:
    """The same tasks, with microbatch 0 the first forward of every stage.

    In free order over lanes that overtake, another could come first; but what a forward takes from its data iterator is learned from
    the first one, and has to be learned from microbatch 0.
    """

    def wait(task: Task) -> Task:
        kind, stage, microbatch = task.action
        return replace(task, after=(*task.after, Action("F", stage, 0))) if kind == "F" and microbatch else task

    return replace(dependencies, tasks={action: wait(task) for action, task in dependencies.tasks.items()})


def without_weights(dependencies: Dependencies, stages: Collection[int]) -> Dependencies:
    """The same tasks, less the W of `stages`, which have no weight whose gradient could wait: their I gives the slot back."""

    def end(task: Task) -> Task:
        kind, stage, _ = task.action
        return replace(task, in_flight=-1, backlog=0) if kind == "I" and stage in stages else task

    kept = {action: end(task) for action, task in dependencies.tasks.items() if not (action.kind == "W" and action.stage in stages)}
    return replace(dependencies, tasks=kept)
