"""Jobs that compare I and W with a plain backward on single layers in Megatron's DDP, each rank for itself."""

from contextlib import ExitStack
from queue import Queue
from unittest import mock

import torch
from jobs import job
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer import TransformerConfig

from rrfp.megatron import split_backward
from rrfp.megatron.split_linear import SplitLinear

WIDTH, LENGTH, BATCH = 8, 6, 2


class Kernels:
    """Stands in for the CUDA extension that adds weight gradients to `main_grad`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(whole_input, output_gradient, main_grad):
        main_grad.add_(output_gradient.t().matmul(whole_input))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def config(dtype=torch.float32, **settings):
    return TransformerConfig(num_layers=2, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True, params_dtype=dtype,
                             pipeline_dtype=dtype, pipeline_model_parallel_size=2, **settings)


class Model(torch.nn.Module):
    def __init__(self, its_config, *, kind=ColumnParallelLinear, bias=True):
        super().__init__()
        self.config = its_config
        options = {"config": its_config, "init_method": torch.nn.init.xavier_normal_, "bias": bias, "skip_bias_add": False}
        if kind is ColumnParallelLinear:
            options["gather_output"] = False
        else:
            options["input_is_parallel"] = True
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=its_config.params_dtype)
        self.first = kind(WIDTH, WIDTH, **options)
        self.second = kind(WIDTH, WIDTH, **options)
        self.unused = kind(WIDTH, WIDTH, **options)

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.norm(x))[0]))[0]


class Twice(Model):
    """One layer at two places."""

    def forward(self, x):
        return self.first(torch.tanh(self.first(self.norm(x))[0]))[0] + self.second(x)[0]


class Tied(Model):
    """One weight in two layers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.second.weight = self.first.weight


class Mixed(Model):
    """A weight that is also used outside its layer."""

    def forward(self, x):
        return super().forward(x) + torch.nn.functional.linear(x, self.first.weight)


class Borrowed(Model):
    """A weight that is given to another layer's forward."""

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)[0]), weight=self.first.weight)[0] + self.second(self.norm(x))[0]


class Halves(Model):
    """A chunk into two linears, and a concatenation."""

    def forward(self, x):
        one, other = self.norm(x).chunk(2, dim=0)
        return torch.cat([self.first(one)[0], self.second(other)[0]])


class Recomputed(Model):
    """A layer in two recomputed parts: autograd accumulates its weight's gradient twice."""

    def forward(self, x):
        part = lambda y: torch.tanh(self.first(y)[0])  # noqa: E731
        return self.second(checkpoint(part, False, checkpoint(part, False, self.norm(x))))[0]


class Frozen(Model):
    """Without biases: the backward of Megatron's layer with a frozen weight loses that of its bias."""

    def __init__(self, its_config):
        super().__init__(its_config, bias=False)
        self.first.weight.requires_grad_(False)


class Rows(Model):
    def __init__(self, its_config):
        super().__init__(its_config, kind=RowParallelLinear)


class NoBias(Model):
    def __init__(self, its_config):
        super().__init__(its_config, bias=False)


class Delayed(torch.nn.Module):
    """A linear layer that follows Transformer Engine's protocol: a queue per module, `backward_dw` assigns the weight's gradient and
    calls the hooks. delay: as `delay_wgrad_compute` of the real one."""

    class Store:
        def __init__(self, delay):
            self.context, self._delay = Queue(), delay

        def delay_wgrad_compute(self):
            return self._delay

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, layer, x, weight):
            context.layer = layer
            context.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(context, gradient):
            x, weight = context.saved_tensors
            flat, flat_x = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            if context.layer.need_backward_dw():
                context.layer.wgrad_store.context.put((flat, flat_x))
                return None, gradient @ weight, None
            return None, gradient @ weight, flat.t() @ flat_x

    def __init__(self, dtype, *, delay):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=dtype))
        self.wgrad_store, self._hooks = self.Store(delay), []
        if delay:
            self.weight.skip_backward_post_hook = True

    def need_backward_dw(self):
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self._hooks.append(hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self):
        for hook in self._hooks:
            hook()

    def backward_dw(self):
        flat, flat_x = self.wgrad_store.context.get_nowait()
        self.weight.grad = flat.t() @ flat_x
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def forward(self, x):
        return self.Function.apply(self, x, self.weight)


class Engine(torch.nn.Module):
    """Layers of Transformer Engine beside a local one."""

    def __init__(self, its_config):
        super().__init__()
        self.config = its_config
        delay = split_backward.DistributedDataParallel.__init__ is not PLAIN  # as its layers are built when the config says so
        self.first, self.second = (Delayed(its_config.params_dtype, delay=delay) for _ in range(2))
        self.local = ColumnParallelLinear(WIDTH, WIDTH, config=its_config, init_method=torch.nn.init.xavier_normal_, gather_output=False)

    def forward(self, x):
        return self.local(self.second(torch.tanh(self.first(x))))[0]


