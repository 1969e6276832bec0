"""`rrfp compare-training`: a user's own training under several schedules, one after another: one table, one picture, one JSON file."""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rrfp.compare.ladder import Ladder, ladder, ladder_table
from rrfp.compare.measure import trace_directory
from rrfp.compare.training import Trained, TrainingFailed, check_command, flags_of, needs, parse_modes, train
from rrfp.compare.training_results import BESIDE, CAUSES, TITLES, TrainingComparison, as_json, rows_of, table
from rrfp.errors import ConfigurationError
from rrfp.outputs import make_directory
from rrfp.values import above_zero, at_least_one


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if a training failed or its losses differ. Raises ConfigurationError for a refusal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = _parser().parse_args(arguments[:split]), arguments[split + 1 :]
    check_command(command)
    if options.warm_up >= options.iterations:
        raise ConfigurationError(f"--warm-up {options.warm_up}: leaves nothing of --iterations {options.iterations} to measure; use fewer")
    modes = parse_modes(options.modes)
    missing = {name: why for name, policy in modes.items() if (why := needs(policy))}
    running = [name for name in modes if name not in missing]
    if not running:
        raise ConfigurationError(f"--modes {' '.join(options.modes)}: none of them can run ({next(iter(missing.values()))}); add megatron-1f1b")
    make_directory("--out", options.out)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, nothing is left behind
    try:
        runs = _measure(command, {name: modes[name] for name in running}, missing, options)
    finally:
        signal.signal(signal.SIGTERM, before)
    if runs is None:
        return 1
    rows = {row.name: row for row in rows_of(runs, missing, warm_up=options.warm_up)}
    emulated = any(call.emulated for trained in runs.values() for each in trained for call in each.calls)
    found = TrainingComparison(tuple(command), options.repeats, options.iterations, options.warm_up, emulated, cores, load,
                               tuple(rows[name] for name in modes))
    steps = _ladder(found)
    print("\n".join(table(found)))
    if steps is not None:
        print("\n" + "\n".join(ladder_table(steps, f"{options.repeats * (options.iterations - options.warm_up)} iterations")))
    path = options.out / "comparison.json"
    path.write_text(json.dumps(as_json(found, steps), indent=1) + "\n")
    print(f"\nfigures: {path}; logs and traces: {options.out}/*/ (`rrfp report`, `rrfp trace`)")
    _draw(options.out, {name: trained[0] for name, trained in runs.items()}, options.warm_up)
    failed = any(needs(modes[name]) is None for name in missing)
    return 1 if failed or any(row.differs for row in found.rows) else 0


def _measure(command: Sequence[str], modes: dict, missing: dict[str, str], options) -> dict[str, list[Trained]] | None:
    """Every mode once per repeat, the order of modes rotated. A mode that fails goes into `missing`; None if it is the first one."""
    runs: dict[str, list[Trained]] = {name: [] for name in modes}
    first = next(iter(modes))
    for repeat in range(options.repeats):
        turn = repeat % len(runs)
        for name in [*runs][turn:] + [*runs][:turn]:
            say = _Progress(f"{name}, repeat {repeat + 1} of {options.repeats}")
            say("starting")
            try:
                runs[name].append(train(
                    command, flags_of(name, modes[name]), trace_directory(options.out, name) / f"repeat{repeat}", iterations=options.iterations,
                    timeout=options.timeout, progress=say))
            except TrainingFailed as error:
                say(f"failed: {error}")
                if name == first:
                    print(f"rrfp compare-training: {name}: {error}", file=sys.stderr)
                    return None
                missing[name] = f"failed: {error}"
                del runs[name]
            else:
                say("done")
    return runs


def _ladder(found: TrainingComparison) -> Ladder | None:
    """Where the speed-up comes from, up to the first rung that was not run (its change would count as the next one's); None without two."""
    ran = {row.name for row in found.rows if row.missing is None}
    causes = dict(takewhile(lambda rung: rung[0] in ran, CAUSES.items()))
    if len(causes) < 2:
        return None
    return ladder(causes, found, beside=[name for name in BESIDE if name in ran])


def _draw(out: Path, runs: dict[str, Trained], warm_up: int) -> None:
    """One iteration of every mode's first training on one time axis: the last, or where draws are emulated the least disturbed one."""
    from rrfp.trace.picture import draw

    measured = range(warm_up, len(next(iter(runs.values())).calls))
    at = min(reversed(measured), key=lambda index: sum(trained.calls[index].outcome.overruns for trained in runs.values()))
    path = out / "timeline.png"
    try:
        draw([(TITLES.get(name, name), trained.timeline) for name, trained in runs.items()], path,
             call=[trained.calls[at].number for trained in runs.values()])
    except ConfigurationError as error:  # no matplotlib
        print(error)
    else:
        print(f"picture: {path} (iteration {at + 1} of each mode's first training)")


class _Progress:
    """Lines on stderr; on a terminal one that is written over."""

    def __init__(self, name: str):
        self._name, self._widest = name, 0

    def __call__(self, line: str) -> None:
        text = f"{self._name}: {line}"
        self._widest = max(self._widest, len(text))
        over = sys.stderr.isatty() and line != "done" and not line.startswith("failed")
        print(text.ljust(self._widest), end="\r" if over else "\n", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rrfp compare-training", usage="rrfp compare-training [options] -- COMMAND", description=__doc__.split(": ", 1)[1],
        epilog="COMMAND starts the training and passes further arguments on to it, for example: torchrun --nproc-per-node 8 -m rrfp pretrain_gpt.py "
        "<Megatron's arguments>. Flags of the schedule, the trace and --exit-interval are added behind it. COMMAND: "
        + shlex.join(["bash", "scripts/pretrain_gpt.sh", "--cpu"]))
    parser.add_argument("--modes", nargs="+", default=list(TITLES), metavar="MODE", help="megatron-1f1b, default, strict:HINT:LIMIT, "
                        f"ready:HINT:LIMIT[:split][:free][:lanes=N]; the first is what the others are compared to; default {' '.join(TITLES)}")
    parser.add_argument("--iterations", type=at_least_one, default=8, metavar="N", help="of every training (default 8)")
    parser.add_argument("--warm-up", type=at_least_one, default=3, metavar="N", help="of them not measured, at the beginning (default 3)")
    parser.add_argument("--repeats", type=at_least_one, default=1, metavar="N", help="trainings per mode, in an order that rotates (default 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR",
                        help="for figures, picture, logs and traces (default runs/compare)")
    parser.add_argument("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help="a training that prints nothing for so long has failed")
    return parser
