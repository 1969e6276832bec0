"""The whole product of policies at the named sizes (docs/proof.md, how every policy is covered).

Three steps: any admissible choice, strict lists and bounded announced waits in the whole pipeline, for deadlocks; every rank alone under
any admissible choice, for bounds; every rank alone under every hint, for the claim that hints only choose among the admissible.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from time import process_time
from unittest import mock

import pytest
from alone import explore_alone
from cells import ANY, Cell, covering, distinct, policies, with_transports
from components import Violation
from explorer import Automaton
from test_proof import ALL, BOTH, FOUR

from rrfp import hint_names
from rrfp.policy import register_hint
from rrfp.scheduler import lists
from rrfp.scheduler.arbiter import WAIT
from rrfp.scheduler.hints import Announced, Rounds

# Shape, one policy in so many: reduced, full, deep.
NAMED = {(4, 4, 1, 1): (89, 1, 1), (4, 3, 1, 2): (499, 5, 1), (3, 3, 2, 1): (199, 1, 1), (2, 3, 2, 2): (999, 11, 1)}


def explore_all(cells: Sequence[Cell], name: str) -> None:
    """Every system in its pipeline: no deadlock, one end."""
    start, states, passed, largest = process_time(), 0, 0, 0
    for cell in cells:
        # What the paper's limit lets several chunks do is not bounded rank by rank: here its bounds are looked at as well.
        report = cell.system().explore(level=1 if cell.paper else 2)
        assert report.deadlock is None, f"{cell}: {report.deadlock}"
        assert len(report.ends) == 1, f"{cell}: {len(report.ends)} ends"
        states, passed, largest = states + report.states, passed + report.passed, max(largest, report.states)
    seconds = process_time() - start
    print(f"{name}: {len(cells)} systems, {states:,} states (largest {largest:,}), {passed:,} events on the way, 0 deadlocks, "
          f"{seconds:.0f} s", flush=True)


def explore_ranks(cells: Sequence[Cell], name: str, *, most: int | None = None) -> None:
    """Every rank of every cell alone; ranks that behave alike once."""
    start, ranks, states, largest = process_time(), {}, 0, 0
    for cell in cells:
        for traits, rank in cell.alone():
            ranks.setdefault(traits, (cell, rank))
    for cell, rank in ranks.values():
        report = explore_alone(Automaton(rank), at_once=cell.any_choice, most=most)
        assert report.complete, f"{cell}: a rank has more than {most} states"
        states, largest = states + report.states, max(largest, report.states)
    print(f"{name}: {len(cells)} policies, {len(ranks)} ranks, {states:,} states (largest {largest:,}), {process_time() - start:.0f} s",
          flush=True)


def ranking(cells: Sequence[Cell]) -> list[Cell]:
    """Those that any admissible choice covers if their hints only rank."""
    return [cell for cell in cells if not cell.by_itself]


@pytest.mark.timeout(86400)
@pytest.mark.parametrize("shape", NAMED, ids=lambda shape: "x".join(map(str, shape)))
def test_no_policy_deadlocks(shape, full, deep):
    cells = list(policies(shape, part=NAMED[shape][deep + full]))
    cover = covering(cells)
    kinds = {"any": [c for c in cover if c.any_choice], "strict": [c for c in cover if c.mode == "strict"],
             "announced": [c for c in cover if not c.any_choice and c.mode == "ready"]}
    for kind, part in kinds.items():
        # Lanes 1 and 2, credits 1 and 4.
        explore_all(with_transports(part, FOUR if full else BOTH), f"{shape} {kind}: {len(part)} of {len(cells)} combinations")


@pytest.mark.timeout(3000)
def test_no_bound_is_exceeded(full):
    """In free order the counts that are bounded are those of microbatch order: which microbatch it is does not matter to them."""
    for shape in NAMED:
        cells = ranking(list(policies(shape, part=1 if full else 199)))
        kept = [cell for cell in cells if not cell.paper and cell.order != "free"]
        explore_ranks(covering(kept), f"{shape} any, every rank alone")


# Shape, one policy in so many: reduced, full, deep.
HINTS = [((2, 2, 1, 1), 7, 1, 1), ((3, 3, 1, 1), 97, 11, 1), ((2, 2, 2, 1), 97, 23, 1), ((4, 4, 1, 1), None, 47, 1), ((2, 3, 2, 1), None, None, 1)]


@pytest.mark.timeout(86400)
def test_every_hint_only_ranks(full, deep):
    """Whatever a rank has seen, its hint takes an admissible action, and one if there is one (`Rank._ask` checks that)."""
    for shape, *parts in HINTS:
        part = parts[deep + full]
        if part is not None:
            cells = [cell for cell in ranking(list(policies(shape, part=part))) if cell.hint != ANY]
            large = shape in ((4, 4, 1, 1), (2, 3, 2, 1))
            # The paper's limit with a bound of W is looked at in its pipeline: alone, a rank could be sent what never comes so.
            kept = [c for c in cells if not (large and c.order == "free") and not (c.paper and c.max_pending_w)]
            explore_ranks(distinct(iter(kept)), f"{shape} every hint, one in {part}, every rank alone")


def test_a_hint_that_does_more_than_rank_is_noticed(monkeypatch):
    """Controls: one that idles where something could run, one that takes what the limit holds."""
    def idle(self, scheduler, now):
        return WAIT if scheduler.started["F"] == 1 else choose(self, scheduler, now)

    def greedy(self, scheduler, now):
        ready = [a for q in scheduler.queues if (a := scheduler.ready_in(q)) is not None]
        return WAIT._replace(action=ready[-1] if ready else None)

    choose = Rounds.choose
    for broken in (idle, greedy):
        monkeypatch.setattr(Rounds, "choose", broken)
        with pytest.raises(Violation, match="chosen where"):
            explore_ranks([Cell((2, 3, 1, 1), "bf", limit="2")], "control")


def test_a_wait_without_a_timer_is_not_covered(monkeypatch):
    """Control: `announced` counts as covered only where its timer ends every wait."""
    assert Cell((4, 4, 1, 1), "announced").by_itself and not Cell((4, 4, 1, 1), "announced", split=True).by_itself
    choose = Announced.choose
    monkeypatch.setattr(Announced, "choose", lambda self, scheduler, now: (
        d if (d := choose(self, scheduler, 0.0)).wake_at is None else WAIT))
    with pytest.raises(Violation, match="None chosen where"):
        explore_ranks([Cell((3, 3, 1, 1), "announced", limit="2p", split=True)], "control")


# -- registered hints and files -------------------------------------------------------------------------------------------


def shuffled(context, rng: random.Random) -> list[list]:
    """A legal list for every rank: what a run with random choices did; now and then two entries are a tie."""
    cell = Cell((context.placement.ranks, context.microbatches, context.placement.stages // context.placement.ranks, 1), ANY,
                limit="2p", split=context.split)
    schedulers = [calls[0][0] for calls in cell.schedulers()]
    rows: list[list] = [[] for _ in schedulers]
    receivers = {edge: s for s in schedulers for task in s.dependencies.tasks.values() for edge in task.arrivals}
    while choices := [(s, row, a) for s, row in zip(schedulers, rows, strict=True) for a in s.admissible()]:
        scheduler, row, action = rng.choice(choices)
        scheduler.launched(action, 0.0)
        scheduler.completed(action, 0.0)
        row.append(action)
        for edge in scheduler.task(action).sends:
            receivers[edge].arrived(edge, action.microbatch)
    return rows


@pytest.fixture
def no_other_hints():
    with mock.patch.dict(hint_names.registered, clear=True):
        yield


@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("no_other_hints")
def test_registered_hints_and_files_only_rank(full, seed, tmp_path):
    """Lists that no built-in hint has: as a registered function, as a file; in ready mode, and obeyed."""
    ranked, strict = [], []
    for number in range(40 if full else 6):
        rng = random.Random(seed + number)
        shape = rng.choice([(2, 2, 1, 1), (3, 2, 1, 1), (2, 3, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2)])
        split, order = rng.random() < 0.5, rng.choice(["microbatch", "free"])
        name = f"shuffled-{number}"
        made: dict[tuple, list] = {}

        def rows(context, made=made, number=number):
            key = context.placement, context.microbatches, context.split
            return made.setdefault(key, shuffled(context, random.Random(seed + number)))

        register_hint(name, rows)
        cell = Cell(shape, name, limit="2p", split=split, order=order)
        cell.schedulers()
        file = tmp_path / f"{name}.csv"
        lists.write([lists.as_row(row) for row in next(iter(made.values()))], file)
        for each in (cell, replace(cell, hint=str(file))):
            ranked.append(each)
            strict.append(replace(each, mode="strict", limit="2p"))
    explore_ranks(ranked, "shuffled lists, every rank alone")
    explore_all(with_transports(strict, FOUR), "shuffled lists, obeyed")
    explore_all(covering(ranked), "shuffled lists, any admissible choice in their place")
    for cell in ranked[:4]:
        report = cell.system().explore(level=1)
        assert report.deadlock is None and len(report.ends) == 1, str(cell)


def test_hints_are_parts_of_any_admissible_choice(full):
    """The argument at work: what ranks have started, in every state under a hint, is what they could have started under any choice."""
    cells = [Cell((2, 2, 1, 1), hint, limit=limit, split=split) for hint in ALL for limit in ("1f1b", "2p") for split in (False, True)
             if hint != ANY and (split or hint not in hint_names.SPLIT_ONLY)]
    cells += [Cell((2, 2, 2, 1), hint) for hint in ("bf", "fill-alt", "announced")] if full else []
    found: dict[tuple, set] = {}
    for cell in cells:
        cover = replace(cell, any_choice=True)
        if cover.behaviour() not in found:
            found[cover.behaviour()] = dispatched(cover)
        part, whole = dispatched(cell), found[cover.behaviour()]
        assert part <= whole, str(cell)


def dispatched(cell: Cell) -> set[tuple]:
    """By reachable state: which actions every rank has begun."""
    system = cell.system()
    return {tuple(frozenset(a for a, lacking in s._lacking.items() if lacking < 0) for part, number in
                  zip(system._parts[:system._ranks], state, strict=False) for s in part.object(number).schedulers)
            for state in system.explore(level=1).reached}
