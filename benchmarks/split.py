"""Do the hints that `auto` settles on, and the split backward, keep on real processes what simulation promises?

`python benchmarks/split.py [--seeds 15-17] [--scenarios NAME ...] [--out DIR]`

Real engine, processes and transport; stages sleep their drawn durations and messages are late as drawn (P = 8, M = 32, F = I = W = 20 ms on
average). Per scenario all modes run side by side (`rrfp compare`), Megatron's own 1F1B among them: `auto` by readiness beside the fixed
list that holds as much, at three memories. A ratio is the list's seconds / the hint's of one seed, and the table shows its median over seeds
beside what the simulator says of the same draws. At the end, one line per goal. With `--out` a scenario that DIR already has for these seeds is
not run again, and the table is of all that DIR has. 15 scenarios take about 8 minutes a seed (6 with --no-megatron).
"""

import argparse
import json
import sys
import tempfile
from math import exp, log
from pathlib import Path
from statistics import median

from rrfp.compare.command import main as compare
from rrfp.mode import parse_mode
from rrfp.simulate.costs import from_scenario
from rrfp.simulate.scenarios import LATE, SCENARIOS

MEGATRON = "megatron-1f1b"
WHOLE, H1, H2, TIGHT = "1F1B's memory, whole", "P, split", "2P-1, split", "1F1B's memory, split"
FILL = "2P-1, split, fill"


def pairs(stages: int) -> dict[str, tuple[str, str]]:
    """The fixed list and the hint at the same memory, by what the memory is."""
    return {
        WHOLE: ("strict:1f1b:1f1b", "ready:auto:1f1b"),
        TIGHT: ("strict:auto:1f1b:split", "ready:auto:1f1b:split"),
        H1: (f"strict:zb-h1:{stages}", f"ready:auto:{stages}:split"),
        H2: ("strict:zb-h2:2p-1", "ready:auto:2p-1:split"),
        FILL: ("strict:zb-h2:2p-1", "ready:fill:2p-1:split"),
    }


class Found:
    """What was measured of one scenario: per seed the seconds by mode; peak in flight by mode."""

    def __init__(self, files: list[Path]):
        contents = [json.loads(file.read_text()) for file in sorted(files)]
        self.scenario, self.stages, self.microbatches = (contents[0][key] for key in ("scenario", "stages", "microbatches"))
        self.unit = contents[0]["unit_s"]
        self.runs: list[tuple[int, dict[str, float]]] = []
        self.peaks: dict[str, list[int]] = {}
        self.late = 0
        for content in contents:
            for index, seed in enumerate(content["seeds"]):
                self.runs.append((seed, {mode["name"]: mode["seconds"][index] for mode in content["modes"]}))
            for mode in content["modes"]:
                name, peaks = mode["name"], mode["peak_in_flight"]
                self.peaks[name] = [max(pair) for pair in zip(peaks, self.peaks.get(name, peaks), strict=True)]
                self.late += mode["overruns"]

    def seconds(self, mode: str) -> float | None:
        """Median of the seeds that ran it; None if none did."""
        return median(found) if (found := [run[mode] for _, run in self.runs if mode in run]) else None

    def ratio(self, slow: str, fast: str) -> float | None:
        """How much faster `fast` is: median of the ratios of the seeds that ran both."""
        ratios = [run[slow] / run[fast] for _, run in self.runs if slow in run and fast in run]
        return median(ratios) if ratios else None

    def simulated(self, slow: str, fast: str) -> float:
        """The same in simulation."""
        draws = [from_scenario(self.scenario, stages=self.stages, microbatches=self.microbatches, unit=self.unit, seed=seed)
                 for seed, run in self.runs if slow in run and fast in run]
        times = [[draw.simulate(parse_mode(mode)).makespan for draw in draws] for mode in (slow, fast)]
        return median(one / other for one, other in zip(*times, strict=True))


