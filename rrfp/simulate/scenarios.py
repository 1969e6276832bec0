"""Emulated stage times and message delays: the draws on which every comparison of policies rests.

A scenario is a name. The same name and seed give the same draws everywhere, so two schedules are compared on equal work.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

from rrfp.errors import ConfigurationError
from rrfp.scheduler.sizes import organ_pipe

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

LEVELS = {"J0": (0.0, 0.0, 0.0), "J1": (0.1, 0.005, 0.5), "J2": (0.2, 0.010, 1.0), "J3": (0.3, 0.015, 1.5)}
"""The RRFP paper's injection levels (its experiment with injected jitter): probability, base in seconds, and factor alpha."""

BY_SIZE = "organ-pipe:"
"""Before a scenario's name: its microbatches fed by their sizes."""

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


class Jitter:
    """The paper's injection at one stage: after an action, with probability p, a delay of alpha x max(base, e) x (.5 + U(0, 1)).

    e = .9 e + .1 c is the moving average of what the stage's actions took.

    Args:
        level: one of `LEVELS`.
    """

    def __init__(self, level: str):
        self._probability, self._base, self._alpha = LEVELS[level]
        self._average: float | None = None

    def after(self, took: float, rng: Random) -> float:
        """Seconds by which an action that took so many seconds is lengthened."""
        self._average = took if self._average is None else 0.9 * self._average + 0.1 * took
        if rng.random() >= self._probability:
            return 0.0
        return self._alpha * max(self._base, self._average) * (0.5 + rng.random())


Draws = dict[tuple[str, int, int], float]


def check_scenario(name: str) -> None:
    """Raises ConfigurationError unless `draw` knows `name`: a scenario (behind organ-pipe: or not), a level, a JSON file that can be read."""
    if name.removeprefix(BY_SIZE) in SCENARIOS or name in LEVELS:
        return
    if not name.endswith(".json"):
        names = ", ".join((*SCENARIOS, *LEVELS))
        raise ConfigurationError(f"scenario {name}: there is no such scenario; choose one of {names}, or give a JSON file")
    _read(name)


def draw(name: str, stages: int, microbatches: int, unit: float, seed: int) -> tuple[Draws, Draws]:
    """Durations and delays of one call.

    Args:
        name: one of `SCENARIOS`, or one behind `organ-pipe:`: the same draws, the microbatches fed in the order of
            `rrfp.scheduler.sizes.organ_pipe`; one of `LEVELS`; or the path of a JSON file (docs/scenarios.md).
        stages: S.
        microbatches: M.
        unit: the mean duration of F, I and W, in whatever unit the result shall have (seconds for `LEVELS`, whose base is in seconds).
        seed: same name and seed, same draws.

    Returns:
        Durations by (kind, stage, microbatch) of F, I, W and B = I + W, and delays by the same key, kind F or B, of the message
        that makes that action ready. A file that gives B alone has neither I nor W.

    Raises:
        KeyError: if there is no such scenario.
        ConfigurationError: if a file cannot be read, or is for other numbers of stages or microbatches.
    """
    if name in LEVELS:
        return _injected(name, stages, microbatches, unit, seed)
    if name.endswith(".json"):
        return _from_file(name, stages, microbatches, unit, seed)
    if name.startswith(BY_SIZE):
        name = name.removeprefix(BY_SIZE)
        order = organ_pipe(data_sizes(name, microbatches, seed), stages)
        durations, delays = ({(kind, s, m): table[kind, s, order[m]] for kind, s, m in table}
                             for table in draw(name, stages, microbatches, unit, seed))
        return durations, delays
    variation = VARIATION[name]
    rng = Random(f"{name}/{seed}")
    images, lengths = _data(rng, microbatches)
    mean_images = max(sum(images) / microbatches, 1e-9)
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


def _data(rng: Random, microbatches: int) -> tuple[list[int], list[float]]:
    """Images and length of every microbatch. The order of the draws, these first, is part of a scenario's definition."""
    images = [rng.choice([0, 0, 1, 2, 4, 8]) for _ in range(microbatches)]
    return images, [_factor(rng, 0.5) for _ in range(microbatches)]


def data_sizes(name: str, microbatches: int, seed: int) -> Sequence[float]:
    """What a scenario's data tell of every microbatch before the call: its images or its length. All equal elsewhere.

    Jitter, pauses and late messages are not in it: nobody knows them in advance.
    """
    images, lengths = _data(Random(f"{name}/{seed}"), microbatches)
    return images if name in _VISION else lengths if name in _LENGTHS else [1.0] * microbatches


