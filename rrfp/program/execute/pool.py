"""ZeRO-3's gathered buckets: which are gathered, gathered ahead, and let go, as actions run. Equal on all replicas, which run one sequence."""

from collections.abc import Callable, Mapping, Sequence

from rrfp.action import Action
from rrfp.program.execute.streams import Operation


class Pool:
    """At most prefetch + 1 gathered buckets: the one in use, and those of the next uses along the row.

    Uses that follow each other and read one bucket are one (`rrfp.program.gathers`). In ready mode the row's next uses are those that
    have not run, so what is gathered ahead may be let go unused when another action overtakes; the bound holds all the same.

    Args:
        row: the actions that read a gathered bucket, in the row's order, with that bucket.
        prefetch, nbytes: by bucket.
        gather: gather(bucket) issues it. free: lets go of it.
        wait: waits for a gather.
    """

    def __init__(self, row: Sequence[tuple[Action, str]], *, prefetch: Mapping[str, int], nbytes: Mapping[str, int],
                 gather: Callable[[str], Operation], free: Callable[[str], None], wait: Callable[[Operation], None]):
        self._row, self._prefetch, self._nbytes = tuple(row), prefetch, nbytes
        self._bucket = dict(row)
        self._gather, self._free, self._wait = gather, free, wait
        self._held: dict[str, Operation] = {}
        self.peak = 0
        """Most bytes that were gathered, or being gathered, at once."""
        self.begin()

    def begin(self) -> None:
        """A new call: nothing has run."""
        self._left = dict.fromkeys(action for action, _ in self._row)

    def acquire(self, action: Action) -> None:
        """Before an action: its bucket is there, the next ones are on their way, all others are let go."""
        if (bucket := self._bucket.get(action)) is None:
            return
        del self._left[action]
        window = self._window(bucket)
        self._keep(window)
        for each in window:
            if each not in self._held:
                self._held[each] = self._gather(each)
        self.peak = max(self.peak, sum(self._nbytes[each] for each in self._held))
        self._wait(self._held[bucket])

    def release(self, action: Action) -> None:
        """After it: what the next uses do not read is let go."""
        if action in self._bucket:
            first = next((self._bucket[each] for each in self._left), None)
            self._keep([] if first is None else self._window(first))

    def _window(self, first: str) -> list[str]:
        uses = [first]
        for action in self._left:
            if self._bucket[action] != uses[-1]:
                if len(uses) > self._prefetch[first]:
                    break
                uses.append(self._bucket[action])
        return list(dict.fromkeys(uses))

    def _keep(self, window: Sequence[str]) -> None:
        for bucket in [each for each in self._held if each not in window]:
            self._wait(self._held.pop(bucket))
            self._free(bucket)
