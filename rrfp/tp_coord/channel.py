"""What every channel between members does: one thread that listens, signs of life, the first failure, goodbyes.

Who owns what. The engine's thread publishes and looks; the channel's thread (`rrfp.comm.loop.Loop`) blocks in a poll until a
member writes, ends, or a heartbeat is due, and then tells the engine. `_lock` guards the latch and what is known of members;
nothing foreign is called under it, and nothing that blocks. On an error in the thread the failure is latched, told to every
member, and handed to `fail`.
"""

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rrfp.comm import rendezvous
from rrfp.comm.loop import Loop
from rrfp.comm.transport import Failure
from rrfp.errors import PipelineError


@dataclass(eq=False)
class Peer:
    """Another member, and what is known of its life.

    pid, started: its process if it runs on this host, else 0.
    """

    rank: int
    pid: int = 0
    started: int = 0
    seen: float = field(default_factory=time.monotonic)
    left: int | None = None
    """The last call that it began, once it has said goodbye."""
    lost: bool = False
    descriptor: int | None = None

    def watch(self) -> None:
        """Raises PipelineError if its process has ended already."""
        if self.pid:
            try:
                self.descriptor = rendezvous.watch(self.pid, self.started)
            except ProcessLookupError:
                raise PipelineError(
                    f"rank {self.rank} (process {self.pid}) ended during start-up: look for its first error") from None


class ListeningChannel:
    """Base of the channels.

    Args:
        rank: this member.
        peers: the members that this one hears.
        heartbeat_s: seconds between signs of life.
        silence_s: seconds without one after which a member counts as lost: it is stopped, or its machine hangs.
        judge: which of the peers' silence this member judges first; the others a heartbeat later, in case that judge is silent
            too.
    """

    def __init__(self, rank: int, peers: Iterable[Peer], *, heartbeat_s: float, silence_s: float, judges: Callable[[int], bool]):
        self.rank = rank
        self._silence_s, self._heartbeat_s, self._judges = silence_s, heartbeat_s, judges
        self._peers = {peer.rank: peer for peer in peers}
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._told = self._closed = False
        self._call = -1
        self._wake: Callable[[], None] | None = None
        self._fail_out: Callable[[Failure], None] | None = None
        self._last_tick = time.monotonic()
        self._loop = Loop(name=f"rrfp-agreement{rank}", interval=heartbeat_s, tick=self._tick, fail=self._fail_here)
        for peer in self._peers.values():
            if peer.descriptor is not None:
                self._loop.add(peer.descriptor, lambda peer=peer: self._on_death(peer))

    # ------------------------------------------------------------------ what subclasses do
    @abstractmethod
    def _sign(self) -> None:
        """Give a sign of life, and take note of the others'."""

    @abstractmethod
    def _spread(self, failure: Failure, source: int | None) -> None:
        """Tell the members that do not know it. Under `_lock`, before `_free`."""

    @abstractmethod
    def _say_goodbye(self, until: float) -> None:
        """Tell the members that this one leaves in good order."""

    @abstractmethod
    def _last_words(self, peer: Peer) -> None:
        """Take in what a member that has ended had still said."""

    @abstractmethod
    def _free(self) -> None:
        """Let go of everything. The thread has ended."""

    # ------------------------------------------------------------------ the engine's thread
    bell: int | None = None
    """See `rrfp.tp_coord.agreement.Agreement`."""

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        with self._lock:
            self._wake, self._fail_out = wake, fail
        self._deliver()

    def abort(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure, self._told = failure, True  # who calls this knows it
            self._spread(failure, None)

    def state(self) -> dict:
        now = time.monotonic()
        return {"peers": {peer.rank: now - peer.seen for peer in self._peers.values() if peer.left is None}}

    def close(self, *, deadline: float = 1.0) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + deadline
        try:
            self._say_goodbye(until)
        finally:
            ended = self._loop.stop(until=max(until, time.monotonic() + 1.0))
            if ended:  # else it may still use what would be freed
                self._loop.close()
                for peer in self._peers.values():
                    if peer.descriptor is not None:
                        os.close(peer.descriptor)
                self._free()
        if not ended:
            raise PipelineError(f"rank {self.rank}: the agreement's thread did not end in time")

    def _begin(self, call: int) -> None:
        with self._lock:
            self._call = call
            gone = [peer for peer in self._peers.values() if peer.left is not None]
        for peer in gone:
            raise PipelineError(self._gone(peer))

    def _gone(self, peer: Peer) -> str:
        return f"rank {peer.rank} left after {_calls(peer.left)}: call {self._call} cannot be agreed on without it"

    # ------------------------------------------------------------------ any thread
    @property
    def quiet(self) -> bool:
        """Whether no failure is known and no member has left: what breaks now is news."""
        return self._failure is None and not self._closed and all(peer.left is None for peer in self._peers.values())

    def fail(self, failure: Failure, *, source: int | None = None) -> None:
        """Latch a failure that was seen here, or told by member `source`; tell the other members and the engine."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = failure  # the first one wins
            self._spread(failure, source)
        self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            if self._failure is None or self._told or self._fail_out is None:
                return
            self._told = True
        self._fail_out(self._failure)

    def _fail_here(self, where: str, text: str, traceback: str) -> None:
        self.fail(Failure(self.rank, f"agreement, {where}", text, traceback))

    # ------------------------------------------------------------------ the channel's thread
    def _news(self) -> None:
        if self._wake is not None:
            self._wake()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._last_tick > 3 * self._heartbeat_s + 1.0:
            # This process itself was stopped: what it knows of the others is old.
            for peer in self._peers.values():
                peer.seen = now
        self._last_tick = now
        self._sign()
        for peer in self._peers.values():
            patience = self._silence_s + (0 if self._judges(peer.rank) else 2 * self._heartbeat_s)
            if now - peer.seen > patience and peer.left is None and not peer.lost:
                self._on_loss(peer, f"no sign of life for {self._silence_s:.0f} s: stopped, or its machine hangs")

    def _left(self, peer: Peer, call: int) -> None:
        """It said goodbye after that call."""
        with self._lock:
            peer.left = call
            missed = self._call > call
        if missed:
            self.fail(Failure(peer.rank, "agreement", self._gone(peer)))

    def _on_death(self, peer: Peer) -> None:
        self._loop.remove(peer.descriptor)
        self._last_words(peer)  # may explain its end
        self._on_loss(peer, f"rank {peer.rank} (process {peer.pid}) ended without saying goodbye")

    def _on_loss(self, peer: Peer, text: str) -> None:
        with self._lock:
            if peer.left is not None or peer.lost:
                return
            peer.lost = True
        self.fail(Failure(peer.rank, "agreement", text, lost=True))


def _calls(call: int) -> str:
    return f"call {call}" if call >= 0 else "no call at all"
