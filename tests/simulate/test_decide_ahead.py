"""What a decision costs, and what deciding ahead does, under the virtual clock."""

import pytest

from rrfp.mode import parse_mode
from rrfp.placement import Placement
from rrfp.simulate.clock import simulate

COST = 0.25
UNIT = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


def run(mode, *, ranks=2, microbatches=8, **options):
    durations = {(kind, stage, m): unit for kind, unit in UNIT.items() for stage in range(ranks) for m in range(microbatches)}
    return simulate(parse_mode(mode), Placement.looped(ranks), microbatches, durations, **options)


@pytest.mark.parametrize("mode", ["ready:bf", "strict:1f1b"])
def test_a_decision_takes_its_time_before_every_action(mode):
    free, late = (run(mode, ranks=1, decision=cost) for cost in (0.0, COST))
    assert late.makespan == free.makespan + 2 * 8 * COST
    assert min(span.start for span in late.spans.values()) == COST


def test_what_was_decided_ahead_starts_at_once():
    """A fixed list: only an action that nothing can be known of before (its input is still to come) has a decision to wait for."""
    free, late, ahead = (run("strict:gpipe:8", **options) for options in ({}, {"decision": COST}, {"decision": COST, "decide_ahead": True}))
    assert free.makespan < ahead.makespan < late.makespan
    starts = [ahead.spans[action].start for action in ahead.rows[0] if action.kind == "F"]
    assert starts == [COST + m for m in range(8)]
    assert ahead.rows == late.rows == free.rows


def test_what_becomes_ready_meanwhile_is_not_looked_at():
    late, ahead = ([str(action) for action in run("ready:bf:8", decide_ahead=choice).rows[1]] for choice in (False, True))
    assert late[:4] == ["1F0", "1B0", "1F1", "1B1"]
    assert ahead != late and sorted(ahead) == sorted(late)
