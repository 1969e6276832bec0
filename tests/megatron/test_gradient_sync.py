"""The order of data parallelism's collectives is the same on replicas that dispatch differently (invariant 7)."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from rrfp.megatron.gradient_sync import GradientSync  # noqa: E402


class Model:
    """A chunk that tells who asked for its parameters, and whether gradients are reduced in the backward that is running."""

    def __init__(self, chunk, log, overlap=False):
        self.chunk, self.log, self.quiet, self.backwards, self.ws = chunk, log, 0, 0, 0
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=overlap)
        self.start_grad_sync = lambda parameters: log.append(("reduce", chunk))

    def parameters(self):
        return self.chunk

    def no_sync(self):
        model = self

        class Quiet:
            def __enter__(self):
                model.quiet += 1

            def __exit__(self, *_):
                model.quiet -= 1

        return Quiet()

    def backward(self):
        self.backwards += 1
        if not self.quiet:
            self.log.append(("in backward", self.chunk))
            self.reduced_after = self.backwards

    def weights(self):
        self.ws += 1
        if not self.quiet:
            self.log.append(("in W", self.chunk))
            self.reduced_after = self.ws


def replica(seed, *, chunks, microbatches, rank=0, align=False, gather=False, by_index=False, forward_only=False, split=(), overlap=False):
    """A call of one rank whose forwards and backwards run in a random order that their dependencies allow. What it started, in order."""
    rng, log = random.Random(seed), []
    models = [Model(chunk, log, overlap) for chunk in range(chunks)]
    functions = {name: [lambda parameters, name=name: log.append((name, parameters)) for _ in models] for name in ("reduce", "gather")}
    config = SimpleNamespace(
        no_sync_func=[model.no_sync for model in models] if chunks > 1 else models[0].no_sync,
        grad_sync_func=(functions["reduce"] if chunks > 1 else functions["reduce"][0]) if align else None,
        param_sync_func=(functions["gather"] if chunks > 1 else functions["gather"][0]) if gather else None)
    sync = GradientSync(config, models, microbatches=microbatches, rank=rank, forward_only=forward_only, split=split)
    forwards = [(chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    backwards = [] if forward_only else list(forwards)
    weights = [each for each in backwards if each[0] in split]
    ran = set()
    while forwards or backwards or weights:
        ready = [("F", each) for each in forwards if each[0] == 0 or ("F", (each[0] - 1, each[1])) in ran]
        ready += [("B", each) for each in backwards if ("F", each) in ran and (
            each[0] == chunks - 1 or ("B", (each[0] + 1, each[1])) in ran)]
        ready += [("W", each) for each in weights if ("B", each) in ran]
        kind, (chunk, m) = rng.choice(ready)
        ran.add((kind, (chunk, m)))
        {"F": forwards, "B": backwards, "W": weights}[kind].remove((chunk, m))
        if kind == "F":
            sync.before_forward(chunk)
            continue
        if kind == "W":
            sync.before_weights(chunk)
            models[chunk].weights()
            sync.after_weights(chunk)
            continue
        if by_index:  # the mistake: the last index, not the last executed
            sync._backwards[chunk] = microbatches - 1 if m == microbatches - 1 else 0
        sync.before_backward(chunk)
        models[chunk].backward()
        sync.after_backward(chunk)
    sync.finish()
    assert all(model.quiet == 0 for model in models)
    if not (align or forward_only or by_index or split):
        assert all(model.reduced_after == microbatches for model in models)
    return [model.reduced_after for model in models] if by_index else log


@pytest.mark.parametrize("chunks, microbatches", [(1, 3), (2, 4), (3, 2), (4, 5)])
def test_gradients_are_reduced_deeper_chunks_first(chunks, microbatches):
    deeper_first = list(reversed(range(chunks)))
    for seed in range(50):
        assert replica(seed, chunks=chunks, microbatches=microbatches) == [("in backward", chunk) for chunk in deeper_first]


@pytest.mark.parametrize("rank", [0, 1, 3, 100])
@pytest.mark.parametrize("chunks, microbatches", [(2, 4), (3, 2), (4, 5)])
def test_aligned_reductions_come_later_and_in_the_same_order(chunks, microbatches, rank):
    for seed in range(50):
        log = replica(seed, chunks=chunks, microbatches=microbatches, rank=rank, align=True)
        assert log == [("reduce", chunk) for chunk in reversed(range(chunks))]


def test_with_one_chunk_an_aligned_reduction_waits_for_the_end_except_on_the_first_rank():
    """As in Megatron's schedule without interleaving."""
    assert replica(1, chunks=1, microbatches=3, rank=0, align=True) == [("in backward", 0)]
    assert replica(1, chunks=1, microbatches=3, rank=2, align=True) == [("reduce", 0)]


def test_parameters_are_gathered_in_the_order_of_the_chunks():
    for seed in range(50):
        log = [event for event in replica(seed, chunks=4, microbatches=3, gather=True) if event[0] == "gather"]
        assert log == [("gather", chunk) for chunk in range(4)]


def test_nothing_is_started_without_a_backward():
    assert replica(1, chunks=3, microbatches=4, align=True, gather=True, forward_only=True) == []


def test_by_index_gradients_would_be_reduced_too_early():
    """The negative control: the last index may run first, and what later microbatches add would miss the reduction."""
    assert any(min(replica(seed, chunks=2, microbatches=4, by_index=True)) < 4 for seed in range(50))


# ------------------------------------------------------------------------------------------------- backwards in two actions
@pytest.mark.parametrize("microbatches", [1, 3, 5])
def test_a_split_chunk_takes_part_in_its_last_i_and_its_last_w(microbatches):
    """Of the one chunk of a rank: what stays in I is ready in its last I, the rest in its last W, and nothing before."""
    for seed in range(50):
        assert replica(seed, chunks=1, microbatches=microbatches, split=[0]) == [("in backward", 0), ("in W", 0)]
        assert replica(seed, chunks=1, microbatches=microbatches, split=[0], align=True, rank=1) == [("reduce", 0)]


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("chunks, microbatches, split", [
    (2, 4, [0, 1]), (3, 2, [0, 1, 2]), (4, 5, [0, 1, 2, 3]), (3, 3, [1]), (2, 3, [1]), (2, 3, [0])])
def test_chunks_are_reduced_in_one_order_whatever_order_their_last_ws_run_in(chunks, microbatches, split, align, rank):
    for seed in range(50):
        log = replica(seed, chunks=chunks, microbatches=microbatches, split=split, align=align, rank=rank, overlap=True)
        assert log == [("reduce", chunk) for chunk in reversed(range(chunks))]


def test_last_ws_do_run_in_other_orders():
    """Control of the one above: without overlap nothing is started here, and what could be ready shows the order of execution."""
    logs = [replica(seed, chunks=2, microbatches=2, split=[0, 1]) for seed in range(50)]
    assert {tuple(chunk for what, chunk in log if what == "in W") for log in logs} == {(1, 0), (0, 1)}
