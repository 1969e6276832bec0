"""Hypothesis over cases: how many ran, and the smallest that fails."""

from collections import Counter
from dataclasses import dataclass, field

import hypothesis
from cases import Case, cases, smaller
from hypothesis import HealthCheck, Phase

from rrfp.errors import ConfigurationError
from runs import run, story

_SEEDS, _MOST_TRIES = 24, 6000


@dataclass
class Outcome:
    counts: Counter = field(default_factory=Counter)
    """Runs, actions, refusals, and runs by what they had."""
    case: Case | None = None
    """The smallest that failed, if any did."""
    error: Exception | None = None

    def __str__(self) -> str:
        first = ("runs", "actions", "refused")
        rest = (f"{name} {count}" for name, count in sorted(self.counts.items()) if name not in first)
        return f"{', '.join(f'{self.counts[name]} {name}' for name in first)}; with {', '.join(rest)}"


def search(seed: int, runs: int, *, fixed: dict | None = None, **broken) -> Outcome:
    """Random runs until one fails, which is then made as small as it gets. `broken`: parts of `run` to replace."""
    outcome = Outcome()

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=runs, deadline=None, database=None, report_multiple_bugs=False,
                         phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
    @hypothesis.given(cases(**fixed or {}))
    def attempt(case: Case):
        try:
            cluster = run(case, **broken)
        except ConfigurationError:
            outcome.counts["refused"] += 1
            hypothesis.reject()
        except Exception as error:
            outcome.case, outcome.error = case, error
            raise
        if outcome.error is None:
            _count(outcome.counts, case, cluster)

    try:
        attempt()
    except Exception:
        if outcome.error is None:
            raise
        _shrink_further(outcome, fixed or {}, broken)
        outcome.error.add_note(story(outcome.case, getattr(outcome.error, "cluster", None)))
    return outcome


def _shrink_further(outcome: Outcome, fixed: dict, broken: dict) -> None:
    """Hypothesis simplifies one field at a time under one seed; a smaller case often fails under another seed only."""
    tried: set[Case] = set()
    progress = True
    while progress:
        progress = False
        tries = (case.replace(seed=seed) for case in smaller(outcome.case)
                 for seed in ((case.seed, *range(_SEEDS)) if case.is_random else (0,)))
        for case in tries:
            if case in tried or any(getattr(case, name) != value for name, value in fixed.items()):
                continue
            tried.add(case)
            if len(tried) > _MOST_TRIES:
                return
            if (error := _failure(case, broken)) is not None and type(error) is type(outcome.error):
                outcome.case, outcome.error, progress = case, error, True
                break


def _failure(case: Case, broken: dict) -> Exception | None:
    try:
        run(case, **broken)
    except ConfigurationError:
        return None
    except Exception as error:
        return error
    return None


def _count(counts: Counter, case: Case, cluster) -> None:
    counts["runs"] += 1
    counts["actions"] += sum(len(executor.order) for member in cluster.members for executor in member.executors)
    words = {"chunks": case.chunks > 1, "domains": case.members > 1, "decided ahead": case.ahead, "split": case.split,
             "strict": case.mode == "strict",
             "lanes": case.lanes > 1, "several calls": len(case.calls) > 1, "evaluation": any(only for _, only in case.calls),
             "blocking": case.stalls != "none", "launched ahead": case.capacity > 1,
             "random hint": case.hint.startswith("a") and case.hint not in ("alt", "announced")}
    counts.update(word for word, holds in words.items() if holds)
