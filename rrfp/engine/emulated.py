"""An executor whose actions sleep: the real engine, processes and transport, without a model. For benchmarks and tests."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from rrfp.action import Action, Edge
from rrfp.comm.transport import Arrival, Part, Payload
from rrfp.scheduler.dependencies import Task


class EmulatedExecutor:
    """Every action lasts what `duration` says, from its launch.

    Args:
        duration: seconds of an action.
        release: gives a receive buffer back.
        nbytes: size of every message.
    """

    capacity = 1
    padded = 0.0

    def __init__(self, duration: Callable[[Action], float], *, release: Callable[[Arrival], None], nbytes: int = 0):
        self._duration = duration
        self._release = release
        self._payload: Payload = (Part("uint8", (nbytes,), np.zeros(nbytes, np.uint8)),)

    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Callable[[Mapping[Edge, Payload]], None]) -> None:
        end = time.monotonic() + self._duration(task.action)
        for arrival in inputs:
            self._release(arrival)
        if (left := end - time.monotonic()) > 0:
            time.sleep(left)
        done({edge: self._payload for edge in task.sends})
