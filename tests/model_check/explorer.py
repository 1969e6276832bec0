"""All reachable states of ranks and links together.

Every component is unfolded on demand: its states are numbered by their keys, and each (state, event) is done once, on a copy of the
real object. A state of the whole is a tuple of such numbers. What docs/proof.md calls the reduction is `System.settle`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rrfp.action import Edge


class Move(NamedTuple):
    """One event of one component in one state."""

    event: tuple
    state: int
    label: str
    outputs: Sequence[tuple]
    commutes: bool


class Automaton:
    """A component (a `Rank` or a `Link`) and all of its states that were reached so far."""

    def __init__(self, start):
        start.check()
        self._objects, self._numbers = [start], {start.key(): 0}
        self._steps: dict[tuple[int, tuple], Move | None] = {}
        self._moves: list[list[Move] | None] = [None]

    def step(self, state: int, event: tuple) -> Move | None:
        """What `event` does in `state`; None if it cannot happen there."""
        key = state, event
        if key not in self._steps:
            self._steps[key] = self._do(state, event)
        return self._steps[key]

    def _do(self, state: int, event: tuple) -> Move | None:
        component = self._objects[state].fork()
        done = component.apply(event)
        if done is None:
            return None
        key = component.key()
        number = self._numbers.setdefault(key, len(self._objects))
        if number == len(self._objects):
            component.check()
            self._objects.append(component)
            self._moves.append(None)
        return Move(event, number, *done, component.commutes(event))

    def moves(self, state: int) -> list[Move]:
        """What the component can do by itself, without what changes nothing."""
        if self._moves[state] is None:
            moves = (self.step(state, event) for event in self._objects[state].events())
            self._moves[state] = [move for move in moves if move is not None and (move.state != state or move.outputs)]
        return self._moves[state]

    def object(self, state: int):
        return self._objects[state]

    def __len__(self) -> int:
        return len(self._objects)


@dataclass
class Report:
    """states: of the whole, distinct. ends: those from which nothing leads on, finished or not. deadlock: the first unfinished one's trace."""

    states: int = 0
    ends: set[tuple[int, ...]] = field(default_factory=set)
    deadlock: list[str] | None = None
    complete: bool = True


class System:
    """Ranks and the links between them.

    Args:
        ranks: one automaton per pipeline rank.
        links: by (member, edge): which automaton of `channels` carries it.
        channels: the automata of the links.
        receivers: edge -> index of the rank that receives it.
    """

    def __init__(
        self, ranks: Sequence[Automaton], links: Mapping[tuple[int, Edge], int], channels: Sequence[Automaton],
        receivers: Mapping[Edge, int]):
        self._parts = [*ranks, *channels]
        self._ranks, self._receivers = len(ranks), receivers
        self._links = {key: index + len(ranks) for key, index in links.items()}
        self._member = {index: key[0] for key, index in self._links.items()}

    def _together(self, state: tuple[int, ...], part: int, move: Move) -> tuple[int, ...] | None:
        """The state after `move` of one part and all that follows from it at once; None if another part does not let it happen."""
        after = list(state)
        after[part] = move.state
        if part < self._ranks:
            for member, edge, *operation in move.outputs:
                link = self._links[member, edge]
                step = self._parts[link].step(after[link], (operation[0], edge, *operation[1:]))
                if step is None:
                    return None
                after[link] = step.state
        else:
            for name, call, edge, microbatch in move.outputs:
                rank = self._receivers[edge]
                after[rank] = self._parts[rank].step(after[rank], (name, self._member[part], call, edge, microbatch)).state
        return tuple(after)

    def successors(self, state: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """(what happens, the state after it)."""
        found = []
        for part, number in enumerate(state):
            for move in self._parts[part].moves(number):
                after = self._together(state, part, move)
                if after is not None:
                    found.append((move.label, after))
        return found

    def settle(self, state: tuple[int, ...]) -> tuple[int, ...]:
        """Everything done that commutes with whatever else can happen."""
        part = 0
        while part < len(state):
            for move in self._parts[part].moves(state[part]):
                # What a member that follows receives leaves it no choice.
                commutes = move.commutes or (part >= self._ranks and self._member[part] > 0)
                after = self._together(state, part, move) if commutes else None
                if after is not None:
                    state, part = after, -1
                    break
            part += 1
        return state

    def finished(self, state: tuple[int, ...]) -> bool:
        return all(part.object(number).finished for part, number in zip(self._parts, state, strict=True))

    def explore(self, *, reduced: bool = True, shortest: bool = False, most: int | None = None) -> Report:
        """Visit every reachable state.

        Args:
            reduced: with the reduction.
            shortest: breadth first, until the first deadlock, whose trace is then a shortest one in starts and arrivals.
            most: give up (`complete` False) beyond so many states.

        Raises:
            Violation: a property does not hold in a state reached.
        """
        settle = self.settle if reduced else lambda state: state
        start = settle((0,) * len(self._parts))
        report, pending = Report(), deque([start])
        seen, came = {start}, {start: None}
        take = pending.popleft if shortest else pending.pop
        while pending:
            state = take()
            successors = self.successors(state)
            if not successors:
                report.ends.add(state)
                if report.deadlock is None and not self.finished(state):
                    report.deadlock = _trace(came, state) if shortest else [self._explain(state)]
                    if shortest:
                        break
            for label, after in successors:
                after = settle(after)
                if after not in seen:
                    seen.add(after)
                    if shortest:
                        came[after] = state, label
                    pending.append(after)
            if most is not None and len(seen) > most:
                report.complete = False
                break
        report.states = len(seen)
        return report

    def _explain(self, state: tuple[int, ...]) -> str:
        ranks = (part.object(number) for part, number in zip(self._parts[:self._ranks], state, strict=False))
        return "; ".join(line for rank in ranks for scheduler in rank.schedulers for line in scheduler.explain())

    def explain_end(self, report: Report) -> str:
        """What holds every rank in an unfinished end."""
        return "; ".join(self._explain(state) for state in report.ends if not self.finished(state))


def _trace(came: Mapping, state: tuple[int, ...]) -> list[str]:
    labels = []
    while (step := came[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]
