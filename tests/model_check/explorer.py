"""All reachable states of ranks and links together.

Every component is unfolded on demand: its states are numbered by their keys, and each (state, event) is done once, on a copy of the
real object. A state of the whole is a tuple of such numbers. The reduction (docs/proof.md) is in reduction.py.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import reduction

from rrfp.action import Edge


class Move(NamedTuple):
    """One event of one component in one state."""

    event: tuple
    state: int
    label: str
    outputs: Sequence[tuple]
    level: int
    """From which level of the reduction on it goes first, alone."""


class Automaton:
    """A component (a `Rank` or a `Link`) and all of its states that were reached so far."""

    def __init__(self, start):
        start.check()
        self._objects, self._numbers = [start], {start.key(): 0}
        self._steps: dict[tuple[int, tuple], Move | None] = {}
        self._moves: list[list[Move] | None] = [None]
        self._first: dict[tuple, Move | None] = {}
        self._branches: dict[int, list[Move]] = {}

    def step(self, state: int, event: tuple) -> Move | None:
        """What `event` does in `state`; None if it cannot happen there."""
        key = state, event
        if key not in self._steps:
            self._steps[key] = self._do(state, event)
        return self._steps[key]

    def _do(self, state: int, event: tuple) -> Move | None:
        before = self._objects[state]
        component = before.fork()
        done = component.apply(event)
        if done is None:
            return None
        key = component.key()
        number = self._numbers.setdefault(key, len(self._objects))
        if number == len(self._objects):
            component.check()
            self._objects.append(component)
            self._moves.append(None)
        return Move(event, number, *done, before.level(event))

    def moves(self, state: int) -> list[Move]:
        """What the component can do by itself, without what changes nothing."""
        if self._moves[state] is None:
            moves = (self.step(state, event) for event in self._objects[state].events())
            self._moves[state] = [move for move in moves if self._matters(state, move)]
        return self._moves[state]

    def first(self, state: int, level: int) -> Move | None:
        """A move that goes first alone at this level of the reduction, if there is one. Level 3: any move."""
        key = state, level
        if key not in self._first:
            component = self._objects[state]
            moves = (self.step(state, event) for event in component.events() if level == 3 or 0 < component.level(event) <= level)
            self._first[key] = next((move for move in moves if self._matters(state, move)), None)
        return self._first[key]

    @staticmethod
    def _matters(state: int, move: Move | None) -> bool:
        return move is not None and (move.state != state or bool(move.outputs))

    def branches(self, state: int) -> list[Move]:
        """A rank's moves that go first together, if there are such."""
        if state not in self._branches:
            events = reduction.branches(self._objects[state])
            self._branches[state] = [] if events is None else [self.step(state, event) for event in events]
        return self._branches[state]

    def object(self, state: int):
        return self._objects[state]

    def __len__(self) -> int:
        return len(self._objects)


@dataclass
class Report:
    """What was explored.

    states: of the whole, distinct, at which something was to be chosen. passed: events done alone on the way to them. ends: states from
    which nothing leads on, finished or not. deadlock: the first unfinished one's trace.
    """

    states: int = 0
    passed: int = 0
    ends: set[tuple[int, ...]] = field(default_factory=set)
    reached: set[tuple[int, ...]] = field(default_factory=set)
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
        # What a member that follows receives leaves it no choice; where arrivals only allow more, no other rank either.
        self._arrivals_first = {
            index: 1 if member > 0 else 2 if reduction.monotone(ranks[receivers[edge]].object(0)) else 3
            for (member, edge), index in self._links.items()}

    def _together(self, state: tuple[int, ...], part: int, move: Move) -> tuple[int, ...] | None:
        """The state after `move` of one part and all that follows from it at once; None if another part does not let it happen."""
        after = list(state)
        return tuple(after) if self._do(after, part, move) is not None else None

    def _do(self, after: list[int], part: int, move: Move) -> list[int] | None:
        """`_together` in place. Which other parts have changed."""
        changed = []
        after[part] = move.state
        if part < self._ranks:
            for member, edge, *operation in move.outputs:
                link = self._links[member, edge]
                step = self._parts[link].step(after[link], (operation[0], edge, *operation[1:]))
                if step is None:
                    return None
                after[link] = step.state
                changed.append(link)
        else:
            for name, call, edge, microbatch in move.outputs:
                rank = self._receivers[edge]
                after[rank] = self._parts[rank].step(after[rank], (name, self._member[part], call, edge, microbatch)).state
                changed.append(rank)
        return changed

    def successors(self, state: tuple[int, ...], level: int = 0) -> list[tuple[str, tuple[int, ...]]]:
        """(what happens, the state after it)."""
        if level == 2:
            for part in range(self._ranks):
                if moves := self._parts[part].branches(state[part]):
                    return [(move.label, self._together(state, part, move)) for move in moves]
        found = []
        for part, number in enumerate(state):
            for move in self._parts[part].moves(number):
                if level == 2 and part < self._ranks and not reduction.stands_for(self._parts[part].object(number), move.event):
                    continue
                after = self._together(state, part, move)
                if after is not None:
                    found.append((move.label, after))
        return found

    def settle(self, state: tuple[int, ...], level: int) -> tuple[tuple[int, ...], int]:
        """(the state after everything is done that goes first alone, how many events that was)."""
        count = 0
        after, look = list(state), [*range(len(state))]
        while look:
            part = look.pop()
            own = 3 if part >= self._ranks and level >= self._arrivals_first[part] else level
            move = self._parts[part].first(after[part], own)
            if move is not None:
                look += [*self._do(after, part, move), part]
                count += 1
        return tuple(after), count

    def finished(self, state: tuple[int, ...]) -> bool:
        return all(part.object(number).finished for part, number in zip(self._parts, state, strict=True))

    def explore(self, *, level: int = 2, shortest: bool = False, most: int | None = None) -> Report:
        """Visit every reachable state.

        Args:
            level: of the reduction, 0 for none.
            shortest: breadth first, until the first deadlock, whose trace is then a shortest one in starts and arrivals.
            most: give up (`complete` False) beyond so many states.

        Raises:
            Violation: a property does not hold in a state reached.
        """
        level = min(level, 1) if shortest else level
        report = Report()

        def settle(state):
            if not level:
                return state
            state, passed = self.settle(state, level)
            report.passed += passed
            return state

        start = settle((0,) * len(self._parts))
        pending = deque([start])
        seen, came = {start}, {start: None}
        take = pending.popleft if shortest else pending.pop
        report.reached = seen
        while pending:
            state = take()
            successors = self.successors(state, level)
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
