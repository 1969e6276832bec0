"""Pipelines of one process, opened one after another: each meets its neighbours under keys of its own."""

from collections import Counter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rrfp.megatron import runtime as runtimes  # noqa: E402
from rrfp.megatron.options import Options  # noqa: E402


@pytest.fixture
def opened(monkeypatch):
    """Opens a runtime for some ranks, groups and chunks that only writes into its stores; fails if anything is there already."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(runtimes, "_runtimes", {})
    monkeypatch.setattr(runtimes, "_openings", Counter())
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group.ranks)
    monkeypatch.setattr(runtimes, "groups_of", lambda collection: collection)
    monkeypatch.setattr(runtimes, "_hook_exit", lambda: None)

    def connect(options, *, store, job_store, **rest):
        for each in (store, job_store):
            assert not each.check(["who"]), "an earlier opening's"
            each.set("who", "here")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(runtimes, "Runtime", connect)
    return lambda ranks, groups, chunks=1: runtimes.runtime_for(
        Options(), SimpleNamespace(ranks=ranks, rank=lambda: 0), collection=groups, chunks=chunks)


def test_the_same_again_is_the_same(opened):
    assert opened([0, 2], ((0, 1),)) is opened([0, 2], ((0, 1),))


@pytest.mark.parametrize("second", [([0, 2], ()), ([0, 2], ((0, 1),), 2), ([0, 3], ((0, 1),)), ([0, 1, 2, 3], ())], ids=str)
def test_whatever_is_different_has_other_keys(opened, second):
    assert opened([0, 2], ((0, 1),)) is not opened(*second)


def test_after_closing_all_keys_are_new(opened):
    opened([0, 2], ())
    runtimes.close_all()
    opened([0, 2], ())
