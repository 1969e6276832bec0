"""The first finding names the cause and the place; where nothing is wrong nothing is found."""

import re

import pytest
from simulated import UNIT, change, late_edge, record, scenario, small_limit, straggler

from rrfp.mode import parse_mode
from rrfp.report.analysis import analyse
from rrfp.report.savings import Change, savings
from rrfp.report.whatif import WhatIf
from rrfp.simulate.rendezvous import simulate_megatron_1f1b


def first(timeline, **options):
    return analyse(timeline, **options).findings[0]


@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b", "ready:alt:2p", "ready:fill-r:2p-1"])
def test_a_straggler_is_named(timeline, mode):
    finding = first(timeline(straggler(3), mode))
    assert (finding.cause, finding.where) == ("straggler", "stage 3")
    assert "1.4" in finding.text or "1.5" in finding.text
    # 1.5 times 20 ms, give or take the jitter.
    assert re.match(r"stage 3: F (29|3[01])\S* ms \(others (19|20)\S*\), ", finding.evidence[0])
    assert finding.seconds > 10 * UNIT


@pytest.mark.parametrize("edge", ["2>3", "4>3"])
@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b"])
def test_a_late_edge_is_named(timeline, edge, mode):
    finding = first(timeline(late_edge(edge), mode))
    assert (finding.cause, finding.where) == ("late edge", f"edge {edge}")
    assert "40.0 ms" in finding.text


@pytest.mark.parametrize("mode", ["strict:1f1b:1f1b", "ready:announced:1f1b", "ready:alt:1f1b"])
def test_a_small_limit_is_named(timeline, mode):
    analysis = analyse(timeline(small_limit(), mode))
    assert (analysis.findings[0].cause, analysis.findings[0].where) == ("limit", "limit 1f1b")
    # That microbatches differ is said too, but after what can be changed.
    assert [(each.cause, each.where) for each in analysis.findings[1:]] == [("imbalance", "stages 0-1")]
    assert analysis.suggestion.predicted_speedup > 1.2


@pytest.mark.parametrize("name, mode", [
    ("uniform", "strict:1f1b:1f1b"), ("uniform", "ready:announced:1f1b"), ("uniform", "ready:fill-r:2p-1"), ("jitter-0.1", "ready:alt:2p")])
def test_of_a_well_tuned_run_nothing_is_said(timeline, name, mode):
    analysis = analyse(timeline(scenario(name), mode))
    assert [each.cause for each in analysis.findings] == ["none"]
    assert "Nothing stands out" in analysis.findings[0].text
    assert analysis.suggestion is None


@pytest.mark.parametrize("break_it", ["straggler", "late edge", "limit"])
def test_without_its_cause_a_finding_is_gone(timeline, break_it):
    """The negative control: the three runs above, mended."""
    mended = {"straggler": straggler(3, factor=1.0), "late edge": late_edge("2>3", units=0.05), "limit": small_limit()}[break_it]
    mode = "ready:alt:2p" if break_it == "limit" else "ready:announced:1f1b"
    assert break_it not in [each.cause for each in analyse(timeline(mended, mode)).findings]


def test_jitter_is_not_taken_for_data(timeline):
    found = analyse(timeline(scenario("jitter-0.6"), "ready:announced:1f1b")).findings
    assert [each.cause for each in found] == ["limit", "jitter"]


def test_several_heavy_stages_are_an_imbalance(timeline):
    heavy = change(scenario("jitter-0.1"), durations=lambda kind, stage, m: 1.6 if stage in (0, 1) else 1.0)
    finding = first(timeline(heavy, "ready:announced:1f1b"))
    assert (finding.cause, finding.where) == ("imbalance", "stages 0-1")


def test_a_stage_whose_work_depends_on_the_microbatch_is_no_straggler(timeline):
    wild = change(scenario("jitter-0.1"), durations=lambda kind, s, m: (0.6, 1.3, 2.5)[m % 3] if s == 3 else 1.0)
    finding = first(timeline(wild, "ready:alt:2p"))
    assert (finding.cause, finding.where) == ("imbalance", "stage 3")


def test_the_last_stage_may_hold_the_output_layer(timeline):
    finding = first(timeline(straggler(5), "ready:announced:1f1b"))
    assert finding.cause == "straggler" and "output layer" in finding.text


def test_with_chunks_a_slow_rank_is_named_by_its_stages(timeline):
    slow = change(scenario("jitter-0.1", stages=8, microbatches=16, chunks=2), durations=lambda k, s, m: 1.5 if s % 4 == 1 else 1.0)
    finding = first(timeline(slow, "ready:announced:1f1b"))
    assert (finding.cause, finding.where) == ("straggler", "stages 1, 5") and finding.text.startswith("Rank 1 (stages 1, 5) is a straggler")


