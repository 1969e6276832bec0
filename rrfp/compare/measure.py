"""Runs the modes of a comparison: for real, interleaved on one group of processes, or in simulation."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rrfp.compare.baselines import BASELINES, make_baselines
from rrfp.compare.group import Contenders, Group, Job, Outcome
from rrfp.compare.work import Work
from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name, parse_mode
from rrfp.policy import BUILT_IN, Policy
from rrfp.simulate.clock import Result
from rrfp.simulate.costs import Costs
from rrfp.simulate.rendezvous import simulate_megatron_1f1b

Modes = Mapping[str, Policy | str]
"""By name: RRFP's policy, or a baseline's name."""


def parse_modes(texts: Sequence[str], *, lanes: int) -> dict[str, Policy | str]:
    """Modes by their shortest name, in order, each once.

    Args:
        lanes: FIFO lanes per edge of modes that do not say.

    Raises:
        ConfigurationError: a mode that does not exist.
    """
    modes: dict[str, Policy | str] = {}
    for text in texts:
        if text in BASELINES:
            modes[text] = text
        elif text.partition(":")[0] not in ("ready", "strict"):
            raise ConfigurationError(f"--modes {text}: is no mode; use {', '.join(BASELINES)}, ready:HINT:LIMIT or strict:HINT:LIMIT")
        else:
            policy = parse_mode(text if "lanes=" in text or lanes == 1 else f"{text}:lanes={lanes}")
            modes[mode_name(policy)] = policy
    return modes


def splits(mode: Policy | str) -> bool | None:
    """Whether a mode's lower bound is that of a split backward; None: neither (`torch-zbv` cuts the stages themselves in two)."""
    if isinstance(mode, Policy):
        return mode.split
    return None if mode == "torch-zbv" else False


def simulated(mode: Policy | str, costs: Costs) -> Result | None:
    """The call in virtual time, or None if this mode is not modelled. Raises ConfigurationError if it cannot run."""
    if isinstance(mode, Policy):
        return costs.simulate(mode)
    return simulate_megatron_1f1b(costs) if mode == "megatron-1f1b" else None


def outcome_of(result: Result) -> Outcome:
    """A simulated call as an outcome. As in a real run, the time before an action was spent waiting for what made it ready."""
    parts = []
    for row in result.rows:
        spent, now = Counter(), 0.0
        for action in row:
            start, end = result.spans[action]
            spent["compute"] += end - start
            spent["B" if action.kind == "I" else action.kind] += start - now
            now = end
        parts.append({part: round(seconds * 1e9) for part, seconds in spent.items()})
    return Outcome(result.makespan, list(result.peak_in_flight), parts)


def trace_directory(out: Path, name: str) -> Path:
    """Where a mode's trace goes."""
    return out / re.sub(r"[^\w.=-]+", "-", name).strip("-")


def measure(
    modes: Modes,
    costs: Sequence[Costs],
    *,
    work: Work,
    out: Path | None = None,
    call_timeout: float = 60.0,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Outcome]]:
    """Every mode once per entry of `costs`, on one group of processes, the order of modes rotated from repeat to repeat.

    Args:
        costs: one per repeat, all of one size; every mode of a repeat gets the same.
        work: spends the actions' seconds.
        out: where traces go, one directory per mode, or None.
        call_timeout: seconds without progress after which a call fails.
        progress: takes a line after every mode's warm-up and every repeat.

    Raises:
        RuntimeError: a rank failed, with its traceback.
    """
    microbatches, placement = costs[0].microbatches, costs[0].placement
    policies = [mode for mode in modes.values() if isinstance(mode, Policy)]
    # A message that waits for a credit is not on its way: as many credits as activations can be in flight.
    credits = max((n for policy in policies for n in policy.limits(placement, microbatches)), default=1)
    baselines = make_baselines(mode for mode in modes.values() if isinstance(mode, str))
    make = partial(Contenders, lanes=sorted({policy.lanes for policy in policies}), credits=credits, baselines=baselines, work=work,
                   placement=placement)
    runs: dict[str, list[Outcome]] = {name: [] for name in modes}
    names = list(modes)
    with Group(placement.ranks, stage=make, call_timeout=call_timeout) as group:
        progress(f"{placement.ranks} processes are up")
        for mode in modes.values():  # connections, buffers, first allocations
            # A few microbatches will do, but a file is for one number of them, and published lists do not exist for any.
            whole = isinstance(mode, Policy) and mode.hint not in BUILT_IN
            group.run(Job(mode, microbatches if whole else min(microbatches, placement.ranks), costs[0].durations))
        for repeat, each in enumerate(costs):
            lasts = sum(each.durations.values()) + sum(each.delays.values())  # more than one action after another
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                trace = None if out is None else trace_directory(out, name)
                job = Job(modes[name], microbatches, each.durations, delays=each.delays, trace=trace)
                runs[name].append(group.run(job, lasts=lasts))
            line = "  ".join(f"{name} {outcomes[-1].seconds:.3f}" for name, outcomes in runs.items())
            progress(f"repeat {repeat + 1} of {len(costs)}: {line}")
    return runs
