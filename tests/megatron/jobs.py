"""What the processes of a `Group` run. Each job is a function of keyword arguments; every rank runs it; its value is the rank's result."""

import faulthandler
import json
import os
import pickle
import random
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from unittest import mock

import torch

from rrfp.megatron import cpu

cpu.enable()
cpu.patch_megatron()
torch.set_num_threads(1)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

import model as gpt  # noqa: E402
from rrfp.megatron import runtime as runtimes  # noqa: E402
from rrfp.megatron.forward_backward import make_forward_backward  # noqa: E402
from rrfp.megatron.options import Options  # noqa: E402
from rrfp.scheduler.sizes import feed_by_size  # noqa: E402

OWN = schedules.forward_backward_pipelining_without_interleaving
OWN_INTERLEAVED = schedules.forward_backward_pipelining_with_interleaving
JOBS = {}


def job(function):
    JOBS[function.__name__] = function
    return function


class RandomDelays:
    """Delays actions and messages at random, differently on each rank: readiness comes in an order that no list foresaw. A `Padding`."""

    def __init__(self):
        self.seed, self.longest = 0, 0.0

    def begin(self, call, microbatches):
        self._call = call

    def start(self):
        pass

    def finish(self, call, action):
        return self._sleep(f"{self.seed}/{call}/{action}")

    def _sleep(self, key):
        rng = random.Random(f"{os.environ['RANK']}/{key}")
        pause = self.longest * rng.random() if rng.random() < 0.5 else 0.0
        if pause:
            time.sleep(pause)
        return pause

    def delay(self, edge, microbatch):
        rng = random.Random(f"{os.environ['RANK']}/{self.seed}/{self._call}/{edge}/{microbatch}")
        return 2 * self.longest * rng.random() if rng.random() < 0.4 else 0.0

    def summary(self):
        return "random delays"


DELAYS = RandomDelays()
runtimes.make_padding = lambda options, *, stages: DELAYS
_models = {}


def model_for(**settings):
    key = repr(sorted(settings.items()))
    if key not in _models:
        built = gpt.build(**settings)
        _models[key] = (*built, gpt.State(*built))
    return _models[key]


def schedule(**options):
    """Our schedule with these options."""
    interleaved = own() is OWN_INTERLEAVED
    return make_forward_backward(Options(timeout=60.0, **options), original=own(), interleaved=interleaved)


def own():
    """Megatron's own schedule for this layout."""
    return OWN if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None else OWN_INTERLEAVED


_references = {}


def reference(microbatches, *, steps=3, **settings):
    """What Megatron's own 1F1B gives, once per setting."""
    key = (microbatches, steps, repr(sorted(settings.items())))
    if key not in _references:
        model, optimizer, state = model_for(**settings)
        state.restore()
        _references[key] = gpt.train(own(), model, optimizer, microbatches, steps=steps)
    return _references[key]


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
def contract():
    """The rest of Megatron's contract, on bare modules as its own tests use them. Returns what differs, by name."""
    import torch.nn as nn
    from megatron.core import ModelParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    rank, size = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    DELAYS.longest = 0.0

    def make():
        torch.manual_seed(3 + rank)
        layer = nn.Linear(8, 8)
        layer.config = ModelParallelConfig(pipeline_model_parallel_size=size, pipeline_dtype=torch.float, sequence_parallel=False)
        layer.config.hidden_size = 8
        layer.model_type = ModelType.encoder_or_decoder
        layer.input = None
        layer.set_input_tensor = lambda tensors: setattr(layer, "input", tensors[0])
        return layer

    def forward(data_iterator, layer):
        batch = next(data_iterator) if data_iterator is not None else None
        x = layer.input if layer.input is not None else batch.float() * torch.ones(4, 2, 8)
        out = layer(x)
        return (
            out,
            lambda output, **kw: (
                (output.sum(), {"sum": output.sum().detach(), "batch": batch})
                if not kw
                else {"raw": output.detach(), "batch": batch}
            ),
        )

    def call(function, layer, **keywords):
        arguments = {
            "forward_step_func": forward,
            "data_iterator": (torch.tensor(float(k)) for k in range(100)),
            "model": [layer],
            "num_microbatches": 5,
            "seq_length": 4,
            "micro_batch_size": 2,
            "decoder_seq_length": 4,
        } | keywords
        result = function(**arguments)
        return result, {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}

    found = {}
    cases = {
        "plain": {},
        "list of iterators": {"data_iterator": [iter([torch.tensor(float(k)) for k in range(9)])]},
        "non-loss data": {"collect_non_loss_data": True, "forward_only": True},
        "forward only": {"forward_only": True},
        "no loss function": {"forward_step_func": lambda it, layer: (forward(it, layer)[0], None), "forward_only": True},
        "one microbatch": {"num_microbatches": 1},
        "fewer than stages": {"num_microbatches": size - 1 or 1},
        "first validation step": {"forward_only": True, "first_val_step": True},
        "module, not list": {"model": None},
        "decoder length": {"seq_length": 99, "decoder_seq_length": 4},
    }
    for name, keywords in cases.items():
        results = []
        for function in (OWN, schedule()):
            layer = make()
            again = dict(keywords)
            if isinstance(again.get("data_iterator"), list):
                again["data_iterator"] = [iter([torch.tensor(float(k)) for k in range(9)])]
            if "model" in again:
                again["model"] = layer
            results.append(call(function, layer, **again))
        if (where := gpt.difference(*results)) is not None:
            found[name] = where
    groups = schedules._build_default_pg_collection() if hasattr(schedules, "_build_default_pg_collection") else None
    if groups is not None:
        layer = make()
        communicator = P2PCommunicator(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=layer.config)
        given = call(schedule(), layer, p2p_communicator=communicator, pg_collection=groups)
        if (where := gpt.difference(call(OWN, make()), given)) is not None:
            found["groups given"] = where
        try:
            call(schedule(), make(), p2p_communicator=communicator)
            found["one of two groups"] = "was accepted"
        except ValueError as error:
            if "both p2p_communicator and pg_collection" not in str(error):
                found["one of two groups"] = str(error)
    # The iterator advances by exactly one item per microbatch, and stays untouched on stages whose forward never asks.
    pulled = iter(range(1000))
    call(schedule(), make(), data_iterator=(torch.tensor(float(k)) for k in pulled), num_microbatches=7)
    if next(pulled) not in (7,):
        found["pulls"] = "not one item per microbatch"
    return found