def test_messages_that_are_late_now_and_then_are_jitter(timeline):
    found = analyse(timeline(scenario("spikes"), "ready:announced:1f1b"))
    assert [(each.cause, each.where) for each in found.findings] == [("limit", "limit 1f1b"), ("jitter", "messages")]
    assert "round otherwise" in found.suggestion.text and "lanes=4" in found.suggestion.mode


@pytest.mark.parametrize("costs, cause, where", [(straggler(3), "straggler", "stage 3"), (late_edge("2>3"), "late edge", "edge 2>3")])
def test_megatrons_own_schedule_is_judged_too(tmp_path, costs, cause, where):
    result = simulate_megatron_1f1b(costs, message_cost=0.0005)
    finding = first(record(tmp_path, costs, simulated=result, meets=True))
    assert (finding.cause, finding.where) == (cause, where)


def test_without_a_mode_the_limit_is_read_off_the_memory(timeline):
    found = analyse(timeline(small_limit(), "strict:1f1b:1f1b", tell=False))
    assert found.mode is None and found.findings[0].cause == "limit"


@pytest.mark.parametrize("costs, cause, where", [(straggler(3), "straggler", "stage 3"), (late_edge("2>3"), "late edge", "edge 2>3")])
def test_where_no_simulation_is_possible_the_critical_path_judges(timeline, costs, cause, where):
    made = timeline(costs, "ready:announced:1f1b")
    del made.ranks[5]
    made.missing = (5,)
    finding = first(made)
    assert (finding.cause, finding.where) == (cause, where)
    assert first(timeline(costs), simulations=False).where == where


def test_a_broken_call_is_not_judged(timeline):
    analysis = analyse(timeline(straggler(3), lost=2), call=0)
    assert [each.cause for each in analysis.findings] == ["none"] and "Rank 2 did not finish" in analysis.findings[0].text


# ---------------------------------------------------------------------- one story
@pytest.mark.parametrize("make", [lambda: straggler(3), lambda: late_edge("2>3"), small_limit])
def test_every_prediction_has_one_base(timeline, make):
    analysis = analyse(timeline(make(), "ready:announced:1f1b"))
    measured, simulated, *changes = analysis.savings
    assert (measured.kind, simulated.kind, measured.seconds) == ("measured", "simulated", analysis.seconds)
    assert simulated.seconds == pytest.approx(measured.seconds, rel=0.01)
    for row in changes:
        assert row.speedup == pytest.approx(measured.seconds / row.seconds)
    # What the findings and the suggestion say is in the table.
    for finding in analysis.findings:
        assert any(row.seconds == pytest.approx(measured.seconds - finding.seconds) for row in changes), finding
    assert any(row.speedup == pytest.approx(analysis.suggestion.predicted_speedup) for row in changes)
    together = [row for row in changes if row.kind == "together"]
    assert len(together) == 1 and together[0].seconds <= min(row.seconds for row in changes if row.kind in ("change", "suggested")) * 1.001


def test_predictions_are_scaled_to_what_was_measured():
    costs = straggler(3)
    what_if = WhatIf(costs, parse_mode("ready:announced:1f1b"))
    larger = Change("limit eager", lambda each: each.with_policy(parse_mode("ready:announced:eager")), 0.1)
    fed = Change("fed", lambda each: each.fed(range(20)), 0.0)
    measured, simulated, _, _, together = savings(2 * what_if.seconds, what_if, [larger, fed], None)
    assert (measured.seconds, simulated.seconds) == (2 * what_if.seconds, what_if.seconds)
    then = costs.simulate(parse_mode("ready:announced:eager")).makespan
    assert together.seconds == pytest.approx(2 * then) and together.what == "limit eager + fed"
    assert savings(1.0, None, [larger], None) == []


def test_a_limit_that_cannot_absorb_the_data_is_one_sentence(timeline):
    analysis = analyse(timeline(small_limit(), "ready:announced:1f1b"))
    first, data = analysis.findings
    assert re.match(r"Microbatches differ \(stages 0-1: [01][FB] takes [\d.]+ to [\d.]+ ms\) and limit 1f1b is too small to absorb it: "
                    r"limit \S+ would take \d+ ms instead of \d+ \([\d.]+x, predicted\)\.$", first.text)
    assert first.idle == "memory limit" and 0 in first.stages and first.action.startswith("--rrfp-limit ")
    assert data.stages == (0, 1) and "by size" in data.action and "heaviest microbatches" in data.evidence[2]
    kinds = {row.what: row.kind for row in analysis.savings}
    assert kinds["every microbatch alike"] == "imagined" and kinds["fed by size"] == "change"
    # The same quantity is the same number, here and in the table of durations.
    of = re.match(r"(\d)([FB]) takes ([\d.]+) to ([\d.]+) ms \(5% to 95%\), spread (\d+)%", data.evidence[0])
    row = next(each for each in analysis.durations if each.where == of[1] + of[2])
    assert [float(of[3]), float(of[4])] == pytest.approx([row.p5 * 1e3, row.p95 * 1e3], rel=0.006)
    assert int(of[5]) == round(100 * row.variability)


