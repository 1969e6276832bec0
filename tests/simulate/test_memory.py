"""Which limits are chosen from measurements: within memory, as fast as the best that fits, and no more than that takes."""

import random
from dataclasses import replace

import pytest
from frozen_costs import frozen

from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler.limits import descending, listed
from rrfp.simulate import memory
from rrfp.simulate.costs import from_scenario
from rrfp.simulate.memory import MARGIN, Room, choose, fitting, within
from rrfp.simulate.search import search

SCENARIOS = ["uniform", "jitter-0.3", "lengths", "images-tokens", "spikes", "paper-multimodal"]


def costs(scenario, *, stages=4, microbatches=16, chunks=1, seed=3):
    return from_scenario(scenario, stages=stages, microbatches=microbatches, unit=0.02, seed=seed, chunks=chunks)


def own(case):
    return Policy(limit="1f1b").limits(case.placement, case.microbatches)


def room(case, times, activation=5.0):
    """Idle memory for `times` 1F1B's activations on top of them."""
    return [Room(activation, (1 + MARGIN) * activation * times * number) for number in own(case)]


# ------------------------------------------------------------------------------------------------- what fits
def test_what_fits_is_1f1b_and_what_idle_memory_takes():
    placement = Placement.looped(4)
    assert fitting(placement, 16, [Room(10, 0)] * 4) == [4, 3, 2, 1]
    assert fitting(placement, 16, [Room(10, 33)] * 4) == [7, 6, 5, 4]
    assert fitting(placement, 16, [Room(10, 32.9)] * 4) == [6, 5, 4, 3], "an activation is taken for a tenth larger than measured"
    assert fitting(placement, 5, [Room(10, 1e6)] * 4) == [5] * 4, "never more than there are"
    assert fitting(placement, 16, [Room(10, -50)] * 4) == [4, 3, 2, 1], "1F1B's own did fit"
    assert fitting(placement, 16, [Room(0, 50)] * 4) == [4, 3, 2, 1]


def test_no_rank_gets_more_than_the_one_before_it_can_use():
    assert fitting(Placement.looped(4), 16, [Room(10, 22), Room(10, 99), Room(10, 0), Room(10, 99)]) == [6, 6, 2, 2]


def test_a_rank_that_holds_nothing_bounds_nobody():
    """Frozen first stages: they keep 1F1B's number, or take the next one's, since a limit may not grow along the pipeline."""
    placement = Placement.looped(4)
    assert fitting(placement, 16, [Room(0, 0), Room(10, 33), Room(10, 33), Room(10, 0)]) == [6, 6, 5, 1]
    assert fitting(placement, 16, [Room(0, 0), Room(0, -9), Room(10, 0), Room(10, 99)]) == [4, 3, 2, 2]
    assert fitting(placement, 16, [Room(10, 0), Room(10, 33), Room(10, 33), Room(10, 0)]) == [4, 4, 4, 1], "the control: one that holds something"
    assert within(placement, 16, [0, 0, 10, 10], 75) == [7] * 4
    assert within(placement, 16, [0, 10, 10, 10], 20) == [4, 2, 2, 2]


def test_chunks_count_together():
    assert fitting(Placement.looped(2, 2), 8, [Room(10, 22)] * 2) == [7, 5]


def test_within_a_given_memory_fewer_than_1f1b_may_fit():
    placement = Placement.looped(4)
    assert within(placement, 16, [10] * 4, 75) == [7] * 4
    assert within(placement, 16, [10, 10, 40, 10], 75) == [7, 7, 1, 1]
    assert within(placement, 16, [10] * 4, 20) == [2] * 4
    assert within(placement, 16, [10, 10, 10, 30], 20) == [2, 2, 2, 0]
    assert within(placement, 5, [10] * 4, 999) == [5] * 4


def test_what_fits_never_takes_more_than_is_idle(seed):
    """For any sizes; the control takes activations for half as large as they are."""
    rng, exceeded = random.Random(seed), 0
    for _ in range(200):
        placement = Placement.looped(rng.randint(1, 8))
        rooms = [Room(rng.uniform(1, 50), rng.uniform(-20, 500)) for _ in range(placement.ranks)]
        least = fitting(placement, 32, [Room(1, 0)] * placement.ranks)

        def taken(limits, rooms=rooms, least=least):
            return [(number - one) * room.activation - max(0.0, room.idle) for number, one, room in zip(limits, least, rooms, strict=True)]

        assert max(taken(fitting(placement, 32, rooms))) <= 0
        exceeded += max(taken(fitting(placement, 32, [Room(room.activation / 2, room.idle) for room in rooms]))) > 0
    assert exceeded > 100


