"""The agreement protocol, and `Solo`, the agreement of a rank with itself.

A *domain* is the set of ranks at one stage that must dispatch the same sequence because collectives run inside their actions.
One member leads: it chooses among what has arrived at *every* member, and its choices are the sequence. The others follow.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from rrfp.action import Action, Edge


class Agreement(Protocol):
    """One member's end. No method blocks; `wake` (see `open`) is called from any thread when there is news."""

    def open(self, wake: Callable[[], None]) -> None:
        """Connect to the other members."""

    def begin(self, call: int) -> None:
        """A new call starts; what was agreed before is over."""

    def arrived(self, edge: Edge, microbatch: int) -> None:
        """This member has received a message."""

    def common(self) -> Sequence[tuple[Edge, int]]:
        """Messages that may count as arrived at this member since the last time it asked.

        Invariant 6: to the leader these are what arrived at every member (each lane is FIFO in the same agreed order, so the
        intersection is a prefix); to a follower its own arrivals, since it only obeys.
        """

    def decide(self, choice: Action | None) -> Action | None:
        """Leader: publish `choice` and get it back. Follower: the next action of the agreed sequence, None if none is out yet.

        Each action is given out once. The engine asks again only when it has launched it: a member may be behind the leader.
        """

    def close(self) -> None:
        """Let go of the other members. Safe to call twice."""


class Solo:
    """A domain of one: every arrival counts at once and every choice is agreed."""

    def __init__(self):
        self._new: list[tuple[Edge, int]] = []

    def open(self, wake: Callable[[], None]) -> None:
        pass

    def begin(self, call: int) -> None:
        self._new.clear()

    def arrived(self, edge: Edge, microbatch: int) -> None:
        self._new.append((edge, microbatch))

    def common(self) -> Sequence[tuple[Edge, int]]:
        new, self._new = self._new, []
        return new

    def decide(self, choice: Action | None) -> Action | None:
        return choice

    def close(self) -> None:
        pass
