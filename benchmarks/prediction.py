"""How well does simulation predict real processes? python benchmarks/prediction.py [emulated | real | traces FROM RUN ...]

emulated: eight stages that sleep drawn durations, real engine, processes and transport, all scenarios, four ways of running. Predicted
    from the draws, plus what the engine itself costs: a traced call of even stages, run first, tells what every action and every message
    takes longer than drawn on this machine. What is measured plays no part in its own prediction.
real: two stages that compute for real (a core each), whose times vary by microbatch. A few calls at the limit `1f1b` are traced; from
    that trace alone other hints and limits are predicted, then run.
traces: predicts, from the trace of one training run, runs of the same job under other options, whose traces follow, and compares.
"""

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from rrfp.compare.baselines import make_baselines
from rrfp.compare.group import Contenders, Group, Job
from rrfp.compare.work import Multiply
from rrfp.mode import parse_mode
from rrfp.simulate.costs import Costs, from_scenario
from rrfp.simulate.measured import each_call, from_trace
from rrfp.simulate.rendezvous import simulate_megatron_1f1b
from rrfp.simulate.scenarios import SCENARIOS
from rrfp.trace.files import read

MEGATRON = "megatron-1f1b"
EMULATED = ("strict:1f1b:1f1b", "ready:announced", "ready:alt:2p", "ready:fill-r:2p-1")
REAL = ("strict:1f1b:1f1b", "ready:announced:eager", "ready:fill-alt:2p", "ready:alt:2p", "ready:b-first:3")
SOURCE = "ready:announced"
BOUND = 0.03


class Errors:
    """Collects |predicted - measured| / measured, prints a line each, and what became of them in the end."""

    def __init__(self):
        self.all: dict[str, list[float]] = {}

    def add(self, name: str, mode: str, measured: float, predicted: float, note: str = "") -> None:
        error = predicted / measured - 1
        self.all.setdefault(mode, []).append(error)
        over = " above 3%" if abs(error) > BOUND and mode != MEGATRON else ""
        print(f"{name:18} {mode:24} {measured:9.4f} {predicted:9.4f} {100 * error:+7.2f}%{over}  {note}".rstrip(), flush=True)

    def head(self, *columns: str) -> None:
        print(f"{columns[0]:18} {'mode':24} {'measured':>9} {'predicted':>9} {'error':>8}  {' '.join(columns[1:])}".rstrip(), flush=True)

    def total(self) -> None:
        for mode, errors in self.all.items():
            sizes = sorted(map(abs, errors))
            print(f"{mode:24} median |error| {100 * median(sizes):.2f}%, worst {100 * sizes[-1]:.2f}%, "
                  f"within 3%: {sum(size <= BOUND for size in sizes)} of {len(sizes)}")


def lengthened(costs: Costs, action: float, message: float) -> Costs:
    """Every action and every message takes so many seconds longer."""
    durations = {key: value + action for key, value in costs.durations.items()}
    return Costs(costs.stages, costs.chunks, costs.microbatches, durations, {key: value + message for key, value in costs.delays.items()})


def engine_cost(group: Group, draws: Costs, directory: Path) -> tuple[float, float]:
    """Seconds by which an action, and a message, takes longer than drawn: two traced calls, the first to warm up."""
    for name in ("warm-up", "calibration"):
        group.run(Job(parse_mode(EMULATED[0]), draws.microbatches, draws.durations, delays=draws.delays, trace=directory / name))
    found = from_trace(directory / "calibration")
    action = median(found.durations[kind, s, m] - draws.durations[kind, s, m] for kind, s, m in found.durations if (s, m) != (0, 0))
    late = [found.delays[key] - draws.delays[key] for key in found.delays if key[1] != (0 if key[0] == "F" else draws.stages - 1)]
    return action, median(late)


