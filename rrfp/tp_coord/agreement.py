"""The agreement protocol, and `Solo`, the agreement of a rank with itself.

A *domain* is the set of ranks at one stage that must dispatch the same sequence because collectives run inside their actions.
One member leads: it chooses among what has arrived at *every* member, and its choices are the sequence. The others follow.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from rrfp.action import Action, Edge
from rrfp.comm.transport import Failure

COLLECTIVE = ("broadcast", "all-gather")
"""Ways that go through a process group."""
KINDS = ("auto", "shared-memory", "messages", *COLLECTIVE)
"""The values of --rrfp-agreement."""


class Agreement(Protocol):
    """One member's end. No method blocks, `close` for about a second at most."""

    size: int
    """Members, this one included."""
    leads: bool
    """Whether the others follow this one."""
    bell: int | None
    """A pipe that has something when there is news that `wake` does not tell of; whoever waits for news empties it. It stays open
    until `close`. None: `wake` tells of all."""

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        """From now on `wake` is called, from any thread, when there is news, and `fail` when a member failed or was lost."""

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

    def abort(self, failure: Failure) -> None:
        """Tell every member. From any thread; only the first failure counts. Members of a stage are no neighbours of one
        transport: without this they would learn of each other's end by a deadline only."""

    def state(self) -> dict:
        """For a hang report. Empty if there is nobody to agree with; else "leader", "members", "decisions" (how many were
        published, or taken) and "peers", rank -> seconds since its last sign of life."""

    def close(self) -> None:
        """Say goodbye and let go of the other members. Safe to call twice and after a failure."""


class Solo:
    """A domain of one: every arrival counts at once and every choice is agreed."""

    size, leads, bell = 1, True, None

    def __init__(self):
        self._new: list[tuple[Edge, int]] = []

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None] = lambda failure: None) -> None:
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

    def abort(self, failure: Failure) -> None:
        pass

    def state(self) -> dict:
        return {}

    def close(self) -> None:
        pass
