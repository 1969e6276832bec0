"""The torch half of CPU mode: `torch.cuda` stand-ins, device arguments, gloo for nccl. Used by `cpu.enable` only.

Three facts decide the shape of this file.

* Megatron writes "cuda" as a literal in some places, `torch.cuda.current_device()` in others, and formats the latter
  into strings. So `current_device()` stays an int, and the tensor factories turn *any* CUDA or integer device into the CPU.
* torch asks itself whether CUDA is there (optimizers, data loaders, autograd, distributed checkpoints) and must hear the
  truth; Megatron asks the same function and must hear yes. The answer depends on the module that calls.
* Dropout draws from the CPU generator, so that generator *is* the CUDA generator: Megatron's RNG tracker then governs
  dropout, and activation recomputation replays it, exactly as on a GPU.
"""

import contextlib
import functools
import os
import resource
import sys
import time
import types
from collections import defaultdict

import torch

from rrfp.errors import ConfigurationError

CPU = torch.device("cpu")

_FACTORIES = (
    "empty zeros ones full tensor as_tensor asarray scalar_tensor arange range linspace logspace eye rand randn randint randperm"
    " normal empty_strided triu_indices tril_indices empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
).split()
_METHODS = "new_empty new_zeros new_ones new_full new_tensor new_empty_strided".split()
_TENSOR_TYPES = "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()


def _nothing():
    """A new function that does nothing: the answer to every call that a CPU need not answer.

    New each time, since torch._dynamo refuses to be imported when one function stands under two names of torch.
    """
    return lambda *args, **kwargs: None


def _caller_is(package: str, *, depth: int = 2) -> bool:
    """Whether the function `depth` frames up was defined in `package`."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name == package or name.startswith(package + ".")


class Stream:
    """A stream on which everything has already run: CPU work is done when its call returns."""

    priority_range = staticmethod(lambda: (0, -1))

    def __init__(self, device=None, priority=0, **kwargs):
        self.device, self.priority, self.cuda_stream, self.stream_id = CPU, priority, 0, 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0


class Event:
    """A CUDA event as a reading of the clock."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._time = None

    def record(self, stream=None):
        self._time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end) -> float:
        """Milliseconds between the two records, as torch.cuda.Event.elapsed_time."""
        if self._time is None or end._time is None:
            raise RuntimeError("both events must be recorded before their elapsed time is asked for")
        return (end._time - self._time) * 1e3


