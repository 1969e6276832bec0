"""`rrfp trace`: from the files of a run to a trace for Perfetto, a picture and a table."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.trace.breakdown import summarise, table
from rrfp.trace.chrome import write_chrome
from rrfp.trace.files import read
from rrfp.trace.picture import draw


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if the picture could not be drawn (the rest was written), 2 if nothing could be read."""
    parser = argparse.ArgumentParser(prog="rrfp trace", description=__doc__.split(": ", 1)[1])
    parser.add_argument("directory", type=Path, nargs="+", metavar="DIR", help="as given to --rrfp-trace; several are compared")
    parser.add_argument("--call", type=int, help="the call to draw and export (default: draw the last complete one, export all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the first DIR)")
    parser.add_argument("--title", action="append", default=[], help="a run's name in the picture and table, in the order of DIR")
    options = parser.parse_args(argv)
    if len(options.title) > len(options.directory):
        given, wanted = len(options.title), len(options.directory)
        parser.error(f"--title was given {given} times for {wanted} directories: give at most one for each")
    out = options.out or options.directory[0]
    titles = options.title + [path.resolve().name for path in options.directory[len(options.title):]]
    try:
        timelines = [(title, read(path)) for title, path in zip(titles, options.directory)]
        out.mkdir(parents=True, exist_ok=True)
        for index, (title, timeline) in enumerate(timelines):
            target = out / ("trace.json" if index == 0 else f"trace{index + 1}.json")
            write_chrome(timeline, target, calls=None if options.call is None else [options.call])
            _report(title, timeline)
            print(f"trace: {target} (open it at https://ui.perfetto.dev)")
    except BrokenPipeError:
        raise  # nobody reads on: `rrfp.cli` ends the command quietly
    except (ConfigurationError, OSError) as error:
        print(f"rrfp trace: {error}", file=sys.stderr)
        return 2
    try:
        draw(timelines, out / "timeline.png", call=options.call)
    except (ConfigurationError, OSError) as error:
        print(f"rrfp trace: {error}", file=sys.stderr)
        return 1
    print(f"picture: {out / 'timeline.png'}")
    return 0


def _report(title: str, timeline) -> None:
    print(title)
    for rank in timeline.missing:
        print(f"rank {rank} is missing: it wrote no trace")
    for note in timeline.notes:
        print(note)
    breakdowns = timeline.breakdowns()
    print(table(summarise(breakdowns)) if breakdowns else "no rank completed a call")


if __name__ == "__main__":
    sys.exit(main())
