"""What --rrfp-hint may name: rules, built-in and published lists, and the functions that a user has registered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler import lists

RULES = ("auto", "announced", "bf", "fb", "b-first", "f-first", "alt", "fill", "fill-alt", "bfw", "fill-r")
BUILT_IN = (*RULES, *lists.LISTS)
SPLIT_ONLY = ("bfw", "fill-r", "zb-h1", "zb-h2", *(name for name, each in lists.PUBLISHED.items() if each.split))


@dataclass(frozen=True)
class HintContext:
    """What a registered hint may look at. Equal on every rank, so that every rank computes equal rows.

    measured: seconds by (kind, stage), as the caller passed them; empty in the first call.
    """

    placement: Placement
    microbatches: int
    limits: tuple[int, ...]
    split: bool
    measured: Mapping[tuple[str, int], float] = field(default_factory=dict)


HintFunction = Callable[[HintContext], Sequence[Sequence]]
registered: dict[str, HintFunction] = {}


def register_hint(name: str, fn: HintFunction) -> None:
    """Make `name` a value of --rrfp-hint.

    Args:
        name: not a built-in's.
        fn: takes a `HintContext`, returns one row per rank: actions, tokens like `2F0`, or tuples of them (ties). It is asked
            anew for every call and must give the same rows on every rank; `Scheduler.digest` lets the ranks compare.

    Raises:
        ConfigurationError: if the name is taken by a built-in.
    """
    if name in (*BUILT_IN, *lists.PUBLISHED):
        raise ConfigurationError(f"register_hint {name}: is a built-in hint; choose another name")
    registered[name] = fn
