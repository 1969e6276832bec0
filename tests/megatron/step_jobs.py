"""Jobs that compare steps with a split backward with Megatron's own schedule on ordinary layers."""

import functools
from contextlib import contextmanager
from unittest import mock

import jobs
import model as gpt
import torch
from jobs import DELAYS, job, own, reference, schedule, splitting
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from rrfp.megatron import runtime as runtimes
from rrfp.megatron import split_backward, split_linear


@functools.cache
def _built(key):
    with splitting():
        return gpt.build(**dict(key))


_states = {}


def split_model_for(**settings):
    key = tuple(sorted(settings.items()))
    built = _built(key)
    if key not in _states:
        _states[key] = gpt.State(*built)
    return (*built, _states[key])


@job
def same(*, microbatches, seeds, options, longest=0.001, steps=2, **settings):
    """The first seed at which the split backward is not bitwise Megatron's own schedule on ordinary layers; None if there is none."""
    expected = reference(microbatches, steps=steps, **settings)
    model, optimizer, state = split_model_for(**settings)
    for seed in seeds:
        DELAYS.seed, DELAYS.longest = seed, longest
        state.restore()
        got = gpt.train(schedule(split_backward=True, **options), model, optimizer, microbatches, steps=steps)
        if (where := gpt.difference(expected, got)) is not None:
            return f"seed {seed}, {options}: {where}"
    return None


@job
def precision(*, kind, steps, microbatches, options):
    """As `same` in half precision; and, with fp16's dynamic loss scale, which starts too high, how many steps were skipped."""
    settings, results, skipped = {"dtype": getattr(torch, kind)}, [], 0
    DELAYS.seed, DELAYS.longest = 3, 0.001
    for split in (False, True):
        with splitting() if split else mock.patch.object(gpt, "BATCH", gpt.BATCH):
            model, optimizer = gpt.build(**settings)
        gpt.seed_generators()
        function = schedule(split_backward=True, **options) if split else own()
        results.append(gpt.train(function, model, optimizer, microbatches, steps=steps))
        skipped = sum(not entry["updated"] for entry in results[-1][:-1])
    return gpt.difference(*results), skipped


@job
def elsewhere(*, microbatches, **settings):
    """Split layers under Megatron's own schedule, under ours with whole backwards, and in evaluation: bitwise ordinary layers."""
    model, optimizer, state = split_model_for(**settings)
    assert len(list(linears_of(model))) > 0
    expected, found = reference(microbatches, steps=2, **settings), {}
    for name, function in (("Megatron's", own()), ("whole", schedule())):
        state.restore()
        found[name] = gpt.difference(expected, gpt.train(function, model, optimizer, microbatches, steps=2))
    whole, _, whole_state = jobs.model_for(**settings)
    evaluations = []
    for one, its_state, function in ((whole, whole_state, own()), (model, state, schedule(split_backward=True))):
        its_state.restore()
        evaluations.append(gpt.step(function, one, None, gpt.batches(0), microbatches, forward_only=True))
    return found | {"evaluation": gpt.difference(*evaluations)}


def linears_of(model):
    return [module for module in model.modules() if isinstance(module, split_linear.SplitLinear)]


@job
def what_is_split(**settings):
    """Names of this rank's weights of linear layers, by whether their gradients are computed in W; and all parameters."""
    model, _, _ = split_model_for(**settings)
    names = {id(p): name for name, p in gpt.named(model)}
    layers = [m for m in model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear)) and m.weight is not None]
    split = {True: set(), False: set()}
    for layer in layers:
        split[isinstance(layer, split_linear.SplitLinear)].add(names[id(layer.weight)])
    return split[True], split[False], {name for name, p in gpt.named(model) if getattr(p, "skip_backward_post_hook", False)}


@job
def traced(*, microbatches, directory, options, longest=0.001, freeze=None, **settings):
    """Trains one step with a trace. freeze: the rank whose linear layers are frozen."""
    runtimes.close_all()
    make = gpt._chunks

    def frozen(*args):
        for vp_stage, chunk in make(*args):
            if parallel_state.get_pipeline_model_parallel_rank() == freeze:
                for module in chunk.modules():
                    if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                        module.weight.requires_grad_(False)
            yield vp_stage, chunk

    with mock.patch.object(gpt, "_chunks", frozen):
        whole, optimizer = gpt.build(**settings)
        with splitting():
            split, split_optimizer = gpt.build(**settings)
    trained = gpt.named
    results = []
    DELAYS.seed, DELAYS.longest = 4, longest
    with mock.patch.object(gpt, "named", lambda model: [pair for pair in trained(model) if pair[1].requires_grad]):
        ours = schedule(split_backward=True, trace=directory, **options)
        for function, model, its_optimizer in ((own(), whole, optimizer), (ours, split, split_optimizer)):
            gpt.seed_generators()
            results.append(gpt.step(function, model, its_optimizer, gpt.iterators(), microbatches, update=False))
    runtimes.close_all()
    return gpt.difference(*results)


