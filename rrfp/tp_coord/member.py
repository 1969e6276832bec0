"""One member's end of a domain of several processes: the protocol itself, over any channel.

Followers publish what has arrived; the leader chooses among what has arrived everywhere and publishes its choices; a follower
takes them one by one. Nothing is asked back, so the leader waits for nobody. Belongs to the thread that runs the engine.
"""

import os
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
    """How members reach each other. Nothing in it blocks but `close`, which takes a second at most if a member does not answer."""

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
    """

    def __init__(self, channel: Channel, *, domain: Domain, rank: int, receipts: Receipts):
        self._channel, self._domain, self._rank, self._receipts = channel, domain, rank, receipts
        self._pid = os.getpid()
        self._call = -1
        self._sequence = self._digest = 0
        """Of the last decision that was published (leader) or given out (follower)."""

    @property
    def leads(self) -> bool:
        return self._rank == self._domain.leader

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        self._check_process()
        self._channel.open(wake, fail)

    def begin(self, call: int) -> None:
        self._check_process()
        self._call = call
        receipts = self._receipts
        receipts.begin(call)
        self._channel.begin(call, {index: receipts.word(index) for index in range(len(receipts.lanes))})

    def arrived(self, edge: Edge, microbatch: int) -> None:
        index = self._receipts.arrived(edge, microbatch)
        if not self.leads:
            self._channel.publish({index: self._receipts.word(index)})

    def common(self) -> Sequence[tuple[Edge, int]]:
        return self._receipts.common(self._channel.words) if self.leads else self._receipts.own()

    def decide(self, choice: Action | None) -> Action | None:
        if not self.leads:
            return self._follow()
        if choice is None:
            return None
        decision = Decision(self._sequence + 1, self._call, choice, fold(self._digest, self._call, choice))
        if not self._channel.put(decision):
            return None
        self._sequence, self._digest = decision.sequence, decision.digest
        return choice

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
                f"the members of a domain diverge: rank {self._rank} expected decision {self._sequence + 1} of call {self._call} with "
                f"digest {digest:08x}, rank {self._domain.leader} sent decision {decision.sequence} of call {decision.call}, "
                f"{decision.action}, with digest {decision.digest:08x}")
        self._sequence, self._digest = decision.sequence, digest
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
