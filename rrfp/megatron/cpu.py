"""Megatron on the CPU: `enable()` before megatron is imported, `patch_megatron()` after.

Megatron assumes CUDA everywhere. CPU mode answers `torch.cuda` calls with their CPU meaning, turns CUDA device arguments
into the CPU and nccl groups into gloo, and mends the few places where megatron-core needs Transformer Engine, Apex or a
compiler that a CPU machine lacks. No Megatron source is edited. Supported: megatron-core 0.17.1 to 0.19.x.

It is a feature of its own: nothing here runs unless `enable()` is called, and it cannot be undone within a process.
`docs/cpu.md` lists every change. The torch half lives in `cpu_torch.py`.
"""

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import warnings

from rrfp.errors import ConfigurationError

_enabled = False
_patched = False


def is_enabled() -> bool:
    """Whether this process is in CPU mode."""
    return _enabled


def enable(*, device_count: int | None = None):
    """Switch this process to CPU mode. Again is harmless.

    device_count: how many devices `torch.cuda.device_count()` reports; by default LOCAL_WORLD_SIZE (set by torchrun), else 1.
    Megatron skips its process groups and seeds when there are none.

    Raises ConfigurationError when megatron is imported already: its modules have bound `torch.cuda` names by then
    (megatron/core/tensor_parallel/random.py), and some would keep the real ones.
    """
    global _enabled
    if _enabled:
        return
    early = sorted(name for name in sys.modules if name.startswith(("megatron.core", "megatron.training")))
    if early:
        raise ConfigurationError(
            f"CPU mode must be enabled before megatron is imported, but {early[0]} is already there: "
            "call rrfp.megatron.cpu.enable() first, or start the script with `python -m rrfp --cpu`"
        )
    from rrfp.megatron import cpu_torch  # here, so that importing this module does not import torch

    # Megatron asserts it for tensor parallelism (arguments.py, validate_args); without a GPU it has no effect
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cpu_torch.stand_in_for_cuda(device_count or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    cpu_torch.rewrite_devices()
    cpu_torch.gloo_for_nccl()
    cpu_torch.no_compilation()
    cpu_torch.own_generator_for_data_loaders()
    _quiet()
    _enabled = True


def patch_megatron():
    """Mend what megatron-core can't do without Transformer Engine, Apex, a compiler or a GPU. Imports it. Again is harmless.

    Raises ConfigurationError unless `enable()` came first.
    """
    global _patched
    if not _enabled:
        raise ConfigurationError("patch_megatron() needs CPU mode: call rrfp.megatron.cpu.enable() first")
    if _patched:
        return
    _patched = True
    _no_compilation_of_helpers()
    _norm_under_sequence_parallelism()
    _norm_of_clip()
    _keep_outputs_while_gloo_sends()
    _checkpoint_worker_without_gpu()


def _quiet():
    """Silence the messages that CPU mode itself causes, and no others."""
    warnings.filterwarnings("ignore", message=".*pin_memory.* argument is set as true but no accelerator is found")
    # CudaRNGStatesTracker.fork compares the CPU generator before and after; here it is the CUDA generator and must change
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


def _no_compilation_of_helpers():
    """The wheel carries the dataset helpers compiled but no Makefile, and compile_helpers() ends the process when make fails.

    A source tree carries neither; an installed wheel's helpers serve it as well (a make of its own would need pybind11 and a
    python3-config of this very interpreter, which a virtual environment has not).
    """
    from megatron.core.datasets import utils

    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is None:
        if (compiled := _helpers_of_the_wheel()) is None:
            return
        specification = importlib.util.spec_from_file_location(name, compiled)
        sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[name])
    utils.compile_helpers = lambda: None


def _helpers_of_the_wheel():
    """The compiled helpers of an installed megatron-core, or None."""
    try:
        files = importlib.metadata.files("megatron-core") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    return next((file.locate() for file in files if file.match(f"megatron/core/datasets/helpers_cpp{suffix}")), None)


def _norm_under_sequence_parallelism():
    """WrappedTorchNorm refuses sequence parallelism since nobody marks its parameters for the gradient all-reduce: mark them."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    @functools.wraps(build)
    def marked(cls, config, *args, **kwargs):
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = build(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def _norm_of_clip():
    """Without Transformer Engine CLIPViTModel's default norm is torch's LayerNorm, which takes no `config`."""
    import torch
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = CLIPViTModel.__init__
    build.__defaults__ = tuple(WrappedTorchNorm if d is torch.nn.LayerNorm else d for d in build.__defaults__)


def _keep_outputs_while_gloo_sends():
    """Before 0.18 the interleaved schedule frees an output that gloo may still be sending: wrong losses. Keep it instead."""
    import megatron.core
    from megatron.core.model_parallel_config import ModelParallelConfig

    if tuple(int(part) for part in megatron.core.__version__.split(".")[:2]) >= (0, 18):
        return
    check = ModelParallelConfig.__post_init__

    @functools.wraps(check)
    def kept(self):
        check(self)
        if self.virtual_pipeline_model_parallel_size is not None:
            self.deallocate_pipeline_outputs = False

    ModelParallelConfig.__post_init__ = kept


def _checkpoint_worker_without_gpu():
    """Asynchronous saving (`--async-save --use-persistent-ckpt-worker`) hands tensors to a process of its own, by reference.

    On a GPU the worker's copy to the host is the snapshot. A tensor on the CPU arrives in shared memory, and "copying" it to
    the CPU copies nothing: training would go on writing what is being saved. So the worker copies for good; the trainer waits
    for that in any case (PersistentAsyncCaller.schedule_async_call).
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    PersistentAsyncCaller.async_loop = staticmethod(_checkpoint_worker)
    FileSystemWriterAsync.preload_tensors = staticmethod(_copy_of_buckets)


def _checkpoint_worker(*args, **kwargs):
    """The loop of the checkpoint worker, an interpreter that is not in CPU mode: all it asks torch.cuda for is its device."""
    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    PersistentAsyncCaller.async_loop(*args, **kwargs)


def _copy_of_buckets(write_buckets, non_blocking=True):
    """FileSystemWriterAsync.preload_tensors: the same buckets with their tensors copied."""
    return [
        (file_name, storage_key, (data, [(item, tensor.detach().clone()) for item, tensor in tensors]))
        for file_name, storage_key, (data, tensors) in write_buckets
    ]
