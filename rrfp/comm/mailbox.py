"""The queue through which threads hand each other work. `put` never blocks and may be called from anywhere."""

from queue import Empty, SimpleQueue


class Mailbox(SimpleQueue):
    """A `SimpleQueue` whose timed wait ends in time.

    CPython 3.12's `SimpleQueue.get(timeout=t)` can wait for ever: if an earlier `put` left the queue's lock free, its first
    look takes that lock, finds nothing, and computes what is left of `t`; if that has become negative (a tiny `t`, a busy
    machine), the second look takes a negative time for "no limit". A failed look without waiting takes the free lock away first.
    """

    def get(self, block: bool = True, timeout: float | None = None):
        if block and timeout is not None:
            try:
                return super().get(block=False)
            except Empty:
                if timeout <= 0:
                    raise
        return super().get(block, timeout)
