"""What a comparison found: figures per mode, as a table and as JSON. Pure functions of outcomes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from rrfp.columns import columns
from rrfp.compare.group import Outcome
from rrfp.trace.breakdown import tenths

SHARES = {"compute": "computing", "F": "blocked_f", "B": "blocked_b", "agreement": "agreement", "announced": "announced",
          "W": "blocked_w", "send": "send", "runtime": "runtime", "ended": "ended"}
"""Parts of a rank's time, as outcomes name them -> as reports do. `announced`: held for announced work. `send`: until messages had
left. `ended`: the rank had ended its call and others had not."""
_ALWAYS = ("compute", "F", "B", "agreement", "runtime")
_TITLES = {"compute": "compute", "F": "wait F", "B": "wait B", "W": "wait W"}


@dataclass(frozen=True)
class Settings:
    """What was compared. Seconds; `seeds`: one per repeat; `stages`: processes, each with `chunks` stages laid out as `layout` says."""

    scenario: str
    stages: int
    microbatches: int
    unit: float
    seeds: tuple[int, ...]
    lanes: int = 1
    compute: str = "emulated"
    """`emulated` (stages sleep), `real` (they multiply matrices) or `simulated` (nothing ran)."""
    cores: int = 1
    load: float = 0.0
    """The machine's load average before the comparison began: other work on it."""
    chunks: int = 1
    layout: str = "looped"


class Timed:
    """What repeats give: a median and quartiles of `seconds`, one number per repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) == 1:
            return self.seconds * 2
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Row(Timed):
    """One mode's figures.

    seconds: per repeat.
    speedup: the first mode's seconds / this mode's, median over repeats: above 1 is faster.
    bound: lower bound in seconds (split or not, as the mode is), median; None where the bounds do not hold for its stages.
    over_bound: seconds / lower bound, median over repeats.
    predicted, error: what simulation says, median, and median of measured / predicted - 1; None if it is not simulated.
    peaks: per stage, the largest over repeats.
    shares: tenths of a percent of all ranks' time by part; they sum to 1000.
    overruns: actions that took noticeably longer than drawn. actions: of how many.
    """

    name: str
    seconds: tuple[float, ...]
    speedup: float
    bound: float | None
    over_bound: float | None
    predicted: float | None
    error: float | None
    peaks: tuple[float, ...]
    shares: Mapping[str, int]
    overruns: int
    actions: int


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of the modes. bound, split_bound: lower bounds in seconds, medians over repeats (None: I and W not known)."""

    settings: Settings
    bound: float
    split_bound: float | None
    rows: tuple[Row, ...]

    def of(self, name: str) -> Row:
        """Raises KeyError if no such mode was compared."""
        return {row.name: row for row in self.rows}[name]


def summarise(
    settings: Settings,
    runs: Mapping[str, Sequence[Outcome]],
    *,
    bounds: Sequence[tuple[float, float | None]],
    split: Mapping[str, bool | None],
    predicted: Mapping[str, Sequence[float]],
) -> Comparison:
    """From outcomes to figures.

    Args:
        runs: by mode, one outcome per repeat.
        bounds: per repeat, the lower bound and that of a split backward (None where the costs of I and W are not known).
        split: by mode, which of the two is its bound; None: neither.
        predicted: by mode, per repeat, what simulation says; modes that it cannot simulate are not in it.
    """
    first = next(iter(runs.values()))
    rows = []
    for name, outcomes in runs.items():
        seconds = tuple(outcome.seconds for outcome in outcomes)
        bound = None if split[name] is None else [pair[split[name]] for pair in bounds]
        said = predicted.get(name)
        # F and B; F, I and W; or those of two halves of every stage.
        kinds = {False: 2, True: 3, None: 6}[split[name]]
        rows.append(Row(
            name=name,
            seconds=seconds,
            speedup=median(one.seconds / other.seconds for one, other in zip(first, outcomes, strict=True)),
            bound=None if bound is None else median(bound),
            over_bound=None if bound is None else median(s / b for s, b in zip(seconds, bound, strict=True)),
            predicted=None if said is None else median(said),
            error=None if said is None else median(s / p - 1 for s, p in zip(seconds, said, strict=True)),
            peaks=tuple(max(peaks) for peaks in zip(*(outcome.peaks for outcome in outcomes), strict=True)),
            shares=shares(outcomes),
            overruns=sum(outcome.overruns for outcome in outcomes),
            actions=kinds * settings.stages * settings.chunks * settings.microbatches * len(outcomes),
        ))
    known = [pair[1] for pair in bounds if pair[1] is not None]
    return Comparison(settings, median(pair[0] for pair in bounds), median(known) if known else None, tuple(rows))


