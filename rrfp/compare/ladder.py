"""The ladder: from Megatron's 1F1B to the best mode, one change at a time, so that a speed-up can be taken apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isclose, log, prod
from statistics import median

from rrfp.columns import columns
from rrfp.compare.results import Comparison, peaks


@dataclass(frozen=True)
class Step:
    """One rung. factor: how much faster than the rung below (the first: 1.0), geometric mean over repeats."""

    cause: str
    mode: str
    factor: float
    seconds: float
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class Ladder:
    """Steps from the baseline up. total: the last rung against the first, by itself. beside: (mode, total factor, seconds, peaks).

    Raises:
        ValueError: the product of the factors is not the total.
    """

    steps: tuple[Step, ...]
    total: float
    beside: tuple[tuple[str, float, float, tuple[float, ...]], ...] = ()

    def __post_init__(self):
        product = prod(step.factor for step in self.steps)
        if not isclose(product, self.total, rel_tol=1e-9):
            raise ValueError(f"the ladder's factors multiply to {product:.6f}, but the total is {self.total:.6f}")


def rungs(*, lanes: int) -> dict[str, str]:
    """Mode -> what it changes, from the baseline up, with `lanes` lanes at the top.

    The larger limit of a fixed order is `eager`: a list for 2P on every stage would make the last stage wait for 2P forwards.
    """
    return {
        "megatron-1f1b": "Megatron's 1F1B",
        "strict:1f1b:1f1b": "asynchronous transport",
        "strict:1f1b:eager": "memory: a larger limit",
        "ready:alt:2p": "readiness",
        "ready:fill-r:2p": "split backward (W)",
        f"ready:fill-r:2p:free:lanes={lanes}": "lanes and free order",
    }


def fixed_orders(stages: int) -> tuple[str, ...]:
    """Modes beside the ladder: fixed orders with a split backward, which show what the split gives without readiness."""
    return f"strict:zb-h1:{stages}", "strict:zb-h2:2p-1"


def ladder(causes: Mapping[str, str], comparison: Comparison, *, beside: Sequence[str] = ()) -> Ladder:
    """Raises KeyError if a mode was not compared."""
    first, steps, below = comparison.of(next(iter(causes))), [], None
    for mode, cause in causes.items():
        row = comparison.of(mode)
        factor = 1.0 if below is None else _ratio(below.seconds, row.seconds)
        steps.append(Step(cause, mode, factor, median(row.seconds), row.peaks))
        below = row
    others = [comparison.of(name) for name in beside]
    return Ladder(tuple(steps), _ratio(first.seconds, below.seconds),
                  tuple((row.name, _ratio(first.seconds, row.seconds), median(row.seconds), row.peaks) for row in others))


def ladder_table(found: Ladder, over: str) -> list[str]:
    """Plain text: a line per rung with its factor and the product so far, then what stands beside it. over: of what the means are, `5 repeats`."""
    rows, so_far = [["step", "mode", "factor", "so far", "median s", "peak in flight per stage"]], 1.0
    for step in found.steps:
        so_far *= step.factor
        rows.append([step.cause, step.mode, f"{step.factor:.3f}", f"{so_far:.3f}", f"{step.seconds:.3f}", peaks(step.peaks)])
    for name, factor, seconds, held in found.beside:
        rows.append(["beside it", name, "", f"{factor:.3f}", f"{seconds:.3f}", peaks(held)])
    return [f"Where the speed-up comes from (geometric means over {over})", "", *columns(rows), "",
            f"product of the factors {so_far:.4f} = total {found.total:.4f}"]


def ladder_json(found: Ladder) -> dict:
    """The `ladder` entry of `--json`."""
    return {
        "total": found.total,
        "steps": [{"cause": step.cause, "mode": step.mode, "factor": step.factor, "median_s": step.seconds,
                   "peak_in_flight": list(step.peaks)} for step in found.steps],
        "beside": [{"mode": name, "factor": factor, "median_s": seconds, "peak_in_flight": list(held)}
                   for name, factor, seconds, held in found.beside],
    }


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Geometric mean of the ratios of one repeat each: only these multiply along the ladder."""
    return exp(sum(log(one / other) for one, other in zip(slow, fast, strict=True)) / len(fast))