class _Context(contextlib.ContextDecorator):
    """A context manager that does nothing, whatever it is given: torch.cuda.device, torch.cuda.stream, nvtx.range."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class CUDAGraph:
    """Refuses: a CUDA graph has no meaning on a CPU."""

    def __init__(self, *args, **kwargs):
        raise ConfigurationError("CUDA graphs do not exist in CPU mode: leave --cuda-graph-impl at none")


def resident_bytes() -> int:
    """This process's resident memory, in bytes: what the memory_* functions of torch.cuda report in CPU mode."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """The largest resident memory so far, in bytes. The operating system keeps it: it cannot be reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stand_in_for_cuda(device_count: int):
    """Replace `torch.cuda` functions by their CPU meaning; report `device_count` devices."""
    cuda, physical = torch.cuda, os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    # 8.0 (Ampere): old enough that no Hopper-only path is taken, new enough for bf16
    properties = types.SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=physical, multi_processor_count=os.cpu_count(), warp_size=32, uuid="cpu"
    )
    _set(
        cuda,
        is_available=lambda: not _caller_is("torch"),
        is_initialized=lambda: True,
        is_bf16_supported=lambda *args, **kwargs: True,
        is_current_stream_capturing=lambda: False,
        device_count=lambda: device_count,
        current_device=lambda: 0,
        get_device_name=lambda device=None: properties.name,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
        get_device_properties=lambda device=None: properties,
        _lazy_call=lambda callback, **kwargs: callback(),
        device=_Context,
        **_named("init _lazy_init set_device synchronize empty_cache ipc_collect set_stream", _nothing),
    )
    _set(
        cuda,
        Stream=Stream,
        ExternalStream=Stream,
        Event=Event,
        CUDAGraph=CUDAGraph,
        stream=_Context,
        StreamContext=_Context,
        **_named("current_stream default_stream", lambda: lambda device=None: Stream()),
    )
    _set(cuda.nvtx, range=_Context, **_named("range_push range_pop range_start range_end mark", _nothing))
    _set(
        cuda,
        memory_stats=lambda device=None: defaultdict(int, {"allocated_bytes.all.current": resident_bytes()}),
        mem_get_info=lambda device=None: (physical - resident_bytes(), physical),
        memory_summary=lambda *args, **kwargs: "",
        **_named("memory_allocated memory_reserved device_memory_used", lambda: lambda device=None: resident_bytes()),
        **_named("max_memory_allocated max_memory_reserved", lambda: lambda device=None: peak_bytes()),
        **_named("reset_peak_memory_stats reset_max_memory_allocated", _nothing),
        **_named("utilization power_draw temperature clock_rate", lambda: lambda device=None: 0),
    )
    for name in _TENSOR_TYPES:
        setattr(cuda, name + "Tensor", getattr(torch, name + "Tensor"))
    _share_generator(device_count)
    if hasattr(torch, "accelerator"):  # asked by torch.optim, data loaders and distributed checkpoints: the truth
        _set(
            torch.accelerator,
            is_available=lambda: False,
            device_count=lambda: 0,
            current_accelerator=lambda check_available=False: None,
            synchronize=_nothing(),
        )


def _share_generator(device_count: int):
    """One generator for both devices: see the head of this file."""
    generator = torch.default_generator
    functions = dict(
        default_generators=(generator,) * device_count,
        get_rng_state=lambda device="cuda": generator.get_state(),
        set_rng_state=lambda state, device="cuda": generator.set_state(state) and None,
        get_rng_state_all=lambda: [generator.get_state()] * device_count,
        set_rng_state_all=lambda states: generator.set_state(list(states)[0]) and None,
        manual_seed=lambda seed: generator.manual_seed(int(seed)) and None,
        manual_seed_all=lambda seed: generator.manual_seed(int(seed)) and None,
        initial_seed=lambda: generator.initial_seed(),
        seed=_nothing(),  # torch.seed() has seeded the one generator already
        seed_all=_nothing(),
    )
    _set(torch.cuda, **functions)
    _set(torch.cuda.random, **{name: f for name, f in functions.items() if name != "default_generators"})
    if hasattr(torch._C, "_cuda_setRNGState"):  # a CUDA build without a GPU: Megatron prefers this one
        torch._C._cuda_setRNGState = generator.set_state


def rewrite_devices():
    """Tensor factories, `.to`, `.cuda` and `torch.load` take a CUDA (or integer) device to mean the CPU."""
    for name in _FACTORIES:
        _wrap(torch, name)
    for name in _METHODS:
        _wrap(torch.Tensor, name)
    _wrap(torch.Tensor, "to", positional=True)
    _wrap(torch.nn.Module, "to", positional=True)
    _wrap(torch.nn.Module, "to_empty")
    _wrap(torch, "load", keyword="map_location")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = _nothing()
    torch.Tensor.type = _tensor_type


def _on_cpu(device):
    if type(device) is torch.device:
        return CPU if device.type == "cuda" else device
    if type(device) is int or (type(device) is str and (device == "cuda" or device.startswith("cuda:"))):
        return CPU
    return device


