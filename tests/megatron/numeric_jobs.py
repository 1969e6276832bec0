"""Jobs that compare losses, gradients and weights with Megatron's own schedule."""

import model as gpt
import torch
from jobs import DELAYS, OWN, OWN_INTERLEAVED, job, model_for, own, reference, schedule
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from rrfp.megatron import runtime as runtimes
from rrfp.megatron.forward_backward import make_forward_backward
from rrfp.megatron.options import Options
from rrfp.scheduler.sizes import feed_by_size


@job
def same(*, microbatches, seeds, options, longest=0.001, steps=3, **settings):
    """The first seed at which our schedule is not bitwise Megatron's, with the place where it isn't; None if there is none."""
    expected = reference(microbatches, steps=steps, **settings)
    model, optimizer, state = model_for(**settings)
    for seed in seeds:
        DELAYS.seed, DELAYS.longest = seed, longest
        state.restore()
        got = gpt.train(schedule(**options), model, optimizer, microbatches, steps=steps)
        if (where := gpt.difference(expected, got)) is not None:
            return f"seed {seed}, {options}: {where}"
    return None


@job
def reorders(*, microbatches, rows, seed=1, **settings):
    """How a free order over `rows` differs from Megatron: (first bitwise difference, largest relative difference of losses and gradients)."""
    import rrfp

    rrfp.register_hint("rows", lambda context: rows)
    expected = reference(microbatches, steps=1, **settings)
    model, optimizer, state = model_for(**settings)
    DELAYS.seed, DELAYS.longest = seed, 0.0
    state.restore()
    got = gpt.train(
        schedule(hint="rows", order="free", mode="strict", limit=str(microbatches)), model, optimizer, microbatches, steps=1
    )
    return gpt.difference(expected[0], got[0]), relative(expected[0], got[0])


def relative(expected, got):
    """Largest difference over losses and gradients, relative to the largest value of its tensor."""
    pairs = list(zip(expected["losses"], got["losses"], strict=True))
    pairs += [(tensor, got["gradients"][name]) for name, tensor in expected["gradients"].items()]
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-12)).item() for a, b in pairs)


@job
def reduced_by(*, what, rows, microbatches, **settings):
    """Largest relative difference from Megatron when replica d follows `rows[d]` in free order and its reductions start with the backward
    that is the last by `what`: "count", as they do, or "index", the mistake."""
    import rrfp
    from rrfp.megatron.executor import MegatronExecutor
    from rrfp.megatron.gradient_sync import GradientSync

    expected = reference(microbatches, steps=1, **settings)
    model, optimizer, state = model_for(**settings)
    rrfp.register_hint("rows", lambda context: rows[parallel_state.get_data_parallel_rank()])
    DELAYS.seed, DELAYS.longest = 1, 0.0
    state.restore()
    backward, before, running = MegatronExecutor._backward, GradientSync.before_backward, []

    def recorded(self, action, tensors):
        running[:] = [action.microbatch]
        return backward(self, action, tensors)

    def by_index(self, chunk):
        self._backwards[chunk] = microbatches - 1 if running == [microbatches - 1] else 0
        before(self, chunk)

    if what == "index":
        MegatronExecutor._backward, GradientSync.before_backward = recorded, by_index
    try:
        got = gpt.train(
            schedule(hint="rows", order="free", mode="strict", limit=str(microbatches)), model, optimizer, microbatches, steps=1
        )
    finally:
        MegatronExecutor._backward, GradientSync.before_backward = backward, before
    return relative(expected[0], got[0])


@job
def gradients_of(*, microbatches, own=True, **settings):
    """Losses and gradients of one iteration, on the CPU, for comparison with another number of stages."""
    model, optimizer, state = model_for(**settings)
    state.restore()
    pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
    function = (OWN if own else schedule()) if pipelined else schedules.forward_backward_no_pipelining
    result = gpt.step(function, model, optimizer, gpt.iterators(), microbatches, update=False)
    return {
        "losses": [loss.numpy() for loss in result["losses"]],
        "gradients": {name: gradient.numpy() for name, gradient in result["gradients"].items()},
    }