# ------------------------------------------------------------------------------------------------- what is chosen
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_1f1bs_memory_it_is_1f1b(scenario):
    case = costs(scenario)
    choice = choose(Policy(), case, fitting(case.placement, case.microbatches, room(case, 0)), seconds=60)
    assert list(choice.limits) == own(case) and choice.tried == 1 and choice.seconds == choice.before


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("hint", ["announced", "fill-alt"])
def test_with_twice_that_it_is_as_fast_as_the_best_fixed_limit(scenario, hint, full):
    """Within 2% of the best of an exhaustive search over shapes, numbers and slopes, on the call that was measured."""
    for stages, microbatches, seed in [(8, 32, seed) for seed in range(3)] if full else [(4, 16, 3)]:
        case, policy = costs(scenario, stages=stages, microbatches=microbatches, seed=seed), Policy(hint=hint)
        most = fitting(case.placement, microbatches, room(case, 1))
        assert most == [2 * number for number in own(case)]
        choice = choose(policy, case, most, seconds=600)
        assert choice.whole and all(low <= number <= high for low, number, high in zip(own(case), choice.limits, most, strict=True))
        mine = case.simulate(replace(policy, limit=listed(choice.limits)))
        assert all(held <= high for held, high in zip(mine.peak_in_flight, most, strict=True))
        best = search(case, memory=most, hints=[hint], split=False)[0]
        assert mine.makespan <= 1.02 * best.seconds, (choice, best)


def test_no_more_memory_than_helps():
    """Without variation 1F1B is as fast as it gets; with it, all that fits would be no faster than what is chosen."""
    even = costs("uniform")
    assert list(choose(Policy(), even, [16] * 4, seconds=60).limits) == own(even)
    uneven = costs("spikes")
    choice = choose(Policy(), uneven, [16] * 4, seconds=60)
    assert own(uneven) < list(choice.limits) < [16] * 4
    assert choice.seconds <= 1.01 * uneven.simulate(Policy(limit="16")).makespan and choice.seconds < choice.before


def test_what_is_chosen_is_fast_on_orders_that_it_was_not_judged_on():
    case = costs("images-tokens", stages=8, microbatches=24, seed=5)
    policy, most = Policy(), fitting(case.placement, 24, room(case, 1))
    chosen = choose(policy, case, most, seconds=600).limits
    others = [memory._reordered(case, seed) for seed in range(10, 16)]
    mine, all_that_fits = (sum(other.simulate(replace(policy, limit=listed(limits))).makespan for other in others) for limits in (chosen, most))
    assert mine <= 1.03 * all_that_fits


def test_reordering_keeps_each_microbatch_together():
    case = costs("images-tokens")
    other = memory._reordered(case, 1)
    columns = [tuple(case.durations["F", stage, m] for stage in range(4)) for m in range(16)]
    moved = [tuple(other.durations["F", stage, m] for stage in range(4)) for m in range(16)]
    assert sorted(columns) == sorted(moved) and columns != moved


def test_several_chunks():
    case = costs("spikes", stages=4, chunks=2, microbatches=8)
    most = fitting(case.placement, 8, room(case, 1))
    choice = choose(Policy(), case, most, seconds=60)
    assert all(low <= number <= high for low, number, high in zip(own(case), choice.limits, most, strict=True))
    assert choice.seconds <= choice.before


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_behind_frozen_stages_it_is_as_fast_as_the_best_that_fits(scenario, first):
    case = frozen(costs(scenario), first)
    rooms = [Room(0, 0)] * first + room(case, 1)[first:]
    most = fitting(case.placement, 16, rooms)
    choice = choose(Policy(), case, most, seconds=60)
    assert choice.whole and choice.limits[first - 1] == max(own(case)[first - 1], choice.limits[first])
    assert all(low <= number <= high for low, number, high in zip(own(case), choice.limits, most, strict=True))
    assert list(choice.limits) == descending(choice.limits)
    everything = case.simulate(replace(Policy(), limit=listed(most))).makespan
    assert choice.seconds <= min(choice.before, (1 + 2 * memory.NEAR) * everything)


def test_out_of_time_it_takes_the_best_of_what_it_tried():
    case = costs("paper-multimodal")
    choice = choose(Policy(), case, [8, 6, 4, 2], seconds=0)
    assert choice.tried == 2 and not choice.whole and choice.limits in {(4, 3, 2, 1), (8, 6, 4, 2)}


@pytest.mark.parametrize("most", [[9, 9, 2, 2], [4, 3, 2, 2], [16, 3, 2, 1]])
def test_ranks_with_unequal_memory(most):
    case = costs("spikes")
    choice = choose(Policy(), case, most, seconds=60)
    assert all(low <= number <= high for low, number, high in zip(own(case), choice.limits, most, strict=True))
    assert list(choice.limits) == descending(choice.limits)
