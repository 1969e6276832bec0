"""Runs the forwards and backwards of a rank's stages with Megatron's own functions.

Everything that Megatron ties to "first" and "last" follows what was *executed* first and last of a chunk, not the microbatch's index.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules

from rrfp.action import Action
from rrfp.comm.tensors import Expected, check_arrival, from_arrival, to_payload
from rrfp.comm.transport import Arrival
from rrfp.engine.executor import Done
from rrfp.engine.launches import Launches
from rrfp.megatron.gradient_sync import GradientSync
from rrfp.megatron.memory import Meter
from rrfp.megatron.microbatches import MicrobatchIterator
from rrfp.megatron.padding import Padding
from rrfp.megatron.split_backward import SplitChunk
from rrfp.placement import Placement
from rrfp.scheduler.dependencies import Task


@dataclass(kw_only=True)
class StepContext:
    """What one call of the schedule was given (the arguments of Megatron's `forward_backward_func`), for one rank."""

    forward_step_func: Callable
    data_iterators: Sequence[Any]
    """Per chunk an iterator or None; a `MicrobatchIterator` where forwards may leave microbatch order."""
    models: Sequence[torch.nn.Module]
    """The rank's chunks, in order."""
    config: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    rank: int
    placement: Placement
    cp_size: int
    max_in_flight: int
    call: int
    first_trainable: int
    """Stages before it are frozen: they run no backward."""
    activation: Expected
    """What a stage input must be."""
    split: Sequence[SplitChunk] = ()
    """Per chunk what its backward leaves for W; empty where backwards are whole."""
    total_num_tokens: torch.Tensor
    """int32 scalar; microbatches add to it, in any order."""
    losses: dict[int, list] = field(default_factory=dict)
    """What `forward_step` stored, per microbatch (the last stage only)."""

    @property
    def weightless(self) -> list[int]:
        """This rank's stages that leave nothing for W."""
        stages = self.placement.stages_of(self.rank)
        return [stages[chunk] for chunk, split in enumerate(self.split) if not split.has_weights]

    def is_last(self, stage: int) -> bool:
        return stage == self.placement.stages - 1

    def keeps(self, stage: int) -> bool:
        """Whether forwards of `stage` are followed by backwards, and so hold an activation."""
        return not self.forward_only and stage >= self.first_trainable


class Saved(NamedTuple):
    """What a backward needs of its forward. gradient: what must come for it; None on the last stage."""

    input: torch.Tensor | None
    output: torch.Tensor
    gradient: Expected | None


class MegatronExecutor:
    """One rank of one call. An `Executor` whose actions complete before `launch` returns; on a GPU, when the device has run them.

    Args:
        context: the call.
        release: gives a receive buffer back.
        padding: lengthens actions on purpose, or None.
        before_forward: called with the microbatch before each forward of the last stage, or None.
        meter: measures what activations hold, or None.
        launches: the actions of this process' GPU, or None on the CPU.
    """

    def __init__(
        self,
        context: StepContext,
        *,
        release: Callable[[Arrival], None],
        padding: Padding | None = None,
        before_forward: Callable[[int], None] | None = None,
        meter: Meter | None = None,
        launches: Launches | None = None,
    ):
        self.capacity = 1 if launches is None else launches.capacity
        self.padded = 0.0
        self._context = context
        self._release = release
        self._padding = padding
        self._before_forward = before_forward
        self._meter = meter
        self._launches = launches
        self._device = context.total_num_tokens.device
        self._saved: dict[tuple[int, int], Saved] = {}
        """By (stage, microbatch): of forwards whose backward has not run."""
        self._forwards: Counter[int] = Counter()  # per stage
        self._sync = GradientSync(context.config, context.models, microbatches=context.num_microbatches, rank=context.rank,
                                  forward_only=context.forward_only,
                                  split=[chunk for chunk, split in enumerate(context.split) if split.has_weights])

    # ------------------------------------------------------------------ the Executor protocol
    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Done) -> None:
        self._check(task.action, inputs)
        if self._meter is not None:
            self._meter.before()
        tensors = [tensor for arrival in inputs for tensor in from_arrival(arrival, release=self._release, device=self._device)]
        if self._launches is None:
            self._run(task, tensors, done)
        else:
            self._queue(task, tensors, done)

    def _run(self, task: Task, tensors: list[torch.Tensor | None], done: Done) -> None:
        if self._padding is not None:
            self._padding.start()
        result = self._act(task.action, tensors)
        if self._padding is not None:
            self.padded = self._padding.finish(self._context.call, task.action)
        payload = to_payload(result) if task.sends else ()
        done({edge: payload for edge in task.sends})

    def _queue(self, task: Task, tensors: list[torch.Tensor | None], done: Done) -> None:
        action, launches = task.action, self._launches
        running = launches.start(action.kind, action.stage)
        result = self._act(action, tensors)
        payload = to_payload(result, device=launches.device) if task.sends else ()
        lengthen = 0.0
        if self._padding is not None:
            lengthen = self._padding.on_device(self._context.call, action, launches.took(action.kind, action.stage))
        launches.finish(running, {edge: payload for edge in task.sends}, done, lengthen=lengthen)

    def _act(self, action: Action, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        result = {"F": self._forward, "W": self._weights}.get(action.kind, self._backward)(action, tensors)
        if self._meter is not None:
            self._meter.after(action.kind, tensors)
        return result

    def _check(self, action: Action, inputs: tuple[Arrival, ...]) -> None:
        for arrival in inputs:
            if action.kind == "F":
                check_arrival(arrival, self._context.activation, may_be_missing=False)
            else:
                check_arrival(arrival, self._saved[action.stage, action.microbatch].gradient, may_be_missing=True)

    def _forward(self, action: Action, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        context, stage, microbatch = self._context, action.stage, action.microbatch
        config, chunk, last = context.config, context.placement.chunk_of(stage), context.is_last(stage)
        # No gradient of the input is asked for where none is sent.
        input_tensor = tensors[0].requires_grad_(stage > context.first_trainable) if tensors else None
        partial = config.num_microbatches_with_partial_activation_checkpoints
        checkpoint = None if partial is None else self._forwards.total() % context.max_in_flight >= partial
        first = schedules.check_first_val_step(context.first_val_step, context.forward_only, self._forwards[stage] == 0)
        if last and self._before_forward is not None:
            self._before_forward(microbatch)
        iterator = context.data_iterators[chunk]
        indexed = isinstance(iterator, MicrobatchIterator)
        if indexed:
            iterator.begin(microbatch)
        self._sync.before_forward(chunk)
        with torch.no_grad() if stage < context.first_trainable else contextlib.nullcontext():
            output_tensor, num_tokens = schedules.forward_step(
                context.forward_step_func,
                iterator,
                context.models[chunk],
                context.num_microbatches,
                input_tensor,
                context.losses.setdefault(microbatch, []),
                config,
                cp_group_size=context.cp_size,
                collect_non_loss_data=context.collect_non_loss_data,
                checkpoint_activations_microbatch=checkpoint,
                is_first_microbatch=first,
                current_microbatch=microbatch,
                vp_stage=chunk if len(context.models) > 1 else None,
                is_last_stage=last,
            )
        if indexed:
            iterator.end()
        context.total_num_tokens += num_tokens
        self._forwards[stage] += 1
        result = [] if last else [self._to_send(action, output_tensor)]
        if context.keeps(stage):
            gradient = None
            if result:  # its shape goes with the data below
                gradient = Expected.like(output_tensor, f"the output of {action}")
            self._saved[stage, microbatch] = Saved(input_tensor if stage > context.first_trainable else None, output_tensor, gradient)
            # `result` is an alias that keeps the storage: what is being sent is not freed under the send.
            schedules.deallocate_output_tensor(output_tensor, config.deallocate_pipeline_outputs)
        return result

    def _to_send(self, action: Action, output_tensor: Any) -> torch.Tensor:
        if not torch.is_tensor(output_tensor):
            raise TypeError(f"{action} returned {type(output_tensor).__name__}: a stage that isn't the last must return one tensor")
        # Without a backward nothing keeps a stage from writing its next output over this one, which may still be waiting to leave.
        return output_tensor.detach() if self._context.keeps(action.stage) else output_tensor.detach().clone()

    def _backward(self, action: Action, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        input_tensor, output_tensor, _ = self._saved.pop((action.stage, action.microbatch))
        chunk = self._context.placement.chunk_of(action.stage)
        waits = action.kind == "I" and self._context.split[chunk].has_weights
        self._sync.before_backward(chunk)
        gradient = None
        with self._context.split[chunk].deferring(action.microbatch) if waits else contextlib.nullcontext():
            # With no gradient: nothing downstream depends on this output, so nothing upstream does through this stage.
            if not tensors or tensors[0] is not None:
                gradient = schedules.backward_step(input_tensor, output_tensor, tensors[0] if tensors else None, self._context.config)
        self._sync.after_backward(chunk)
        return [gradient]

    def _weights(self, action: Action, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        chunk, config = self._context.placement.chunk_of(action.stage), self._context.config
        self._sync.before_weights(chunk)
        # As in the backward of Megatron's functions, which remember how their forward ran.
        with torch.autocast("cuda", dtype=config.autocast_dtype) if config.enable_autocast else contextlib.nullcontext():
            self._context.split[chunk].run(action.microbatch)
        self._sync.after_weights(chunk)
        return []

    def finish(self) -> None:
        """After the last action: reductions that were kept for the end start now. RuntimeError if a weight gradient was left behind."""
        for chunk in self._context.split:
            chunk.check_empty()
        self._sync.finish()

    def abandon(self) -> None:
        """After a failure: leave the model as Megatron expects to find it."""
        self._sync.abandon()
        self._saved.clear()
        for chunk in self._context.split:
            chunk.clear()
