"""Megatron's 1F1B, modelled: equal to the fixed list where nothing waits, and held back where its calls meet."""

import pytest

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.mode import parse_mode
from rrfp.simulate.clock import Span
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.simulate.scenarios import SCENARIOS

LIST = parse_mode("strict:1f1b:1f1b")


@pytest.mark.parametrize("stages, microbatches", [(1, 3), (2, 1), (4, 2), (4, 4), (8, 32)])
def test_the_closed_form_and_the_order(stages, microbatches):
    costs = from_scenario("uniform", stages=stages, microbatches=microbatches, unit=1.0, seed=0)
    model, listed = simulate_megatron_1f1b(costs), costs.simulate(LIST)
    assert model.makespan == 3 * (microbatches + stages - 1)
    assert model.rows == listed.rows and model.peak_in_flight == listed.peak_in_flight


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_never_faster_than_the_same_list_with_buffers(scenario):
    costs = from_scenario(scenario, stages=6, microbatches=20, unit=1.0, seed=3)
    model = simulate_megatron_1f1b(costs).makespan
    assert model >= costs.simulate(LIST).makespan - 1e-9
    assert simulate_megatron_1f1b(costs, message_cost=0.01).makespan > model


def small(**other):
    """Two stages, three microbatches, F=1, B=2; other times by (kind, stage, microbatch) written as in `F10`."""
    times = {("F" if kind == "F" else "B", s, m): 1.0 if kind == "F" else 2.0 for kind in "FB" for s in range(2) for m in range(3)}
    times |= {(name[0], int(name[1]), int(name[2])): value for name, value in other.items()}
    return Costs(2, 1, 3, times, {(kind, s, m): 0.0 for kind in "FB" for s in range(2) for m in range(3)})


def test_a_sender_waits_for_its_receiver():
    """What buffers avoid: stage 0 cannot go on with B0 although its gradient is there, until stage 1 takes F1."""
    costs = small(F11=5.0)
    spans = simulate_megatron_1f1b(costs).spans
    # Stage 1: F0 1-2, B0 2-4. Stage 0: F0 0-1, F1 1-2, then its call (send F1, receive B0) ends with stage 1's at 4.
    assert spans[Action("B", 0, 0)] == Span(4, 6)
    assert spans[Action("F", 1, 1)] == Span(4, 9) and spans[Action("F", 0, 2)] == Span(6, 7)
    # Stage 0 sends F2 at 7, but stage 1 is at its call only at 9 + 2.
    assert spans[Action("B", 1, 1)] == Span(9, 11) and spans[Action("B", 0, 1)].start == 11
    slow = small(F01=1.0, B00=1.0, F10=9.0)
    assert simulate_megatron_1f1b(slow).spans[Action("F", 0, 1)].start == 1, "stage 1 takes F0 before it computes"


def test_a_late_message_holds_its_receiver_only():
    costs = small()
    costs.delays["F", 1, 0] = 3.0
    spans = simulate_megatron_1f1b(costs).spans
    assert spans[Action("F", 0, 1)].start == 1 and spans[Action("F", 1, 0)].start == 4


def test_several_chunks_are_refused():
    with pytest.raises(ConfigurationError, match="megatron-1f1b, 2 chunks"):
        simulate_megatron_1f1b(from_scenario("uniform", stages=4, microbatches=4, unit=1.0, seed=0, chunks=2))
