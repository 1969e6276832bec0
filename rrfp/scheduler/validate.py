"""Refuses lists that cannot be run, before anything runs."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler.dependencies import Dependencies, Task
from rrfp.scheduler.hints import Row
from rrfp.scheduler.lists import actions_of, interleaved_forwards

Where = Callable[[int, int], str]
"""What to call an action's place, given its rank and its position in the row, counted from 0."""


def _position(rank: int, position: int) -> str:
    return f"rank {rank}, position {position}"


def check_rows(rows: Sequence[Row], pipeline: Sequence[Dependencies], *, source: str, where: Where = _position) -> None:
    """Every expected action exactly once, on its own rank, after what it needs there, and no deadlock across ranks.

    Args:
        rows: one row per rank.
        pipeline: the dependencies of every rank.
        source: what to call the list in a refusal, for example `--rrfp-hint zb.csv`.
        where: what to call an action's place, given rank and position; a file's names line and column.

    Raises:
        ConfigurationError: naming the place and the token.
    """
    if len(rows) != len(pipeline):
        raise ConfigurationError(f"{source}: has {len(rows)} rows for {len(pipeline)} ranks; write one row per rank")
    homes = {action: dependencies.rank for dependencies in pipeline for action in dependencies.tasks}
    _check_placement(rows, {action.stage: rank for action, rank in homes.items()}, source)
    for dependencies, row in zip(pipeline, rows, strict=True):
        _check_row(dependencies, row, homes, source, where)
    stuck = replay(rows, pipeline).stuck
    if stuck:
        places = " and ".join(f"{action} at {where(rank, position)}" for rank, position, action in stuck)
        raise ConfigurationError(f"{source}: deadlocks: {places} wait for each other; reorder these rows")


def _check_placement(rows: Sequence[Row], homes: Mapping[int, int], source: str) -> None:
    """A V is named as such: it is the placement of published lists (ZB-V, DualPipeV), and no row of them could be mended here.

    homes: stage -> rank in this run.
    """
    owners = {action.stage: rank for rank, row in enumerate(rows) for action in actions_of(row)}
    ranks, chunks = len(rows), len(owners) // len(rows)
    if [owners[stage] for stage in sorted(owners)] != list(Placement.v(ranks, chunks).owners):
        return
    if strange := [stage for stage in sorted(owners) if owners[stage] != homes.get(stage)]:
        stage = strange[0]
        here = f"this run has it on rank {homes[stage]}" if stage in homes else f"this run has {len(homes)} stages"
        raise ConfigurationError(
            f"{source}: is a list with a V placement (as of ZB-V, DualPipeV): stage {stage} on rank {owners[stage]}, {here};"
            " use a list for this run's placement, for example --rrfp-hint 1f1b, or a rule, for example --rrfp-hint announced")


def _check_row(dependencies: Dependencies, row: Row, homes: Mapping[Action, int], source: str, where: Where) -> None:
    rank, seen = dependencies.rank, {}
    for position, action in enumerate(actions_of(row)):
        here = f"{source}: {where(rank, position)}: {action}"
        if action in seen:
            raise ConfigurationError(f"{here} stands at position {seen[action]} already; each action is listed once")
        if action not in dependencies.tasks:
            home = homes.get(action)
            why = f"belongs to rank {home}"
            if home is None:
                why = "is no action of this call (stage, microbatch and kind must exist)"
            whole = action._replace(kind="B")
            if action.kind in ("I", "W") and whole in dependencies.tasks:
                if whole in actions_of(row):
                    raise ConfigurationError(f"{here} is half of the backward that {whole} in this row is the whole of; list {whole}, or"
                                             f" {action._replace(kind='I')} and {action._replace(kind='W')}, not both")
                raise ConfigurationError(f"{here} is half of a split backward, and this run's is whole; split it, or write {whole}")
            raise ConfigurationError(f"{here} {why}; remove it")
        for before in dependencies.tasks[action].after:
            # A tie counts as order: what it needs must stand earlier, or in the same group, but before it.
            if before not in seen:
                raise ConfigurationError(f"{here} stands before {before}, which it needs; list {before} first")
        seen[action] = position
    missing = [action for action in dependencies.tasks if action not in seen]
    if missing:
        raise ConfigurationError(f"{source}: {where(rank, len(seen))}: the row ends without {missing[0]}"
                                 f" ({len(missing)} missing); list every action of the call")


def check_microbatch_order(rows: Sequence[Row], *, source: str) -> None:
    """A strict list must keep microbatch order within a (stage, kind), I and B counting as one, unless the order is free."""
    if (found := next(_out_of_order(rows), None)) is not None:
        rank, position, action, last = found
        way_out = "--rrfp-order free, or --rrfp-mode ready" if action.kind == last.kind else "--rrfp-order free"
        raise ConfigurationError(
            f"{source}: rank {rank}, position {position}: {action} after {last} leaves microbatch order; use {way_out}")


def check_mixed_backwards(rows: Sequence[Row], *, source: str) -> None:
    """A list that runs some of a stage's backwards whole and splits others must have them in microbatch order, unless the order is free.

    The two kinds are queues of their own, so microbatch order would not put one's before the other's: a gradient could be sent
    before an earlier one that its receiver, in microbatch order, wants first, and hold the edge's credits.
    """
    for rank, position, action, last in _out_of_order(rows):
        if action.kind != last.kind:
            raise ConfigurationError(f"{source}: rank {rank}, position {position}: {action} after {last}: where whole and split backwards of a"
                                     " stage mix, they must be in microbatch order; use --rrfp-order free")


