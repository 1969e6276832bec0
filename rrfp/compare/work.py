"""How a stage spends an action's seconds, and the executor that spends them inside the engine, without a model."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from rrfp.action import Action, Edge
from rrfp.comm.transport import Arrival, Part, Payload
from rrfp.scheduler.dependencies import Task

LATE = 0.001
"""Seconds by which a sleep may end late before it counts as an overrun: more says that the machine was busy with other work."""
_SIDE = 64  # a product so small that no library spreads it over threads


class Work(Protocol):
    """Spends time. One per process, shared by all ways of running in it.

    emulated: whether the time is slept.
    overruns: how many times it has taken noticeably longer than asked for, so far.
    """

    emulated: bool
    overruns: int

    def spend(self, seconds: float) -> None: ...


class Sleep:
    """Emulated compute: sleeps, so that more stages than cores can run."""

    emulated = True

    def __init__(self):
        self.overruns = 0

    def spend(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        time.sleep(max(0.0, seconds))
        self.overruns += time.monotonic() > due + LATE


class Multiply:
    """Real compute: as many matrix products as fill `seconds` on an idle core of this machine.

    per_second: products per second of one idle core; `Multiply.calibrated` measures it.
    """

    emulated = False

    def __init__(self, per_second: float):
        self.overruns = 0
        self._per_second = per_second
        self._left = np.full((_SIDE, _SIDE), 1.0 / _SIDE, np.float32)
        self._out = np.empty_like(self._left)

    @classmethod
    def calibrated(cls, seconds: float = 0.2) -> "Multiply":
        """The fastest of five measurements of `seconds` of processor time in all: other work on the machine does not count."""
        trial = cls(1.0)
        trial._multiply(100)
        rates = []
        for _ in range(5):
            count, start = 0, time.thread_time()
            while (now := time.thread_time()) < start + seconds / 5:
                trial._multiply(20)
                count += 20
            rates.append(count / (now - start))
        return cls(max(rates))

    def spend(self, seconds: float) -> None:
        start = time.monotonic()
        self._multiply(round(seconds * self._per_second))
        self.overruns += time.monotonic() > start + 1.1 * seconds + LATE

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            np.matmul(self._left, self._left, out=self._out)


class WorkExecutor:
    """Every action lasts what `duration` says, as `work` spends it.

    Args:
        duration: seconds of an action.
        work: spends them.
        release: gives a receive buffer back.
        nbytes: size of every message.
    """

    capacity = 1

    def __init__(
        self, duration: Callable[[Action], float], *, work: Work, release: Callable[[Arrival], None], nbytes: int = 0
    ):
        self.padded = 0.0
        self._duration, self._work, self._release = duration, work, release
        self._payload: Payload = (Part("uint8", (nbytes,), np.zeros(nbytes, np.uint8)),)

    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Callable[[Mapping[Edge, Payload]], None]) -> None:
        start = time.monotonic()
        for arrival in inputs:
            self._release(arrival)
        # What has passed since the launch is part of the action.
        self._work.spend(self._duration(task.action) - (time.monotonic() - start))
        self.padded = time.monotonic() - start if self._work.emulated else 0.0
        done({edge: self._payload for edge in task.sends})
