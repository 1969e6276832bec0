"""Agreement by collectives of torch, for comparison and for clusters where nothing else gets through. The only place here with
torch. The group is the agreement's own and of gloo, on a GPU too: a decision takes no place among the collectives of a device, whose
order it is there to decide, and nothing spins on a device until the leader has chosen.

*broadcast*: the leader's choice among what has arrived at the leader. A follower may have to wait for the message; it will
come, since each lane is FIFO in an agreed order. *all-gather*, the RRFP paper's protocol (section 4.2): every member offers its
choice, the offers are gathered, and nobody runs unless all are the same; else they try again. Members whose rules never agree
(moving averages differ) would try for ever: after `TIES` rounds in which all offered something the leader's offer is taken,
which is as safe as a broadcast.

Collectives block, so each member has a thread for them (daemon: it may be inside one whose peer is stopped). What they cannot
carry, signs of life, failures and goodbyes, goes over a channel of the usual kind. The thread shares with the engine's thread
only what `_changed` guards, and a queue; an error in it is handed to the channel unless a failure is known already.
"""

import threading
import time
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from queue import Empty

import torch

from rrfp.action import Action, Edge
from rrfp.comm.mailbox import Mailbox
from rrfp.comm.transport import Failure
from rrfp.errors import ConfigurationError, PipelineError
from rrfp.tp_coord.channel import ListeningChannel
from rrfp.tp_coord.domain import Domain
from rrfp.tp_coord.member import Member
from rrfp.tp_coord.record import RECORD_BYTES, Decision, decode, encode, fold

BEAT = 0.5
"""Seconds after which an idle member starts a round with nothing to say: so a thread is never in a collective for long."""
TIES = 16
_PAUSES = (0.0005, 0.05)  # seconds between rounds without consent: the first, and the longest
_SETTLE = 2.0  # seconds in which the channel tells whose end has broken a collective
_PARTING = 1.0  # seconds to wait for the others' last round
_NOTHING, _STOP = bytes(RECORD_BYTES), b"\xff" * RECORD_BYTES


def over(kind: str, channel: ListeningChannel, store, *, namespace: str, domain: Domain, rank: int, timeout: float):
    """What makes the member, and its channel: collectives for the decisions, `channel` for everything else.

    store: a store of torch. timeout: seconds after which a collective fails.

    Raises:
        ConfigurationError: another store.
        RuntimeError: gloo could not connect the members.
    """
    try:
        if not isinstance(store, torch.distributed.Store):
            raise ConfigurationError(f"--rrfp-agreement {kind} needs a store of torch.distributed to connect gloo, got "
                                     f"{type(store).__name__}: take auto")
        prefix = torch.distributed.PrefixStore(f"{namespace}/gloo", store)
        me = domain.members.index(rank)
        group = torch.distributed.ProcessGroupGloo(prefix, me, len(domain.members), timedelta(seconds=timeout))
    except BaseException:
        channel.close()
        raise
    if kind == "broadcast":
        return Member, BroadcastChannel(channel, group, me)
    return AllGatherMember, AllGatherChannel(channel, group, me)


