"""`rrfp compare`: ways of running side by side, in one run, on real processes with the real engine and transport."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rrfp.compare.ladder import fixed_orders, ladder, ladder_json, ladder_table, rungs
from rrfp.compare.results import Settings, as_json, summarise, table
from rrfp.errors import ConfigurationError
from rrfp.outputs import check_file, check_picture, make_directory
from rrfp.simulate.bounds import lower_bound
from rrfp.simulate.costs import LAYOUTS, Costs, from_scenario, unit_of
from rrfp.values import above_zero, at_least_one, parse_seeds

DEFAULT_MODES = ("megatron-1f1b", "strict:1f1b:1f1b", "ready:announced:1f1b", "ready:alt:2p", "ready:fill-r:2p-1")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if a rank failed (its traceback is printed). Raises ConfigurationError for a refusal."""
    options = _parser().parse_args(argv)
    # Ranks share the cores: one thread each, before anything loads a library that starts its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rrfp.compare import measure
    from rrfp.compare.baselines import check_baseline

    if options.stages < 2:
        raise ConfigurationError(f"--stages {options.stages}: a pipeline has at least 2 stages; for example --stages 4")
    _check(options)
    causes = rungs(lanes=options.lanes if options.lanes > 1 else 8) if options.explain else {}
    beside = fixed_orders(options.stages) if options.explain else ()
    texts = [*causes, *beside, *(options.modes or (() if options.explain else DEFAULT_MODES))]
    modes = measure.parse_modes(texts, lanes=1 if options.explain else options.lanes)
    for mode in modes.values():
        if isinstance(mode, str) and ((options.chunks or 1) > 1 or options.placement == "v"):
            raise ConfigurationError(f"--modes {mode}: runs one stage per process, and this comparison has several (--chunks, --placement);"
                                     " leave the mode out, and name others with --modes")
        if isinstance(mode, str) and not options.simulated:
            check_baseline(mode, stages=options.stages, microbatches=options.microbatches)
        elif isinstance(mode, str) and mode != "megatron-1f1b":
            raise ConfigurationError(f"--modes {mode}: is not modelled by --simulated; leave one of the two out")
    seeds = _seeds(options)
    chunks = options.chunks or (2 if options.placement == "v" else 1)
    costs = [from_scenario(options.scenario, stages=options.stages * chunks, microbatches=options.microbatches, unit=options.unit / chunks,
                           seed=seed, chunks=chunks, layout=options.placement)
             for seed in seeds]
    longest = max(max(each.durations.values()) + max(each.delays.values(), default=0.0) for each in costs)
    if longest >= options.timeout and not options.simulated:
        raise ConfigurationError(f"--timeout {options.timeout:g}: an action of this scenario and its message may take {longest:.3g} s, which"
                                 f" would count as no progress; use --timeout {3 * longest:.0f} or a smaller --unit")
    # Refuses what cannot run before any process starts.
    results = {name: [measure.simulated(mode, each) for each in costs] for name, mode in modes.items()}

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    compute = "simulated" if options.simulated else options.compute
    unit = unit_of(options.scenario, options.unit, costs[0])
    settings = Settings(options.scenario, options.stages, options.microbatches, unit, tuple(seeds), options.lanes, compute, cores, load,
                        chunks, options.placement)
    with tempfile.TemporaryDirectory(prefix="rrfp-compare-") as scratch:
        out = options.out or (Path(scratch) if options.picture else None)
        if options.simulated:
            runs = {name: [measure.outcome_of(result) for result in found] for name, found in results.items()}
            results = {}
        else:
            shortest = len(modes) * sum(min(bound for bound in _bounds(each) if bound is not None) for each in costs)
            _say(f"{len(modes)} modes, {len(costs)} repeats: at least {shortest:.0f} s")
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, nothing is left behind
            try:
                runs = measure.measure(modes, costs, work=_work(options, cores), out=out, call_timeout=options.timeout, progress=_say)
            except RuntimeError as error:
                print(f"rrfp compare: {error}", file=sys.stderr)
                return 1
            finally:
                signal.signal(signal.SIGTERM, before)
        comparison = summarise(
            settings, runs, bounds=[_bounds(each) for each in costs],
            split={name: measure.splits(mode) for name, mode in modes.items()},
            predicted={name: [result.makespan for result in found] for name, found in results.items() if found[0] is not None})
        found = ladder(causes, comparison, beside=beside) if options.explain else None
        print("\n".join(table(comparison)))
        if found is not None:
            print("\n" + "\n".join(ladder_table(found, f"{len(costs)} repeats")))
        if options.json is not None:
            whole = as_json(comparison) | ({"ladder": ladder_json(found)} if found is not None else {})
            options.json.write_text(json.dumps(whole, indent=1) + "\n")
        if options.picture is not None:
            _draw(out, list(modes), options.picture, seeds[0])
    return 0


