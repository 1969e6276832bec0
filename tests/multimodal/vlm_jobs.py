"""The script that a `Group`'s processes run here, and its jobs."""

import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "megatron"))
import jobs  # noqa: E402  first: it puts Megatron on the CPU before anything imports it
import model as gpt  # noqa: E402
import torch  # noqa: E402
import vlm  # noqa: E402
from jobs import DELAYS, job, own, schedule, splitting  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from rrfp.comm.zmq_transport import ZmqTransport  # noqa: E402
from rrfp.megatron import runtime as runtimes  # noqa: E402
from rrfp.megatron.frozen import FrozenPrefix  # noqa: E402
from rrfp.megatron.split_backward import SplitChunk  # noqa: E402
from rrfp.multimodal.layout import embedding_ranks, parse  # noqa: E402
from rrfp.multimodal.stage import trained_shares  # noqa: E402
from rrfp.multimodal.step import forward_step  # noqa: E402
from rrfp.scheduler.arbiter import Scheduler  # noqa: E402

LAYOUT: dict[str, str] = {}
_models = {}


def model_for(*, dtype="float32", split=False, **settings):
    settings["dtype"] = getattr(torch, dtype)
    key = repr((split, sorted(settings.items())))
    if key not in _models:
        with splitting() if split else contextlib.nullcontext():
            built = vlm.build(LAYOUT["vlm"], **settings)
        _models[key] = (*built, gpt.State(*built))
    return _models[key]


@job
def same(*, counts, microbatches, seeds, options, steps=2, size=1, multiple=1, longest=0.002, split=False, lost=None, **settings):
    """As numeric_jobs.same: the first seed at which our schedule is not bitwise Megatron's, with the place; None if there is none.

    split: ours runs I and W. lost: the microbatch whose W changes nothing, the mistake.
    """
    model, optimizer, state = model_for(**settings)
    runtimes.close_all()  # what is frozen is agreed on once per connection
    run = {"counts": counts, "microbatches": microbatches, "steps": steps, "size": size, "multiple": multiple}
    state.restore()
    expected = vlm.train(own(), model, optimizer, **run)
    model, optimizer, state = model_for(split=split, **settings)
    weights = SplitChunk.run

    def losing(self, microbatch):
        before = [(p, p.main_grad.clone()) for p in self._module().parameters() if p.requires_grad and microbatch == lost]
        weights(self, microbatch)
        for parameter, gradient in before:
            parameter.main_grad.copy_(gradient)

    try:
        SplitChunk.run = losing
        for seed in seeds:
            DELAYS.seed, DELAYS.longest = seed, longest
            state.restore()
            got = vlm.train(schedule(split_backward=split, **options), model, optimizer, **run)
            if (where := gpt.difference(expected, got)) is not None:
                return f"seed {seed}, {options}: {where}"
    finally:
        SplitChunk.run = weights
    return None


@job
def gradients(*, counts, microbatches, size=1, reverse_images=False, **settings):
    """Losses and gradients of one iteration, for comparison with another layout."""
    runtimes.close_all()
    model, optimizer, state = model_for(**settings)
    state.restore()
    function = schedules.forward_backward_no_pipelining
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        function = schedule()
    dp, of = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    iterator = vlm.iterators(model, counts, start=dp, every=of, size=size)
    if reverse_images:
        for chunk in vlm.chunks_of(model):
            if (language := vlm.stage_of(chunk).language) is not None:
                language.embed = lambda tokens, images, grids: type(language).embed(language, tokens, images.flip(1), grids.flip(0))
    try:
        result = vlm.step(function, model, optimizer, iterator, microbatches, update=False, size=size)
    finally:
        if reverse_images and language is not None:
            del language.embed
    return {
        "losses": [entry["lm loss"].numpy() for entry in result["losses"]],
        "gradients": {name: gradient.numpy() for name, gradient in result["gradients"].items()},
    }