@job
def ready_counts(*, microbatches, steps, **settings):
    """How often each parameter is ready for its reduction, per step, with whole and with split backwards; of a bucket that was never counted
    nothing is told (Megatron starts its reduction as a whole)."""
    found = []
    for split in (False, True):
        model, optimizer, state = split_model_for(**settings) if split else jobs.model_for(**settings)
        state.restore()
        names = {p: name for name, p in gpt.named(model)}
        iterator, per_step = gpt.iterators(), []
        DELAYS.seed, DELAYS.longest = 6, 0.001
        counted = {}
        groups = [g for chunk in ([model] if not isinstance(model, torch.nn.ModuleList) else model) for g in chunk.bucket_groups]
        kind = type(groups[0])
        register = kind.register_grad_ready

        def count(self, param, *rest):
            if self.is_last_microbatch:
                counted[names[param]] = counted.get(names[param], 0) + 1
            return register(self, param, *rest)

        with mock.patch.object(kind, "register_grad_ready", count):
            for _ in range(steps):
                counted.clear()
                gpt.step(schedule(split_backward=split), model, optimizer, iterator, microbatches)
                per_step.append(dict(counted))
        golden = {names[p]: n for g in groups for p, n in g.golden_per_param_grad_ready_counts.items()}
        found.append((per_step, golden))
    return found


@job
def memory_of_pending(*, microbatches, options, **settings):
    """Most bytes that microbatches which wait for their W hold on this rank beyond their activations, and how many such microbatches."""
    model, optimizer, state = split_model_for(**settings)
    state.restore()
    most = [0, 0]
    closes = split_backward.SplitChunk.deferring

    @contextmanager
    def watched(self, microbatch):
        with closes(self, microbatch):
            yield
        storages = {}
        for linear in self.linears:
            for uses in linear._queue:
                for use in uses:
                    for tensor in (use.input, use.output_gradient):
                        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        most[0], most[1] = max(most[0], sum(storages.values())), max(most[1], self.pending)

    DELAYS.seed, DELAYS.longest = 8, 0.0
    with mock.patch.object(split_backward.SplitChunk, "deferring", watched):
        gpt.step(schedule(split_backward=True, **options), model, optimizer, gpt.iterators(), microbatches, update=False)
    return tuple(most)


@job
def early_hooks(*, microbatches, steps, **settings):
    """The mistake: a weight is told to be ready when its I has run. The first difference from Megatron, or the error."""
    expected = reference(microbatches, steps=steps, **settings)
    model, optimizer, state = split_model_for(**settings)
    state.restore()
    DELAYS.seed, DELAYS.longest = 1, 0.001
    close, run = split_linear.SplitLinear.close, split_linear.SplitLinear._run_hooks

    def ready_now(self):
        if self._uses:
            self.weight.grad = torch.zeros_like(self.weight)
            run(self)
        close(self)

    def add_only(self):  # in W nobody is told any more
        self.weight.main_grad.add_(self.weight.grad)
        self.weight.grad = None

    try:
        with mock.patch.multiple(split_linear.SplitLinear, close=ready_now, _run_hooks=add_only):
            got = gpt.train(schedule(split_backward=True), model, optimizer, microbatches, steps=steps)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return gpt.difference(expected, got)


@job
def weights_first():
    """The mistake: W does not wait for its I. What the step says, and whether anything waits afterwards."""
    import dataclasses

    from rrfp import policy
    from rrfp.action import Action

    def impatient(*args, **kwargs):
        built = chain(*args, **kwargs)
        tasks = {action: dataclasses.replace(task, after=(Action("F", action.stage, action.microbatch),)) if action.kind == "W" else task
                 for action, task in built.tasks.items()}
        return dataclasses.replace(built, tasks=tasks)

    chain, policy.chain = policy.chain, impatient
    model, optimizer, _ = split_model_for()
    try:
        gpt.step(schedule(split_backward=True, hint="f-first"), model, optimizer, gpt.iterators(), 4, update=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}", [layer.waiting for layer in linears_of(model) if layer.waiting]
    finally:
        policy.chain = chain
    return None


@job
def left_behind():
    """The mistake: a W that computes nothing. And a model that was built without the split."""
    model, optimizer, _ = split_model_for()
    said = []

    def nothing(self, microbatch):
        self._pending.pop(microbatch)

    with mock.patch.object(split_backward.SplitChunk, "run", nothing):
        try:
            gpt.step(schedule(split_backward=True), model, optimizer, gpt.iterators(), 2, update=False)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    model, optimizer, _ = jobs.model_for()
    try:
        gpt.step(schedule(split_backward=True), model, optimizer, gpt.iterators(), 2, update=False)
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    return said
