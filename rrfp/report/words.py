"""Numbers and places as the report words them: one unit and one rounding for the same quantity everywhere."""

from collections.abc import Sequence

from rrfp.report.spread import percentile


def ms(seconds: float) -> str:
    """`3259 ms`, `19.9 ms`, `1.00 ms`: three digits, more above a second."""
    value = seconds * 1e3
    if not value:
        return "0 ms"
    return f"{value:.0f} ms" if abs(value) >= 99.95 else f"{value:#.3g} ms"


def between(values: Sequence[float]) -> str:
    """From the 5th to the 95th percentile of some seconds: `17.1 to 23.8 ms`, or `always 40.0 ms`."""
    ordered = sorted(values)
    low, high = (ms(percentile(ordered, share)) for share in (0.05, 0.95))
    return f"always {high}" if low == high else f"{low.removesuffix(' ms')} to {high}"


def listed(word: str, numbers: Sequence[int]) -> str:
    """`stage 3`, `stages 0-1`, `stages 2, 5`."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{word}s {numbers[0]}-{numbers[-1]}"
    return f"{word}s {', '.join(map(str, numbers))}"


def counts(numbers: Sequence[int]) -> str:
    """`8/7/6/5`; of many their range."""
    return "/".join(map(str, numbers)) if len(numbers) <= 16 else f"{min(numbers)} to {max(numbers)}"
