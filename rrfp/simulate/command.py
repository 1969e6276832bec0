"""`rrfp simulate`: the schedulers of training under a virtual clock. Nothing is run for real."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median, quantiles

from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name, parse_mode
from rrfp.outputs import check_file, check_picture
from rrfp.policy import Policy
from rrfp.simulate.bounds import lower_bound, tight_bound
from rrfp.simulate.clock import Result
from rrfp.simulate.costs import LAYOUTS, Costs, from_scenario, unit_of
from rrfp.simulate.rendezvous import check_modelled, simulate_megatron_1f1b
from rrfp.simulate.scenarios import CALM, LEVELS, SCENARIOS, check_scenario
from rrfp.simulate.timeline import timeline_of, waits_of
from rrfp.values import above_zero, at_least_one, parse_seeds

MEGATRON = "megatron-1f1b"
_MODELLED = " (modelled)"
BASELINE = "strict:1f1b:1f1b"
TIGHT_UP_TO = 20_000
"""Stages x microbatches up to which the tight bound is worked out: a few seconds."""


@dataclass(frozen=True)
class Way:
    """A mode and how to simulate it. `policy` is None for Megatron's own schedule, which is modelled."""

    name: str
    policy: Policy | None
    run: Callable[[Costs], Result]

    @property
    def split(self) -> bool:
        return self.policy is not None and self.policy.split

    @property
    def order(self) -> str:
        return "microbatch" if self.policy is None else self.policy.order

    def check(self, costs: Costs) -> None:
        """Raises ConfigurationError if it cannot be simulated with these costs."""
        if self.policy is not None:
            costs.check(self.policy)
        else:
            check_modelled(costs)

    def limits(self, costs: Costs) -> list[int]:
        return costs.limits(self.policy or parse_mode(BASELINE))


