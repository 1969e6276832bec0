"""Megatron's local linear layers, with weight gradients that can wait: the layer's half of `split_backward.py`.

The layer becomes an instance of a subclass of its class. Its forward is Megatron's, and so is its backward unless an I is running
(`deferring`). Then the backward computes the input's gradient and the bias', and saves (input, gradient of the output).

What autograd would have summed and accumulated once is one entry of the layer's queue: a weight that is used several times in a
microbatch has its gradients summed in the same order before DDP's hook sees them, and the hook is called equally often. That makes
W bitwise what the whole backward is.
"""

import contextlib
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, LinearWithGradAccumulationAndAsyncCommunication, RowParallelLinear
from megatron.core.utils import get_tensor_model_parallel_group_if_none, prepare_input_tensors_for_wgrad_compute

_Whole = LinearWithGradAccumulationAndAsyncCommunication
_PARAMETERS = inspect.signature(layers.linear_with_grad_accumulation_and_async_allreduce)
"""In the order in which `_Whole` takes them, in every supported release."""

_deferring = False


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """An I is running. Actions run one at a time, so one switch serves the process; autograd's threads on a GPU read it too."""
    global _deferring
    _deferring = True
    try:
        yield
    finally:
        _deferring = False


def is_deferring() -> bool:
    """Whether an I is running."""
    return _deferring


class Use(NamedTuple):
    """One use of a weight in one forward: all that its gradient needs."""

    input: torch.Tensor
    """[..., inputs]; under sequence parallelism this rank's part of the sequence."""
    output_gradient: torch.Tensor
    """[..., outputs]."""
    versions: tuple[int, int]
    """Of both, when they were saved: nobody may write into them."""
    sequence_parallel: bool
    fused: bool
    """The gradient is added to `main_grad` by the kernel that computes it."""
    group: torch.distributed.ProcessGroup | None