def table(found: list[Found], stages: int) -> list[str]:
    """Markdown: a row per scenario; in parentheses simulation's ratio."""
    sides = pairs(stages)
    lines = ["| scenario | seeds | Megatron's 1F1B | " + " | ".join(sides) + " | Megatron / H2 |", "| --- " * (len(sides) + 4) + "|"]
    for each in found:
        cells = [f"{each.ratio(*side):.3f} ({each.simulated(*side):.3f})" for side in sides.values()]
        theirs, gain = each.seconds(MEGATRON), each.ratio(MEGATRON, sides[H2][1])
        lines.append(f"| {each.scenario} | {len(each.runs)} | " + ("-" if theirs is None else f"{theirs:.2f} s") + " | " + " | ".join(cells)
                     + " | " + ("-" if gain is None else f"{gain:.2f}") + " |")
    lines += ["", "Peak in flight per stage, the largest over the scenarios:", ""]
    for name in dict.fromkeys(name for each in found for name in each.peaks):
        columns = zip(*(each.peaks[name] for each in found if name in each.peaks), strict=True)
        lines.append(f"* `{name}`: {' '.join(str(max(column)) for column in columns)}")
    return lines


def verdicts(found: list[Found], stages: int) -> list[str]:
    """One line per goal, as far as its scenarios were measured."""
    by_name, sides = {each.scenario: each for each in found}, pairs(stages)
    lines = []

    def say(what: str, value: float, goal: float, *, most: bool = False, where: str = "") -> None:
        good = value <= goal if most else value >= goal
        lines.append(f"{'yes' if good else 'NO '} {what}: {value:.3f}{where} (goal: at {'most' if most else 'least'} {goal})")

    if uniform := by_name.get("uniform"):
        ideal = (3 * uniform.microbatches + stages - 1) * uniform.unit
        for side in (H2, FILL):
            say(f"uniform, {sides[side][1]} / ((3M + P - 1) F)", uniform.seconds(sides[side][1]) / ideal, 1.03, most=True)
    if (jitter := by_name.get("jitter-0.3")) and jitter.seconds(MEGATRON):
        for side in (H2, FILL):
            say(f"jitter-0.3, {sides[side][1]} against Megatron's 1F1B", jitter.ratio(MEGATRON, sides[side][1]), 1.25)
    for side, pair in sides.items():
        worst = min(found, key=lambda each: each.ratio(*pair))
        say(f"{side}: {pair[1]} against {pair[0]}, worst scenario", worst.ratio(*pair), 0.99, where=f" in {worst.scenario}")
    for side, goal in ((WHOLE, 1.02), (H1, 1.08)):
        if set(LATE) <= set(by_name):
            ratios = [by_name[name].ratio(*sides[side]) for name in LATE]
            say(f"{side}: geometric mean over {', '.join(LATE)}", exp(sum(map(log, ratios)) / len(ratios)), goal)
    lines.append(f"{sum(each.late for each in found)} actions of all runs ended over 1 ms late")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--unit", type=float, default=0.02)
    parser.add_argument("--seeds", default="15-17")
    parser.add_argument("--scenarios", nargs="+", default=SCENARIOS)
    parser.add_argument("--out", type=Path, help="keep the figures there, a file per scenario and seeds")
    parser.add_argument("--no-megatron", action="store_true", help="leave Megatron's 1F1B out")
    options = parser.parse_args()
    modes = list(dict.fromkeys([*([] if options.no_megatron else [MEGATRON]), *(mode for pair in pairs(options.stages).values() for mode in pair)]))
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        for scenario in options.scenarios:
            file = out / f"{scenario}.{options.seeds}.json"
            if file.exists():
                continue
            part = file.with_suffix(".part")
            status = compare(["--stages", str(options.stages), "--microbatches", str(options.microbatches), "--scenario", scenario, "--seeds",
                              options.seeds, "--unit", str(options.unit), "--json", str(part), "--modes", *modes])
            if status:
                return status
            part.rename(file)
            sys.stdout.flush()
        files = {name: list(out.glob(f"{name}.*.json")) for name in SCENARIOS}
        found = [Found(files[name]) for name in SCENARIOS if files[name]]
        print("\n" + "\n".join([*table(found, options.stages), "", *verdicts(found, options.stages)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
