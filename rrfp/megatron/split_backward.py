"""The backward in two actions: I (gradient of the input) and W (gradients of the weights), for Megatron's layers.

A linear layer's backward is two products. The stage before waits for one of them only, so the other can wait for a gap: I saves what
it needs, W computes it. Megatron has a protocol for that, Transformer Engine's delayed weight gradients: `skip_backward_post_hook` on
the weight, `register_wgrad_accumulation_and_reduce_hooks` and a first-in-first-out `backward_dw` on the layer, and
`delay_wgrad_compute` in DDP's config, whose hook then runs at the end of `backward_dw`. Layers of Transformer Engine speak it; here
Megatron's own `ColumnParallelLinear` and `RowParallelLinear` learn it (`split_linear.py`). Everything else stays in I: embeddings,
norms, biases, routers, and weights that are tied or used in other ways too.

Outside an I of this package (one stage, Megatron's own schedule, evaluation) nothing waits: the layers are what they were.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig

from rrfp.errors import ConfigurationError
from rrfp.megatron.compatibility import delegation
from rrfp.megatron.split_linear import SplitLinear, deferring, is_deferring, split_linears

_CHUNK = "_rrfp_split_chunk"
"""The attribute of a chunk's DDP that holds its `SplitChunk`."""
_wrapped: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
"""DDPs of chunks with layers of Transformer Engine that put weight gradients off."""


class SplitChunk:
    """One chunk of the model whose weight gradients can wait between an I and its W.

    Args:
        module: the chunk, before Megatron's DDP wraps it. Its linear layers are changed in place.
    """

    def __init__(self, module: torch.nn.Module):
        self.linears: tuple[SplitLinear, ...] = split_linears(module)
        self._module = weakref.ref(module)
        # Last layers first, as a backward meets them: DDP's buckets fill in that order.
        self._delayed = [each for each in reversed(list(module.modules())) if isinstance(each, SplitLinear) or _is_delayed(each)]
        self._pending: dict[int, list[tuple[Any, int]]] = {}
        """By microbatch, oldest I first: the layers that have something for its W, and how often `backward_dw` takes."""

    @property
    def has_weights(self) -> bool:
        """Whether any weight that can be trained has its gradient in W."""
        return any(p.requires_grad for layer in self._delayed for p in _deferred_parameters(layer))

    @property
    def pending(self) -> int:
        """How many microbatches wait for their W."""
        return len(self._pending)

    def share(self) -> tuple[int, int]:
        """(elements of the trainable weights whose gradients are computed in W, elements of all trainable parameters)."""
        deferred = {id(p): p for layer in self._delayed for p in _deferred_parameters(layer) if p.requires_grad}
        return sum(p.numel() for p in deferred.values()), sum(p.numel() for p in self._module().parameters() if p.requires_grad)

    @contextlib.contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Around the backward of an I: gradients of weights wait for `run(microbatch)`."""
        before = [_waiting(layer) for layer in self._delayed]
        with deferring():
            yield
        for linear in self.linears:
            linear.close()
        counts = ((layer, _waiting(layer) - count) for layer, count in zip(self._delayed, before, strict=True))
        self._pending[microbatch] = [(layer, count) for layer, count in counts if count]

    def run(self, microbatch: int) -> None:
        """W: compute and accumulate what the I of `microbatch` left. RuntimeError if that I has not run."""
        if microbatch not in self._pending:
            raise RuntimeError(f"the W of microbatch {microbatch} was to run before its I: nothing has been saved for it")
        for layer, count in self._pending.pop(microbatch):
            for _ in range(count):
                layer.backward_dw()

    def check_empty(self) -> None:
        """At the end of a step. RuntimeError if a gradient was left behind."""
        left = [type(layer).__name__ for layer in self._delayed if _waiting(layer)]
        if self._pending or left:
            raise RuntimeError(f"weight gradients were left behind at the end of the step: microbatches {sorted(self._pending)}, in {left}")

    def run_delayed(self) -> None:
        """What layers of Transformer Engine put off in a backward that is no I: nobody else would compute it."""
        for layer in self._delayed:
            while not isinstance(layer, SplitLinear) and _waiting(layer):
                layer.backward_dw()

    def clear(self) -> None:
        """After a failure: forget what waits."""
        self._pending.clear()
        for layer in self._delayed:
            if isinstance(layer, SplitLinear):
                layer.clear()
            elif (store := _store(layer)) is not None:
                while not store.empty():
                    store.get_nowait()


def is_prepared(model: torch.nn.Module) -> bool:
    """Whether `install` prepared this DDP."""
    return hasattr(model, _CHUNK)


def chunks_of(models: Sequence[torch.nn.Module]) -> list[SplitChunk]:
    """What `install` prepared. Raises ConfigurationError for a model that it never saw."""
    if unknown := [model for model in models if not is_prepared(model)]:
        raise ConfigurationError(
            f"--rrfp-split-backward: this {type(unknown[0]).__name__} was not wrapped in Megatron's DistributedDataParallel after "
            "rrfp.install(), so its layers can't leave weight gradients for W; call rrfp.install() before the model is built, or run "
            "without --rrfp-split-backward")
    return [getattr(model, _CHUNK) for model in models]


# ------------------------------------------------------------------ layers of Transformer Engine
# What they have is read, never imported: TransformerEngineBaseModule has `wgrad_store` with a queue `context`; a TEGroupedMLP or a
# FusedSharedExpertMLP of Megatron may run fused operations instead, whose stores are theirs and not in the module tree, and drives
# them in its own `backward_dw` (megatron/core/transformer/moe/experts.py, shared_experts.py).
_FUSED = ("_fused_ops", "_fused_grouped_swiglu_ops")


def _is_delayed(layer: torch.nn.Module) -> bool:
    if any(hasattr(layer, name) for name in _FUSED):
        return True
    needs = getattr(layer, "need_backward_dw", None)
    return needs is not None and hasattr(layer, "wgrad_store") and bool(needs())


def _store(layer: Any):
    """The queue of what waits in a layer, or None."""
    for name in _FUSED:
        if (operations := getattr(layer, name, None)) is not None:
            return _store(list(operations[0].children())[0])
    return getattr(getattr(layer, "wgrad_store", None), "context", None)


def _waiting(layer: Any) -> int:
    """How often `backward_dw` has something to do."""
    if isinstance(layer, SplitLinear):
        return layer.waiting
    store = _store(layer)
    return 0 if store is None else store.qsize()


def _deferred_parameters(layer: Any) -> list[torch.nn.Parameter]:
    if isinstance(layer, SplitLinear):
        return [layer.weight]
    return [p for p in layer.parameters() if getattr(p, "skip_backward_post_hook", False)]


# ------------------------------------------------------------------ into Megatron
def install(replace: Callable[[Any, str, Any], None]) -> None:
    """From now on models are prepared when Megatron's DDP wraps them. Before a model is built.

    replace(owner, name, value): sets an attribute, and remembers how to undo it.
    """
    wrap, check = DistributedDataParallel.__init__, TransformerConfig.__post_init__

    @functools.wraps(wrap)
    def __init__(self, config, ddp_config, module, *args, **kwargs):
        chunk = SplitChunk(module) if _splits(config) else None
        own, ddp_config.delay_wgrad_compute = ddp_config.delay_wgrad_compute, chunk is not None or ddp_config.delay_wgrad_compute
        try:
            wrap(self, config, ddp_config, module, *args, **kwargs)
        finally:
            ddp_config.delay_wgrad_compute = own  # of use to nobody but __init__
        if chunk is not None:
            setattr(self, _CHUNK, chunk)
            if len(chunk.linears) < len(chunk._delayed):
                _wrapped.add(self)
                _compute_at_once_elsewhere()

    @functools.wraps(check)
    def __post_init__(self):
        # Megatron's check allows it with its own schedule of overlapped expert communication only, which drives it by itself.
        own, self.delay_wgrad_compute = self.delay_wgrad_compute, False
        check(self)
        self.delay_wgrad_compute = own or (_splits(self) and find_spec("transformer_engine") is not None)

    replace(DistributedDataParallel, "__init__", __init__)
    replace(TransformerConfig, "__post_init__", __post_init__)


def _splits(config: Any) -> bool:
    """Whether a model with this config runs under this package's schedule."""
    return getattr(config, "pipeline_model_parallel_size", 1) > 1 and delegation(config) is None