class Fused(torch.nn.Module):
    """As a TEGroupedMLP that runs fused operations: they are no submodules, their queues are theirs, and DDP's hooks are the layers'."""

    def __init__(self, its_config):
        super().__init__()
        self.config = its_config
        self.layer = Delayed(its_config.params_dtype, delay=split_backward.DistributedDataParallel.__init__ is not PLAIN)
        self._fused_ops = None
        if self.layer.need_backward_dw():
            self.layer.wgrad_store, store = None, self.layer.wgrad_store
            self._store = [store]

    def forward(self, x):
        if self._fused_ops is None and hasattr(self, "_store"):  # made by the first forward
            operation = Delayed(x.dtype, delay=True)
            operation.weight = self.layer.weight
            operation.wgrad_store = self._store[0]
            self._fused_ops = (torch.nn.Sequential(operation, torch.nn.Identity(), torch.nn.Identity()),)
        return self._fused_ops[0](x) if self._fused_ops else self.layer(x)

    def backward_dw(self):
        self._fused_ops[0][0].backward_dw()
        self.layer._trigger_wgrad_accumulation_and_reduce_hooks()


PLAIN = DistributedDataParallel.__init__
MODELS = {kind.__name__: kind for kind in (Model, Twice, Tied, Mixed, Borrowed, Halves, Recomputed, Frozen, Rows, NoBias, Engine, Fused)}


def wrapped(kind, *, dtype, overlap, fused, split, collective=None):
    from jobs import splitting

    with ExitStack() as stack:
        if split:
            stack.enter_context(splitting())
        its_config = config(dtype)
        model = MODELS[kind](its_config)
        ddp = DistributedDataParallel(its_config, DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, grad_reduce_in_fp32=dtype != torch.float32, bucket_size=None), model)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = fused
        if collective is not None and hasattr(module, collective):
            setattr(module, collective, True)  # over a group of one rank
    return ddp


def plain(ddp, inputs):
    for x in inputs:
        ddp(x).float().square().sum().backward()


def late(ddp, inputs, *, lag):
    """I of each, and W `lag` microbatches later."""
    [chunk] = split_backward.chunks_of([ddp])
    for m, x in enumerate(inputs):
        output = ddp(x).float().square().sum()
        with chunk.deferring(m):
            output.backward()
        if m >= lag:
            chunk.run(m - lag)
    for m in range(max(0, len(inputs) - lag), len(inputs)):
        chunk.run(m)
    chunk.check_empty()


def eager(ddp, inputs):
    """As Megatron's own schedules: what layers of Transformer Engine put off is computed after each backward."""
    tensor_config = mock.Mock(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=False)
    for x in inputs:
        schedules.backward_step(x, ddp(x).float().square().sum(), None, tensor_config)


@job
def small(*, kind, dtype="float32", overlap=False, fused=False, lag=2, way="late", collective=None, break_it=False):
    """The first parameter or input whose gradient after three microbatches isn't bitwise the plain backward's; and what was split at the end."""
    dtype, results, split_at_end = getattr(torch, dtype), [], None
    layers.fused_weight_gradient_mlp_cuda = Kernels
    for split in (False, True):
        ddp = wrapped(kind, dtype=dtype, overlap=overlap, fused=fused, split=split, collective=collective)
        generator = torch.Generator().manual_seed(6)
        inputs = [torch.randn(LENGTH, BATCH, WIDTH, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
        ddp.zero_grad_buffer()
        if split:
            hooks = mock.patch.object(SplitLinear, "_accumulated", SplitLinear.close) if break_it else ExitStack()
            with ddp.no_sync() if overlap else ExitStack(), hooks:
                eager(ddp, inputs) if way == "eager" else late(ddp, inputs, lag=lag)
            split_at_end = sorted(name for name, module in ddp.module.named_modules() if isinstance(module, SplitLinear) and not module._whole)
        else:
            with ddp.no_sync() if overlap else ExitStack():
                plain(ddp, inputs)
        results.append({name: p.main_grad.clone() for name, p in ddp.module.named_parameters() if p.requires_grad}
                       | {f"input {m}": x.grad for m, x in enumerate(inputs)})
    whole, split = results
    differences = (f"{name}: {(whole[name] - split[name]).abs().max():.3g}" for name in whole if not torch.equal(whole[name], split[name]))
    return next(differences, None), split_at_end


@job
def written_in_place():
    """What W says if the gradient that an I saved is written over before it."""
    ddp = wrapped("Model", dtype=torch.float32, overlap=False, fused=False, split=True)
    [chunk] = split_backward.chunks_of([ddp])
    output = ddp(torch.randn(LENGTH, BATCH, WIDTH)).square().sum()
    with chunk.deferring(0):
        output.backward()
    ddp.module.first._queue[0][0].output_gradient.mul_(2)
    try:
        chunk.run(0)
    except RuntimeError as error:
        return str(error)
    return None
