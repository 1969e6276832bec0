"""ZeRO-3's pool by itself: whatever order actions run in, the bucket in use is there, and never more than prefetch + 1 are."""

import random

import pytest

from rrfp.action import Action
from rrfp.program.execute.pool import Pool


class Buckets:
    """Gathers and frees that are counted."""

    def __init__(self):
        self.here, self.waited, self.log = set(), set(), []

    def gather(self, bucket):
        assert bucket not in self.here, "gathered twice"
        self.here.add(bucket)
        self.log.append(f"+{bucket}")
        return bucket

    def wait(self, bucket):
        self.waited.add(bucket)

    def free(self, bucket):
        assert bucket in self.waited, "let go of while it was being gathered"
        self.here.remove(bucket)
        self.waited.discard(bucket)
        self.log.append(f"-{bucket}")


def make(row, prefetch):
    buckets = Buckets()
    titles = {title for _, title in row}
    pool = Pool(row, prefetch=dict.fromkeys(titles, prefetch), nbytes=dict.fromkeys(titles, 10), gather=buckets.gather, free=buckets.free,
                wait=buckets.wait)
    return pool, buckets


def row_of(layers, microbatches):
    return [(Action(kind, stage, m), f"bucket{stage}") for m in range(microbatches) for kind in "FB"
            for stage in (range(layers) if kind == "F" else reversed(range(layers)))]


def test_along_the_row_the_next_is_on_its_way():
    row = row_of(3, 1)
    pool, buckets = make(row, 1)
    for action, _ in row:
        pool.acquire(action)
        pool.release(action)
    # 2F0 and 2B0, one after the other, are one use of bucket 2; behind it comes bucket 1, which is there still.
    assert " ".join(buckets.log) == "+bucket0 +bucket1 -bucket0 +bucket2 -bucket2 +bucket0 -bucket1 -bucket0" and pool.peak == 20


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_in_any_order_the_bound_holds(prefetch, seed, full):
    rng = random.Random(seed)
    for _ in range(100 if full else 20):
        row = row_of(4, 3)
        pool, buckets = make(row, prefetch)
        for _ in range(2):  # calls
            pool.begin()
            for action, bucket in sorted(row, key=lambda each: row.index(each) + rng.randint(0, 6)):
                pool.acquire(action)
                assert bucket in buckets.waited and len(buckets.here) <= prefetch + 1
                pool.release(action)
            assert not buckets.here
        assert pool.peak <= 10 * (prefetch + 1)
