"""One member's end of a domain of several processes: the protocol itself, over any channel.

Followers publish what has arrived; the leader chooses among what has arrived everywhere and publishes its choices; a follower
takes them one by one. Nothing is asked back, so the leader waits for nobody. Belongs to the thread that runs the engine.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from rrfp.action import Action, Edge
from rrfp.comm.message import Malformed
from rrfp.comm.transport import Failure
from rrfp.errors import PipelineError
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.receipts import Receipts
from rrfp.tp_coord.record import Decision, fold


class Channel(Protocol):
    """How members reach each other. Nothing in it blocks but `close`, which takes a second at most if a member does not
    answer."""

    bell: int | None
    """As `rrfp.tp_coord.agreement.Agreement`'s."""

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        """From now on news and failures are told. Called from any thread."""

    def begin(self, call: int, words: Mapping[int, int]) -> None:
        """A new call starts, with these words by lane. Raises PipelineError if a member has left."""

    def publish(self, words: Mapping[int, int]) -> None:
        """Follower: words by lane for the leader, and wake it."""

    def words(self, index: int) -> Iterable[tuple[int, int]]:
        """Leader: every other member's rank and word of a lane."""

    def put(self, decision: Decision) -> bool:
        """Leader: hand it to every follower and wake them. False if a follower is so far behind that there is no room yet."""

    def look(self, sequence: int) -> Decision | None:
        """Follower: the decision of that number if it is out. Raises Malformed."""

    def took(self, sequence: int) -> None:
        """Follower: it is not needed any more."""

    def abort(self, failure: Failure) -> None:
        """Tell every member. Only the first failure counts."""

    def state(self) -> dict: ...

    def close(self) -> None: ...


class Member:
    """An `Agreement` between processes; `rrfp.tp_coord.opening.open_agreement` makes it.

    Args:
        channel: connected.
        domain: who must agree.
        rank: this member.
        receipts: fresh.
        spin_s: seconds for which a member that waits for the others only looks again and again, before it goes to sleep.
    """

    def __init__(self, channel: Channel, *, domain: Domain, rank: int, receipts: Receipts, spin_s: float = 0.0):
        self._channel, self._domain, self._rank, self._receipts = channel, domain, rank, receipts
        self._spin_s = spin_s
        self._spun = False  # in vain, and nothing has changed since
        self._common: Sequence[tuple[Edge, int]] = ()
        self._pid = os.getpid()
        self._call = -1
        self._sequence = self._digest = 0
        """Of the last decision that was published (leader) or given out (follower)."""

    @property
    def size(self) -> int:
        return len(self._domain.members)

    @property
    def leads(self) -> bool:
        return self._rank == self._domain.leader

    @property
    def bell(self) -> int | None:
        return self._channel.bell

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        self._check_process()
        self._wake = wake
        self._channel.open(wake, fail)

    def begin(self, call: int) -> None:
        self._check_process()
        self._call = call
        receipts = self._receipts
        receipts.begin(call)
        self._common, self._spun = (), False
        self._channel.begin(call, {index: receipts.word(index) for index in range(len(receipts.lanes))})

    def arrived(self, edge: Edge, microbatch: int) -> None:
        index = self._receipts.arrived(edge, microbatch)
        self._spun = False
        if not self.leads:
            self._channel.publish({index: self._receipts.word(index)})

    def common(self) -> Sequence[tuple[Edge, int]]:
        if not self.leads:
            return self._receipts.own()
        common, self._common = self._common, ()
        return common or self._receipts.common(self._channel.words)

    def decide(self, choice: Action | None) -> Action | None:
        if not self.leads:
            action = self._follow()
            # Something could run here, so what is missing is the leader's word: it is about to come.
            if action is None and choice is not None and self._spin(lambda: self._channel.look(self._sequence + 1) is not None):
                action = self._follow()
            return action
        if choice is None:
            if self._receipts.pending and self._spin(self._look_for_common):
                self._wake()  # the engine asks for what is common first
            return None
        decision = Decision(self._sequence + 1, self._call, choice, fold(self._digest, self._call, choice))
        if not self._channel.put(decision):
            return None
        self._sequence, self._digest, self._spun = decision.sequence, decision.digest, False
        return choice

    def _look_for_common(self) -> bool:
        self._common = self._receipts.common(self._channel.words)
        return bool(self._common)

    def _spin(self, found: Callable[[], bool]) -> bool:
        if self._spun or not self._spin_s:
            return False
        until = time.monotonic() + self._spin_s
        while not found():
            os.sched_yield()  # other processes go first, and threads of this one
            if time.monotonic() > until:
                self._spun = True
                return False
        return True

    def _follow(self) -> Action | None:
        try:
            decision = self._channel.look(self._sequence + 1)
        except Malformed as error:
            raise PipelineError(f"decision {self._sequence + 1} of rank {self._domain.leader} cannot be read: {error}") from None
        if decision is None or decision.call > self._call:
            return None
        # Both ends count and digest the sequence by themselves: one that parts is an error here, not a hang in a collective.
        digest = fold(self._digest, decision.call, decision.action)
        if (decision.sequence, decision.digest, decision.call) != (self._sequence + 1, digest, self._call):
            raise PipelineError(
                f"the members of a domain diverge: rank {self._rank} expected decision {self._sequence + 1} of call {self._call} "
                f"with digest {digest:08x}, rank {self._domain.leader} sent decision {decision.sequence} of call "
                f"{decision.call}, {decision.action}, with digest {decision.digest:08x}")
        self._sequence, self._digest, self._spun = decision.sequence, digest, False
        self._channel.took(decision.sequence)
        return decision.action

    def abort(self, failure: Failure) -> None:
        if os.getpid() == self._pid:
            self._channel.abort(failure)

    def state(self) -> dict:
        if os.getpid() != self._pid:
            return {}
        return {"leader": self._domain.leader, "members": list(self._domain.members), "decisions": self._sequence,
                **self._channel.state()}

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._channel.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PipelineError(f"this agreement belongs to process {self._pid}; a forked child must not use it")