def _injected(level: str, stages: int, microbatches: int, unit: float, seed: int) -> tuple[Draws, Draws]:
    """The paper's jitter upon even stages. I carries what is injected at B, so that split and whole do equal work."""
    rng = Random(f"{level}/{seed}")
    durations: Draws = {}
    for s in range(stages):
        jitter = Jitter(level)
        for m in range(microbatches):
            # Forward and backward in turn, as in the steady state: a draw must not depend on the order in which a policy runs them.
            durations["F", s, m] = unit + jitter.after(unit, rng)
            durations["I", s, m] = unit + jitter.after(2 * unit, rng)
            durations["W", s, m] = unit
            durations["B", s, m] = durations["I", s, m] + durations["W", s, m]
    return durations, {(kind, s, m): 0.0 for kind in "FB" for s in range(stages) for m in range(microbatches)}


# -- a user's own file (docs/scenarios.md) -------------------------------------------------------------------------------


def _refuse(path: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"scenario {path}: {what}; docs/scenarios.md shows the format")


def _read(path: str) -> dict:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refuse(path, f"cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise _refuse(path, "holds no JSON object")
    if unknown := set(content) - {"unit", "stages", "microbatches", "F", "B", "I", "W", "delays"}:
        raise _refuse(path, f"does not know {', '.join(sorted(unknown))}")
    kinds = [kind for kind in "FBIW" if kind in content]
    if kinds not in (["F", "B"], ["F", "I", "W"]):
        raise _refuse(path, f"gives {' '.join(kinds) or 'no kind'}, and must give F and B, or F, I and W")
    return content


def _from_file(path: str, stages: int, microbatches: int, unit: float, seed: int) -> tuple[Draws, Draws]:
    content = _read(path)
    for word, given in (("stages", stages), ("microbatches", microbatches)):
        if content.get(word, given) != given:
            raise _refuse(path, f"is for {content[word]} {word}, not {given}")
    unit = _number(path, "unit", content.get("unit", unit))
    kinds = [kind for kind in "FBIW" if kind in content]
    # One generator per table: a change of one does not change the draws of the others.
    durations: Draws = {}
    for kind in kinds:
        durations |= _table(path, kind, content[kind], kind, stages, microbatches, unit, Random(f"{kind}/{seed}"))
    if "B" not in content:
        durations |= {("B", s, m): durations["I", s, m] + durations["W", s, m] for s in range(stages) for m in range(microbatches)}
    if not any(durations.values()):
        raise _refuse(path, "all durations are 0, so there is nothing to compare")
    delays: Draws = {}
    late = content.get("delays", {})
    if not isinstance(late, dict) or set(late) - {"F", "B"}:
        raise _refuse(path, "delays: must be an object with F, B or both")
    for kind in "FB":
        delays |= _table(path, f"delays {kind}", late.get(kind, 0.0), kind, stages, microbatches, unit, Random(f"late {kind}/{seed}"))
    return durations, delays


def _table(path: str, where: str, given, kind: str, stages: int, microbatches: int, unit: float, rng: Random) -> Draws:
    """One kind's times: a number, a full table by stage and microbatch, or a description to draw from."""
    if isinstance(given, list):
        if len(given) != stages or any(not isinstance(row, list) or len(row) != microbatches for row in given):
            raise _refuse(path, f"{where}: a table has {stages} rows (stages) of {microbatches} numbers (microbatches)")
        return {(kind, s, m): unit * _number(path, where, value) for s, row in enumerate(given) for m, value in enumerate(row)}
    spec = given if isinstance(given, dict) else {"mean": given}
    if unknown := set(spec) - {"mean", "cv", "microbatches", "probability"}:
        raise _refuse(path, f"{where}: does not know {', '.join(sorted(unknown))}")

    def each(word: str, otherwise: float, count: int) -> list[float]:
        value = spec.get(word, otherwise)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise _refuse(path, f"{where}: {word} has {len(values)} numbers where {count} are needed")
        return [_number(path, f"{where}: {word}", one) for one in values]

    mean, variation = each("mean", 0.0, stages), each("cv", 0.0, stages)
    factor, probability = each("microbatches", 1.0, microbatches), each("probability", 1.0, stages)
    return {
        (kind, s, m): unit * mean[s] * factor[m] * _factor(rng, variation[s]) if rng.random() < probability[s] else 0.0
        for s in range(stages) for m in range(microbatches)
    }


def _number(path: str, where: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise _refuse(path, f"{where}: {value!r} is not a number of at least 0")
    return float(value)
