"""Idle time by cause: it adds up, and each cause is found where it was put."""

import random
from itertools import pairwise

import pytest
from simulated import UNIT, change, late_edge, record, scenario, small_limit, straggler

from rrfp.report.causes import CAUSES, Explanation
from rrfp.report.steps import graph
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.simulate.scenarios import SCENARIOS


def explain(timeline) -> Explanation:
    return Explanation(graph(timeline, 0))


def sums(explanation: Explanation, rank: int) -> dict[str, float]:
    found = dict.fromkeys(CAUSES, 0.0)
    for wait in explanation.waits:
        if wait.rank == rank:
            found[wait.cause] = found.get(wait.cause, 0.0) + wait.end - wait.start
    return found


def assert_tiles(explanation: Explanation) -> None:
    """Actions and waits of every rank tile the call: no gap, no overlap, to the last bit."""
    g = explanation.graph
    for rank, row in g.rows.items():
        pieces = sorted([(step.start, step.end) for step in row if step.end > step.start]
                        + [(wait.start, wait.end) for wait in explanation.waits if wait.rank == rank])
        assert pieces[0][0] == 0.0 and pieces[-1][1] == g.seconds
        assert all(before[1] == after[0] for before, after in pairwise(pieces))


MODES = ["strict:1f1b:1f1b", "ready:announced:1f1b", "ready:alt:eager", "ready:fill-r:2p-1", "ready:alt:2p:free:lanes=4"]


def test_idle_time_is_explained_without_a_rest_in_every_scenario(timeline, seed, full):
    rng = random.Random(seed)
    for name in SCENARIOS if full else rng.sample(SCENARIOS, 4):
        for mode in MODES if full else rng.sample(MODES, 2):
            assert_tiles(explain(timeline(scenario(name, stages=5, microbatches=11, seed=rng.randrange(1000)), mode)))


@pytest.mark.parametrize("stages, microbatches, chunks", [(1, 3, 1), (2, 1, 1), (4, 2, 1), (8, 8, 2), (2, 4, 2)])
def test_odd_shapes(timeline, stages, microbatches, chunks):
    assert_tiles(explain(timeline(scenario("jitter-0.3", stages=stages, microbatches=microbatches, chunks=chunks), MODES[1])))


def test_an_even_pipeline_only_fills_and_drains(timeline):
    explanation = explain(timeline(scenario("uniform", stages=4, microbatches=8), overhead=0.0))
    for rank in range(4):
        found = sums(explanation, rank)
        # 1F1B's bubble: (P - 1) (F + B).
        assert found["warm-up"] + found["drain"] == pytest.approx(3 * 3 * UNIT)
        assert sum(found.values()) == pytest.approx(3 * 3 * UNIT)


def test_behind_a_straggler_activations_are_late_and_before_it_gradients(timeline):
    explanation = explain(timeline(straggler(2, factor=2.0, stages=5, microbatches=16), "ready:alt:2p"))
    assert sums(explanation, 4)["slow upstream"] > 8 * UNIT
    assert sums(explanation, 4)["slow downstream"] < UNIT
    assert sums(explanation, 2)["slow upstream"] + sums(explanation, 2)["slow downstream"] < UNIT
    blamed = [wait.culprit for wait in explanation.waits if wait.rank == 4 and wait.cause == "slow upstream"]
    assert sum(culprit.startswith("2") for culprit in blamed) > 0.8 * len(blamed)


def test_a_late_message_is_told_from_a_slow_stage(timeline):
    late, prompt = (explain(timeline(late_edge("1>2", units=units, stages=4, microbatches=8))) for units in (2.0, 0.05))
    assert sums(late, 2)["late message"] > 4 * UNIT
    assert all(wait.culprit == "1>2" for wait in late.waits if wait.cause == "late message")
    assert not any(wait.cause == "late message" for wait in prompt.waits)


def test_a_limit_holds_forwards_back_while_others_starve(timeline):
    costs = small_limit(stages=4, microbatches=16)
    small, large = (explain(timeline(costs, f"ready:alt:{limit}")) for limit in ("1", "2p"))
    assert sum(sums(small, rank)["memory limit"] for rank in range(4)) > 10 * UNIT
    assert sum(sums(large, rank)["memory limit"] for rank in range(4)) < UNIT


def test_a_fixed_order_waits_though_other_work_is_ready(timeline):
    costs = scenario("images", stages=4, microbatches=16)
    strict, ready = (explain(timeline(costs, f"{mode}:zb-h1:4")) for mode in ("strict", "ready"))
    assert sum(sums(strict, rank)["fixed order"] for rank in range(4)) > 10 * UNIT
    assert not any(wait.cause == "fixed order" for wait in ready.waits)


def test_an_announced_wait_is_its_own_cause(timeline):
    found = 0.0
    for seed in range(4):
        explanation = explain(timeline(scenario("mixed", stages=4, microbatches=16, seed=seed), "ready:announced:1f1b"))
        found += sum(sums(explanation, rank)["announced wait"] for rank in range(4))
    assert found > 0.0


def test_the_runtime_is_what_lies_between_an_arrival_and_its_action(timeline):
    made = timeline(scenario("uniform", stages=3, microbatches=4))
    for trace in made.ranks.values():
        call = trace.calls[0]
        # Every action starts one millisecond late and is so much shorter.
        call.actions = [ran._replace(start=ran.start + 0.001) for ran in call.actions]
    explanation = explain(made)
    assert_tiles(explanation)
    for rank in range(3):
        assert sums(explanation, rank)["runtime"] == pytest.approx(8 * 0.001 + (1e-4 if rank == 0 else 0.0), abs=2e-4)


def test_a_lost_rank_is_lost_from_its_last_sign_of_life(timeline):
    explanation = explain(timeline(scenario("uniform", stages=4, microbatches=8), lost=1))
    assert_tiles(explanation)
    [lost] = [wait for wait in explanation.waits if wait.cause == "lost"]
    assert lost.rank == 1 and lost.end == explanation.graph.seconds


def test_a_rendezvous_adds_up_too(tmp_path):
    costs = scenario("jitter-0.3", stages=4, microbatches=8)
    made = record(tmp_path, costs, simulated=simulate_megatron_1f1b(costs, message_cost=0.001), meets=True)
    explanation = explain(made)
    assert_tiles(explanation)
    assert sum(sums(explanation, rank)["memory limit"] + sums(explanation, rank)["fixed order"] for rank in range(4)) > 0


def test_reasons_name_what_happened_last(timeline):
    explanation = explain(timeline(scenario("uniform", stages=3, microbatches=6)))
    reasons = {str(step.action): why for step, why in explanation.reasons.items()}
    assert reasons["0F0"] == ("the call began", None)
    assert reasons["0F1"] == ("after 0F0 ended", None)
    assert reasons["1F0"] == ("input 0F0 arrived", "0F0")
    # When stage 0 had run out of work the microbatch's gradient was still being computed at the last stage.
    assert reasons["0B0"] == ("input 1B0 arrived", "2B0")
    assert reasons["0F3"] == ("0B0 ended and freed its memory", None)
    late = change(scenario("uniform", stages=3, microbatches=6), delays=lambda k, s, m: 0.1 if (k, s, m) == ("F", 2, 3) else 0.0)
    reasons = {str(step.action): why for step, why in explain(timeline(late)).reasons.items()}
    assert reasons["2F3"] == ("input 1F3 arrived, late on 1>2", "1>2")