class CollectiveChannel:
    """A thread that runs rounds, and the usual channel beside it."""

    bell = None  # decisions come through the thread

    def __init__(self, life: ListeningChannel, group, me: int):
        self._life, self._group, self._me = life, group, me
        self._wake: Callable[[], None] = lambda: None
        self._decisions: deque[Decision] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rrfp-agreement-collectives", daemon=True)
        self._thread.start()

    @abstractmethod
    def _round(self) -> bool:
        """One collective. False after the last."""

    @abstractmethod
    def _stop(self) -> None:
        """Make this member's next round its last."""

    # ------------------------------------------------------------------ the engine's thread
    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        self._wake = wake
        self._life.open(wake, fail)

    def begin(self, call: int, words: Mapping[int, int]) -> None:
        self._life.begin(call, {})

    def publish(self, words: Mapping[int, int]) -> None:
        pass  # nobody counts

    def words(self, index: int) -> Iterable[tuple[int, int]]:
        return ()

    def look(self, sequence: int) -> Decision | None:
        return self._decisions[0] if self._decisions else None

    def took(self, sequence: int) -> None:
        self._decisions.popleft()

    def abort(self, failure: Failure) -> None:
        self._life.abort(failure)

    def state(self) -> dict:
        return self._life.state()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._stop()
        until = time.monotonic() + _PARTING
        while self._thread.is_alive() and self._life.quiet and time.monotonic() < until:
            self._thread.join(0.05)
        self._thread.join(0.05)
        if self._thread.is_alive():
            self._tear()
            self._thread.join(1.0)
        self._life.close()
        self._group = None

    def _tear(self) -> None:
        # Nothing else ends a collective of gloo that waits for a member: a wait that runs out closes the connection under it.
        for peer in range(self._group.size()):
            if peer != self._me:
                with suppress(RuntimeError):
                    self._group.recv([torch.zeros(1, device="cpu")], peer, 1).wait(timedelta(milliseconds=1))

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:
            trace = traceback.format_exc()
            until = time.monotonic() + _SETTLE
            while self._life.quiet and not self._closing and time.monotonic() < until:
                time.sleep(0.01)
            if self._life.quiet and not self._closing:
                text = str(error) if isinstance(error, PipelineError) else f"a collective of the agreement broke: {error}"
                self._life.fail(Failure(self._life.rank, "agreement", text, trace))

    def _agreed(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._wake()


class BroadcastChannel(CollectiveChannel):
    """Decisions of the leader, member 0, in order."""

    def __init__(self, life: ListeningChannel, group, me: int):
        self._queue = Mailbox()
        super().__init__(life, group, me)

    def put(self, decision: Decision) -> bool:
        self._queue.put(encode(decision))
        return True

    def _stop(self) -> None:
        self._queue.put(_STOP)

    def _round(self) -> bool:
        record = _NOTHING
        if self._me == 0:
            with suppress(Empty):
                record = self._queue.get(timeout=BEAT)
        tensor = _tensor(record)
        self._group.broadcast(tensor, 0).wait()
        if self._me != 0:
            record = tensor.numpy().tobytes()
            if record not in (_NOTHING, _STOP):
                self._agreed(decode(record))
        return record != _STOP


class AllGatherChannel(CollectiveChannel):
    """Offers of all members, round by round. Every member sees the same offers, and so comes to the same conclusion."""

    def __init__(self, life: ListeningChannel, group, me: int):
        self._changed = threading.Condition()
        self._offer: tuple[int, Action] | None = None
        self._tried: tuple[int, Action] | None = None
        self._ending = False
        # Below: the thread's own.
        self._sequence = self._digest = self._ties = 0
        self._pause = _PAUSES[0]
        super().__init__(life, group, me)

    def begin(self, call: int, words: Mapping[int, int]) -> None:
        with self._changed:
            self._offer = None
        super().begin(call, words)

    def offer(self, call: int, choice: Action) -> None:
        """This member's choice. It may be replaced by another one until it is agreed on."""
        with self._changed:
            if not self._decisions:  # else what it was chosen after is not even out
                self._offer = (call, choice)
                self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _round(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ending or (self._offer is not None and self._offer != self._tried),
                                   BEAT if self._offer is None else self._pause)
            self._tried = self._offer
            record = _STOP if self._ending else _NOTHING
            if self._offer is not None and not self._ending:
                record = encode(Decision(self._sequence + 1, *self._offer, self._digest))
        gathered = [torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cpu") for _ in range(self._group.size())]
        self._group.allgather([gathered], [_tensor(record)]).wait()
        records = [tensor.numpy().tobytes() for tensor in gathered]
        if _STOP in records:
            return False
        offers = [decode(record) for record in records if record != _NOTHING]
        if len(offers) == len(records) and (decision := self._consent(offers)) is not None:
            self._sequence, self._digest = decision.sequence, decision.digest
            self._pause, self._ties = _PAUSES[0], 0
            with self._changed:
                self._offer = self._tried = None
                self._agreed(decision)
        else:
            self._pause = min(2 * self._pause, _PAUSES[1])
        return True

    def _consent(self, offers: list[Decision]) -> Decision | None:
        first = offers[0]
        for index, offer in enumerate(offers):
            if (offer.sequence, offer.call, offer.digest) != (first.sequence, first.call, first.digest):
                raise PipelineError(
                    f"the members of a domain diverge: member {index} offers {offer.action} of call {offer.call} after "
                    f"{offer.sequence - 1} decisions with digest {offer.digest:08x}, member 0 offers {first.action} of "
                    f"call {first.call} after {first.sequence - 1} with digest {first.digest:08x}")
        if any(offer.action != first.action for offer in offers):
            self._ties += 1
            if self._ties < TIES:
                return None
        return first._replace(digest=fold(first.digest, first.call, first.action))


class AllGatherMember(Member):
    """No member leads: each offers what it would run, among what has arrived here, and takes what all have agreed on."""

    def arrived(self, edge: Edge, microbatch: int) -> None:
        self._receipts.arrived(edge, microbatch)

    def common(self):
        return self._receipts.own()

    def decide(self, choice: Action | None) -> Action | None:
        action = self._follow()
        if action is None and choice is not None:
            self._channel.offer(self._call, choice)
        return action


def _tensor(record: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(record), dtype=torch.uint8)
