"""What a call would take with one thing changed, and with all that can be changed: one table, one base.

Every row is the simulator's, under the call's own durations and message times. It is scaled by what the call took over what the
simulator makes of it unchanged; how far apart these two are is in the table too, and says how far to trust the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rrfp.errors import RRFPError
from rrfp.mode import parse_mode
from rrfp.report.suggestion import Suggestion
from rrfp.report.whatif import WhatIf

DEFAULT = parse_mode("ready:announced:1f1b")
"""How RRFP runs unless it is told otherwise."""


@dataclass(frozen=True)
class Change:
    """Something that could be different, as a function of the call."""

    label: str
    """`limit eager`, `stage 5 as fast as the others`..."""
    apply: Callable[[WhatIf], WhatIf]
    gain: float
    """Seconds that the call would be shorter with this alone."""
    possible: bool = True
    """False for what nobody can do, only imagine: every microbatch alike."""


@dataclass(frozen=True)
class Saving:
    """A row of the table."""

    what: str
    kind: str
    """`measured`, `simulated` (both as it ran), `change` (that alone), `suggested` (the suggestion, where it is more than one of
    these), `imagined` (not to be had) or `together`."""
    seconds: float
    """What the call took or would take."""
    speedup: float
    """The call as it ran over this, 1.0 where nothing is changed."""


def savings(seconds: float, what_if: WhatIf | None, changes: list[Change], suggestion: Suggestion | None) -> list[Saving]:
    """The table; empty where the call can't be simulated.

    Args:
        seconds: what the call took.
        what_if: the call as it ran.
        changes: one for each finding that has one.
        suggestion: gets a row of its own if it is no finding's.
    """
    if what_if is None:
        return []
    rows = [Saving("as it ran", "measured", seconds, 1.0), Saving("as it ran, simulated", "simulated", what_if.seconds, 1.0)]

    def row(label: str, kind: str, then: float) -> None:
        rows.append(Saving(label, kind, then, seconds / then if then > 0 else 1.0))

    for change in sorted(changes, key=lambda each: not each.possible):
        row(change.label, "change" if change.possible else "imagined", seconds - change.gain)
    possible = [change for change in changes if change.possible]
    if suggestion is not None:
        policy = parse_mode(suggestion.mode)
        label = suggestion.mode
        if policy == replace(DEFAULT if what_if.rendezvous else what_if.policy, limit=policy.limit):
            label = f"RRFP with limit {policy.limit}" if what_if.rendezvous else f"limit {policy.limit}"
        if label not in [change.label for change in changes]:
            row(label, "suggested", seconds / suggestion.predicted_speedup)
            # It stands for the limit that a finding names: both can't be.
            possible = [change for change in possible if "limit " not in change.label]
            possible.append(Change(label, lambda each: each.with_policy(policy), 0.0))
    if len(possible) > 1:
        together = what_if
        try:
            for change in possible:
                together = change.apply(together)
            row(" + ".join(change.label for change in possible), "together", seconds * together.seconds / what_if.seconds)
        except RRFPError:
            pass
    return rows

