"""A domain inside one process under a virtual clock: members that hear of each other late. A test tool.

Member 0 leads. News between members (what arrived, what was decided) takes `delay` seconds, in order.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from rrfp.action import Action, Edge
from rrfp.comm.clock import VirtualClock
from rrfp.comm.transport import Failure


class ScriptedDomain:
    """All members' ends.

    Args:
        members: how many ranks must dispatch the same sequence.
        clock: delivers the news when it is advanced.
        delay: delay(member), seconds that news to or from a member takes.
    """

    def __init__(self, members: int, *, clock: VirtualClock, delay: Callable[[int], float] = lambda member: 0.0):
        self.clock, self.delay = clock, delay
        self._members = [ScriptedAgreement(self, index) for index in range(members)]
        self._due: Counter[tuple[int, int]] = Counter()

    def agreement(self, member: int) -> "ScriptedAgreement":
        return self._members[member]

    @property
    def size(self) -> int:
        return len(self._members)

    def tell(self, source: int, target: int, news: Callable[["ScriptedAgreement"], None]) -> None:
        """In order between two members: later news never overtakes."""
        due = self.clock.now() + self.delay(source) + self.delay(target)
        due = self._due[source, target] = max(due, self._due[source, target])
        self.clock.call_at(due, lambda: self._members[target].hear(news))


class ScriptedAgreement:
    """One member's end of a `ScriptedDomain`; an `Agreement`."""

    bell = None

    def __init__(self, domain: ScriptedDomain, member: int):
        self._domain, self._member = domain, member
        self._wake: Callable[[], None] = lambda: None
        self._fail: Callable[[Failure], None] = lambda failure: None
        self._failure: Failure | None = None
        self._call = -1
        self._new: list[tuple[Edge, int]] = []
        self._seen: Counter[tuple[int, Edge, int]] = Counter()  # leader: (call, edge, microbatch) -> members that have it
        self._sequence: dict[int, list[Action]] = {}  # follower: call -> what was agreed and not yet taken

    @property
    def size(self) -> int:
        return self._domain.size

    @property
    def leads(self) -> bool:
        return self._member == 0

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None] = lambda failure: None) -> None:
        self._wake, self._fail = wake, fail

    def begin(self, call: int) -> None:
        self._call = call
        self._new = []
        if self.leads:
            # A follower may have been in this call before the leader.
            self._new = [key[1:] for key, count in self._seen.items() if key[0] == call and count == self._domain.size]
        self._sequence = {number: actions for number, actions in self._sequence.items() if number >= call}

    def arrived(self, edge: Edge, microbatch: int) -> None:
        call = self._call
        if self.leads:
            self._count(call, edge, microbatch)
        else:
            self._new.append((edge, microbatch))
            self._domain.tell(self._member, 0, lambda leader: leader._count(call, edge, microbatch))

    def _count(self, call: int, edge: Edge, microbatch: int) -> None:
        # Invariant 6: a message counts once every member has it.
        self._seen[call, edge, microbatch] += 1
        if call == self._call and self._seen[call, edge, microbatch] == self._domain.size:
            self._new.append((edge, microbatch))

    def common(self) -> Sequence[tuple[Edge, int]]:
        new, self._new = self._new, []
        return new

    def decide(self, choice: Action | None) -> Action | None:
        if not self.leads:
            sequence = self._sequence.get(self._call)
            return sequence.pop(0) if sequence else None
        if choice is not None:
            call = self._call
            for follower in range(1, self._domain.size):
                self._domain.tell(0, follower, lambda member: member._sequence.setdefault(call, []).append(choice))
        return choice

    def hear(self, news: Callable[["ScriptedAgreement"], None]) -> None:
        news(self)
        self._wake()

    def abort(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            for other in range(self._domain.size):
                if other != self._member:
                    self._domain.tell(self._member, other, lambda member: member._learn(failure))

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._fail(failure)

    def state(self) -> dict:
        return {}

    def close(self) -> None:
        pass
