"""What to change, from the simulator: the same costs under other limits and hints."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rrfp.mode import mode_name
from rrfp.policy import SPLIT_ONLY, Policy
from rrfp.report.whatif import MEGATRON, WhatIf, best_of, larger_limits
from rrfp.simulate.costs import Costs

WORTH = 1.02
"""A predicted speed-up below this is not worth a change: predictions are good to a few percent."""
FREE = 1.05
"""So much more must microbatches out of order promise: their gradients are summed in another order, so they round otherwise."""
_BUDGET = 100_000
"""Actions simulated in all, some seconds' worth: of a longer call only the likeliest ways are tried."""


@dataclass(frozen=True)
class Suggestion:
    """A way of running that the simulator predicts to be faster."""

    text: str
    mode: str
    """In the notation of `rrfp.mode`."""
    predicted_speedup: float
    """Predicted seconds now over predicted seconds then: both from the simulator, on the same costs."""
    seconds: float
    """Predicted seconds then."""


def suggest(costs: Costs, policy: Policy, *, mode: str | None = None) -> Suggestion | None:
    """The way of running that promises most; among those within 1% of the fastest, the first of: same memory, then less before more.

    Args:
        costs: of the call.
        policy: what it ran under.
        mode: `megatron-1f1b` if that was Megatron's own schedule.

    Returns None if nothing promises 2% (`WORTH`).
    """
    now = WhatIf(costs, policy, mode == MEGATRON)
    candidates = list(_candidates(now))
    if len(candidates) * costs.stages * costs.microbatches * 2 > _BUDGET:
        most = candidates[-1].policy.limit
        candidates = [each for each in candidates if each.policy.hint in (policy.hint, "alt") and each.policy.limit in (policy.limit, most)]
    best = best_of([now, *candidates]) or now
    if policy.lanes == 1 and any(late > 0 for late in costs.delays.values()):
        # Late messages then hold back nothing behind them.
        free = best.with_policy(replace(best.policy, mode="ready", hint="alt", lanes=4, order="free"))
        if best.seconds > FREE * free.seconds:
            best = free
    if best is now or now.seconds < WORTH * best.seconds:
        return None
    speedup = now.seconds / best.seconds
    peaks = best.costs.simulate(best.policy).peak_in_flight
    before = costs.simulate(policy).peak_in_flight
    memory = "at the same memory" if max(peaks) <= max(before) else f"for at most {max(peaks)} activations on a rank instead of {max(before)}"
    text = f"{_change(now, best.policy)}: predicted {speedup:.2f}x, {memory}"
    if best.policy.order == "free" != policy.order:
        text += "; gradients are then summed in another order and round otherwise"
    return Suggestion(text, mode_name(best.policy), speedup, best.seconds)


def lead(cause: str) -> str:
    """How a suggestion is introduced where the first finding has that cause: no other schedule mends a fault."""
    return {"straggler": "Before it is mended, a side gain", "late edge": "Before it is mended, a stopgap", "imbalance": "Also try"}.get(cause, "Try")


def _candidates(now: WhatIf) -> Iterator[WhatIf]:
    """Ways to try, by memory and then by how little they change."""
    policy, costs = now.policy, now.costs
    bigger = larger_limits(policy, costs.placement, costs.microbatches)
    hints = ["announced", "alt", "fill-alt"]
    if costs.splits:
        hints.append("fill-r")
    for base in [policy, *bigger]:
        if base is not policy and not now.rendezvous:
            yield now.with_policy(base)
        for hint in hints:
            other = replace(base, hint=hint, mode="ready", split=hint in SPLIT_ONLY or (policy.split and costs.splits))
            if other != base:
                yield now.with_policy(other)


def _change(now: WhatIf, then: Policy) -> str:
    """`limit 2p and hint alt instead of limit 1f1b and hint announced`."""
    policy = now.policy
    pairs = [("mode", policy.mode, then.mode), ("hint", policy.hint, then.hint), ("limit", policy.limit, then.limit),
             ("order", policy.order, then.order), ("lanes", policy.lanes, then.lanes)]
    if policy.split != then.split and then.hint not in SPLIT_ONLY:
        pairs.append(("backward", "split" if policy.split else "whole", "split" if then.split else "whole"))
    changed = [pair for pair in pairs if pair[1] != pair[2]]
    if now.rendezvous:
        return f"{mode_name(then)} instead of Megatron's own 1F1B"
    if len(changed) > 2:
        return f"{mode_name(then)} instead of {mode_name(policy)}"
    news = " and ".join(f"{name} {value}" for name, _, value in changed)
    old = " and ".join(f"{name} {value}" if len(changed) > 1 else str(value) for name, value, _ in changed)
    return f"{news} instead of {old}"