def _out_of_order(rows: Sequence[Row]) -> Iterator[tuple[int, int, Action, Action]]:
    """(rank, position, action, the one before it of a larger microbatch), within a (stage, kind), I and B counting as one."""
    for rank, row in enumerate(rows):
        newest: dict[tuple[int, str], Action] = {}
        for position, action in enumerate(actions_of(row)):
            key = action.stage, "B" if action.kind == "I" else action.kind
            last = newest.setdefault(key, action)
            if last.microbatch > action.microbatch:
                yield rank, position, action, last
            newest[key] = action


def check_first_forward(rows: Sequence[Row], *, source: str) -> None:
    """A strict list in free order must still start every stage with microbatch 0 (`dependencies.first_forward_first`)."""
    for rank, row in enumerate(rows):
        seen: set[int] = set()
        for position, action in enumerate(actions_of(row)):
            if action.kind == "F" and action.stage not in seen:
                seen.add(action.stage)
                if action.microbatch:
                    raise ConfigurationError(
                        f"{source}: rank {rank}, position {position}: {action} is the first forward of its stage;"
                        f" start with {Action('F', action.stage, 0)}, from which its data iterator is learned")


def check_message_order(rows: Sequence[Row], pipeline: Sequence[Dependencies], *, source: str) -> None:
    """A strict list in free order may not wait for a message behind others that it leaves lying: they hold the edge's credits."""
    if stuck := replay(rows, pipeline, credits=1).stuck:
        rank, position, action = stuck[0]
        raise ConfigurationError(
            f"{source}: rank {rank}, position {position}: {action} waits for a message that stands behind others which the list"
            " wants later; take messages in the order in which they are sent, or use --rrfp-mode ready")


def check_forward_order(rows: Sequence[Row], placement: Placement, microbatches: int, *, source: str) -> None:
    """A strict list under --rrfp-order megatron must run forwards as interleaved 1F1B does."""
    for rank, row in enumerate(rows):
        forwards = [action for action in actions_of(row) if action.kind == "F"]
        expected = interleaved_forwards(placement.stages_of(rank), microbatches, placement.ranks)
        for position, (action, wanted) in enumerate(zip(forwards, expected, strict=True)):
            if action != wanted:
                raise ConfigurationError(
                    f"{source}: rank {rank}, forward {position}: {action} where --rrfp-order megatron needs {wanted};"
                    " use --rrfp-order microbatch")


@dataclass(frozen=True)
class Replay:
    """What a list does when it is obeyed."""

    stuck: list[tuple[int, int, Action]]
    """(rank, position, action) at which each unfinished rank waits for ever."""
    peak: list[int]
    """Most activations in flight per rank."""
    peak_pending: list[int]
    """Most pending weight gradients per rank."""


def replay(rows: Sequence[Row], pipeline: Sequence[Dependencies], *, credits: float = math.inf) -> Replay:
    """Obey the rows with no notion of time: what a rank holds at most depends on its own row alone.

    credits: messages of one edge that may be under way or not yet consumed; a list that runs with few runs with more.
    """
    done: set[Action] = set()
    arrived: set[tuple[Edge, int | None]] = set()
    left = [[list(group) for group in reversed(row)] for row in rows]
    peaks, pendings = [], []
    for dependencies, row in zip(pipeline, rows, strict=True):
        level = peak = pending = peak_pending = 0
        for action in actions_of(row):
            task = dependencies.tasks[action]
            level += task.in_flight
            pending += task.backlog
            peak, peak_pending = max(peak, level), max(peak_pending, pending)
        peaks.append(peak)
        pendings.append(peak_pending)

    def runnable(task: Task) -> bool:
        return all(a in done for a in task.after) and all((e, task.action.microbatch) in arrived for e in task.arrivals)

    def advance(rank: int) -> Iterator[Task]:
        while left[rank]:
            group = left[rank][-1]
            ready = next((a for a in group if runnable(pipeline[rank].tasks[a])), None)
            if ready is None:
                return
            group.remove(ready)
            if not group:
                left[rank].pop()
            done.add(ready)
            yield pipeline[rank].tasks[ready]

    receiver = {edge: index for index, d in enumerate(pipeline) for task in d.tasks.values() for edge in task.arrivals}
    sent: dict[Edge, deque[int | None]] = {edge: deque() for edge in receiver}
    free = dict.fromkeys(receiver, credits)
    wake = list(range(len(rows)))

    def deliver(edge: Edge) -> None:
        while sent[edge] and free[edge]:
            free[edge] -= 1
            arrived.add((edge, sent[edge].popleft()))
            wake.append(receiver[edge])

    while wake:
        for task in advance(wake.pop()):
            for edge in task.arrivals:
                free[edge] += 1
                deliver(edge)
            for edge in task.sends:
                if edge in receiver:
                    sent[edge].append(task.action.microbatch)
                    deliver(edge)
    stuck = [(pipeline[r].rank, len(actions_of(rows[r])) - sum(map(len, groups)), groups[-1][0])
             for r, groups in enumerate(left) if groups]
    return Replay(stuck, peaks, pendings)