@job
def odd_stages(*, kind):
    """A stage that does what Megatron allows, or must refuse: (its losses or error under Megatron, under our schedule)."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model, _, state = model_for()
    DELAYS.seed, DELAYS.longest = 4, 0.01
    found = []
    for function in (OWN, schedule()):
        state.restore()
        kept = []

        def forward_step(data_iterator, chunk, kept=kept):
            if kind == "skips" and data_iterator is not None:
                batch = next(data_iterator)
                while batch["index"] % 3 == 1:
                    batch = next(data_iterator)
                data_iterator = iter([batch])
            output, loss_func = gpt.forward_step(data_iterator, chunk)
            if kind == "reuses its buffer" and not parallel_state.is_pipeline_last_stage():
                if not kept:
                    kept.append(torch.empty_like(output))
                output = kept[0].copy_(output)
            if kind == "returns a tuple" and rank == 0:
                return (output, output), loss_func
            return output, loss_func

        forward_only = kind == "reuses its buffer"
        try:
            result = gpt.step(function, model, None, gpt.batches(0), 6, forward_only=forward_only, update=False, forward_step_func=forward_step)
            found.append({"losses": [loss.tolist() for loss in result["losses"]]})
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        if kind == "returns a tuple":
            break
    return found


@job
def returns_a_tuple():
    """The pipeline cannot go on after it, so this is a group's last job."""
    global OWN
    OWN = schedule()
    return odd_stages(kind="returns a tuple")


@job
def partial_backward():
    """The last but one stage's output needs no gradient: it and the stages before it get none, and the step ends."""
    rank, size = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    model, optimizer, state = model_for()
    state.restore()
    DELAYS.longest = 0.0

    def forward_step(data_iterator, chunk):
        output, loss_func = gpt.forward_step(data_iterator, chunk)
        if rank == size - 2:
            output = output.detach()
        return output, loss_func

    model.zero_grad_buffer()
    result = gpt.step(schedule(), model, optimizer, gpt.batches(0), 3, update=False, forward_step_func=forward_step)
    return {name: gradient.abs().max().item() for name, gradient in result["gradients"].items()}


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
def live_buffers(*, poison):
    """Trains once while every receive buffer that the engine believes free is overwritten. With `poison`, buffers under live inputs too."""
    from rrfp.megatron import executor

    model, optimizer, state = model_for()
    expected = reference(4, steps=1)
    state.restore()
    DELAYS.longest = 0.0
    original = executor.from_arrival

    def early(arrival, *, release, device):
        memories = [part.data for part in arrival.payload if part.data is not None]
        tensors = original(arrival, release=release, device=device)
        overwritten.extend(memories)
        return tensors

    overwritten = []
    before_backward = schedules.backward_step

    def overwrite(*arguments):
        for memory in overwritten:
            memory[:] = 0
        return before_backward(*arguments)

    if poison:
        executor.from_arrival, schedules.backward_step = early, overwrite
    try:
        got = gpt.train(schedule(), model, optimizer, 4, steps=1)
    finally:
        executor.from_arrival, schedules.backward_step = original, before_backward
    return gpt.difference(expected[0], got[0])


