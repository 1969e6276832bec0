"""Megatron models as programs: a `GPTModel` whose layers are tagged by stage (PP) and whose experts are tagged EP, fit to be captured.

What runs is Megatron's own forward. Only what no trace can hold is another function of the same mathematics while it runs: buffers that
layers share, cached tables of positions, the random states of dropouts that drop nothing, and the loss, whose own in-place arithmetic
has a backward written by hand. A trace differentiates what Megatron's other hand-written backwards compute in their forward; with one
tensor-parallel rank that is the same.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F

from rrfp.errors import ConfigurationError
from rrfp.megatron import experts
from rrfp.megatron.traceable import check_traceable
from rrfp.program.capture import annotate

__all__ = ["annotate_gpt", "language_model_loss", "whole_models"]


def whole_models(*, seed: int) -> None:
    """Set Megatron up for models that are whole in every process (all its parallel sizes are 1), and seed torch and Megatron: call it first.

    Where `torch.distributed` is not initialised, it is, for this process alone.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def annotate_gpt(model: torch.nn.Module, *, stages: int | Sequence[int]) -> torch.nn.Module:
    """Make a whole Megatron-core `GPTModel` ready for `rrfp.program.capture`, in place; returns it. Do it once, before the optimizer is made.

    The embedding is in stage 0, the final norm, the output layer and the loss are in the last. A mixture of experts becomes one stacked
    parameter per weight matrix, `experts x ...`, for a `shard` to cut (`rrfp.megatron.experts`); experts are numbered along the model.

    Args:
        model: built by `get_gpt_layer_local_spec`, with all its layers in this process: every parallel size 1.
        stages: how many, of equally many layers; or the number of layers of each. The first and the last may have none.

    Raises:
        ConfigurationError: the layers do not divide so, or the model uses what cannot be traced, by name.
    """
    check_traceable(model)
    counts = _layers_of(stages, len(model.decoder.layers))
    homes = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for layer, stage in zip(model.decoder.layers, homes, strict=True):
        _run_inside(layer, "forward", functools.partial(annotate, "PP", stage))
    if model.config.num_moe_experts:
        experts.stack_experts(model)
    _run_inside(model.embedding, "forward", functools.partial(annotate, "PP", 0))
    last = functools.partial(annotate, "PP", len(counts) - 1)
    if model.decoder.final_layernorm is not None:
        _run_inside(model.decoder.final_layernorm, "forward", last)
    _run_inside(model, "_postprocess", last)
    _run_inside(model, "forward", functools.partial(_traceable, model))
    model.compute_language_model_loss = _token_losses
    return model


def language_model_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a batch, as pretrain_gpt's: for `rrfp.program.capture`, and for `compile`.

    Args:
        model: an annotated `GPTModel`.
        batch: `tokens` and `labels`, integers of batch x sequence; and perhaps `loss_mask`, batch x sequence: the mean is then over
            what it weighs, of each microbatch by itself.
    """
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    losses = model(tokens, positions, None, labels=batch["labels"])
    if "loss_mask" not in batch:
        return losses.mean()
    weights = batch["loss_mask"].to(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def _layers_of(stages: int | Sequence[int], layers: int) -> list[int]:
    if isinstance(stages, int):
        if stages < 1 or layers % stages:
            raise ConfigurationError(f"stages {stages}: must divide the model's {layers} layers; or give the number of layers of each stage")
        return [layers // stages] * stages
    counts = list(stages)
    if sum(counts) != layers or any(count < (position not in (0, len(counts) - 1)) for position, count in enumerate(counts)):
        raise ConfigurationError(f"stages {counts}: must be {layers} layers in all, at least one each but for the first and the last stage")
    return counts


def _run_inside(owner: torch.nn.Module, name: str, context: Callable[[], AbstractContextManager]) -> None:
    """Let a method of one object run inside a context."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def inside(*args, **kwargs):
        with context():
            return function(*args, **kwargs)

    setattr(owner, name, inside)


def _token_losses(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """As `LanguageModule.compute_language_model_loss`: labels batch x sequence, logits sequence x batch x words -> batch x sequence.

    Megatron's (`tensor_parallel.vocab_parallel_cross_entropy`) sums over tensor-parallel ranks, in fp32, and has a backward of its own.
    """
    return F.cross_entropy(logits.float().permute(1, 2, 0), labels, reduction="none")


class _FreshMemory:
    """Stands for `GlobalMemoryBuffer`: one buffer for all calls cannot be part of a trace, nor be saved by two microbatches."""

    def get_tensor(self, shape, dtype, name, mem_alloc_context=None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")


class _NoDraws:
    """Stands for `CudaRNGStatesTracker` where nothing is drawn."""

    def fork(self, name=None) -> AbstractContextManager:
        return nullcontext()


@contextmanager
def _traceable(model: torch.nn.Module) -> Iterator[None]:
    """While this model runs: functions that a trace can hold in the place of those that it cannot."""
    from megatron.core.transformer import dot_product_attention as attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention.parallel_state, "get_global_memory_buffer", _FreshMemory))
        stack.enter_context(mock.patch.object(attention.tensor_parallel, "get_cuda_rng_tracker", _NoDraws))
        for user in (moe_utils, token_dispatcher) if model.config.num_moe_experts else ():
            stack.enter_context(mock.patch.object(user, "get_capacity", experts.capacity))
        if (rotary := getattr(model, "rotary_pos_emb", None)) is not None:
            # Its own forward keeps every table that it ever made.
            stack.enter_context(mock.patch.object(type(rotary), "forward", type(rotary).forward.__wrapped__))
            stack.enter_context(mock.patch.object(rotary, "inv_freq", rotary.inv_freq))
        yield