@job
def messages(*, counts, microbatches, notice=True, split=False, options=None, **settings):
    """What our schedule does: messages of the rank by edge, its actions by stage and kind, and the most activations held."""
    runtimes.close_all()
    model, optimizer, state = model_for(split=split, **settings)
    state.restore()
    seen, send = {}, ZmqTransport.send

    def counted(self, edge, *args, **keywords):
        seen[str(edge)] = seen.get(str(edge), 0) + 1
        return send(self, edge, *args, **keywords)

    found = FrozenPrefix.first_trainable
    ZmqTransport.send = counted
    if not notice:
        FrozenPrefix.first_trainable = lambda self, models, **keywords: 0
    try:
        vlm.step(schedule(split_backward=split, **(options or {})), model, optimizer, vlm.iterators(model, counts), microbatches)
    finally:
        ZmqTransport.send, FrozenPrefix.first_trainable = send, found
    [runtime] = {id(each): each for each in runtimes._runtimes.values()}.values()
    scheduler = runtime.engine.scheduler
    return seen, {f"{queue.stage}{queue.kind}": queue.launched for queue in scheduler.queues}, scheduler.peak_in_flight


@job
def unsent_of_frozen(*, counts, microbatches, bounded=True, **settings):
    """The most messages that this rank had handed over and that had not left, with forwards on stage 2 that take their time."""
    runtimes.close_all()
    model, optimizer, state = model_for(**settings)
    state.restore()
    bound, left, most = Scheduler.bound_unsent, Scheduler.left, [0]

    def looked(self, edge):
        most[0] = max(most[0], self._unsent[edge])
        return left(self, edge)

    def slow(iterator, chunk):
        if vlm.stage_of(chunk).stage == 2:
            time.sleep(0.02)  # the emulated length of an action, not a wait
        return forward_step(iterator, chunk)

    Scheduler.left = looked
    if not bounded:
        Scheduler.bound_unsent = lambda self, count: bound(self, 1000)
    try:
        vlm.step(schedule(), model, optimizer, vlm.iterators(model, counts), microbatches, step_func=slow)
    finally:
        Scheduler.bound_unsent, Scheduler.left = bound, left
    return most[0]


@job
def without_zero_gradients(*, counts, microbatches):
    """One process, reduction that overlaps: the error when parameters that took no part have no gradients. None if there is none."""
    model, optimizer, state = model_for(dropout=0.0, overlap=True)
    state.restore()
    vlm.stage_of(model).vision._zero_gradients = False
    try:
        vlm.step(schedules.forward_backward_no_pipelining, model, optimizer, vlm.iterators(model, counts), microbatches, update=False)
    except AssertionError as error:
        return str(error)
    finally:
        _models.clear()


@job
def evaluates(*, counts, microbatches):
    """Where an evaluation's losses and captions differ from those under Megatron's schedule; None if nowhere."""
    runtimes.close_all()
    model, optimizer, state = model_for()
    results = []
    for function in (own(), schedule()):
        state.restore()
        DELAYS.seed, DELAYS.longest = 4, 0.001
        results.append(vlm.step(function, model, optimizer, vlm.iterators(model, counts), microbatches, forward_only=True))
    assert all("right captions" in entry for entry in results[0]["losses"])
    return gpt.difference(*results)


@job
def trained(**settings):
    """What every stage trains."""
    model, _, _ = model_for(**settings)
    return trained_shares([vlm.stage_of(chunk) for chunk in vlm.chunks_of(model)], parallel_state.get_pipeline_model_parallel_group())


@job
def unfreezes(**settings):
    """What our schedule says when a frozen stage trains all at once: the error, or None."""
    runtimes.close_all()
    model, optimizer, state = model_for(**settings)
    state.restore()
    iterator = vlm.iterators(model, [1])
    vlm.step(schedule(), model, optimizer, iterator, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    try:
        vlm.step(schedule(), model, optimizer, iterator, 2, update=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runtimes.close_all()
        _models.clear()


def main():
    settings = json.loads(sys.argv[1])
    text = LAYOUT["vlm"] = settings["layout"].pop("vlm")
    sys.argv[1] = json.dumps(settings)
    initialize = parallel_state.initialize_model_parallel

    def with_embedding_ranks(*args, **keywords):
        initialize(*args, get_embedding_ranks=lambda ranks, *_: embedding_ranks(parse(text), ranks), **keywords)

    parallel_state.initialize_model_parallel = with_embedding_ranks
    jobs.main()


if __name__ == "__main__":
    main()
