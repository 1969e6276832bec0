"""The files of a failure: a folder per run, in it a text and a view of every rank that could write, and the report that merges them."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.report.hang import Report, merge

PREFIX = "rrfp-failure-"
_LOCK_S = 2.0
"""Seconds that a rank waits for another one that merges; then it merges beside it."""


def write(view: dict, text: str, *, directory: Path) -> Path:
    """Writes this rank's `rank<r>.txt` and `rank<r>.json`, and merges what is there into `report.txt` and `report.json`.

    Whoever comes last leaves the complete report. Readers see whole files only.

    Args:
        view: as for `rrfp.report.hang.merge`.
        text: what this rank says itself.
        directory: where the folder `rrfp-failure-<run>` is made.

    Returns the path of `report.txt`. Raises OSError.
    """
    folder = Path(directory) / f"{PREFIX}{view['run']}"
    folder.mkdir(parents=True, exist_ok=True)
    rank = view["global_rank"]
    _replace(folder / f"rank{rank}.txt", text + "\n")
    _replace(folder / f"rank{rank}.json", json.dumps({"rrfp_view": 1} | view, default=str))
    report = folder / "report.txt"
    with _alone(folder):
        if rank not in _included(folder):
            merged = merge(_views(folder))
            _replace(report, merged.text())
            _replace(folder / "report.json", json.dumps(merged.data(), indent=1))
    return report


def find(directory: Path) -> list[Path]:
    """The failure folders that `directory` is or holds, the newest run first."""
    directory = Path(directory)
    if any(_views(directory)):
        return [directory]
    return sorted((path for path in directory.glob(f"{PREFIX}*") if any(_views(path))), key=lambda path: path.name, reverse=True)


def load(folders: Sequence[Path]) -> Report:
    """The report of one run, whose folders may lie on several hosts. Raises ConfigurationError if they are of several runs."""
    views = {(view["run"], view["global_rank"]): view for folder in folders for view in _views(folder)}
    runs = sorted({run for run, _ in views})
    if len(runs) != 1:
        found = f"of runs {', '.join(runs)}" if runs else "no rank's view"
        raise ConfigurationError(f"{', '.join(map(str, folders))}: {found}; a report is of one run, name its {PREFIX}* folders")
    return merge(views.values())


def _views(folder: Path) -> Iterator[dict]:
    for path in sorted(folder.glob("rank*.json")):
        try:
            view = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # what one rank could not write must not hide what the others did
        if isinstance(view, dict) and view.get("rrfp_view") == 1:
            yield view


def _included(folder: Path) -> list[int]:
    """The ranks that the report has. One that waited for the lock often finds itself merged already."""
    try:
        return json.loads((folder / "report.json").read_text(encoding="utf-8"))["present"]
    except (OSError, ValueError, KeyError):
        return []


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One rank at a time; without a lock if there is none to be had in time, which costs at most the last rank's view."""
    with open(folder / ".lock", "a") as lock:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= until:
                    break
                time.sleep(0.02)
        yield
