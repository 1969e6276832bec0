"""What a user chose, checked once, and carried to everything in this room. Imports neither torch nor megatron."""

import importlib
from dataclasses import dataclass, field
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.megatron.padding import LEVELS, parse_scenario
from rrfp.policy import Policy, register_hint
from rrfp.tp_coord.agreement import KINDS

SCHEDULES = ("1f1b", "rrfp")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `rrfp.install`, one per flag (`hint` is `--rrfp-hint`, and so on).

    schedule: `1f1b` leaves Megatron's schedule in place; `rrfp` replaces it.
    hint, mode, limit, order, lanes: see `rrfp.policy.Policy`.
    memory_fraction: the share of the device's memory that limit `auto` may fill; see docs/limits.md.
    agreement: how ranks whose actions share collectives agree: one of `rrfp.tp_coord.opening.KINDS`.
    decide_ahead: they agree on the next action before the running one; see docs/agreement.md.
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
    hint: str = "announced"
    mode: str = "ready"
    limit: str = "auto"
    memory_fraction: float = 0.9
    order: str = "microbatch"
    lanes: int = 1
    agreement: str = "auto"
    decide_ahead: bool = False
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
        if self.emulate is not None:
            parse_scenario(self.emulate)
        if self.inject is not None and self.inject not in LEVELS:
            raise ConfigurationError(f"--rrfp-inject {self.inject}: no such level; choose one of {', '.join(LEVELS)}")
        if self.emulate is not None and self.inject is not None:
            raise ConfigurationError(
                f"--rrfp-inject {self.inject} with --rrfp-emulate {self.emulate}: injected jitter comes on top of real compute, which "
                "emulated durations hide; give one of the two")
        _register(self.hint)
        policy = Policy(hint=self.hint, mode=self.mode, limit=str(self.limit), order=self.order, lanes=self.lanes)
        object.__setattr__(self, "policy", policy)

    @property
    def instruments(self) -> bool:
        """Whether Megatron's own schedule has to be wrapped too."""
        return self.trace is not None or self.emulate is not None or self.inject is not None


def _register(hint: str) -> None:
    """`module:function` names a hint function where it can be imported: registered under that name (`rrfp.register_hint`)."""
    module, colon, name = hint.partition(":")
    if not colon or Path(hint).is_file():
        return
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"--rrfp-hint {hint}: can't be imported ({error}); write module:function, importable from the script's folder") from None
    register_hint(hint, function)