@functools.cache
def _compute_at_once_elsewhere() -> None:
    """Once per process, for good: a model may outlive `rrfp.uninstall()`, and its gradients must not be lost under another schedule."""
    backward_step = schedules.backward_step

    @functools.wraps(backward_step)
    def whole(*args, **kwargs):
        result = backward_step(*args, **kwargs)
        if not is_deferring():
            for model in list(_wrapped):
                getattr(model, _CHUNK).run_delayed()
        return result

    schedules.backward_step = whole


def refusal(args: Any) -> str | None:
    """One line if a job with these (validated) arguments of Megatron can't split its backward; else None."""
    flag = "--rrfp-split-backward"
    if (reason := delegation(args)) is not None:
        return f"{flag} with {reason}; Megatron's own schedule would run this job, and it has no W: run without {flag}"
    if getattr(args, "overlap_dispatch_backward_with_experts_wgrad", False):
        return (f"{flag} with --overlap-dispatch-backward-with-experts-wgrad: both put off the experts' weight gradients; use one of the two")
    if getattr(args, "transformer_impl", "local") == "transformer_engine":
        from megatron.core.utils import is_te_min_version

        needs = [("2.3.0", True, "delayed weight gradients"),
                 ("2.7.0", not args.gradient_accumulation_fusion, "delayed weight gradients with --no-gradient-accumulation-fusion"),
                 ("2.8.0", args.overlap_grad_reduce, "delayed weight gradients with --overlap-grad-reduce")]
        for version, wanted, what in reversed(needs):  # as Megatron's validate_args has it for --delay-wgrad-compute
            if wanted and not is_te_min_version(version):
                return f"{flag}: {what} need Transformer Engine {version} or later; install it, or run without {flag}"
    return None
