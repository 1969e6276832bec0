"""The first failure wins: it is latched once, and everybody asks the latch."""

import re
import threading
from collections.abc import Callable, Mapping

from rrfp.comm.transport import Failure
from rrfp.errors import PipelineError

ELSEWHERE = "another pipeline"
"""Where a failure is said to be that happened in another pipeline of the job: its rank is then the one that heard of it, and its text
says who failed."""


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

    @property
    def text(self) -> str:
        """Rank, place and reason, with the remote traceback if there is one; empty if nothing has failed."""
        return "" if self._failure is None else describe(self._failure, self.name)

    def raise_if_set(self) -> None:
        """Raises PipelineError that says `text`."""
        if self._failure is not None:
            raise PipelineError(self.text)


def describe(failure: Failure, name: Callable[[int], str] = "rank {}".format) -> str:
    """`rank 2 failed (2F3): ValueError: ...`, followed by that rank's traceback.

    Of another pipeline: `in another pipeline, stage 1 (rank 3) failed (1F3): ValueError: ...`.
    """
    who = name(failure.rank)
    verb = "was lost" if failure.lost else "failed"
    text = f"{who} {verb} ({failure.where}): {failure.text}"
    if is_hearsay(failure):
        who, text = "that rank", f"in {failure.where}, {failure.text}"
    return f"{text}\n--- traceback of {who} ---\n{failure.traceback.rstrip()}" if failure.traceback else text


def is_hearsay(failure: Failure) -> bool:
    """Whether it happened in another pipeline of the job."""
    return failure.where == ELSEWHERE


def came_home(failure: Failure, names: Mapping[int, str]) -> Failure:
    """News of one's own pipeline that went round through another one, put as its own ranks would have; anything else as it is.

    names: how errors call this pipeline's ranks.
    """
    if is_hearsay(failure):
        for rank, name in names.items():
            if (told := re.fullmatch(rf"{re.escape(name)} (was lost|failed) \(([^()]*)\): (.*)", failure.text, re.S)) is not None:
                return Failure(rank, told[2], told[3], failure.traceback, lost=told[1] == "was lost")
    return failure
