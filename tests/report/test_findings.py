"""The first finding names the cause and the place; where nothing is wrong nothing is found."""

import re

import pytest
from simulated import UNIT, change, late_edge, record, scenario, small_limit, straggler

from rrfp.report.analysis import analyse
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
