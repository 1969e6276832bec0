"""Jobs about the rest of Megatron's contract, and about ranks that disagree."""

import time
from unittest import mock

import model as gpt
import torch
from jobs import DELAYS, OWN, job, model_for, reference, schedule
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from rrfp.megatron import runtime as runtimes
from rrfp.megatron.forward_backward import make_forward_backward
from rrfp.megatron.options import Options


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
