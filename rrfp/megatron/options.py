"""What a user chose, checked once, and carried to everything in this room. Imports neither torch nor megatron."""

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rrfp.comm.choices import CHOICES
from rrfp.errors import ConfigurationError
from rrfp.megatron.padding import LEVELS, parse_scenario
from rrfp.policy import Policy, read_hint, register_hint
from rrfp.scheduler.lists import PUBLISHED
from rrfp.tp_coord.agreement import KINDS

SCHEDULES = ("1f1b", "rrfp")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `rrfp.install`, one per flag (`hint` is `--rrfp-hint`, and so on).

    schedule: `1f1b` leaves Megatron's schedule in place; `rrfp` replaces it.
    hint, mode, limit, order, lanes: see `rrfp.policy.Policy`.
    memory_fraction: the share of the device's memory that limit `auto` may fill; see docs/limits.md.
    split_backward: backwards run as I (input gradient, sent on) and W (weight gradients, in gaps); see docs/split.md.
    max_pending_w: how many microbatches of a rank may wait for their W. None: 1 under full recomputation, else no bound but the limit.
    agreement: how ranks whose actions share collectives agree: one of `rrfp.tp_coord.opening.KINDS`.
    decide_ahead: they agree on the next action before the running one; see docs/agreement.md.
    transport: the way of payloads between GPUs: one of `rrfp.comm.choices.CHOICES` (`rrfp.comm.paths` explains them).
    run_ahead: actions that are queued on the GPU behind the one that runs.
    interface: network interface or address for messages between hosts; None: the one that faces the master.
    timeout: seconds without progress inside a call (three times that in the first); None: 600 (the command line takes
        Megatron's distributed timeout).
    trace: directory for the trace, or None.
    emulate: `NAME[:UNIT_MS[:SEED]]`, a scenario of emulated durations, or None.
    inject: a level of the paper's jitter, J0 to J3, or None.
    nvtx: name actions for a profiler.

    Raises:
        ConfigurationError: a value is refused; the message names the flag, the value, the rule and the way out.
    """

    schedule: str = "rrfp"
    hint: str = "auto"
    mode: str = "ready"
    limit: str = "auto"
    memory_fraction: float = 0.9
    order: str = "microbatch"
    lanes: int = 1
    split_backward: bool = False
    max_pending_w: int | None = None
    agreement: str = "auto"
    decide_ahead: bool = False
    transport: str = "auto"
    run_ahead: int = 1
    interface: str | None = None
    timeout: float | None = None
    trace: str | None = None
    emulate: str | None = None
    inject: str | None = None
    nvtx: bool = False
    policy: Policy = field(init=False)

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(f"--pipeline-schedule {self.schedule}: no such schedule; choose one of {', '.join(SCHEDULES)}")
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise ConfigurationError(f"--rrfp-timeout {self.timeout:g}: a timeout is a number of seconds above 0; nothing waits for ever")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigurationError(f"--rrfp-memory-fraction {self.memory_fraction:g}: a share of the device's memory is above 0 and at most 1; "
                                     "use for example .9")
        if self.agreement not in KINDS:
            raise ConfigurationError(f"--rrfp-agreement {self.agreement}: no such way to agree; choose one of {', '.join(KINDS)}")
        if self.transport not in CHOICES:
            raise ConfigurationError(f"--rrfp-transport {self.transport}: no such way; choose one of {', '.join(CHOICES)}")
        if self.run_ahead < 0:
            raise ConfigurationError(f"--rrfp-run-ahead {self.run_ahead}: a number of actions, 0 or more; 1 is the default")
        if self.emulate is not None:
            parse_scenario(self.emulate)
        if self.inject is not None and self.inject not in LEVELS:
            raise ConfigurationError(f"--rrfp-inject {self.inject}: no such level; choose one of {', '.join(LEVELS)}")
        if self.emulate is not None and self.inject is not None:
            raise ConfigurationError(
                f"--rrfp-inject {self.inject} with --rrfp-emulate {self.emulate}: injected jitter comes on top of real compute, which "
                "emulated durations hide; give one of the two")
        if self.hint in PUBLISHED and PUBLISHED[self.hint].v:
            raise ConfigurationError(
                f"--rrfp-hint {self.hint}: is a list with a V placement (stages s and 2P-1-s on one rank), and Megatron places chunks looped; use"
                f" a list for that, for example 1f1b, or try it on emulated stages (`rrfp simulate --placement v --modes strict:{self.hint}:2p`)")
        if self.split_backward and self.schedule != "rrfp":
            raise ConfigurationError(f"--rrfp-split-backward with --pipeline-schedule {self.schedule}: Megatron's own schedule has no W; use "
                                     "--pipeline-schedule rrfp, or leave --rrfp-split-backward out")
        _register(self.hint)
        policy = Policy(hint=self.hint, mode=self.mode, limit=str(self.limit), order=self.order, lanes=self.lanes, split=self.split_backward,
                        max_pending_w=self.max_pending_w)
        object.__setattr__(self, "policy", policy)

    def policy_for(self, config: Any) -> Policy:
        """The policy for a model with this Megatron config (or these arguments), which the default of max_pending_w depends on.

        What waits for its W holds the inputs and output gradients of every linear layer of the chunk. Without recomputation that is
        about what an activation holds, and it holds an activation's slot; under full recomputation it is many times as much.
        """
        recomputed = getattr(config, "recompute_granularity", None) == "full"
        return replace(self.policy, max_pending_w=1) if self.split_backward and recomputed and self.max_pending_w is None else self.policy

    @property
    def patience(self) -> float:
        """Seconds without progress inside a call after which it fails."""
        return self.timeout or 600.0

    @property
    def instruments(self) -> bool:
        """Whether Megatron's own schedule has to be wrapped too."""
        return self.trace is not None or self.emulate is not None or self.inject is not None


def _register(hint: str) -> None:
    """`module:function` names a hint function where it can be imported: registered under that name (`rrfp.register_hint`).

    So may the generator that a file names.
    """
    if Path(hint).is_file():
        hint = read_hint(hint).generator or ""
    module, colon, name = hint.partition(":")
    if not colon:
        return
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"--rrfp-hint {hint}: can't be imported ({error}); write module:function, importable from the script's folder") from None
    register_hint(hint, function)
