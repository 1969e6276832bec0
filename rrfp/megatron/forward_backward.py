"""The drop-in for Megatron's pipeline schedules, with one or several chunks per rank."""

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from rrfp.comm.rendezvous import Fact
from rrfp.comm.tensors import Expected
from rrfp.errors import ConfigurationError
from rrfp.megatron.compatibility import check_call, delegation
from rrfp.megatron.executor import MegatronExecutor, StepContext
from rrfp.megatron.facts import first_call_facts
from rrfp.megatron.limits import MeasuredLimits, Shape, describe_limit
from rrfp.megatron.measured import gather_durations
from rrfp.megatron.memory import Meter
from rrfp.megatron.microbatches import MicrobatchIterator
from rrfp.megatron.options import Options
from rrfp.megatron.rerun import in_rerun, number_results
from rrfp.megatron.runtime import Runtime, runtime_for
from rrfp.megatron.split_backward import chunks_of, is_prepared
from rrfp.mode import mode_name
from rrfp.policy import Policy
from rrfp.scheduler.arbiter import MOST_UNSENT, Scheduler


def make_forward_backward(options: Options, *, original: Callable, interleaved: bool = False) -> Callable:
    """A function with the contract of Megatron's 1F1B (`schedules.forward_backward_pipelining_without_interleaving`).

    It returns what Megatron's returns: on the last stage one entry per microbatch, in microbatch order; elsewhere `[]`.
    `original` runs what is delegated, after one line that says why.

    interleaved: the contract of `forward_backward_pipelining_with_interleaving`: several chunks per rank. Any number of microbatches
        runs; Megatron's own refuses some (a remainder of M by the pipeline's size).
    """
    limits = MeasuredLimits(options)

    @functools.wraps(original)
    def forward_backward(
        *,
        forward_step_func,
        data_iterator,
        model,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable | None = None,
        p2p_communicator=None,
        pg_collection=None,
        force_all_reduce: bool | None = False,
    ):
        if interleaved:
            decoder_seq_length = None  # as Megatron's interleaved schedule, which takes no notice of it
        models, iterators = _chunks(model, data_iterator, interleaved=interleaved)
        config = get_model_config(models[0])
        _check_p2p(config, interleaved=interleaved)
        reason = delegation(config) or _delegated_call(adjust_tensor_shapes_fn, p2p_communicator, pg_collection)
        if reason is not None:
            _say_once(f"[rrfp] Megatron's own schedule runs this job: {reason}")
            return original(
                forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, num_microbatches=num_microbatches,
                seq_length=seq_length, micro_batch_size=micro_batch_size, decoder_seq_length=decoder_seq_length, forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data, first_val_step=first_val_step, adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
                p2p_communicator=p2p_communicator, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        check_call(config, order=options.order, split=is_prepared(models[0]))
        check_call(getattr(models[0], "ddp_config", None), order=options.order)  # FSDP is named there
        split = chunks_of(models) if options.split_backward and not forward_only else ()
        configured = options.policy_for(config)
        groups, pp_group = _groups(p2p_communicator, pg_collection)
        runtime = runtime_for(options, pp_group, collection=groups, chunks=len(models))
        shape = Shape(num_microbatches, micro_batch_size, decoder_seq_length or seq_length)
        policy, meter = limits.begin(configured, runtime, shape, forward_only=forward_only)
        finalize = config.finalize_model_grads_func is not None and not forward_only
        last_stage = runtime.rank == runtime.placement.ranks - 1
        embedding = schedules.clear_embedding_activation_buffer(config, model, last_stage) if finalize else None
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)

        # Agreed on in the first call, whatever kind it is: ranks whose first calls differ meet, and hear that they differ.
        first_trainable = runtime.first_trainable(models)
        context = StepContext(
            forward_step_func=forward_step_func,
            # In microbatch order the k-th forward is microbatch k, as Megatron has it: the iterator itself, whatever a step does with it.
            data_iterators=[MicrobatchIterator(one) if one is not None and options.order == "free" else one for one in iterators],
            models=models,
            config=config,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            rank=runtime.rank,
            placement=runtime.placement,
            cp_size=groups.cp.size(),
            max_in_flight=policy.limits(runtime.placement, num_microbatches)[runtime.rank],
            call=runtime.engine.call + 1,
            first_trainable=0 if forward_only else first_trainable,
            activation=_activation(config, groups, seq_length=seq_length, micro_batch_size=micro_batch_size, decoder_seq_length=decoder_seq_length),
            split=split,
            total_num_tokens=torch.zeros([], dtype=torch.int, device="cuda"),
        )
        describe_call = functools.partial(
            first_call_facts, config, groups, microbatches=num_microbatches, micro_batch_size=micro_batch_size,
            seq_length=decoder_seq_length or seq_length, forward_only=forward_only)
        _run(runtime, policy, context, pp_group, describe_call, meter, limit=describe_limit(configured, policy))
        limits.end(runtime, groups, pp_group, models)

        if finalize:
            schedules.finish_embedding_wgrad_compute(config, embedding, last_stage, groups.tp)
            config.finalize_model_grads_func(
                models,
                context.total_num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        runtime.scalars.write()
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return [entry for microbatch in range(num_microbatches) for entry in context.losses.get(microbatch, ())]

    return forward_backward


def _run(
    runtime: Runtime, policy: Policy, context: StepContext, pp_group, describe_call: Callable[..., dict[str, Fact]], meter: Meter | None, *,
    limit: str | None,
) -> None:
    """One call of the engine. describe_call(rows=...): what all ranks must have alike in the first. limit: in words, if it is news."""
    padding = runtime.padding
    free = policy.order == "free"
    if free and in_rerun():
        policy = dataclasses.replace(policy, order="microbatch")
    scheduler = _scheduler(runtime, policy, context, pp_group, describe_call)
    runtime.recorder.mode = mode_name(policy.settled(runtime.placement, context.num_microbatches))
    if limit is not None:
        _say_limits(runtime, policy, limit, context)
    if context.split:
        _say_split(runtime, policy, context)
    if min(runtime.placement.stages_of(runtime.rank)) < context.first_trainable:
        scheduler.bound_unsent(MOST_UNSENT)  # no activation, so no limit, holds the forwards of a frozen stage
    if padding is not None:
        padding.begin(context.call, context.num_microbatches)
    executor = MegatronExecutor(context, release=runtime.transport.release, padding=padding,
                                before_forward=number_results if free else None, meter=meter, launches=runtime.launches)
    if runtime.launches is not None:
        runtime.launches.begin()
    try:
        runtime.engine.run(scheduler, executor, announce=scheduler.announces, forward_only=context.forward_only,
                           microbatches=context.num_microbatches)
        executor.finish()
    except BaseException:
        executor.abandon()
        raise
    runtime.scalars.add(runtime.recorder.last_call)
    runtime.durations = dict(scheduler.durations)


def _scheduler(
    runtime: Runtime, policy: Policy, context: StepContext, pp_group, describe_call: Callable[..., dict[str, Fact]],
) -> Scheduler:
    """This call's scheduler. Raises ConfigurationError if the policy refuses; in the first call on every rank, if any refuses or differs."""
    measured = gather_durations(runtime.durations, pp_group) if policy.adapts else None
    refusal, scheduler, rows = None, None, ""
    try:
        scheduler = policy.scheduler(
            runtime.placement, runtime.rank, context.num_microbatches, forward_only=context.forward_only,
            first_trainable=context.first_trainable, weightless=context.weightless, durations=runtime.durations, measured=measured)
        if policy.split and (whole := next((action for action in scheduler.dependencies.tasks if action.kind == "B"), None)):
            # Its gradients would be final while others of the stage still wait, and reductions go by the count of W.
            raise ConfigurationError(
                f"--rrfp-hint {policy.hint}: holds a whole backward ({whole}), and --rrfp-split-backward splits all of them; write "
                f"I and W entries for every backward, or leave --rrfp-split-backward out")
        rows = f"digest {scheduler.digest[:12]}"
    except ConfigurationError as error:
        refusal, rows = error, f"refused ({error})"
    # Later calls: every CALL message carries the digest, and is compared with the neighbours' without waiting for them.
    if not runtime.met:
        runtime.meet(describe_call(rows=rows))
        if refusal is not None:
            runtime.discard()
    if refusal is not None:
        raise refusal
    return scheduler


def _activation(config, groups, *, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None) -> Expected:
    """What Megatron would receive an activation as (`schedules.get_tensor_shapes`, `config.pipeline_dtype`).

    With multi-token prediction on a stage of its own, whose output has the predicted tokens behind the sequence, Megatron's schedule asks
    for every shape, as with variable lengths (`P2PCommunicator._communicate`).
    """
    (shape,) = schedules.get_tensor_shapes(
        seq_length=seq_length, micro_batch_size=micro_batch_size, decoder_seq_length=decoder_seq_length, config=config, tp_group=groups.tp,
        cp_group=groups.cp)
    dtype = config.pipeline_dtype
    shape = None if getattr(config, "mtp_standalone", False) else shape or None
    return Expected(None if dtype is None else str(dtype).removeprefix("torch."), shape, "from this rank's configuration")


def _say_limits(runtime: Runtime, policy: Policy, limit: str, context: StepContext) -> None:
    """Once per number of microbatches: the most activations that each stage can hold, beside Megatron's own schedule."""
    microbatches, frozen = context.num_microbatches, context.first_trainable
    if runtime.rank == 0:
        if frozen:
            _say_once(f"[rrfp] stage{'s 0 to' if frozen > 1 else ''} {frozen - 1} {'are' if frozen > 1 else 'is'} frozen: forwards only, no activation "
                      "is held and no gradient is sent there")
        own, theirs = (" ".join(map(str, p.limits(runtime.placement, microbatches))) for p in (policy, Policy(limit="1f1b")))
        _say_once(
            f"[rrfp] hint {policy.describe(runtime.placement, microbatches)}, mode {policy.mode}, limit {limit}, order {policy.order}; most activations in flight per stage "
            f"with {microbatches} microbatches: {own} (Megatron's 1F1B: {theirs})")


def _say_split(runtime: Runtime, policy: Policy, context: StepContext) -> None:
    """Once per rank and bound: how much of what is trained waits for W, and how long."""
    deferred, trained = map(sum, zip(*(chunk.share() for chunk in context.split)))
    bound = "the limit bounds how many" if policy.max_pending_w is None else f"{policy.max_pending_w} at most"
    _say_once(f"[rrfp] {runtime.name(runtime.rank)}: split backward: W computes {deferred / max(trained, 1):.0%} of the gradients' elements "
              f"({deferred} of {trained}); microbatches that wait for it: {bound}")


def _chunks(model, data_iterator, *, interleaved: bool) -> tuple[list, list]:
    """The rank's chunks and their iterators. Raises AssertionError as Megatron's schedules do."""
    if interleaved:
        assert isinstance(model, list), "interleaved pipeline parallelism expected model chunking"
        assert all(isinstance(chunk, torch.nn.Module) for chunk in model), "invalid model chunking"
        assert isinstance(data_iterator, list), "interleaved pipeline parallelism expected each model chunk to have a data iterator"
        return model, data_iterator
    iterator = _single(data_iterator, "data_iterator") if isinstance(data_iterator, list) else data_iterator
    return [_single(model, "model")], [iterator]


def _check_p2p(config, *, interleaved: bool) -> None:
    """Raises ValueError where Megatron's schedules do; otherwise how Megatron's messages would travel doesn't matter here."""
    if interleaved and config.overlap_p2p_comm and config.batch_p2p_comm:
        raise ValueError("Can not use both overlap_p2p_comm and batch_p2p_comm")
    if not interleaved and config.overlap_p2p_comm:
        raise ValueError("Non-interleaved pipeline parallelism does not support overlapping p2p communication")


def _single(value, name: str):
    if not isinstance(value, list):
        return value
    assert len(value) == 1, f"non-interleaved pipeline-parallel schedule does not support model chunking ({name} has {len(value)})"
    return value[0]


def _delegated_call(adjust_tensor_shapes_fn, p2p_communicator, pg_collection) -> str | None:
    if adjust_tensor_shapes_fn is not None:
        return "adjust_tensor_shapes_fn: one stage's message is several tensors (distillation)"
    if "MultiModule" in type(pg_collection).__name__ or "MultiModule" in type(p2p_communicator).__name__:
        return "multi-module process groups: they have a schedule and communicators of their own"
    return None


def _groups(p2p_communicator, pg_collection):
    """The process groups, as Megatron's schedule finds them: both given, or neither."""
    if p2p_communicator is None and pg_collection is None:
        collection = _default_groups()
        return collection, collection.pp
    if p2p_communicator is None or pg_collection is None:
        raise ValueError("Provide both p2p_communicator and pg_collection, or neither")
    assert hasattr(pg_collection, "tp"), "pg_collection must have tp"
    assert hasattr(pg_collection, "cp"), "pg_collection must have cp"
    return pg_collection, p2p_communicator.pp_group


def _default_groups():
    """`schedules._build_default_pg_collection` (0.19); earlier releases build the same inside their schedules."""
    if hasattr(schedules, "_build_default_pg_collection"):
        return schedules._build_default_pg_collection()
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


_said: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)
