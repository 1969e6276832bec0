"""Actions that are lengthened on purpose: emulated durations, and the paper's injected jitter.

The training stays real. An *emulated* action sleeps until its drawn duration is over (`--rrfp-emulate`), so that a pipeline's
timing can be seen where the processors are too few; an *injected* delay comes on top of real compute (`--rrfp-inject`). Draws
depend on seed, call, stage, kind and microbatch alone, never on the order of execution, so every schedule meets the same ones.
"""

import random
import time
from typing import Protocol

from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.simulate.scenarios import LEVELS, SCENARIOS, Jitter, draw


class Padding(Protocol):
    """Called around every action, on its thread."""

    def begin(self, call: int, microbatches: int) -> None:
        """A call starts."""

    def start(self) -> None:
        """An action starts."""

    def finish(self, call: int, action: Action) -> float:
        """It has done its work: sleep what is missing. Returns the seconds slept."""

    def on_device(self, call: int, action: Action, took: float) -> float:
        """In place of `start` and `finish` where actions run on a GPU: for how many seconds it shall stay busy behind this one.

        took: what such an action took when it completed last; 0 if none has.
        """

    def summary(self) -> str:
        """One line for the end of a run."""


class Emulation:
    """`--rrfp-emulate NAME[:UNIT_MS[:SEED]]`: every action lasts as long as its scenario says.

    Args:
        text: the option's value; UNIT_MS is the mean duration of a forward in milliseconds (default 20; a backward is twice that).
        stages: how many stages there are.

    Raises:
        ConfigurationError: for an unknown scenario, or a unit or seed that is no number.
    """

    def __init__(self, text: str, *, stages: int):
        self.name, self.unit, self.seed = parse_scenario(text)
        self.overruns = 0
        self.worst_overrun = 0.0
        self.actions = 0
        self._stages = stages
        self._microbatches = 0
        self._call = -1
        self._start = 0.0
        self._duration: dict[tuple[str, int, int], float] = {}
        self._delay: dict[tuple[str, int, int], float] = {}

    def begin(self, call: int, microbatches: int) -> None:
        """Draw a call's durations and delays (before its first action)."""
        if (call, microbatches) != (self._call, self._microbatches):
            self._call, self._microbatches = call, microbatches
            self._duration, self._delay = draw(self.name, self._stages, microbatches, self.unit, self.seed + call)

    def start(self) -> None:
        self._start = time.monotonic()

    def finish(self, call: int, action: Action) -> float:
        self.actions += 1
        missing = self._start + self._duration[action.kind, action.stage, action.microbatch] - time.monotonic()
        if missing <= 0:
            self.overruns += 1
            self.worst_overrun = max(self.worst_overrun, -missing)
            return 0.0
        time.sleep(missing)
        return missing

    def on_device(self, call: int, action: Action, took: float) -> float:
        self.actions += 1
        missing = self._duration[action.kind, action.stage, action.microbatch] - took
        if missing <= 0:
            self.overruns += 1
            self.worst_overrun = max(self.worst_overrun, -missing)
        return max(0.0, missing)

    def delay(self, edge: Edge, microbatch: int) -> float:
        """Seconds by which the message over `edge` is late."""
        return self._delay.get(("F" if edge.source < edge.destination else "B", edge.destination, microbatch), 0.0)

    @property
    def delays_messages(self) -> bool:
        return any(self._delay.values())

    def summary(self) -> str:
        """One line for the end of a run: how many actions took longer than they were to."""
        return (f"emulated durations: scenario {self.name}, forward {self.unit * 1e3:g} ms on average; {self.overruns} of "
                f"{self.actions} actions took longer than drawn (worst by {self.worst_overrun * 1e3:.1f} ms)")


class Injection:
    """`--rrfp-inject LEVEL`: the paper's jitter on top of real compute.

    An action is followed by the delay that `scenarios.Jitter` draws for it, from the moving average of what the stage's actions took.

    Raises:
        ConfigurationError: for an unknown level.
    """

    def __init__(self, level: str, *, seed: int = 0):
        if level not in LEVELS:
            raise ConfigurationError(f"--rrfp-inject {level}: no such level; choose one of {', '.join(LEVELS)}")
        self.level = level
        self.injected = 0
        self.actions = 0
        self._jitter = Jitter(level)
        self._seed = seed
        self._start = 0.0

    def begin(self, call: int, microbatches: int) -> None:
        pass

    def start(self) -> None:
        self._start = time.monotonic()

    def finish(self, call: int, action: Action) -> float:
        pause = self.on_device(call, action, time.monotonic() - self._start)
        if pause:
            time.sleep(pause)
        return pause

    def on_device(self, call: int, action: Action, took: float) -> float:
        self.actions += 1
        pause = self._jitter.after(took, random.Random(f"{self.level}/{self._seed}/{call}/{action}"))
        self.injected += pause > 0
        return pause

    def summary(self) -> str:
        return f"injected jitter {self.level}: {self.injected} of {self.actions} actions were delayed"


def parse_scenario(text: str) -> tuple[str, float, int]:
    """`images:30:7` -> ("images", 0.030, 7). Raises ConfigurationError."""
    name, *rest = text.split(":")
    if name not in SCENARIOS:
        raise ConfigurationError(f"--rrfp-emulate {text}: no scenario {name!r}; choose one of {', '.join(SCENARIOS)}")
    try:
        unit = float(rest[0]) / 1e3 if rest else 0.020
        seed = int(rest[1]) if len(rest) > 1 else 0
        if unit <= 0 or len(rest) > 2:
            raise ValueError
    except ValueError:
        raise ConfigurationError(f"--rrfp-emulate {text}: write NAME[:UNIT_MS[:SEED]], like images:30:7, with a unit above 0") from None
    return name, unit, seed