def test_the_heaviest_microbatches_are_named(timeline):
    heavy = change(scenario("jitter-0.1", microbatches=24), durations=lambda kind, s, m: {7: 5.0, 15: 4.0}.get(m, 0.4 + 0.2 * (m % 3)) if s == 2 else 1.0)
    data = next(each for each in analyse(timeline(heavy, "ready:announced:1f1b")).findings if "by size" in each.action)
    assert "heaviest microbatches at stage 2: 7, 15," in data.evidence[2]


def test_a_fault_comes_with_its_next_step_and_the_limit_as_a_stopgap(timeline):
    made = timeline(late_edge("2>3"), "ready:announced:1f1b")
    for rank, trace in made.ranks.items():
        trace.host = f"node{rank // 3}"
    edge, limit = analyse(made).findings
    assert "from rank 2 (on node0) to rank 3 (on node1): one direction only, 3>2 takes 1.00 ms; the delay is constant" in edge.action
    assert (edge.stages, edge.edges, edge.idle) == ((3,), ("2>3",), "late message") and "always 40.0 ms" in edge.evidence[0]
    assert limit.text.startswith("Limit 1f1b is small as well: ") and "with edge 2>3 mended" in limit.text and "stopgap" in limit.action
    slow = first(timeline(straggler(3)))
    assert slow.stages == (3,) and "the device of rank 3" in slow.action


def test_a_delay_that_comes_and_goes_in_both_directions_is_told_apart(timeline):
    both = change(scenario("jitter-0.1"), delays=lambda k, s, m: (0.02 + 0.01 * (m % 4)) if (k, s) in (("F", 3), ("B", 2)) else 0.001)
    actions = {each.where: each.action for each in analyse(timeline(both, "ready:announced:1f1b")).findings}
    assert "the way back, 3>2, is late as well" in actions["edge 2>3"] and "comes and goes" in actions["edge 2>3"]


def test_jitter_is_left_out_where_a_fault_is_larger(timeline):
    noisy = change(scenario("jitter-0.3"), durations=lambda kind, stage, m: 2.0 if stage == 3 else 1.0)
    assert "jitter" not in [each.cause for each in analyse(timeline(noisy, "ready:announced:1f1b")).findings]
    # Without the fault it is said.
    assert "jitter" in [each.cause for each in analyse(timeline(scenario("jitter-0.6"), "ready:announced:1f1b")).findings]


def test_leaving_megatrons_schedule_is_one_row(tmp_path):
    costs = straggler(3)
    analysis = analyse(record(tmp_path, costs, simulated=simulate_megatron_1f1b(costs, message_cost=0.0005), meets=True))
    assert analysis.suggestion.mode == "ready:announced:eager"
    assert [row.what for row in analysis.savings][2:] == [
        "stage 3 as fast as the others", "RRFP with limit eager", "stage 3 as fast as the others + RRFP with limit eager"]


def test_what_costs_no_memory_and_gains_more_comes_first(timeline):
    """Half of the microbatches are three times the others, in turns: feeding them by size beats any limit."""
    turns = change(scenario("uniform", microbatches=16), durations=lambda kind, s, m: 3.0 if m % 2 else 1.0)
    found = analyse(timeline(turns, "ready:announced:1f1b"))
    assert found.findings[0].cause == "limit" and found.findings[0].action.startswith("feed microbatches by size first")
    gains = {row.what: row.speedup for row in found.savings}
    assert gains["fed by size"] > gains[next(what for what in gains if what.startswith("limit "))] > 1


def test_a_limit_that_matters_more_than_a_fault_comes_first(timeline):
    both = change(small_limit(), delays=lambda k, s, m: 0.03 if (k, s) == ("F", 2) else 0.0002)
    found = analyse(timeline(both, "ready:announced:1f1b")).findings
    assert [each.cause for each in found][0] == "limit" and "as well" not in found[0].text
    assert ("late edge", "edge 1>2") in [(each.cause, each.where) for each in found]


def test_a_limit_beside_a_fault_is_judged_with_that_mended(timeline):
    costs = straggler(3)
    slow, limit = analyse(timeline(costs, "ready:announced:1f1b")).findings
    mended = change(costs, durations=lambda kind, s, m: 1 / 1.5 if s == 3 else 1.0)
    figures = [int(each) for each in re.findall(r"(\d+) ms instead of (\d+)", limit.text)[1]]
    policies = [parse_mode(f"ready:announced:{shape}") for shape in ("eager", "1f1b")]
    assert figures == pytest.approx([1e3 * mended.simulate(each).makespan for each in policies], rel=0.01)
