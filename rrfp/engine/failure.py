"""The first failure wins: it is latched once, and everybody asks the latch."""

import threading
from collections.abc import Callable

from rrfp.comm.transport import Failure
from rrfp.errors import PipelineError


class FailureLatch:
    """Holds the first `Failure` a process learns of. Thread-safe; later ones are ignored (they follow from the first).

    name: how errors call a pipeline rank.
    """

    def __init__(self, *, name: Callable[[int], str] = "rank {}".format):
        self.name = name
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self.set_event = threading.Event()

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def set(self, failure: Failure) -> bool:
        """Latch it. True if it was the first."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = failure
        self.set_event.set()
        return True

    def raise_if_set(self) -> None:
        """Raises PipelineError that names rank, place and reason, with the remote traceback if there is one."""
        if self._failure is not None:
            raise PipelineError(describe(self._failure, self.name))


def describe(failure: Failure, name: Callable[[int], str] = "rank {}".format) -> str:
    """`rank 2 failed (2F3): ValueError: ...`, followed by that rank's traceback."""
    who = name(failure.rank)
    verb = "was lost" if failure.lost else "failed"
    text = f"{who} {verb} ({failure.where}): {failure.text}"
    return f"{text}\n--- traceback of {who} ---\n{failure.traceback.rstrip()}" if failure.traceback else text