@dataclass(frozen=True)
class Row:
    """What one way did over the seeds. Ratios are medians of per-seed ratios.

    ratio: seconds of the first mode / seconds of this one: above 1 is faster.
    over_bound, over_tight: seconds / bound, at least 1. over_tight is None where it was not worked out.
    shares: percent of all ranks' time: computing, blocked on F, on B, ended (after the rank's last action, until the call ends).
    peaks: most activations in flight per rank, over the seeds.
    """

    name: str
    seconds: list[float]
    ratio: float
    over_bound: float
    over_tight: float | None
    shares: dict[str, float]
    peaks: list[int]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rrfp simulate", description=__doc__.split(": ", 1)[1])
    what = parser.add_argument_group("the call")
    what.add_argument("--stages", type=at_least_one, metavar="P", help="ranks in the pipeline (default 8; from a trace: its own)")
    what.add_argument("--microbatches", type=at_least_one, metavar="M", help="default 32; from a trace: its own")
    what.add_argument("--chunks", type=at_least_one, metavar="C", help="stages per rank; each costs 1/C of the unit (default 1; 2 in a V)")
    what.add_argument("--placement", choices=tuple(LAYOUTS), default="looped",
                      help="how chunks go round: looped as Megatron interleaves them (default), or v for lists of ZB-V and DualPipeV")
    what.add_argument("--scenario", "--costs", nargs="+", metavar="NAME",
                      help=f"default uniform; {', '.join((*SCENARIOS, *LEVELS))}, a JSON file of your own, or all; several make a table of ratios")
    what.add_argument("--unit", type=above_zero, default=0.02, metavar="SECONDS", help="mean seconds of a rank's forward (default 0.02)")
    what.add_argument("--seeds", type=parse_seeds, default=range(15, 20), metavar="A-B", help="draws, default 15-19")
    what.add_argument("--trace", type=Path, metavar="DIR", help="instead of a scenario: what a traced run cost")
    what.add_argument("--call", type=int, metavar="N", help="of the trace (default: the last complete one)")
    how = parser.add_argument_group("the ways of running it; the first is what the others are compared with")
    how.add_argument("--modes", nargs="+", metavar="MODE",
                     help=f"ready:HINT[:LIMIT] or strict:HINT[:LIMIT], then any of :split, :free, :lanes=N; or {MEGATRON} (modelled)")
    how.add_argument("--hint", help=f"one mode, option by option, against {BASELINE}")
    how.add_argument("--limit", help="for --hint (default 1f1b)")
    how.add_argument("--mode", choices=("ready", "strict"), help="for --hint (default ready)")
    how.add_argument("--split", action="store_true", help="for --hint: the backward in two parts, I and W")
    how.add_argument("--order", choices=("microbatch", "megatron", "free"), help="for --hint (default microbatch)")
    how.add_argument("--lanes", type=at_least_one, default=1, metavar="N",
                     help="FIFO lanes per edge (default 1: a late message holds back those behind it), where a mode does not say")
    how.add_argument("--announce-delay", type=above_zero, default=0.0, metavar="SECONDS", help="what an announcement takes (default 0)")
    out = parser.add_argument_group("output")
    out.add_argument("--each", action="store_true", help="with several scenarios, also the ratio of each")
    out.add_argument("--json", type=Path, metavar="FILE")
    out.add_argument("--picture", type=Path, metavar="FILE", help="a PNG: the first seed under every mode, on one time axis")
    out.add_argument("--search", action="store_true", help="instead of modes: the best hint and limit within --memory-bound")
    out.add_argument("--memory-bound", type=at_least_one, metavar="N", help="activations that a rank may hold, for --search")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for what is refused, with one line that says why."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except BrokenPipeError:
        raise  # nobody reads on: `rrfp.cli` ends the command quietly
    except (ConfigurationError, OSError) as error:
        print(f"rrfp simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    names = list(SCENARIOS) if options.scenario == ["all"] else options.scenario or ["uniform"]
    if options.trace and options.scenario:
        raise ConfigurationError(f"--trace {options.trace}: says what the call costs, and so does --scenario; use one or the other")
    for name in names:
        check_scenario(name)
    if options.call is not None and not options.trace:
        raise ConfigurationError(f"--call {options.call}: picks a call of a trace; name it with --trace DIR")
    if options.trace and (options.chunks or 1) > 1:
        raise ConfigurationError(f"--chunks {options.chunks}: the trace says how many stages a rank has; leave the option out")
    if options.trace and options.placement != "looped":
        raise ConfigurationError(f"--placement {options.placement}: the trace says which rank has which stage; leave the option out")
    options.chunks = options.chunks or (2 if options.placement == "v" else 1)
    if options.memory_bound and not options.search:
        raise ConfigurationError(f"--memory-bound {options.memory_bound}: is what --search keeps to; add --search, or use --limit")
    if len(names) > 1:
        if options.json or options.picture or options.search:
            raise ConfigurationError(f"--scenario {' '.join(options.scenario)}: --json, --picture and --search are for one scenario; name one")
        _compare_scenarios(options, names)
        return
    if options.search and (options.json or options.picture):
        raise ConfigurationError("--search: prints a list, and writes neither --json nor --picture; leave them out")
    check_file("--json", options.json)
    check_picture(options.picture)
    draws = _costs(options, names[0])
    if options.search:
        _search(options, draws, names[0])
        return
    _compare_modes(options, draws, "trace" if options.trace else names[0])


# -- what is simulated ---------------------------------------------------------------------------------------------------


def _costs(options: argparse.Namespace, scenario: str) -> list[Costs]:
    """The costs of a call, one for every seed, or those of a trace."""
    if options.trace is None:
        ranks, microbatches = options.stages or 8, options.microbatches or 32
        return [from_scenario(scenario, stages=ranks * options.chunks, microbatches=microbatches, unit=options.unit / options.chunks,
                              seed=seed, chunks=options.chunks, layout=options.placement) for seed in options.seeds]
    from rrfp.simulate.measured import from_trace

    costs = from_trace(options.trace, call=options.call)
    for flag, given, own in (("--stages", options.stages, costs.placement.ranks), ("--microbatches", options.microbatches, costs.microbatches)):
        if given not in (None, own):
            raise ConfigurationError(f"{flag} {given}: the trace is of {own}; leave the option out")
    return [costs]


def _ways(options: argparse.Namespace) -> list[Way]:
    single = [f"--{word}" for word in ("hint", "limit", "mode", "split", "order") if getattr(options, word)]
    if options.modes:
        if single:
            raise ConfigurationError(f"{single[0]}: says what --modes says already; use one or the other")
        names = options.modes
    else:
        if single and not options.hint:
            raise ConfigurationError(f"{single[0]}: belongs to --hint; name the hint, or use --modes")
        words = [options.mode or "ready", options.hint or "auto", options.limit or "1f1b"]
        words += ["split"] * options.split + ([options.order] if options.order not in (None, "microbatch") else [])
        names = [BASELINE, ":".join(words)]
    return [_way(name, options) for name in names]


def _way(name: str, options: argparse.Namespace) -> Way:
    if name == MEGATRON:
        return Way(name + _MODELLED, None, simulate_megatron_1f1b)
    policy = parse_mode(name if "lanes=" in name or options.lanes == 1 else f"{name}:lanes={options.lanes}")

    def run(costs: Costs) -> Result:
        return costs.simulate(policy, announce_delay=options.announce_delay)

    return Way(mode_name(policy), policy, run)


# -- one scenario, in detail ---------------------------------------------------------------------------------------------


def _compare_modes(options: argparse.Namespace, draws: list[Costs], scenario: str) -> None:
    ways, costs = _ways(options), draws[0]
    for way in ways:  # before anything is printed
        way.check(costs)
    placement = costs.placement
    bounds = {split: [lower_bound(each, split=split).seconds for each in draws] for split in (False, True) if not split or costs.splits}
    print(_heading(options, costs, scenario))
    said = [f"{median(bounds[split]):.4f} s with a {'split' if split else 'whole'} backward" for split in sorted({way.split for way in ways})
            if split in bounds]
    print(f"no schedule can be faster than {', '.join(said)}")
    if costs.seconds is not None:
        print(f"measured: {costs.seconds:.4f} s" + (f" under {costs.mode}" if costs.mode else ""))
    width = max(len(way.name) for way in ways)
    print(f"{'mode':{width}} {'seconds':>9} {'speed-up':>8} {'x bound':>8} {'x tight':>8} {'compute':>8} {'wait F':>7} {'wait B':>7} "
          f"{'ended':>6}  peak in flight")
    rows, first, shown = [], [], []
    tight: dict[tuple, list[float] | None] = {}
    for way in ways:
        results = [way.run(each) for each in draws]
        key = way.split, way.order, *way.limits(costs)
        if key not in tight:
            tight[key] = _tight(way, draws)
        row = _row(way, results, first, bounds[way.split], tight[key])
        first = first or row.seconds
        rows.append(row)
        shown.append((way, results[0]))
        over_tight = "-" if row.over_tight is None else f"{row.over_tight:.3f}"
        percent = " ".join(f"{share:{size}.1f}%" for share, size in zip(row.shares.values(), (7, 6, 6, 5), strict=True))
        print(f"{row.name:{width}} {median(row.seconds):9.4f} {row.ratio:8.3f} {row.over_bound:8.3f} {over_tight:>8} {percent}  {_peaks(row.peaks)}",
              flush=True)
    if options.json:
        _write_json(options, costs, scenario, bounds, rows)
    if options.picture:
        from rrfp.trace.picture import draw as draw_picture

        draw_picture([(way.name, timeline_of(result, placement, costs.microbatches)) for way, result in shown], options.picture)


def _row(way: Way, results: list[Result], first: list[float], bounds: list[float], tight: list[float] | None) -> Row:
    seconds = [result.makespan for result in results]
    shares = [_shares(result) for result in results]
    return Row(
        name=way.name,
        seconds=seconds,
        ratio=median(before / now for before, now in zip(first or seconds, seconds, strict=True)),
        over_bound=median(taken / bound for taken, bound in zip(seconds, bounds, strict=True)),
        over_tight=None if tight is None else median(taken / bound for taken, bound in zip(seconds, tight, strict=True)),
        shares={part: sum(share[part] for share in shares) / len(shares) for part in shares[0]},
        peaks=[max(held) for held in zip(*(result.peak_in_flight for result in results), strict=True)],
    )


def _tight(way: Way, draws: list[Costs]) -> list[float] | None:
    """The tight bound of every draw, or None where that takes too long."""
    if draws[0].stages * draws[0].microbatches > TIGHT_UP_TO:
        return None
    return [tight_bound(costs, split=way.split, limits=way.limits(costs), order=way.order) for costs in draws]


def _shares(result: Result) -> dict[str, float]:
    """Percent of the time of all ranks; they sum to 100."""
    whole = result.makespan * len(result.rows) / 100
    waits = [wait for row in waits_of(result) for wait in row]
    busy = sum(span.end - span.start for span in result.spans.values()) / whole
    waited = {f"blocked_{cause.lower()}": sum(wait.end - wait.start for wait in waits if wait.cause == cause) / whole for cause in "FB"}
    return {"computing": busy, **waited, "ended": max(0.0, 100 - busy - sum(waited.values()))}


def _heading(options: argparse.Namespace, costs: Costs, scenario: str) -> str:
    chunks = _chunks(costs)
    what = f"{costs.placement.ranks} ranks{chunks}, {costs.microbatches} microbatches, "
    if options.trace:
        return what + f"as traced in {options.trace}"
    seeds = f"seed {options.seeds[0]}" if len(options.seeds) == 1 else f"medians of seeds {options.seeds[0]} to {options.seeds[-1]}"
    return what + f"scenario {scenario}, forward {unit_of(scenario, options.unit, costs):.3g} s on average, {seeds}, {_lanes(options.lanes)}"


def _chunks(costs: Costs) -> str:
    return "" if costs.chunks == 1 else f" of {costs.chunks} chunks" + (" in a V" if costs.layout == "v" else "")


def _lanes(lanes: int) -> str:
    return "1 lane" if lanes == 1 else f"{lanes} lanes"


def _peaks(peaks: list[int]) -> str:
    return "/".join(map(str, peaks)) if len(peaks) <= 16 else f"at most {max(peaks)}, {sum(peaks)} in all"


def _write_json(options: argparse.Namespace, costs: Costs, scenario: str, bounds: dict[bool, list[float]], rows: list[Row]) -> None:
    """The keys that a comparison of real runs writes, as far as a simulation has them."""
    content = {
        "scenario": scenario,
        "stages": costs.placement.ranks,
        "chunks": costs.chunks,
        "placement": costs.layout,
        "microbatches": costs.microbatches,
        "compute": "simulated",
        "unit_s": None if options.trace else unit_of(scenario, options.unit, costs),
        "seeds": None if options.trace else list(options.seeds),
        "bound_s": median(bounds[False]),
        "split_bound_s": median(bounds[True]) if True in bounds else None,
        "measured_s": costs.seconds,
        "modes": [],
    }
    for row in rows:
        q1, middle, q3 = quantiles(row.seconds, n=4, method="inclusive") if len(row.seconds) > 1 else row.seconds * 3
        content["modes"].append({
            "name": row.name.removesuffix(_MODELLED), "median_s": middle, "q1_s": q1, "q3_s": q3, "ratio": row.ratio, "over_bound": row.over_bound,
            "over_tight_bound": row.over_tight, "peak_in_flight": row.peaks, "shares": row.shares})
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# -- several scenarios ---------------------------------------------------------------------------------------------------


def _compare_scenarios(options: argparse.Namespace, names: list[str]) -> None:
    ways = _ways(options)
    draws = {name: _costs(options, name) for name in names}
    for way in ways:  # before anything is printed
        for each in draws.values():
            way.check(each[0])
    some = draws[names[0]][0]
    chunks = _chunks(some)
    print(f"{some.placement.ranks} ranks{chunks}, {some.microbatches} microbatches, {len(names)} scenarios, {len(options.seeds)} seeds, "
          f"{_lanes(options.lanes)}; time of {ways[0].name} / time of the mode, above 1 is faster")
    print("x bound, x tight: geometric means of the scenarios' medians of seconds / bound")
    width = max(len(way.name) for way in ways)
    print(f"{'mode':{width}} {'peak':>5} {'all':>7} {'worst calm median':>18} {'late and mixed':>15} {'worst draw':>11} {'x bound':>8} {'x tight':>8}")
    first: dict[str, list[float]] = {}
    bounds: dict[tuple, dict[str, list[float] | None]] = {}
    for way in ways:
        key = way.split, way.order, *way.limits(some)
        if key not in bounds:
            bounds[key] = {name: _tight(way, draws[name]) for name in names}
        rows = {}
        for name in names:
            results, least = [way.run(costs) for costs in draws[name]], [lower_bound(costs, split=way.split).seconds for costs in draws[name]]
            rows[name] = _row(way, results, first.get(name, []), least, bounds[key][name])
        first = first or {name: row.seconds for name, row in rows.items()}
        calm, late = [[row.ratio for name, row in rows.items() if (name in CALM) is wanted] for wanted in (True, False)]
        worst = min(before / now for name, row in rows.items() for before, now in zip(first[name], row.seconds, strict=True))
        tight = [row.over_tight for row in rows.values()]
        cells = [_mean([row.ratio for row in rows.values()]), min(calm, default=None), _mean(late), worst,
                 _mean([row.over_bound for row in rows.values()]), None if None in tight else _mean(tight)]
        print(f"{way.name:{width}} {max(way.limits(some)):5}", *(f"{'-' if cell is None else f'{cell:.3f}':>{size}}"
              for cell, size in zip(cells, (7, 18, 15, 11, 8, 8), strict=True)), flush=True)
        if options.each:
            for name, row in rows.items():
                tail = "" if row.over_tight is None else f", x tight {row.over_tight:.3f}"
                print(f"   {name:16} {row.ratio:.3f}, x bound {row.over_bound:.3f}{tail}")


def _mean(values: Sequence[float]) -> float | None:
    """Geometric mean; None of nothing."""
    return exp(sum(map(log, values)) / len(values)) if values else None


# -- search --------------------------------------------------------------------------------------------------------------


def _search(options: argparse.Namespace, draws: list[Costs], scenario: str) -> None:
    from rrfp.simulate.search import render, search

    if options.memory_bound is None:
        raise ConfigurationError("--search: needs --memory-bound N, the activations that a rank may hold; 1F1B holds as many as there are ranks")
    for flag in ("modes", "hint", "limit"):
        if getattr(options, flag):
            raise ConfigurationError(f"--{flag}: is what --search looks for; leave it out")
    candidates = search(draws, memory=options.memory_bound, mode=options.mode or "ready", split=options.split or None,
                        lanes=options.lanes, order=options.order or "microbatch", progress=sys.stderr)
    print(_heading(options, draws[0], scenario))
    print(render(candidates))
