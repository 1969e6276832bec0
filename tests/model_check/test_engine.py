"""The explorer's rank does what the engine's loop does: every transition of it, done by a real `Engine`, leads to the same state."""

from collections.abc import Iterable

import pytest
from cells import ANY, Cell
from components import AFTER, Domain, scheduler_key
from explorer import Automaton

from rrfp.action import Action
from rrfp.comm.transport import Announcement, Arrival
from rrfp.engine.loop import Completion, Engine
from rrfp.scheduler.arbiter import Decision, Scheduler
from rrfp.tp_coord.agreement import Solo

CELLS = [
    Cell((2, 2, 1, 1), "announced", limit="2p"), Cell((2, 2, 1, 1), ANY, split=True, max_pending_w=1), Cell((2, 2, 1, 1), "fill-r", split=True),
    Cell((2, 2, 1, 1), "bf", order="free", lanes=2), Cell((2, 2, 1, 1), "1f1b", mode="strict"), Cell((2, 1, 2, 1), "bf", limit="paper:1"),
    Cell((2, 2, 1, 2), "bf"),
]
MORE = [Cell((3, 3, 1, 1), "announced", limit="2p"), Cell((2, 2, 2, 1), ANY), Cell((2, 2, 1, 2), "announced", lanes=2)]


class Silent:
    """A recorder that keeps nothing."""

    def __getattr__(self, name):
        return lambda *arguments, **options: None


class Port:
    """A transport and an executor that only keep what the loop asked of them."""

    capacity, padded = 1, 0.0

    def __init__(self):
        self.asked: list[tuple] = []

    def begin(self, *arguments):
        pass

    def send(self, edge, microbatch, payload, **options):
        self.asked.append((edge, "send", 0, microbatch))

    def announce(self, edge, microbatch, duration, **options):
        self.asked.append((edge, "announce", 0, microbatch))

    def consumed(self, arrival):
        self.asked.append((arrival.edge, "consume", 0, arrival.microbatch))

    def launch(self, task, inputs, done):
        """Runs until the explorer's event `end`."""


class Loop:
    """The members of one rank, each a real `Engine`, doing the events of a `Rank`."""

    def __init__(self, cell: Cell, rank: int):
        members = cell.schedulers()[rank][0]
        self.domain = Domain(len(members), lanes=cell.lanes) if len(members) > 1 else None
        self.time, self.engines, self.ports = [0.0], [], []
        for k, scheduler in enumerate(members):
            port = Port()
            engine = Engine(rank=rank, owner=cell.stages.rank_of, transport=port, recorder=Silent(), timeout=1e9, clock=self._now,
                            agreement=self.domain.agreement(k) if self.domain else Solo())
            engine.begin(scheduler, port, announce=scheduler.announces)
            self.engines.append(engine)
            self.ports.append(port)

    def _now(self) -> float:
        """0.0, but once AFTER where the explorer asks so: that is when the loop chooses."""
        now, self.time[0] = self.time[0], 0.0
        return now

    def do(self, event: tuple) -> list[tuple]:
        """What the loop asks of transport and executor."""
        name, k = event[0], event[1]
        if name == "hear":
            k = event[1][1]
            self.domain.agreement(k).hear(self.domain.news[event[1]].popleft())
        engine, port = self.engines[k], self.ports[k]
        scheduler = engine.scheduler
        if name == "arrive":
            engine.post(Arrival(event[2], event[3], 0, event[4], (), 0.0))
        elif name == "announce":
            engine.post(Announcement(event[2], event[3], event[4], 0.0, 1.0))
        elif name == "end":
            action: Action = engine.running
            engine.post(Completion(action, dict.fromkeys(scheduler.task(action).sends, ()), 0.0))
        if name in ("ask", "start"):
            self.time[0] = AFTER if event[2] == AFTER else 0.0
            if name == "start":
                scheduler.choose = lambda now: Decision(event[2])
            engine.advance()
            vars(scheduler).pop("choose", None)
        else:
            engine._take_events()
        asked = [(k, *each) for each in port.asked]
        port.asked.clear()
        return asked

    def state(self) -> tuple:
        return _keys(engine.scheduler for engine in self.engines), self.domain.key() if self.domain else ()


def _keys(schedulers: Iterable[Scheduler]) -> tuple:
    return tuple(scheduler_key(scheduler, leads=k == 0) for k, scheduler in enumerate(schedulers))


def check_rank(cell: Cell, rank: int, part: Automaton) -> int:
    """Every transition that the exploration took, on a fresh loop brought to its state. How many."""
    leaving: dict[int, list[tuple]] = {}
    for (state, event), move in part._steps.items():
        if move is not None:
            leaving.setdefault(state, []).append(event)
    paths, todo, checked = {0: ()}, [0], 0
    while todo:
        state = todo.pop()
        for event in leaving.get(state, ()):
            loop, move = Loop(cell, rank), part.step(state, event)
            for before in paths[state]:
                loop.do(before)
            asked = loop.do(event)
            there = part.object(move.state)
            expected = [each for each in move.outputs if each[2] not in ("release", "flushed")]
            assert asked == expected, f"{cell}, rank {rank}: {move.label or event}"
            domain = there.domain.key() if there.domain else ()
            assert loop.state() == (_keys(there.schedulers), domain), f"{cell}, rank {rank}: {move.label or event}"
            checked += 1
            if move.state not in paths:
                paths[move.state] = (*paths[state], event)
                todo.append(move.state)
    return checked


@pytest.mark.timeout(3000)
def test_every_transition_is_the_loop_s_own(full):
    for cell in CELLS + (MORE if full else []):
        system = cell.system()
        system.explore(level=1)
        checked = sum(check_rank(cell, rank, part) for rank, part in enumerate(system._parts[:system._ranks]))
        print(f"{cell}: {checked:,} transitions")


def test_a_loop_that_differs_is_noticed(monkeypatch):
    """Control: one that announces too late."""
    launch = Engine._launch

    def late(self, action):
        announce, self._announce = self._announce, False
        launch(self, action)
        self._announce = announce

    monkeypatch.setattr(Engine, "_launch", late)
    system = CELLS[0].system()
    system.explore(level=1)
    with pytest.raises(AssertionError, match="start"):
        check_rank(CELLS[0], 0, system._parts[0])