def emulated(options) -> None:
    def costs(name: str, seed: int) -> Costs:
        return from_scenario(name, stages=options.stages, microbatches=options.microbatches, unit=options.unit_ms / 1e3, seed=seed)

    stage = functools.partial(Contenders, baselines=make_baselines({MEGATRON}.intersection(options.modes)))
    errors = Errors()
    with tempfile.TemporaryDirectory() as directory, Group(options.stages, stage=stage) as group:
        action, message = engine_cost(group, costs("uniform", 0), Path(directory))
        print(f"the engine: {1e3 * action:.2f} ms per action and {1e3 * message:.2f} ms per message beyond what was drawn", flush=True)
        errors.head("scenario", "without the engine's part; overruns")
        for name in options.scenarios:
            for mode in options.modes:
                runs = []
                for seed in range(options.seed, options.seed + options.seeds):
                    draws = costs(name, seed)
                    policy = MEGATRON if mode == MEGATRON else parse_mode(mode)
                    outcome = group.run(Job(policy, options.microbatches, draws.durations, delays=draws.delays))
                    known = lengthened(draws, action, message)
                    bare, predicted = ((simulate_megatron_1f1b(each) if mode == MEGATRON else each.simulate(policy)).makespan
                                       for each in (draws, known))
                    runs.append((outcome.seconds, predicted, bare, outcome.overruns))
                measured, predicted, bare, overruns = (median(column) for column in zip(*runs, strict=True))
                errors.add(name, mode, measured, predicted, f"({100 * (bare / measured - 1):+.2f}%; {overruns:g})")
    errors.total()


def real(options) -> None:
    stage = functools.partial(Contenders, work=Multiply.calibrated())
    errors = Errors()
    with tempfile.TemporaryDirectory() as directory, Group(options.stages, stage=stage) as group:
        errors.head("scenario", "from", SOURCE)
        for name in options.scenarios:
            draws = from_scenario(name, stages=options.stages, microbatches=options.microbatches, unit=options.unit_ms / 1e3, seed=options.seed)

            def run(mode: str, trace: Path | None = None, draws=draws) -> float:
                return group.run(Job(parse_mode(mode), draws.microbatches, draws.durations, delays=draws.delays, trace=trace)).seconds

            source = Path(directory) / name
            for _ in range(1 + options.repeats):  # the first is not used: it warms up
                run(SOURCE, source)
            known = each_call(read(source))

            def predict(mode: str, known=known) -> float:
                return median(each.simulate(parse_mode(mode)).makespan for each in known)

            errors.add(name, f"{SOURCE} (itself)", median(each.seconds for each in known), predict(SOURCE))
            predicted = {mode: predict(mode) for mode in options.modes}
            for mode in options.modes:
                errors.add(name, mode, median(run(mode) for _ in range(options.repeats)), predicted[mode])
    errors.total()


def traces(options) -> None:
    source = each_call(read(options.source))
    errors = Errors()
    errors.head("run", f"from {options.source}, {source[0].mode}")
    for path in [options.source, *options.runs]:
        calls = each_call(read(path))
        mode = calls[0].mode
        if mode == MEGATRON:
            predicted = median(simulate_megatron_1f1b(each).makespan for each in source)
        else:
            predicted = median(each.simulate(parse_mode(mode)).makespan for each in source)
        errors.add(path.name, mode, median(each.seconds for each in calls), predicted, f"{len(calls)} calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(dest="way", required=True)
    for name, stages, modes, scenarios in (("emulated", 8, EMULATED, SCENARIOS), ("real", 2, REAL, ("uniform", "jitter-0.3", "lengths", "pauses"))):
        way = ways.add_parser(name)
        way.add_argument("--stages", type=int, default=stages)
        way.add_argument("--microbatches", type=int, default=32)
        way.add_argument("--unit-ms", type=float, default=20.0)
        way.add_argument("--seed", type=int, default=15, help="the first seed")
        way.add_argument("--scenarios", nargs="+", default=scenarios, choices=SCENARIOS, metavar="NAME")
        way.add_argument("--modes", nargs="+", default=modes, metavar="MODE", help=f"as `rrfp compare` writes them; emulated also {MEGATRON}")
    ways.choices["emulated"].add_argument("--seeds", type=int, default=1, help="how many; errors are of the medians over them")
    ways.choices["real"].add_argument("--repeats", type=int, default=3, help="calls traced, and calls measured per mode")
    way = ways.add_parser("traces")
    way.add_argument("source", type=Path, metavar="FROM")
    way.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options = parser.parse_args()
    print(f"{options.way}: {' '.join(sys.argv[2:])} ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})", flush=True)
    {"emulated": emulated, "real": real, "traces": traces}[options.way](options)
    print(f"load at the end {os.getloadavg()[0]:.1f}: other work on the machine is measured but not predicted")


if __name__ == "__main__":
    main()
