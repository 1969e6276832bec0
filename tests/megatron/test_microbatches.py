"""The data iterator: each forward gets its own microbatch's items, in whatever order the forwards run."""

import itertools
import random

import pytest

from rrfp.megatron.microbatches import MicrobatchIterator


class Source:
    """Endless numbered items; counts what was pulled, and has an attribute of its own."""

    def __init__(self, items=10**9):
        self.pulled, self.items, self.epoch = 0, items, 7

    def __next__(self):
        if self.pulled == self.items:
            raise StopIteration
        self.pulled += 1
        return self.pulled - 1

    def __iter__(self):
        return self


def forward(iterator: MicrobatchIterator, microbatch: int, calls: int) -> list:
    iterator.begin(microbatch)
    items = [next(iterator) for _ in range(calls)]
    iterator.end()
    return items


def test_in_order_it_is_the_iterator_itself():
    source = Source()
    iterator = MicrobatchIterator(source)
    for microbatch in range(5):
        assert forward(iterator, microbatch, 2) == [2 * microbatch, 2 * microbatch + 1]
        assert source.pulled == 2 * (microbatch + 1)  # nothing is pulled ahead


def test_any_order_gives_each_microbatch_its_items(seed, full):
    rng = random.Random(seed)
    for _ in range(2000 if full else 200):
        microbatches, calls = rng.randrange(1, 12), rng.randrange(4)
        order = [0, *rng.sample(range(1, microbatches), microbatches - 1)]
        source = Source()
        iterator = MicrobatchIterator(source)
        for microbatch in order:
            assert forward(iterator, microbatch, calls) == [microbatch * calls + call for call in range(calls)], (order, calls)
        assert source.pulled == microbatches * calls  # a whole call pulls exactly its items


def test_without_it_another_order_would_mix_items():
    """Negative control: what a plain iterator hands to microbatches 0, 2, 1."""
    source = Source()
    assert {microbatch: next(source) for microbatch in (0, 2, 1)} == {0: 0, 2: 1, 1: 2}


def test_a_forward_that_never_asks_leaves_the_iterator_alone():
    iterator = MicrobatchIterator(iter(()))
    for microbatch in (0, 2, 1):
        assert forward(iterator, microbatch, 0) == []


def test_forwards_that_ask_differently_are_an_error():
    iterator = MicrobatchIterator(Source())
    forward(iterator, 0, 2)
    with pytest.raises(RuntimeError, match=r"microbatch 3 called next\(data_iterator\) 1 times, microbatch 0 2 times"):
        forward(iterator, 3, 1)
    iterator = MicrobatchIterator(Source())
    forward(iterator, 0, 1)
    with pytest.raises(RuntimeError, match=r"microbatch 1 called next\(data_iterator\) 2 times, microbatch 0 1 times"):
        forward(iterator, 1, 2)
    iterator = MicrobatchIterator(Source())
    forward(iterator, 0, 0)
    with pytest.raises(RuntimeError, match="microbatch 1 called"):
        forward(iterator, 1, 1)


def test_an_iterator_that_ends_says_so():
    iterator = MicrobatchIterator(Source(items=3))
    forward(iterator, 0, 1)
    assert forward(iterator, 2, 1) == [2]
    iterator.begin(3)
    with pytest.raises(StopIteration):
        next(iterator)
    assert forward(iterator, 1, 1) == [1]  # what was pulled ahead is not lost


def test_attributes_and_iteration_are_the_iterators():
    iterator = MicrobatchIterator(Source())
    assert iterator.epoch == 7 and iter(iterator) is iterator
    iterator.begin(0)
    assert list(itertools.islice(iterator, 2)) == [0, 1]
    with pytest.raises(AttributeError, match="nothing"):
        iterator.nothing


def test_range_is_no_iterator_and_is_only_asked_if_the_forward_asks():
    """Megatron's own tests pass `range(0, 100)` to forwards that never ask."""
    iterator = MicrobatchIterator(range(100))
    assert forward(iterator, 0, 0) == []
    iterator.begin(1)
    with pytest.raises(RuntimeError):
        next(iterator)
