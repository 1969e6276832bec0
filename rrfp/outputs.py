"""Files that a command writes at its end: what could not be written after minutes of work is refused before."""

import importlib.util
from pathlib import Path

from rrfp.errors import ConfigurationError


def check_file(option: str, path: Path | None) -> None:
    """Raises ConfigurationError unless a file can be written at `path`; None: the option was not given. Leaves no file."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigurationError(f"{option} {path}: there is no directory {path.parent}; make it first")
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: cannot be written ({error.strerror}); name another file") from None
    if not there:
        path.unlink()


def check_picture(path: Path | None) -> None:
    """The same for a PNG, which takes matplotlib."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ConfigurationError(f"--picture {path}: is a PNG; give it a name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(f"--picture {path}: matplotlib is not installed (pip install matplotlib); or leave --picture out")
    check_file("--picture", path)


def make_directory(option: str, path: Path | None) -> None:
    """Makes a directory to write into. Raises ConfigurationError if that is not possible."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{option} {path}: no directory can be made there ({error.strerror}); name another") from None
