"""Any policy, hint, pipeline, durations, delays, stalls, lanes, credits: every call ends, and every promise is kept.

A failure prints the smallest case, what every rank ran, and the line that repeats it.
"""

import pytest
from cases import Case
from search import search

from runs import run

SHARES = 5
REDUCED, FULL = 10_000, 50_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_schedule_ends_and_keeps_its_promises(full, seed, share):
    wanted = (FULL if full else REDUCED) // SHARES
    outcome = search(seed + share, wanted)
    print(outcome)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.counts["runs"] >= wanted
    for word in ("chunks", "domains", "decided ahead", "split", "strict", "lanes", "several calls", "evaluation", "blocking", "launched ahead",
                 "random hint"):
        assert outcome.counts[word] > wanted / 100, word


@pytest.mark.parametrize("text", [
    '{"ranks": 3, "calls": [[2, false]], "hint": "a random list", "mode": "strict", "lanes": 2, "delays": "random", "seed": %d}',
    '{"ranks": 3, "calls": [[4, false], [2, true]], "hint": "any", "lanes": 3, "order": "free", "delays": "random", "seed": %d}',
    '{"ranks": 2, "chunks": 3, "placement": "random", "calls": [[4, false]], "hint": "any", "delays": "random", "seed": %d}',
])
def test_cases_that_once_failed_or_nearly_did(text):
    for seed in range(10):
        run(Case.parse(text % seed))


def test_a_case_is_repeated_from_its_text():
    case = Case(ranks=2, calls=((3, False), (1, True)), hint="any", delays="random", late=0.3, seed=7)
    assert Case.parse(str(case)) == case
    first, second = (run(each) for each in (case, Case.parse(str(case))))
    assert [m.executors[-1].log for m in first.members] == [m.executors[-1].log for m in second.members]