def _wrap(owner, name: str, *, keyword: str = "device", positional: bool = False):
    function = getattr(owner, name, None)
    if function is None:  # not every torch has every factory
        return

    @functools.wraps(function)
    def on_cpu(*args, **kwargs):
        if keyword in kwargs:
            kwargs[keyword] = _on_cpu(kwargs[keyword])
        if kwargs.get("pin_memory"):  # page-locking needs an accelerator
            kwargs["pin_memory"] = False
        if positional:  # `.to` takes no integer but a device index (bool is another type)
            args = args[:1] + tuple(map(_on_cpu, args[1:]))
        return function(*args, **kwargs)

    setattr(owner, name, on_cpu)


_torch_type = torch.Tensor.type


def _tensor_type(self, dtype=None, *args, **kwargs):
    """Tensor.type. Megatron's optimizers compare its name with 'torch.cuda.FloatTensor': they, and only they, see that prefix."""
    if isinstance(dtype, str):
        return _torch_type(self, dtype.replace("torch.cuda.", "torch."), *args, **kwargs)
    if dtype is not None:
        return _torch_type(self, dtype, *args, **kwargs)
    name = _torch_type(self)
    return name.replace("torch.", "torch.cuda.", 1) if _caller_is("megatron") and not name.startswith("torch.cuda.") else name


def gloo_for_nccl():
    """Process groups asked for as nccl become gloo; arguments that only nccl takes are dropped."""
    dist, c10d = torch.distributed, torch.distributed.distributed_c10d
    new_group, init_process_group, barrier, all_to_all_single = (
        dist.new_group, dist.init_process_group, dist.barrier, dist.all_to_all_single
    )

    @functools.wraps(new_group)
    def gloo_group(*args, **kwargs):
        kwargs = _gloo_options(kwargs)
        if kwargs.get("backend") in ("nccl", "ucc"):
            kwargs["backend"] = "gloo"
        return new_group(*args, **kwargs)

    @functools.wraps(init_process_group)
    def gloo_init(backend=None, *args, **kwargs):
        if not args and kwargs.get("store") is None and (start := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
            # torchrun keeps one store over its restarts, in which gloo would find the addresses of processes that are gone.
            store, kwargs["rank"], kwargs["world_size"] = next(dist.rendezvous("env://"))
            kwargs["store"], kwargs["init_method"] = dist.PrefixStore(f"start{start}", store), None
        return init_process_group(backend if backend in ("gloo", "mpi", "fake") else "gloo", *args, **_gloo_options(kwargs))

    @functools.wraps(barrier)
    def gloo_barrier(group=None, async_op=False, device_ids=None):
        return barrier(group=group, async_op=async_op)

    @functools.wraps(all_to_all_single)
    def gloo_all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        # Megatron makes lists of the sizes only when the tensor is on a GPU; gloo takes lists only
        sizes = (s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes))
        return all_to_all_single(output, input, *sizes, **kwargs)

    for module in (dist, c10d):
        _set(
            module,
            new_group=gloo_group,
            init_process_group=gloo_init,
            barrier=gloo_barrier,
            all_to_all_single=gloo_all_to_all_single,
        )


def _gloo_options(kwargs: dict) -> dict:
    return {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}


def no_compilation():
    """`torch.compile` returns its function unchanged: Megatron's jit_fuser then runs eagerly."""

    def compile(model=None, **kwargs):
        return model if model is not None else lambda function: function

    torch.compile = compile
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # for those who reach torch._dynamo directly


def own_generator_for_data_loaders():
    """A DataLoader draws the seed of its workers from the CPU generator. Here that would shift the dropout behind it, and a
    resumed run, which makes its loaders after the generator's state is restored, would leave the path of the first: give
    loaders a generator of their own."""
    build = torch.utils.data.DataLoader.__init__
    generator = torch.Generator()

    @functools.wraps(build)
    def with_generator(self, *args, **kwargs):
        if kwargs.get("generator") is None:
            kwargs["generator"] = generator
        build(self, *args, **kwargs)

    torch.utils.data.DataLoader.__init__ = with_generator


def _named(names: str, make) -> dict:
    return {name: make() for name in names.split()}


def _set(owner, **attributes):
    for name, value in attributes.items():
        setattr(owner, name, value)
