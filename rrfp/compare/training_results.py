"""What a comparison of trainings found: figures per mode, as a table and as JSON. Pure functions of what was read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rrfp.columns import columns
from rrfp.compare.ladder import Ladder, ladder_json
from rrfp.compare.results import SHARES, Timed, peaks, shares
from rrfp.compare.training import DEFAULT, MEGATRON, Trained

TITLES = {
    MEGATRON: "Megatron's 1F1B",
    "strict:1f1b:1f1b": "the control: the same order, our transport",
    "strict:1f1b:eager": "the same order, deeper warm-up",
    "strict:zb-h1:2p-1": "ZB-H1 in fixed order",
    "ready:bf:2p": "RRFP, BF, memory of 2P",
    "ready:bfw:2p": "RRFP, BFW, memory of 2P",
    DEFAULT: "RRFP as it comes: hint and limit `auto`",
}
"""The modes of a comparison, if no others are asked for."""
CAUSES = {
    MEGATRON: "Megatron's 1F1B",
    "strict:1f1b:1f1b": "asynchronous transport",
    "strict:1f1b:eager": "memory: a larger limit",
    "ready:bf:2p": "readiness",
    "ready:bfw:2p": "split backward (W)",
}
"""What each of them changes, from the baseline up."""
BESIDE = ("strict:zb-h1:2p-1", DEFAULT)


@dataclass(frozen=True)
class Row(Timed):
    """One mode.

    seconds: of every measured iteration, as Megatron logged them, all repeats. schedule: those of the schedule alone, from the trace.
    speedup: the first mode's seconds / this one's, median over iterations: above 1 is faster.
    losses: `reference`, `equal`, or what differs first.
    peaks: per stage, the largest. shares: tenths of a percent of all ranks' time by part. gigabytes: on a GPU, or 0.
    overruns: of `actions` measured ones, those that took longer than they were emulated to take.
    missing: why it did not run; nothing else is set then.
    """

    name: str
    seconds: tuple[float, ...] = ()
    schedule: tuple[float, ...] = ()
    speedup: float = 0.0
    losses: str = ""
    peaks: tuple[int, ...] = ()
    shares: Mapping[str, int] | None = None
    gigabytes: float = 0.0
    overruns: int = 0
    actions: int = 0
    missing: str | None = None

    @property
    def differs(self) -> bool:
        return self.missing is None and self.losses not in ("reference", "equal")


@dataclass(frozen=True)
class TrainingComparison:
    """Rows in the order of the modes. repeats: trainings per mode; iterations: of each, the first `warm_up` of them not measured."""

    command: tuple[str, ...]
    repeats: int
    iterations: int
    warm_up: int
    emulated: bool
    cores: int
    load: float
    rows: tuple[Row, ...]

    def of(self, name: str) -> Row:
        """Raises KeyError if no such mode was run to its end."""
        return {row.name: row for row in self.rows if row.missing is None}[name]


def rows_of(runs: Mapping[str, Sequence[Trained]], missing: Mapping[str, str], *, warm_up: int) -> tuple[Row, ...]:
    """From trainings to figures.

    Args:
        runs: by mode, one per repeat; as many of each. The first mode is what others are compared to.
        missing: by mode, why it did not run.
        warm_up: iterations at the beginning of every training that are not measured. Their losses count.
    """
    reference, rows = next(iter(runs.values())), []
    first = _seconds(reference, warm_up)
    for name in [*runs, *missing]:
        if name in missing:
            rows.append(Row(name, missing=missing[name]))
            continue
        trained = runs[name]
        calls = [call for each in trained for call in each.calls[warm_up:]]
        outcomes = [call.outcome for call in calls]
        seconds = _seconds(trained, warm_up)
        rows.append(Row(
            name=name,
            seconds=seconds,
            schedule=tuple(outcome.seconds for outcome in outcomes),
            speedup=median(one / other for one, other in zip(first, seconds, strict=True)),
            losses=compare_losses(reference, trained),
            # Of all iterations: warming up takes memory too.
            peaks=tuple(max(held) for held in zip(*(call.outcome.peaks for each in trained for call in each.calls), strict=True)),
            shares=shares(outcomes),
            gigabytes=max(each.gigabytes for each in trained),
            overruns=sum(outcome.overruns for outcome in outcomes),
            actions=sum(call.actions for call in calls),
        ))
    return tuple(rows)


def compare_losses(reference: Sequence[Trained], other: Sequence[Trained]) -> str:
    """`reference`, `equal`, or the first iteration in which a logged number differs: digit for digit, every repeat."""
    for trained in other:
        for number, (one, its) in enumerate(zip(reference[0].steps, trained.steps, strict=True), 1):
            for field in one.fields.keys() | its.fields.keys():
                if one.fields.get(field) != its.fields.get(field):
                    return f"DIFFERENT from iteration {number} on ({field} {its.fields.get(field)} instead of {one.fields.get(field)})"
    return "reference" if other is reference else "equal"


def _seconds(runs: Sequence[Trained], warm_up: int) -> tuple[float, ...]:
    return tuple(step.milliseconds / 1e3 for each in runs for step in each.steps[warm_up:])


# ---------------------------------------------------------------------------------------------------------------- output
def table(found: TrainingComparison) -> list[str]:
    """Plain text: what was compared, a row per mode, and what a reader must know to trust it."""
    rows = [row for row in found.rows if row.missing is None]
    parts = [part for part, name in SHARES.items() if any(name in row.shares for row in rows)]
    memory = any(row.gigabytes for row in rows)
    titles = {"F": "wait F", "B": "wait B", "W": "wait W"}
    head = ["mode", "losses", "median ms", "q1", "q3", "faster", *(titles.get(part, part) for part in parts), *(["GiB"] if memory else []),
            "peak in flight per stage"]
    body = [[
        row.name, "DIFFERENT" if row.differs else row.losses, f"{1e3 * row.median:.0f}", *(f"{1e3 * quartile:.0f}" for quartile in row.quartiles),
        f"{row.speedup:.3f}", *(f"{row.shares.get(SHARES[part], 0) / 10:.1f}" for part in parts),
        *([f"{row.gigabytes:.1f}"] if memory else []), peaks(row.peaks)] for row in rows]
    width = max(len(row.name) for row in found.rows)
    lines = [*heading(found), "", *columns([head, *body])]
    lines += [f"{row.name.ljust(width)}  {row.missing}" for row in found.rows if row.missing is not None]
    lines += ["", *(f"{row.name}: {TITLES[row.name]}" for row in found.rows if row.name in TITLES), "",
              "losses: every number that Megatron logs, times apart, digit for digit in every iteration; ms: whole iterations, as logged;",
              f"faster: {rows[0].name}'s time / the mode's, median over iterations; compute to ended: percent of all ranks' time in the schedule"]
    if memory:
        lines.append("GiB: the most that a rank had allocated, as Megatron logs it (on a CPU: resident, the libraries too)")
    lines += [f"{row.name}: {row.losses}" for row in rows if row.differs]
    return lines + _warnings(found)


def heading(found: TrainingComparison) -> list[str]:
    """What was compared, in a few lines."""
    measured = found.iterations - found.warm_up
    how = ("the training is real, its durations are EMULATED: every action sleeps up to a drawn one" if found.emulated
           else "the training is real, and so are its durations")
    return [" ".join(found.command),
            f"{found.repeats} training{'s' * (found.repeats > 1)} per mode of {found.iterations} iterations, the last {measured} measured; "
            f"{found.cores} cores, load {found.load:.1f} before", how]


def as_json(found: TrainingComparison, ladder: Ladder | None) -> dict:
    """What the comparison writes beside its table: seconds, shares in percent; `ratio` is the first mode's time / this one's."""
    return {
        "command": list(found.command), "repeats": found.repeats, "iterations": found.iterations, "warm_up": found.warm_up,
        "emulated": found.emulated, "cores": found.cores, "load": found.load,
        "modes": [{"name": row.name, "missing": row.missing} if row.missing is not None else {
            "name": row.name, "losses": row.losses, "median_s": row.median, "q1_s": row.quartiles[0], "q3_s": row.quartiles[1],
            "ratio": row.speedup, "peak_in_flight": list(row.peaks), "gib": row.gigabytes,
            "shares": {part: share / 10 for part, share in row.shares.items()}, "overruns": row.overruns, "actions": row.actions,
            "seconds": list(row.seconds), "schedule_s": list(row.schedule)} for row in found.rows],
    } | ({} if ladder is None else {"ladder": ladder_json(ladder)})


def _warnings(found: TrainingComparison) -> list[str]:
    late, actions, lines = sum(row.overruns for row in found.rows), sum(row.actions for row in found.rows), []
    if late:
        lines.append(f"{late} of {actions} actions ({late / actions:.1%}) took longer than drawn"
                     + (": THE MACHINE WAS BUSY, or the unit is too short; these are not clean figures" if late > 0.05 * actions else ""))
    if found.load > found.cores:
        lines.append(f"load {found.load:.1f} on {found.cores} cores before the first run: other work may have slowed these runs")
    return lines