def shares(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Tenths of a percent of all ranks' time over all outcomes, by `SHARES`' reported names; they sum to 1000."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        for parts in outcome.parts:
            total.update(parts)
            total["ended"] += max(0, round(outcome.seconds * 1e9) - sum(parts.values()))
    known = [part for part in SHARES if part in _ALWAYS or total[part]]
    return {SHARES[part]: share for part, share in tenths({part: total[part] for part in known}).items()}


# ---------------------------------------------------------------------- output
def as_json(comparison: Comparison) -> dict:
    """What `--json` writes: seconds, shares in percent; `ratio` is the first mode's time / this one's, above 1 is faster."""
    settings = comparison.settings
    return {
        "scenario": settings.scenario,
        "stages": settings.stages,
        "chunks": settings.chunks,
        "placement": settings.layout,
        "microbatches": settings.microbatches,
        "unit_s": settings.unit,
        "seeds": list(settings.seeds),
        "lanes": settings.lanes,
        "compute": settings.compute,
        "cores": settings.cores,
        "load": settings.load,
        "bound_s": comparison.bound,
        "split_bound_s": comparison.split_bound,
        "modes": [
            {
                "name": row.name,
                "median_s": row.median,
                "q1_s": row.quartiles[0],
                "q3_s": row.quartiles[1],
                "ratio": row.speedup,
                "peak_in_flight": list(row.peaks),
                "shares": {part: share / 10 for part, share in row.shares.items()},
                "over_bound": row.over_bound,
                "simulated_s": row.predicted,
                "simulation_error": row.error,
                "overruns": row.overruns,
                "seconds": list(row.seconds),
            }
            for row in comparison.rows
        ],
    }


def table(comparison: Comparison) -> list[str]:
    """Plain text: what was compared, a row per mode, and what a reader must know to trust it."""
    settings, rows = comparison.settings, comparison.rows
    parts = [part for part, name in SHARES.items() if any(name in row.shares for row in rows)]
    measured = settings.compute != "simulated"
    head = ["mode", "median s", "q1", "q3", "faster", "x bound", *(["simulated", "off by"] if measured else [])]
    head += [_TITLES.get(part, part) for part in parts] + ["peak in flight per stage"]
    body = [[
        row.name, f"{row.median:.3f}", *(f"{quartile:.3f}" for quartile in row.quartiles), f"{row.speedup:.3f}",
        _or_dash(row.over_bound, ".3f"), *([_or_dash(row.predicted, ".3f"), _or_dash(row.error, "+.1%")] if measured else []),
        *(f"{row.shares.get(SHARES[part], 0) / 10:.1f}" for part in parts), peaks(row.peaks),
    ] for row in rows]
    bounds = f"lower bound {comparison.bound:.3f} s, with a split backward {_or_dash(comparison.split_bound, '.3f')} s (medians)"
    legend = (f"faster: {rows[0].name}'s seconds / the mode's, median over repeats; x bound: seconds / its lower bound; "
              "compute to ended: percent of all ranks' time")
    return [*heading(settings), bounds, "", *columns([head, *body]), "", legend, *warnings_of(comparison)]


def heading(settings: Settings) -> list[str]:
    """What was compared, in a line or two."""
    how = {"emulated": "compute is EMULATED (stages sleep), engine, processes and transport are real",
           "real": "stages compute for real (matrix products)",
           "simulated": "SIMULATED: nothing ran"}[settings.compute]
    machine = "" if settings.compute == "simulated" else f"; {settings.cores} cores, load {settings.load:.1f} before"
    seeds = sorted(set(settings.seeds))
    named = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    lanes = f"{settings.lanes} lane{'s' * (settings.lanes > 1)} unless a mode says otherwise"
    stages = f"{settings.stages} stages"
    if settings.chunks > 1:
        stages = f"{settings.stages} ranks of {settings.chunks} chunks{' in a V' if settings.layout == 'v' else ''}"
    what = (f"{settings.scenario}: {stages}, {settings.microbatches} microbatches, unit {settings.unit * 1e3:.3g} ms, "
            f"{len(settings.seeds)} repeats ({named}), {lanes}")
    return [what, how + machine]


def warnings_of(comparison: Comparison) -> list[str]:
    """Lines that say how far the figures can be trusted on a busy machine; empty if nothing was measured or nothing was late."""
    settings = comparison.settings
    late, actions = sum(row.overruns for row in comparison.rows), sum(row.actions for row in comparison.rows)
    lines = []
    if late:
        lines.append(f"{late} of {actions} actions ({late / actions:.1%}) took over 1 ms longer than drawn"
                     + (": THE MACHINE WAS BUSY, these are not clean figures" if late > 0.05 * actions else ""))
    if settings.compute != "simulated" and settings.load > settings.cores:
        lines.append(f"load {settings.load:.1f} on {settings.cores} cores before the first run: other work may have slowed these runs")
    return lines


def peaks(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
