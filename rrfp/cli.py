"""The command line: `rrfp doctor`, `trace`, `report`, `simulate`, `compare`, `compare-training`, `schedule`, `balance`, `program`, and
`python -m rrfp [--cpu] SCRIPT ...` under torchrun."""

import importlib
import os
import sys
from collections.abc import Sequence

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
    """Returns the exit status: 0, 2 for a refusal of one line, or 130 for a command that was interrupted (Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] == "--version":
            print(f"rrfp {__version__}")
            return 0
        if arguments and arguments[0] in COMMANDS:
            # As `python -m` does: a Megatron-LM checkout in the working directory comes before an installed wheel.
            if os.getcwd() not in sys.path and "" not in sys.path:
                sys.path.insert(0, os.getcwd())
            return importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:]) or 0
    except RRFPError as error:
        print(f"rrfp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"rrfp {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    from rrfp.megatron.launcher import launch

    return launch(arguments)
