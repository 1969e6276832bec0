"""`auto` in simulation: as good as the best of its candidates, and not slower than the fixed list at equal memory."""

from math import exp, log
from statistics import median

import pytest

from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler import Scheduler, chain
from rrfp.scheduler.hints import Strict
from rrfp.scheduler.lists import generate
from rrfp.simulate import drive, simulate
from rrfp.simulate.scenarios import LATE, SCENARIOS, draw

# ranks, microbatches, chunks, limit, split; candidates; by how much the best of them may be better (geometric mean over all scenarios)
CASES = {
    "1F1B's memory": ((8, 32, 1, "1f1b", False), ("alt", "fill", "fill-alt", "1f1b"), .000),
    "eager": ((8, 32, 1, "eager", False), ("alt", "fill", "1f1b"), .002),
    "a flat P": ((8, 32, 1, "8", False), ("alt", "fill", "fill-alt", "1f1b"), .000),
    "a quarter more": ((8, 32, 1, "10", False), ("alt", "fill", "1f1b"), .008),
    "2P": ((8, 32, 1, "2p", False), ("announced", "alt", "fill", "1f1b"), .002),
    "a slope": ((8, 32, 1, "23-9", False), ("announced", "alt", "fill"), .002),
    "split, 1F1B's memory": ((8, 32, 1, "1f1b", True), ("fill", "bfw", "alt", "zb-h1"), .002),
    "split, P": ((8, 32, 1, "8", True), ("fill", "fill-r", "bfw", "alt", "zb-h1"), .000),
    "split, 2P-1": ((8, 32, 1, "2p-1", True), ("fill", "fill-r", "bfw", "alt"), .012),
    "split, between": ((8, 32, 1, "12", True), ("announced", "fill", "bfw", "alt", "zb-h2"), .004),
    "split, a slope": ((8, 32, 1, "19-11", True), ("announced", "fill", "bfw", "alt"), .002),
    "two chunks": ((4, 16, 2, "1f1b", False), ("1f1b", "alt", "fill-alt", "bf"), .002),
    "two chunks, more memory": ((4, 16, 2, "14", False), ("announced", "1f1b", "alt"), .000),
    "two chunks, split": ((4, 16, 2, "1f1b", True), ("announced", "1f1b", "fill-r", "bfw"), .002),
}


def seconds(policy, case, scenarios, seeds, **options):
    """Makespans by scenario, one per seed."""
    ranks, microbatches, chunks, *_ = case
    placement = Placement.looped(ranks, chunks)
    return {name: [simulate(policy, placement, microbatches, *draw(name, ranks * chunks, microbatches, 1.0 / chunks, seed), **options).makespan
                   for seed in seeds] for name in scenarios}


def faster(slow, fast):
    """By scenario: median ratio, above 1 where `fast` is faster."""
    return {name: median(one / other for one, other in zip(slow[name], fast[name], strict=True)) for name in slow}


def mean(ratios):
    return exp(sum(map(log, ratios)) / len(ratios))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_no_candidate_is_better(name, full):
    """Full: 15 scenarios, 10 held-out seeds. Reduced: three scenarios and two seeds, with more room."""
    case, candidates, room = CASES[name]
    scenarios, seeds = (SCENARIOS, range(15, 25)) if full else (("jitter-0.3", "images-tokens", "spikes"), range(15, 17))
    *_, limit, split = case
    auto = seconds(Policy(limit=limit, split=split), case, scenarios, seeds)
    for hint in candidates:
        ratios = faster(seconds(Policy(hint=hint, limit=limit, split=split), case, scenarios, seeds), auto)
        assert mean(ratios.values()) >= 1 - room - (0 if full else .02), f"{hint}: {ratios}"


CONTROLS = {
    "whole, 1F1B's memory": (Policy(hint="1f1b", mode="strict"), Policy(), 1.02),
    "split, 1F1B's memory": (Policy(mode="strict", split=True), Policy(split=True), 1.02),
    "split, P": (Policy(hint="zb-h1", mode="strict", limit="8", split=True), Policy(limit="8", split=True), 1.08),
    "split, 2P-1": (Policy(hint="zb-h2", mode="strict", limit="2p-1", split=True), Policy(limit="2p-1", split=True), 1.08),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CONTROLS)
def test_it_does_not_lose_to_the_fixed_list_that_holds_as_much(name, full):
    """Never more than 1% slower on any scenario, and faster where messages are late or microbatches are mixed."""
    strict, auto, gain = CONTROLS[name]
    case = (8, 32, 1, auto.limit, auto.split)
    scenarios, seeds = (SCENARIOS, range(15, 45)) if full else (("jitter-0.3", "lengths", "spikes"), range(15, 18))
    ratios = faster(seconds(strict, case, scenarios, seeds), seconds(auto, case, scenarios, seeds))
    assert min(ratios.values()) >= .99, ratios
    assert mean([ratios[each] for each in LATE if each in ratios]) >= (gain if full else 1.0), ratios


def test_control_announcements_that_nobody_hears_lose(full):
    """What waiting is worth: without news every missing head counts as not begun, and the same hint over the same list loses."""
    strict, placement = CONTROLS["whole, 1F1B's memory"][0], Placement.looped(8)
    heard, deaf = [], []
    for seed in range(15, 45) if full else range(15, 20):
        durations, delays = draw("jitter-0.3", 8, 32, 1.0, seed)
        control = simulate(strict, placement, 32, durations, delays).makespan
        for announce, found in ((True, heard), (False, deaf)):
            schedulers = [Policy().scheduler(placement, rank, 32) for rank in range(8)]
            assert all(each.announces for each in schedulers)
            found.append(control / drive(schedulers, durations.__getitem__, announce=announce).makespan)
    assert median(heard) >= .995 and median(deaf) < .985, (heard, deaf)


def test_control_a_flat_warm_up_is_much_slower():
    """Why the list of a flat limit is not made for that limit on every rank: eight forwards before a backward, eight in all."""
    durations, _ = draw("uniform", 8, 32, 1.0, 15)
    placement = Placement.looped(8)
    flat = generate("1f1b", placement, 32, [8] * 8, split=False)
    rows = Policy(hint="announced", mode="strict", limit="8").list_for(placement, 32)
    times = [drive([Scheduler(chain(placement, rank, 32), Strict(row), limit=8) for rank, row in enumerate(each)],
                   durations.__getitem__).makespan for each in (flat, rows)]
    assert times[1] == 117 and times[0] > 1.3 * times[1]
