"""Values on a command line, read the same way by every command: each raises argparse's error, which names the option."""

from argparse import ArgumentTypeError


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def parse_seeds(text: str) -> range:
    """`15-44` or `15`."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and int(low) <= int(high or low)):
        raise ArgumentTypeError(f"{text!r}: write a seed like 15, or a range like 15-44")
    return range(int(low), int(high or low) + 1)