@job
def buffers_after(*, calls):
    """Receive buffers that exist after `calls` iterations (they must not grow), from the transport's state."""
    model, optimizer, state = model_for()
    DELAYS.longest = 0.0
    counts = []
    function = schedule()
    for _ in range(calls):
        gpt.step(function, model, optimizer, gpt.batches(0), 6)
        runtime = next(iter(runtimes._runtimes.values()))
        counts.append(sum(edge.get("buffers", 0) for edge in runtime.transport.state()["edges"].values()))
    return counts


@job
def registered(*, equal):
    """A registered hint that reorders by measured durations; with equal=False every rank makes other rows of it."""
    import rrfp
    from rrfp.errors import ConfigurationError

    seen = []

    def hint(context):
        seen.append(dict(context.measured))
        order = list(range(context.microbatches))
        rows = []
        for stage in range(context.placement.stages):
            rows.append([f"{stage}F{m}" for m in order] + [f"{stage}B{m}" for m in order])
        if not equal and parallel_state.get_pipeline_model_parallel_rank() == 1:
            rows[0] = (
                [f"0F{m}" for m in order[:1]] + [f"0B{order[0]}"] + [f"0F{m}" for m in order[1:]] + [f"0B{m}" for m in order[1:]]
            )
        return rows

    rrfp.register_hint("measured", hint)
    runtimes.close_all()  # what all ranks must have alike is compared in a pipeline's first call
    model, optimizer, state = model_for()
    state.restore()
    DELAYS.longest = 0.0
    try:
        got = gpt.train(schedule(hint="measured", limit="8"), model, optimizer, 4, steps=2)
    except ConfigurationError as error:
        return str(error)
    return gpt.difference(reference(4, steps=2), got), [sorted(measured) for measured in seen]


@job
def disagreement(*, options=(), versions=(), calls=(), config=(), sends=(), absent=None, timeout=10.0):
    """A pipeline on which ranks have something otherwise: what each raises, and after how many seconds.

    options, versions, calls, config: rank -> what that rank has otherwise: options of the schedule, {"module": version}, a list of calls
        as dicts of microbatches and forward_only, fields of the model's config.
    sends: rank -> "shape" or "dtype", what is wrong with the tensors that it sends.
    absent: (rank, call): a rank that does not enter that call until it hears of the others' failure.
    """
    import contextlib
    import importlib

    def forward_step(data_iterator, chunk):
        output, loss_func = gpt.forward_step(data_iterator, chunk)
        wrong = dict(sends).get(rank)
        return output[..., : gpt.HIDDEN // 2].clone() if wrong == "shape" else output.bfloat16() if wrong else output, loss_func

    rank = parallel_state.get_pipeline_model_parallel_rank()
    own = {name: dict(value).get(rank) for name, value in
           {"options": options, "versions": versions, "calls": calls, "config": config}.items()}
    runtimes.close_all()
    model, _, state = model_for()
    state.restore()
    DELAYS.longest = 0.0
    plan = own["calls"] or dict(calls).get("all") or [{"microbatches": 4}]
    with contextlib.ExitStack() as changed:
        for module, version in (own["versions"] or {}).items():
            changed.enter_context(mock.patch.object(importlib.import_module(module), "__version__", version))
        # A rank that waits in a collective for one that has failed is ended by its watcher, and the group with it.
        changed.enter_context(mock.patch.object(model.config, "finalize_model_grads_func", None))
        for field, value in (own["config"] or {}).items():
            changed.enter_context(mock.patch.object(model.config, field, value))
        chosen = Options(**{"timeout": timeout, **(own["options"] or {})})
        function = make_forward_backward(chosen, original=OWN)
        start = time.monotonic()
        try:
            runtime = runtimes.runtime_for(chosen, parallel_state.get_pipeline_model_parallel_group())
            for number, call in enumerate(plan):
                start = time.monotonic()
                if absent == (rank, number):
                    runtime.engine.latch.set_event.wait(60)
                gpt.step(function, model, None, gpt.batches(0), update=False, forward_step_func=forward_step, **call)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
        finally:
            runtimes.close_all()
    return None, time.monotonic() - start


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


def main():
    settings = json.loads(sys.argv[1])
    faulthandler.enable()
    folder, rank = Path(settings["folder"]), int(os.environ["RANK"])
    pipe = Client(settings["door"])
    pipe.send(rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=settings["pipeline"], **settings["layout"])
    while pipe.poll(600):
        try:
            name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:  # no more jobs
            break
        try:
            result = (True, JOBS[name](**arguments))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
    else:
        sys.exit("no job came")
    runtimes.close_all()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
