"""What has arrived where. Pure: one member's own messages by lane, and to the leader the intersection over all members.

Counters are enough, and no bitmap is needed, with several lanes too: a lane is FIFO in the order that the sending stage has
agreed on, and which lane a message takes is a function of edge and microbatch. So every member receives the same sequence on
each lane, what it has of it is a prefix, and the intersection of prefixes is the shortest one. Lanes may overtake each other,
each has a counter of its own. That members do receive the same sequence is not taken on trust: each counter carries a digest of
the lane's messages, and the leader compares it with its own digest at the same count.
"""

from collections.abc import Callable, Iterable, Sequence

from rrfp.action import Edge
from rrfp.errors import PipelineError
from rrfp.tp_coord.record import Receipt, fold_message


class Receipts:
    """Args:
    edges: the edges that come in from other ranks; the same on every member.
    lanes: lanes per edge. lane_of(edge, microbatch) must be what the transport uses.
    """

    def __init__(self, edges: Iterable[Edge], lanes: int, lane_of: Callable[[Edge, int], int] | None = None):
        self.lanes = [(edge, lane) for edge in sorted(set(edges)) for lane in range(lanes)]
        self._index = {lane: index for index, lane in enumerate(self.lanes)}
        self._lane_of = lane_of or (lambda edge, microbatch: microbatch % lanes)
        self._digests = [[0] for _ in self.lanes]
        """Per lane, its digest after 0, 1, ... messages of this call."""
        self.begin(0)

    def begin(self, call: int) -> None:
        self._call = call
        self._new: list[tuple[Edge, int]] = []
        self.pending = 0
        """Leader: messages that have arrived here and that `common` has not given out."""
        self._messages: list[list[tuple[Edge, int]]] = [[] for _ in self.lanes]
        self._digests = [digests[-1:] for digests in self._digests]
        self._given = [0] * len(self.lanes)

    def arrived(self, edge: Edge, microbatch: int) -> int:
        """Returns the index of its lane."""
        index = self._index[edge, self._lane_of(edge, microbatch)]
        self._messages[index].append((edge, microbatch))
        self._digests[index].append(fold_message(self._digests[index][-1], self._call, microbatch))
        self._new.append((edge, microbatch))
        self.pending += 1
        return index

    def word(self, index: int) -> int:
        """What to tell the leader of a lane."""
        return Receipt(self._call, len(self._messages[index]), self._digests[index][-1]).word

    def own(self) -> Sequence[tuple[Edge, int]]:
        """What has arrived here since the last time."""
        new, self._new = self._new, []
        return new

    def common(self, words: Callable[[int], Iterable[tuple[int, int]]]) -> Sequence[tuple[Edge, int]]:
        """Leader: what has arrived at every member and was not given out yet.

        words(index): every other member's rank, and its word for that lane.

        Raises:
            PipelineError: a member has received other messages on a lane than this one.
        """
        if not self.pending:
            return ()
        common = []
        for index, messages in enumerate(self._messages):
            if self._given[index] == len(messages):
                continue
            least = min((self._count(index, *word) for word in words(index)), default=len(messages))
            common += messages[self._given[index] : least]
            self._given[index] = max(least, self._given[index])
        self.pending -= len(common)
        return common

    def _count(self, index: int, rank: int, word: int) -> int:
        receipt, digests = Receipt.of(word, near=self._call), self._digests[index]
        if receipt.call != self._call:  # a member behind has nothing of this call, one ahead has had it all
            return 0 if receipt.call < self._call else len(digests) - 1
        if receipt.count < len(digests) and receipt.digest != digests[receipt.count] & 0xFFFFFF:
            edge, lane = self.lanes[index]
            raise PipelineError(
                f"the members of a domain diverge: the first {receipt.count} messages of call {self._call} on edge {edge} "
                f"lane {lane} came in another order, or were others, at rank {rank}: the sending stage's "
                "members have not run one sequence")
        return min(receipt.count, len(digests) - 1)
