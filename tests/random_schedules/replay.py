"""Repeats one random run: python tests/random_schedules/replay.py '{"ranks": 2, "hint": "any"}' prints every rank's order."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "engine")]

from cases import Case  # noqa: E402

from runs import run, story  # noqa: E402

if __name__ == "__main__":
    case = Case.parse(sys.argv[1])
    try:
        print(story(case, run(case)))
    except Exception as error:
        print(story(case, getattr(error, "cluster", None)))
        raise
