"""The demo: one GPT, four pipeline stages, real text, the same seed; Megatron's own 1F1B, then RRFP. Called by scripts/demo.sh.

Four processes on a small machine can't show a pipeline's timing by real compute, so every action is padded to an emulated duration
(the training stays real). The strict control stands beside every other run: it is the fixed order on our transport, so what it gains is
communication, and only what a run gains over it is readiness or memory.
"""

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rrfp.compare.training import Trained, TrainingFailed, train
from rrfp.compare.training_results import compare_losses
from rrfp.errors import ConfigurationError
from rrfp.megatron.padding import parse_scenario
from rrfp.trace.breakdown import CAUSES, summarise
from rrfp.trace.chrome import write_chrome
from rrfp.trace.files import Timeline
from rrfp.trace.picture import draw

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "Megatron 1F1B": ["--pipeline-schedule", "1f1b"],
    "RRFP strict (control)": ["--pipeline-schedule", "rrfp", "--rrfp-mode", "strict", "--rrfp-hint", "1f1b"],
    "RRFP": ["--pipeline-schedule", "rrfp", "--rrfp-limit", "1f1b"],
    "RRFP, memory of 2P": ["--pipeline-schedule", "rrfp", "--rrfp-hint", "fill-alt", "--rrfp-limit", "2p"],
}
DEADLINE = 300.0
"""Seconds without output after which a training has failed."""


def run(name: str, flags: list[str], options, folder: Path) -> Trained:
    """Train once. Exits with what the training said if it fails."""

    def progress(line: str) -> None:
        # One line that is written over on a terminal, and stays a line of its own in a file.
        print(f"{name:<22} {line:<60}", end="\r" if sys.stdout.isatty() else "\n", flush=True)

    command = ["bash", str(ROOT / "scripts/pretrain_gpt.sh"), "--cpu", "--train-iters", str(options.iterations)]
    command += ["--global-batch-size", str(2 * options.microbatches), "--rrfp-emulate", options.scenario]
    start = time.monotonic()
    progress(f"starting {options.stages} processes ...")
    try:
        trained = train(command, flags, folder, iterations=options.iterations, timeout=DEADLINE, progress=progress)
    except TrainingFailed as error:
        sys.exit(f"\n[rrfp] {name}: the training failed: {error}")
    print(f"{name:<22} {f'done in {time.monotonic() - start:.0f} s':<60}", flush=True)
    return trained


def row(name: str, same: str, timeline: Timeline, baseline: float | None) -> tuple[list[str], float]:
    """One line of the table, and the median time of an iteration. same: whether its losses are the reference's."""
    seconds = []
    for number in timeline.calls[1:]:
        call = timeline.of_call(number).values()
        seconds.append(max(c.end for c in call) - min(c.begin for c in call))
    median = statistics.median(seconds)
    summary = summarise(timeline.breakdowns())
    late, actions = _overran(timeline)
    parts = summary.mean.parts()
    total = sum(parts.values())
    blocked = sum(parts.get(cause, 0) for cause in CAUSES)
    peaks = "/".join(str(max(part.peak_in_flight.values())) for part in summary.ranks.values())
    factor = f"{(baseline or median) / median:.2f}"
    return [
        name,
        same,
        f"{1000 * median:.0f} ms",
        factor,
        peaks,
        f"{100 * parts['compute'] / total:.0f}%",
        f"{100 * blocked / total:.0f}%",
        f"{100 * parts['runtime'] / total:.1f}%",
        f"{100 * late / actions:.1f}%",
    ], median


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument(
        "--scenario", default="lengths:20:1", help="emulated durations: NAME[:UNIT_MS[:SEED]], see docs/emulation.md"
    )
    options = parser.parse_args()
    try:
        parse_scenario(options.scenario)
    except ConfigurationError as error:
        parser.error(str(error).replace("--rrfp-emulate", "--scenario"))
    print(
        f"training a GPT on real text over {options.stages} stages on this CPU, {options.microbatches} microbatches an iteration; durations are "
        f"EMULATED (scenario {options.scenario}): every action sleeps up to its drawn duration, the same draws in every run",
        flush=True,
    )
    os.environ.update({"STAGES": str(options.stages), "DATA": str(options.out / "data"), "PYTHONWARNINGS": "ignore"})
    timelines, rows, reference, baseline = [], [], None, None
    for name, flags in RUNS.items():
        folder = options.out / re.sub(r"\W+", "-", name.lower()).strip("-")
        trained = [run(name, flags, options, folder)]
        timeline = trained[0].timeline
        reference = reference or trained
        cells, median = row(name, compare_losses(reference, trained).split()[0], timeline, baseline)
        baseline = baseline or median
        rows.append(cells)
        timelines.append((name, timeline))
        write_chrome(timeline, folder / "trace.json")
    head = ["schedule", "losses", "iteration", "speed-up", "peak in flight", "computing", "blocked", "runtime", "overran"]
    widths = [max(len(cells[column]) for cells in [head, *rows]) for column in range(len(head))]
    print()
    for cells in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    print(
        f"\nlosses: loss, gradient norm and all else that is logged, of all {options.iterations} iterations, digit for digit. iteration: the schedule's own time, median of "
        f"iterations 2 to {options.iterations}. peak in flight: activations held per stage. overran: actions whose real compute took longer than "
        "drawn.\n"
        "The control does 1F1B's work in 1F1B's order: what differs between those two rows is transport and noise; read the others against it."
    )
    late, actions = (sum(counts) for counts in zip(*(_overran(timeline) for _, timeline in timelines)))
    if late > 0.02 * actions:
        print(f"THIS MACHINE WAS BUSY: {100 * late / actions:.0f}% of the actions overran, so these times don't compare schedules. Run it again.")
    try:
        # The same draws in every run: the iteration that other work on the machine disturbed least.
        quietest = min(timelines[0][1].calls[1:], key=lambda call: sum(_overran(timeline, [call])[0] for _, timeline in timelines))
        draw(timelines, options.out / "timeline.png", call=quietest)
        print(f"timeline: {options.out / 'timeline.png'} (iteration {quietest + 1})")
    except ConfigurationError as error:
        print(error)
    print(f"traces:   {options.out}/*/trace.json (open at https://ui.perfetto.dev); tables: rrfp trace {options.out}/rrfp")
    if any(cells[1] == "DIFFERENT" for cells in rows):
        sys.exit("[rrfp] losses differ: please report this with the logs")


def _overran(timeline: Timeline, calls: Iterable[int] | None = None) -> tuple[int, int]:
    """How many actions took longer than drawn, and how many there were, after the first iteration."""
    chosen = timeline.calls[1:] if calls is None else calls
    ran = [action for call in chosen for rank in timeline.of_call(call).values() for action in rank.actions]
    return sum(action.padded == 0 for action in ran), len(ran)


if __name__ == "__main__":
    main()
