"""Costs of calls with frozen stages."""

from collections.abc import Collection
from dataclasses import replace

from rrfp.simulate.costs import Costs


def frozen(costs: Costs, first: int, *, weightless: Collection[int] = ()) -> Costs:
    """The same call if the stages before `first` were frozen, and nothing of a backward of `weightless` stages could wait for a W."""
    durations = {key: taken for key, taken in costs.durations.items() if key[0] == "F" or key[1] >= first}
    for kind, stage, microbatch in list(durations):
        if kind == "W" and stage in weightless:
            del durations[kind, stage, microbatch]
            durations["B", stage, microbatch] = durations["I", stage, microbatch]
    return replace(costs, durations=durations)
