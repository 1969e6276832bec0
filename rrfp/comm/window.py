"""Which calls a rank listens to. Ranks are not in step between calls, so what belongs to a later one waits for it."""

from collections.abc import Callable, Iterable, Mapping

from rrfp.action import Edge
from rrfp.comm.transport import Announcement, Arrival, Event, Failure
from rrfp.errors import PipelineError


class CallWindow:
    """Posts what belongs to the current call, keeps what belongs to later ones. Not thread-safe: its owner locks.

    ahead: how many calls a sender may be ahead. It sends at least one message of every edge in each call, so that is its
    credits: a first stage that only runs forwards (evaluation, one microbatch per call) gets so far before anything holds it.
    entered(edge, call): whether the sender's word of that call is here; until then what it sent of it is kept.
    """

    def __init__(self, *, ahead: int = 1, entered: Callable[[Edge, int], bool] = lambda edge, call: True):
        self._ahead, self._entered = ahead, entered
        self.call: int | None = None
        self._early: list[Arrival | Announcement] = []

    def begin(self, call: int, post: Callable[[Event], None]) -> tuple[Arrival, str] | None:
        """Start a call and post what came early for it. Returns an arrival that fits neither it nor a later one, and why."""
        if self.call is not None and call <= self.call:
            raise PipelineError(f"call {call} begins after call {self.call}: call numbers only grow")
        self.call = call
        early, self._early = self._early, []
        for event in early:
            if isinstance(event, Arrival) and (wrong := self.wrong(event.call)):
                return event, wrong
            self.deliver(event, post)
        return None

    def wrong(self, call: int) -> str | None:
        """Why a payload of this call cannot come now. Before the first call any can."""
        if self.call is None or self.call <= call <= self.call + self._ahead:
            return None
        return f"a message of call {call} during call {self.call}"

    def deliver(self, event: Arrival | Announcement, post: Callable[[Event], None]) -> None:
        if self.call is None or event.call > self.call or not self._entered(event.edge, event.call):
            self._early.append(event)
        elif event.call == self.call:
            post(event)
        # else an announcement that came after its call: it travels beside the payloads, so that is no mistake, and of no use

    def look_again(self, post: Callable[[Event], None]) -> None:
        """A sender has told of a call: post what was kept for that."""
        early, self._early = self._early, []
        for event in early:
            self.deliver(event, post)

    def clear(self) -> None:
        self._early.clear()


class Roll:
    """Which calls the neighbours have entered, and whether they mean by them what this rank does. Not thread-safe: its owner locks.

    ahead: how many calls a neighbour may have completed that this rank has not entered; it may be inside one more.
    """

    def __init__(self, rank: int, peers: Iterable[int], *, ahead: int):
        self._rank, self._most = rank, ahead + 1
        self._own: dict[int, Mapping[str, str]] = {}
        self._theirs: dict[int, dict[int, Mapping[str, str]]] = {peer: {} for peer in peers}
        self.last: dict[int, int] = {}
        """The latest call that each neighbour has told of; nothing before its first."""

    @property
    def kept(self) -> int:
        """How many calls' facts are kept, of this rank and of its neighbours, for a comparison to come."""
        return len(self._own) + sum(map(len, self._theirs.values()))

    def entered(self, peer: int, call: int) -> bool:
        return peer in self.last and call <= self.last[peer]

    def enter(self, call: int, facts: Mapping[str, str]) -> Failure | None:
        """This rank enters a call. What a neighbour that is in it already means by it, if that is something else."""
        self._own[call] = facts
        found = [self._compare(peer, call) for peer in self._theirs]
        self._forget()
        return next(filter(None, found), None)

    def hear(self, peer: int, call: int, facts: Mapping[str, str]) -> Failure | str | None:
        """A neighbour enters a call: a Failure if it means something else by it, a text if it cannot enter that call now."""
        if self.entered(peer, call):
            return f"call {call} is entered after call {self.last[peer]}"
        waiting = self._theirs[peer]
        if len(waiting) == self._most:
            return f"call {call} is entered, {self._most} calls before this rank"
        self.last[peer] = call
        waiting[call] = facts
        found = self._compare(peer, call)
        self._forget()
        return found

    def _forget(self) -> None:
        """Own facts are of no more use once every neighbour has been compared with them: after the comparisons, never between."""
        for old in [old for old in self._own if all(self.entered(other, old) for other in self._theirs)]:
            del self._own[old]

    def _compare(self, peer: int, call: int) -> Failure | None:
        """The Failure is the same at both ends, so that whichever is told first says it all."""
        waiting = self._theirs[peer]
        if call not in waiting or call not in self._own:
            return None
        (low, ours), (high, theirs) = sorted([(self._rank, self._own[call]), (peer, waiting[call])], key=lambda end: end[0])
        for old in [old for old in waiting if old <= call]:
            del waiting[old]
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                text = (f"ranks {low} and {high} disagree on what call {call} is: {name} {ours.get(name)} on rank {low}, "
                        f"{theirs.get(name)} on rank {high}; every rank must make the same calls in the same order")
                return Failure(low, f"call {call}", text)
        return None
