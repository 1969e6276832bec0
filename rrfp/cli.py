"""The command line: `rrfp doctor`, `trace`, `report`, `simulate`, `compare`, `compare-training`, `schedule`, `balance`, `program`, and
`python -m rrfp [--cpu] SCRIPT ...` under torchrun."""

import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence

from rrfp import __version__
from rrfp.errors import RRFPError

COMMANDS = {
    "doctor": "rrfp.doctor",
    "trace": "rrfp.trace.command",
    "simulate": "rrfp.simulate.command",
    "compare": "rrfp.compare.command",
    "compare-training": "rrfp.compare.training_command",
    "report": "rrfp.report.command",
    "schedule": "rrfp.schedule.command",
    "balance": "rrfp.balance.command",
    "program": "rrfp.program.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: a training's, or a command's as `status_of` gives it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == "--version":
        return status_of("rrfp", lambda: print(f"rrfp {__version__}"))
    if arguments and arguments[0] in COMMANDS:
        # As `python -m` does: a Megatron-LM checkout in the working directory comes before an installed wheel.
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        return status_of(f"rrfp {arguments[0]}", lambda: importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:]))
    from rrfp.megatron.launcher import launch

    if arguments and arguments[0] in ("-h", "--help"):
        return status_of("rrfp", lambda: launch(arguments))
    return launch(arguments)


def status_of(name: str, command: Callable[[], int | None]) -> int:
    """Runs a command. Its exit status: its own, 2 for a refusal of one line, 130 if it was interrupted (Ctrl-C), or 141, as of a command
    that SIGPIPE ends, if nobody reads its output any more (`| head -1`)."""
    try:
        try:
            return command() or 0
        finally:
            if sys.stdout is not None:  # as in a process that was started without one
                sys.stdout.flush()  # not at the interpreter's exit, where nobody could catch what comes of it
    except RRFPError as error:
        print(f"rrfp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if sys.stdout is None or not _unread(sys.stdout.fileno()):
            raise  # another pipe, between processes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return 141


def _unread(descriptor: int) -> bool:
    """Whether it is a pipe, or a socket, that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