@job
def without_agreement(*, keep, microbatches, seeds, timeout=3.0, **settings):
    """What happens when ranks whose actions share collectives do not agree, or only those of the groups in `keep` do.

    An error, or the first difference from Megatron; None if nothing went wrong. The group cannot go on after it.
    """
    from rrfp.megatron import domain

    expected = reference(microbatches, steps=2, **settings)
    model, optimizer, state = model_for(**settings)
    runtimes.close_all()
    domain._GROUPS = {name: get for name, get in domain._GROUPS.items() if name in keep}
    for seed in seeds:
        DELAYS.seed, DELAYS.longest = seed, 0.004
        state.restore()
        try:
            function = make_forward_backward(Options(timeout=timeout, hint="bf", limit="8"), original=own(), interleaved=own() is OWN_INTERLEAVED)
            got = gpt.train(function, model, optimizer, microbatches, steps=2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if (where := gpt.difference(expected, got)) is not None:
            return f"seed {seed}: {where}"
    return None


@job
def free_order(*, microbatches, iterations, lanes):
    """Many iterations in free order over lanes that overtake, beside Megatron's order: largest relative difference of any loss; indices checked."""
    runtimes.close_all()  # another number of lanes is another set of connections
    function = schedule(order="free", hint="alt", limit="2p", lanes=lanes)
    model, optimizer, state = model_for(dropout=0.0)
    losses = {}
    for name in ("own", "free"):
        state.restore()
        iterator, losses[name] = gpt.batches(0), []
        for iteration in range(iterations):
            DELAYS.seed, DELAYS.longest = iteration, 0.001 if name == "free" else 0.0
            result = gpt.step(OWN if name == "own" else function, model, optimizer, iterator, microbatches)
            expected = list(range(iteration * microbatches, (iteration + 1) * microbatches))
            assert not result["indices"] or result["indices"] == expected, (result["indices"], expected)
            losses[name].append(torch.stack([loss[0] for loss in result["losses"]]) if result["losses"] else torch.zeros(1))
    runtimes.close_all()
    return max(((a - b).abs() / a.abs().clamp(min=1)).max().item() for a, b in zip(losses["own"], losses["free"], strict=True))


@job
def modes_in_turn(*, options):
    """Evaluation, training, evaluation, with other numbers and lengths of microbatches: bitwise Megatron's, and nothing is left."""
    plan = [(3, 8, True), (4, 16, False), (1, 12, True), (2, 8, False), (5, 16, True), (3, 4, False)]
    everything = []
    for function in (OWN, schedule(**options)):
        model, optimizer, state = model_for()
        state.restore()
        DELAYS.seed, DELAYS.longest = 5, 0.001
        results = []
        for number, (microbatches, length, forward_only) in enumerate(plan):
            iterator = gpt.batches(10 * number, length=lambda index, length=length: length)
            gpt.SEQUENCE, before = length, gpt.SEQUENCE
            results.append(gpt.step(function, model, optimizer, iterator, microbatches, forward_only=forward_only))
            gpt.SEQUENCE = before
        everything.append(results)
    return gpt.difference(*everything)


@job
def evaluates(*, microbatches, seeds, longest=0.001):
    """The seeds at which an evaluation's losses (which only the last stage has) are not bitwise Megatron's, each with the place."""
    model, optimizer, state = model_for()
    state.restore()
    expected = gpt.step(OWN, model, optimizer, gpt.batches(0), microbatches, forward_only=True)
    found = []
    for seed in seeds:
        DELAYS.seed, DELAYS.longest = seed, longest
        state.restore()  # dropout is on
        got = gpt.step(schedule(), model, optimizer, gpt.batches(0), microbatches, forward_only=True)
        if (where := gpt.difference(expected, got)) is not None:
            found.append(f"seed {seed}: {where}")
    return found


@job
def lengths_in_one_call(*, lengths):
    """Microbatches of different lengths in one call (Megatron needs variable_seq_lengths for it, we need nothing)."""
    model, optimizer, state = model_for(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    results = []
    for function in (OWN, schedule()):
        state.restore()
        DELAYS.seed, DELAYS.longest = 7, 0.001
        results.append(gpt.train(function, model, optimizer, len(lengths), steps=2, forward_step_func=_variable(lengths)))
    return gpt.difference(*results)


@job
def fed_by_size(*, lengths):
    """Two steps of microbatches fed by size, under Megatron's schedule and ours: their difference, and the order on the last stage."""
    model, optimizer, state = model_for(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    ranks, count = parallel_state.get_pipeline_model_parallel_world_size(), len(lengths)
    results = []
    for function in (OWN, schedule()):
        state.restore()
        DELAYS.seed, DELAYS.longest = 7, 0.001
        iterator = feed_by_size(gpt.batches(0), lambda batch: lengths[batch["index"] % count], microbatches=count, ranks=ranks)
        results.append([gpt.step(function, model, optimizer, iterator, count, forward_step_func=_variable(lengths)) for _ in range(2)])
    return gpt.difference(*results), [step["indices"] for step in results[1]]


def _variable(lengths):
    """A forward step whose middle stages know the length from their input, as a user's would."""

    def forward_step(data_iterator, model):
        batch = next(data_iterator) if data_iterator is not None else None
        unwrapped = model.module
        length = batch["tokens"].shape[1] if batch is not None else unwrapped.decoder.input_tensor.shape[0]
        # Every stage trims to its microbatch's length.
        if batch is not None:
            length = lengths[batch["index"] % len(lengths)]
            batch = batch | {"tokens": batch["tokens"][:, :length], "labels": batch["labels"][:, :length]}
        iterator = iter([batch]) if batch is not None else None
        before, gpt.SEQUENCE = gpt.SEQUENCE, length
        try:
            return gpt.forward_step(iterator, model)
        finally:
            gpt.SEQUENCE = before

    return forward_step


@job
def precision(*, kind, steps, microbatches):
    """bf16, or fp16 with a dynamic loss scale that starts too high: bitwise Megatron's, and how many steps were skipped."""
    settings = {"dtype": {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]}
    results, skipped = [], 0
    DELAYS.seed, DELAYS.longest = 3, 0.001
    for function in (OWN, schedule()):
        model, optimizer = gpt.build(**settings)
        gpt.seed_generators()
        results.append(gpt.train(function, model, optimizer, microbatches, steps=steps))
        skipped = sum(not entry["updated"] for entry in results[-1][:-1])
    return gpt.difference(*results), skipped


@job
def timers_and_sync():
    """Timers at level 2, grad_sync_func and per-token loss: bitwise Megatron's."""
    from megatron.core.timers import Timers

    results = []
    for function in (OWN, schedule()):
        model, optimizer, state = model_for(calculate_per_token_loss=True)
        state.restore()
        config = model.config
        synced = []
        config.timers, config.barrier_with_L1_time = Timers(2, "minmax"), True
        config.grad_sync_func = lambda parameters, synced=synced: synced.append(len(list(parameters)))
        DELAYS.seed, DELAYS.longest = 9, 0.001
        results.append(gpt.train(function, model, optimizer, 4, steps=2) + [{"synced": synced}])
        config.timers = config.grad_sync_func = None
    return gpt.difference(*results)
