"""Emulated stage times and message delays: the draws on which every comparison of policies rests.

A scenario is a name. The same name and seed give the same draws everywhere, so two schedules are compared on equal work.
"""

import math
from random import Random

VARIATION = {
    "uniform": 0.0,
    "jitter-0.1": 0.1,
    "jitter-0.3": 0.3,
    "jitter-0.6": 0.6,
    "lengths": 0.1,
    "images": 0.1,
    "images-tokens": 0.1,
    "straggler": 0.1,
    "pauses": 0.1,
    "links": 0.1,
    "spikes": 0.1,
    "rare-spikes": 0.1,
    "mixed": 0.2,
    "paper-language": 0.1,
    "paper-multimodal": 0.1,
}
"""Coefficient of variation of every single duration, by scenario."""

SCENARIOS = tuple(VARIATION)
CALM = SCENARIOS[:10]
"""No late messages worth the name, no mixes: where a rule must not lose to a fixed list."""
LATE = SCENARIOS[10:]
"""Late messages and mixes."""

_VISION = ("images", "images-tokens", "mixed", "paper-multimodal")  # stages 0 and 1 cost what the images of a microbatch cost
_TOKENS = ("images-tokens", "mixed", "paper-multimodal")  # later stages cost more with more images
_LENGTHS = ("lengths", "paper-language")  # every stage costs what the microbatch's length costs
_PAUSES = ("pauses", "mixed")


def _factor(rng: Random, variation: float) -> float:
    """Lognormal with mean 1 and the given coefficient of variation."""
    if not variation:
        return 1.0
    sigma = math.sqrt(math.log(1 + variation * variation))
    return rng.lognormvariate(-sigma * sigma / 2, sigma)


def _late(name: str, unit: float, rng: Random) -> float:
    """One message's delay."""
    match name:
        case "links":
            return 0.2 * unit * rng.expovariate(1)
        case "spikes":
            return 10 * unit if rng.random() < 0.05 else 0.0
        case "rare-spikes":
            return 5 * unit if rng.random() < 0.02 else 0.0
        case "mixed":
            return 5 * unit if rng.random() < 0.02 else 0.1 * unit
        case "paper-language":
            return 0.5 * unit * rng.expovariate(1)
        case "paper-multimodal":
            return 10 * unit if rng.random() < 0.05 else 0.1 * unit
    return 0.0


Draws = dict[tuple[str, int, int], float]


def draw(name: str, stages: int, microbatches: int, unit: float, seed: int) -> tuple[Draws, Draws]:
    """Durations and delays of one call.

    Args:
        name: one of `SCENARIOS`.
        stages: S.
        microbatches: M.
        unit: the mean duration of F, I and W, in whatever unit the result shall have.
        seed: same name and seed, same draws.

    Returns:
        Durations by (kind, stage, microbatch) of F, I, W and B = I + W, and delays by the same key, kind F or B, of the message
        that makes that action ready.

    Raises:
        KeyError: if there is no such scenario.
    """
    variation = VARIATION[name]
    rng = Random(f"{name}/{seed}")
    # The order of the draws below is part of the definition.
    images = [rng.choice([0, 0, 1, 2, 4, 8]) for _ in range(microbatches)]
    mean_images = max(sum(images) / microbatches, 1e-9)
    lengths = [_factor(rng, 0.5) for _ in range(microbatches)]
    durations: Draws = {}
    delays: Draws = {}
    for s in range(stages):
        for m in range(microbatches):
            base = unit
            if name in _VISION and s < 2:
                base *= max(0.05, images[m] / mean_images)
            if name in _TOKENS and s >= 2:
                base *= 0.6 + 0.4 * images[m] / mean_images
            if name in _LENGTHS:
                base *= lengths[m]
            if name == "straggler" and s == stages // 2:
                base *= 1.3
            for kind in "FIW":
                durations[kind, s, m] = base * _factor(rng, variation)
                if name in _PAUSES and rng.random() < 0.02:
                    durations[kind, s, m] += 5 * unit
            durations["B", s, m] = durations["I", s, m] + durations["W", s, m]
            for kind in "FB":
                delays[kind, s, m] = _late(name, unit, rng)
    return durations, delays