def _check(options) -> None:
    """What could not be written after minutes of measuring is refused before, and so is what --simulated would ignore."""
    if options.simulated and options.picture is not None:
        raise ConfigurationError(f"--picture {options.picture}: --simulated runs nothing to draw; use `rrfp simulate --picture`")
    if options.simulated and options.out is not None:
        raise ConfigurationError(f"--out {options.out}: --simulated runs nothing to trace; leave one of the two out")
    if options.simulated and options.compute == "real":
        raise ConfigurationError("--compute real: --simulated runs nothing; leave one of the two out")
    check_file("--json", options.json)
    check_picture(options.picture)
    make_directory("--out", options.out)


def _bounds(costs: Costs) -> tuple[float, float | None]:
    return lower_bound(costs, split=False).seconds, lower_bound(costs, split=True).seconds if costs.splits else None


def _draw(out: Path, names: Sequence[str], path: Path, seed: int) -> None:
    """The first repeat of every mode on one time axis."""
    from rrfp.compare.measure import trace_directory
    from rrfp.trace.files import read
    from rrfp.trace.picture import draw

    timelines = [(name, read(trace_directory(out, name))) for name in names]
    draw(timelines, path, call=[timeline.calls[0] for _, timeline in timelines])
    print(f"picture: {path} (seed {seed}, each mode from its own zero)")


def _work(options, cores: int):
    from rrfp.compare.work import Multiply, Sleep

    if options.compute == "emulated":
        return Sleep()
    if options.stages > cores:
        _say(f"warning: {options.stages} ranks compute on {cores} cores: they take turns, and every mode is slower than drawn")
    return Multiply.calibrated()


def _seeds(options) -> list[int]:
    """One per repeat: the seeds in turn."""
    seeds = options.seeds or range(options.repeats or 5)
    return [seeds[repeat % len(seeds)] for repeat in range(options.repeats or len(seeds))]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rrfp compare", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="pipeline stages, one process each")
    parser.add_argument("--chunks", type=at_least_one, metavar="C",
                        help="stages per process, each 1/C of the unit, for RRFP's modes (default 1; 2 in a V)")
    parser.add_argument("--placement", choices=tuple(LAYOUTS), default="looped",
                        help="how chunks go round: looped (default), or v for lists of ZB-V and DualPipeV")
    parser.add_argument("--microbatches", type=at_least_one, required=True, metavar="M", help="microbatches per iteration")
    parser.add_argument("--scenario", required=True, metavar="NAME", help="how long actions take and how late messages are "
                        "(docs/scenarios.md): a scenario, J0 to J3, or a JSON file")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="megatron-1f1b, torch-1f1b, torch-zbv, strict:HINT:LIMIT, "
                        f"ready:HINT:LIMIT[:split][:free][:lanes=N]; default {' '.join(DEFAULT_MODES)}")
    parser.add_argument("--explain", action="store_true", help="the ladder from Megatron's 1F1B up, one change at a time "
                        "(--modes are added beside it)")
    parser.add_argument("--simulated", action="store_true", help="simulate instead of running: any P, seconds instead of minutes")
    parser.add_argument("--unit", type=above_zero, default=0.02, metavar="SECONDS", help="mean seconds of a forward (default 0.02)")
    parser.add_argument("--seeds", type=parse_seeds, metavar="A-B", help="draws, one repeat each (default 0 to repeats - 1)")
    parser.add_argument("--repeats", type=at_least_one, metavar="N", help="repeats (default 5, or one per seed)")
    parser.add_argument("--lanes", type=at_least_one, default=1, metavar="N", help="FIFO lanes per edge of modes that do not say: with 1 "
                        "a late message holds back those behind it; under --explain the lanes of the last rung (default there 8)")
    parser.add_argument("--compute", choices=("emulated", "real"), default="emulated", help="stages sleep, or multiply matrices")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a PNG of the first repeat there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the traces there, a directory per mode, for `rrfp report`")
    parser.add_argument("--timeout", type=above_zero, default=60.0, metavar="SECONDS", help="without progress, a call fails (default 60)")
    return parser
