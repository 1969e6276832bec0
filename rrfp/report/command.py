"""`rrfp report`: why a run took as long as it did, or who is to blame that it failed, as one HTML page that stands alone."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.report import failures
from rrfp.report.analysis import analyse
from rrfp.report.hang import Report
from rrfp.report.page import without, write_page
from rrfp.report.suggestion import lead
from rrfp.trace.files import Timeline, has_trace, read

_PATIENCE = 10_000
"""Actions from which on the simulations of a call take longer than somebody waits without being told."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if nothing could be read or written."""
    parser = argparse.ArgumentParser(prog="rrfp report", description=__doc__.split(": ", 1)[1])
    parser.add_argument("directory", type=Path, nargs="+", metavar="DIR",
                        help="the trace, as given to --rrfp-trace; or what a failure left (rrfp-failure-*), of several hosts if need be")
    parser.add_argument("--call", type=int, action="append", metavar="N",
                        help="the call to explain, may be repeated (default: the last complete training call, and the slowest)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: report.html in DIR)")
    parser.add_argument("--compare", type=Path, metavar="DIR", help="another run, drawn below on the same time axis")
    parser.add_argument("--quick", action="store_true", help="leave out what asks the simulator: predicted gains and the suggestion")
    options = parser.parse_args(argv)
    directory = options.directory[0]
    out = options.out or directory / "report.html"
    try:
        failure = _failure(options.directory)
        if failure is not None:
            print(failure.text())
            if not has_trace(directory):
                return 0
        elif len(options.directory) > 1:
            raise ConfigurationError(f"{' '.join(map(str, options.directory))}: a trace is one directory; several are for what a failure left")
        options.directory = directory
        timeline = read(options.directory)
        wanted, simulations = options.call or calls_to_embed(timeline), not options.quick
        if simulations and (large := _actions(timeline, wanted)) > _PATIENCE:
            print(f"rrfp report: {large} actions are many to simulate, this may take minutes; --quick leaves that out", file=sys.stderr)
        analyses = [analyse(timeline, call=number, simulations=simulations) for number in wanted]
        compare = []
        if options.compare is not None:
            other = read(options.compare)
            compare = [analyse(other, simulations=False)]  # only its timeline and figures are shown
        out.parent.mkdir(parents=True, exist_ok=True)
        write_page(analyses, out, title=_name(options.directory), compare=compare,
                   compare_title=_name(options.compare or options.directory), failure=failure)
    except BrokenPipeError:
        raise  # nobody reads on: `rrfp.cli` ends the command quietly
    except (ConfigurationError, OSError) as error:
        print(f"rrfp report: {error}", file=sys.stderr)
        return 2
    first = analyses[0]
    if timeline.missing:
        print(without(timeline.missing))
    for note in first.notes:
        print(note)
    for finding in first.findings:
        print(finding.text)
        if finding.action:
            print(f"  Next: {finding.action}")
    if first.suggestion:
        print(f"{lead(first.findings[0].cause)}: {first.suggestion.text}")
    print(f"report: {out} (call{'s' * (len(analyses) > 1)} {', '.join(str(each.call) for each in analyses)}; open it in a browser)")
    return 0


def _failure(directories: Sequence[Path]) -> Report | None:
    """The newest failure that the directories hold. Raises ConfigurationError if they are of several runs."""
    # Replicas write their traces into folders of their own, below the job's.
    found = [failures.find(each) or (failures.find(each.parent) if each.name.startswith("pipeline") else []) for each in directories]
    if len(directories) > 1:
        return failures.load([folders[0] for folders in found if folders]) if any(found) else None
    if not found[0]:
        return None
    if older := found[0][1:]:
        print(f"{len(older)} earlier failure{'s' * (len(older) > 1)}: {', '.join(map(str, older))}")
    return failures.load(found[0][:1])


def calls_to_embed(timeline: Timeline) -> list[int | None]:
    """The last complete training call, then the slowest; the first one (connecting, warming up) is no candidate if there are others.

    [None], `analyse`'s own choice, where no call is complete.
    """
    seconds = {}
    for number in timeline.calls:
        calls = timeline.of_call(number).values()
        if len(calls) == len(timeline.ranks) and all(call.complete and not call.forward_only for call in calls):
            seconds[number] = max(call.end for call in calls) - min(call.begin for call in calls)
    if not seconds:
        return [None]
    later = list(seconds)[1:] or list(seconds)
    return list(dict.fromkeys([later[-1], max(later, key=seconds.get)]))


def _actions(timeline: Timeline, numbers: Sequence[int | None]) -> int:
    return sum(len(trace.calls[number].actions) for trace in timeline.ranks.values() for number in numbers if number in trace.calls)


def _name(directory: Path) -> str:
    return f"RRFP report: {directory.resolve().name}"


if __name__ == "__main__":
    sys.exit(main())
