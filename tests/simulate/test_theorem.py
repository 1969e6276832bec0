"""The RRFP paper's Theorem 6.1 (arXiv 2605.18750), as a property of the very scheduler that training uses.

Under BF, one chunk per rank, messages that take no time, and no limit, the makespan C of M microbatches obeys

    C <= F + B + sum_{j=1}^{M-1} (Fmax_j - Flast_j) + sum_{j=0}^{M-2} (Bmax_j - Blast_j),

where Fmax_j is the longest forward of microbatch j on any stage and Flast_j that on the last. F is what the forwards would take if
the last stage set the pace: one pass through all stages, then the other microbatches on the last; B likewise. That leaves open how
the pass is counted where microbatches differ. Here every stage counts with its longest action. Where durations depend on the stage
alone, that is the pass of microbatch 0 (forward) and of the last one (backward); where they don't, those two are too little: a
control below.
"""

import pytest
from hypothesis import given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.simulate import simulate


def makespan(durations, ranks: int, microbatches: int, *, delay: float = 0.0, **policy) -> float:
    delays = {(kind, s, m): delay for kind in "FB" for s in range(ranks) for m in range(microbatches)}
    policy = Policy(**{"hint": "bf", "limit": str(microbatches), **policy})
    return simulate(policy, Placement.looped(ranks), microbatches, durations, delays if delay else None).makespan


def bound(durations, ranks: int, microbatches: int, *, pass_of=None) -> float:
    """pass_of: the microbatches whose passes count, of F and of B; None: each stage with its longest action."""
    total = 0.0
    for kind, others, index in (("F", range(1, microbatches), 0), ("B", range(microbatches - 1), 1)):
        stages = [[durations[kind, s, m] for m in range(microbatches)] for s in range(ranks)]
        through = sum(max(stage) if pass_of is None else stage[pass_of[index]] for stage in stages)
        pace = through + sum(stages[-1][m] for m in others)
        total += pace + sum(max(stage[m] for stage in stages) - stages[-1][m] for m in others)
    return total


def of_stages(forwards, backwards, microbatches: int):
    """Durations that depend on the stage alone."""
    return {(kind, s, m): float(value) for kind, values in (("F", forwards), ("B", backwards))
            for s, value in enumerate(values) for m in range(microbatches)}


@st.composite
def calls(draw):
    """Whole numbers: sums are exact, and much happens at one instant."""
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    most = draw(st.sampled_from((1, 2, 10, 100)))
    count = 2 * ranks * microbatches
    values = map(float, draw(st.lists(st.integers(0, most), min_size=count, max_size=count)))
    keys = ((kind, s, m) for kind in "FB" for s in range(ranks) for m in range(microbatches))
    return dict(zip(keys, values, strict=True)), ranks, microbatches


@st.composite
def even_calls(draw):
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    some = st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks)
    return draw(some), draw(some), microbatches


def checked(seed: int, examples: int, strategy, check) -> None:
    seeded(seed)(settings(max_examples=examples, deadline=None, database=None)(given(strategy)(check)))()


def test_no_call_takes_longer_than_the_bound(full, seed):
    def check(call):
        took, most = makespan(*call), bound(*call)
        note(f"makespan {took}, bound {most}")
        assert took <= most

    checked(seed, 10_000 if full else 1000, calls(), check)


def test_the_pass_of_the_first_and_the_last_microbatch_is_enough_where_stages_are_even(full, seed):
    def check(call):
        forwards, backwards, microbatches = call
        durations, ranks = of_stages(*call), len(forwards)
        most = bound(durations, ranks, microbatches, pass_of=(0, -1))
        assert makespan(durations, ranks, microbatches) <= most == bound(durations, ranks, microbatches)

    checked(seed, 3000 if full else 300, even_calls(), check)


def test_the_bound_is_attained_wherever_the_last_stage_is_the_slowest(full, seed):
    """Then the imbalance is 0, and no schedule does it in less: the last stage can't start before, work less, or end later."""
    def check(call):
        forwards, backwards, microbatches = call
        forwards[-1], backwards[-1] = max(forwards), max(backwards)
        durations, ranks = of_stages(forwards, backwards, microbatches), len(forwards)
        least = sum(forwards) + sum(backwards) + (microbatches - 1) * (forwards[-1] + backwards[-1])
        assert makespan(durations, ranks, microbatches) == bound(durations, ranks, microbatches) == least

    checked(seed, 3000 if full else 300, even_calls(), check)


UNEVEN = {("F", 0, 0): 4.0, ("F", 0, 1): 4.0, ("F", 1, 0): 2.0, ("F", 1, 1): 4.0, ("F", 2, 0): 1.0, ("F", 2, 1): 1.0,
          ("B", 0, 0): 3.0, ("B", 0, 1): 4.0, ("B", 1, 0): 3.0, ("B", 1, 1): 3.0, ("B", 2, 0): 1.0, ("B", 2, 1): 2.0}


def test_the_bound_is_attained_with_imbalance():
    assert makespan(UNEVEN, 3, 2) == bound(UNEVEN, 3, 2) == 25.0
    imbalance = (4.0 - 1.0) + (3.0 - 1.0)  # of the forward of microbatch 1, of the backward of microbatch 0
    assert bound(UNEVEN, 3, 2) - imbalance == 20.0


@pytest.mark.parametrize("broken", [{"delay": 1.0}, {"limit": "1"}], ids=["late messages", "a limit"])
def test_control_outside_its_assumptions_the_bound_is_exceeded(broken):
    durations = of_stages([1, 1], [2, 2], 4)
    assert makespan(durations, 2, 4) == bound(durations, 2, 4) == 15.0
    assert makespan(durations, 2, 4, **broken) > 15.0


def test_control_the_pass_of_the_first_microbatch_is_too_little_where_microbatches_differ():
    """Hypothesis finds it: microbatch 1 passes both stages, microbatch 0 takes no time."""
    def check(call):
        assert makespan(*call) <= bound(*call, pass_of=(0, -1))

    with pytest.raises(AssertionError):
        checked(0, 2000, calls(), check)
    durations = {(kind, s, m): 1.0 if (kind, m) == ("F", 1) else 0.0 for kind in "FB" for s in range(2) for m in range(2)}
    assert makespan(durations, 2, 2) == 2.0 <= bound(durations, 2, 2)
    assert bound(durations, 2, 2, pass_of=(0, -1)) == 1.0, "it counts the forward of microbatch 1 once: it takes one unit on each stage"


def test_control_an_action_too_many_is_noticed():
    """The bound is tight enough to show one more unit of work."""
    longer = UNEVEN | {("B", 0, 1): 5.0}
    assert makespan(longer, 3, 2) > bound(UNEVEN, 3, 2)
