"""`rrfp schedule`: fixed schedules as lists. Shows one, checks one, or turns one into PyTorch's CSV notation. Nothing is run for real."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.outputs import check_file, check_picture
from rrfp.schedule.plan import NAMES, Plan, plan_of
from rrfp.schedule.table import figures, steps, timetable
from rrfp.scheduler import lists
from rrfp.values import at_least_one


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 for a list that cannot run. Raises ConfigurationError for a refusal."""
    options = _parser().parse_args(argv)
    try:
        plan = plan_of(options.list, ranks=options.ranks, chunks=options.chunks, microbatches=options.microbatches, limit=options.limit,
                       split=options.split, renumber=options.order == "microbatch")
        return options.run(plan, options)
    except ConfigurationError as error:
        # A refusal of the list itself is what `check` was asked for; one of an option is a refusal here, too.
        if options.run is not _check or not str(error).removeprefix("--rrfp-hint ").startswith(f"{options.list}: "):
            raise
        print(_cannot(options.list, error))
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rrfp schedule", description=__doc__.split(": ", 1)[1])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, what in (("show", _show, "figures and a table of who does what when, at unit durations"),
                            ("check", _check, "one line: whether it can run, or the first entry that cannot"),
                            ("convert", _convert, "write it as a CSV file that PyTorch reads too")):
        one = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        one.set_defaults(run=run)
        one.add_argument("list", metavar="NAME|FILE", help=f"{', '.join(NAMES)}, a CSV file with one line per rank, or a program (.json)")
        if run is _convert:
            one.add_argument("out", type=Path, metavar="OUT", help="the file to write")
            one.add_argument("--generator", metavar="NAME", help="name in it the hint that makes the list for other numbers of microbatches "
                             "(a first line that PyTorch does not read)")
        one.add_argument("--ranks", "--stages", type=at_least_one, metavar="P", help="ranks in the pipeline (of a file: its own)")
        one.add_argument("--chunks", type=at_least_one, metavar="C", help="stages per rank (default 1; of published lists 2)")
        one.add_argument("--microbatches", type=at_least_one, metavar="M", help="of a file: its own")
        one.add_argument("--limit", metavar="LIMIT", help="activations per rank that the list is made for, as --rrfp-limit (default: 1f1b for "
                         "1f1b and rules, else as many as the list takes)")
        one.add_argument("--split", action="store_true", help="the backward in two parts, I and W, where the hint works either way")
        one.add_argument("--order", choices=("free", "microbatch"), default="free",
                         help="free: microbatches as the list has them (default); microbatch: in ascending order at every stage, as training "
                         "runs a published list by default")
        if run is _show:
            one.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of the timeline")
    return parser


def _show(plan: Plan, options: argparse.Namespace) -> int:
    check_picture(options.picture)
    print(f"{plan.name}: {plan.describe()}{_left_out(plan)}")
    try:
        plan.check()
    except ConfigurationError as error:
        print(_cannot(plan.name, error))
        print("\n".join(["", *steps(plan)]))
        return 1
    print(f"at F=1 B=2 I=1 W=1: makespan {plan.result.makespan:g}, bubble {plan.bubble:.1%}")
    print("\n".join(["", *figures(plan), "", *timetable(plan)]))
    if options.picture is not None:
        from rrfp.simulate.timeline import timeline_of
        from rrfp.trace.picture import draw

        draw([(plan.name, timeline_of(plan.result, plan.placement, plan.microbatches))], options.picture, unit="units")
        print(f"\npicture: {options.picture}")
    return 0


def _check(plan: Plan, options: argparse.Namespace) -> int:
    plan.check()
    peaks, pending = plan.peaks
    verdict = f"{plan.name}: runs: {plan.describe()}; makespan {plan.result.makespan:g}, bubble {plan.bubble:.1%}, in flight {_each(peaks)}"
    verdict += f", pending W {_each(pending)}" if plan.split else ""
    if (place := plan.out_of_order()) is not None:
        verdict += f"; leaves microbatch order ({place}), so strict mode needs --rrfp-order free"
    if not plan.looped:
        verdict += "; not for Megatron, which places chunks looped"
    print(verdict + _left_out(plan))
    return 0


def _convert(plan: Plan, options: argparse.Namespace) -> int:
    check_file("OUT", options.out)
    if options.generator is not None:
        plan.check_generator(options.generator, source=f"--generator {options.generator}:")
    try:
        plan.check()
    except ConfigurationError as error:
        print(_cannot(plan.name, error))
        return 1
    generator = options.generator or (plan.file.generator if plan.file is not None else None)
    lists.write(plan.steps, options.out, generator=generator)
    print(f"{options.out}: {plan.describe()}{_left_out(plan)}")
    return 0


def _cannot(name: str, error: ConfigurationError) -> str:
    return f"{name}: cannot run: " + str(error).removeprefix("--rrfp-hint ").removeprefix(f"{name}: ")


def _left_out(plan: Plan) -> str:
    """What PyTorch's lowering had added, and was read over."""
    if plan.file is None or not plan.file.left_out:
        return ""
    return f"; left out, for it follows from the rest: {', '.join(f'{count} {kind}' for kind, count in sorted(plan.file.left_out.items()))}"


def _each(counts: list[int]) -> str:
    return "/".join(map(str, counts)) if len(counts) <= 16 else f"at most {max(counts)}"
