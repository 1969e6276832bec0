"""The command line: `rrfp doctor`, `rrfp trace DIR`, and `python -m rrfp [--cpu] SCRIPT ...` under torchrun."""

import sys
from collections.abc import Sequence

from rrfp.errors import RRFPError

COMMANDS = ("doctor", "trace")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a refusal of one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] == "doctor":
            from rrfp.doctor import main as doctor

            return doctor(arguments[1:])
        if arguments and arguments[0] == "trace":
            from rrfp.trace.command import main as trace

            return trace(arguments[1:]) or 0
    except RRFPError as error:
        print(f"rrfp: {error}", file=sys.stderr)
        return 2
    from rrfp.megatron.launcher import launch

    return launch(arguments)