class SplitLinear:
    """What a linear layer of Megatron gains: Transformer Engine's protocol of delayed weight gradients.

    A weight that turns out to be used in an ordinary way too (by an operation that is no call of its layer) is whole from then on:
    its gradient is computed in I, as before.
    """

    _uses: list[Use]
    """Of the running I, since autograd last accumulated the weight's gradient."""
    _queue: deque[list[Use]]
    _hooks: list[Callable]
    _whole: bool

    def _prepare(self) -> None:
        self._uses, self._queue, self._hooks, self._whole = [], deque(), [], False
        self.weight.skip_backward_post_hook = True
        # The node runs, and with it the hook, after all uses of a backward, whether or not any of them gave a gradient.
        self._accumulator = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
        self._accumulator.register_hook(lambda *_: self._accumulated())

    def _forward_impl(self, input, weight, *args, **kwargs):
        if weight is not self.weight or not weight.requires_grad:
            return super()._forward_impl(input, weight, *args, **kwargs)
        bound = _PARAMETERS.bind(input, weight, *args, **kwargs)
        bound.apply_defaults()
        bound.arguments["tp_group"] = get_tensor_model_parallel_group_if_none(bound.arguments["tp_group"])
        return _Split.apply(self, *bound.arguments.values())

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable) -> None:
        """`hook()` runs whenever the weight's gradient has been computed (Megatron's DDP calls this)."""
        self._hooks.append(hook)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`."""
        return bool(self._queue)

    @property
    def waiting(self) -> int:
        """How often `backward_dw` has something to do."""
        return len(self._queue)

    def backward_dw(self) -> None:
        """Compute the oldest gradient that waits, accumulate it and run the hooks. Does nothing if none waits."""
        if not self._queue:
            return
        with torch.no_grad():  # outside autograd's engine gradients would be recorded
            self._accumulate(self._queue.popleft())
            self._run_hooks()

    def close(self) -> None:
        """At the end of an I."""
        if self._uses:
            self._queue.append(self._uses)
            self._uses = []

    def clear(self) -> None:
        """Forget what waits."""
        self._uses = []
        self._queue.clear()

    def _accumulated(self) -> None:
        """Autograd has accumulated this weight's gradient: what it did is one entry of the queue, or is to be handed on now."""
        if self.weight.grad is None:
            self.close()
            return
        if self._uses:  # and an ordinary use besides
            uses, self._uses, self._whole = self._uses, [], True
            with torch.no_grad():
                self._accumulate(uses)
        self._run_hooks()

    def _run_hooks(self) -> None:
        for hook in self._hooks:
            hook()

    def _accumulate(self, uses: list[Use]) -> None:
        gradients = [gradient for use in uses if (gradient := self._gradient(use)) is not None]
        for gradient in gradients:
            self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        if not gradients and self.weight.grad is None:
            # It is in main_grad; DDP's hook wants to see some gradient, of which it makes nothing.
            self.weight.grad = self.weight.new_zeros(()).expand(self.weight.shape)
            self.weight.grad_added_to_main_grad = True

    def _gradient(self, use: Use) -> torch.Tensor | None:
        """As in `_Whole.backward`. None if it was added to `main_grad`."""
        if (use.input._version, use.output_gradient._version) != use.versions:
            raise RuntimeError(
                f"a tensor that a weight gradient of {type(self).__name__} {tuple(self.weight.shape)} needs was written in place between I "
                "and W; run without --rrfp-split-backward, or keep that operation out of place")
        whole_input = use.input
        if use.sequence_parallel:
            size = [use.input.shape[0] * use.group.size(), *use.input.shape[1:]]
            # A buffer of Megatron's that every such layer shares: its contents live until the next layer's, and that is enough.
            whole_input = layers.get_global_memory_buffer().get_tensor(size, use.input.dtype, "mpu")
            layers.dist_all_gather_func(whole_input, use.input.contiguous(), group=use.group)
        output_gradient, whole_input = prepare_input_tensors_for_wgrad_compute(use.output_gradient, whole_input)
        if not use.fused:
            return output_gradient.t().matmul(whole_input)
        kernels = layers.fused_weight_gradient_mlp_cuda
        main_grad = self.weight.main_grad
        add = kernels.wgrad_gemm_accum_fp32 if main_grad.dtype == torch.float32 else kernels.wgrad_gemm_accum_fp16
        add(whole_input, output_gradient, main_grad)
        return None


class _Split(_Whole):
    """`_Whole`, which leaves the weight's gradient out of its backward while an I runs."""

    @staticmethod
    def forward(ctx, layer, *args):
        ctx.layer = layer
        return _Whole.forward(ctx, *args)

    @staticmethod
    @layers.custom_bwd
    def backward(ctx, output_gradient):
        layer = ctx.layer
        if not _deferring or layer._whole:
            return (None, *_Whole.backward(ctx, output_gradient))
        input, weight = ctx.saved_tensors
        input_gradient = output_gradient.matmul(weight)
        if ctx.sequence_parallel:
            part = torch.empty(input.shape, dtype=input.dtype, device=input.device)
            layers.dist_reduce_scatter_func(part, input_gradient, group=ctx.tp_group)
            input_gradient = part
        elif ctx.allreduce_dgrad:
            torch.distributed.all_reduce(input_gradient, group=ctx.tp_group)
        output_gradient = output_gradient.contiguous()
        bias_gradient = output_gradient.reshape(-1, output_gradient.shape[-1]).sum(dim=0) if ctx.use_bias else None
        layer._uses.append(Use(input, output_gradient, (input._version, output_gradient._version), ctx.sequence_parallel,
                               ctx.gradient_accumulation_fusion, ctx.tp_group))
        return (None, input_gradient, None, bias_gradient, *[None] * (len(ctx.needs_input_grad) - 4))


_classes: dict[type, type] = {}


def _split_class(kind: type) -> type:
    """The subclass of a linear layer's class."""
    if kind not in _classes:
        _classes[kind] = type(f"Split{kind.__name__}", (SplitLinear, kind), {})
    return _classes[kind]


def split_linears(module: torch.nn.Module) -> tuple[SplitLinear, ...]:
    """Turn the linear layers of `module` whose weight gradients may wait into `SplitLinear`s; returns them."""
    owners = Counter(id(p) for each in module.modules() for p in each._parameters.values() if p is not None)
    found = []
    for each in module.modules():
        if isinstance(each, SplitLinear):  # wrapped once more
            found.append(each)
        elif _can_wait(each, owners):
            each.__class__ = _split_class(type(each))
            each._prepare()
            found.append(each)
    return tuple(found)


def _can_wait(layer: torch.nn.Module, owners: Counter[int]) -> bool:
    """A local linear layer with a weight of its own that is trained, and that nothing else is known to use."""
    kind = next((kind for kind in (ColumnParallelLinear, RowParallelLinear) if isinstance(layer, kind)), None)
    if kind is None or type(layer)._forward_impl is not kind._forward_impl:
        return False
    weight = layer.weight
    if weight is None or not weight.requires_grad or owners[id(weight)] > 1 or getattr(weight, "shared_embedding", False):
        return False
    return not (layer.config.defer_embedding_wgrad_compute and getattr(layer, "grad_output_buffer", None) is not None)
