"""The Megatron room: the only one, with `rrfp.multimodal`, that imports megatron. Importing it does not; `install` does."""

import argparse
import dataclasses
import sys
from collections.abc import Callable

from rrfp.errors import ConfigurationError
from rrfp.megatron.arguments import add_arguments, options_from
from rrfp.megatron.options import Options
from rrfp.placement import Placement
from rrfp.policy import BUILT_IN

__all__ = ["Options", "add_arguments", "install", "install_from_args", "uninstall"]

_INTERLEAVING = "forward_backward_pipelining_with_interleaving"
_WITHOUT_INTERLEAVING = "forward_backward_pipelining_without_interleaving"

_installed: Options | None = None
_undo: list[Callable[[], None]] = []


def install(*, cpu: bool = False, **options) -> None:
    """Make Megatron's `get_forward_backward_func` return this package's schedule (or Megatron's own, watched).

    Call it before the model is built; with `cpu=True` before megatron is imported. `options` are those of `Options`. Again with the
    same options is harmless, with others replaces them.

    Raises:
        ConfigurationError: an option is refused, megatron-core is missing or of an unknown release, or there is no GPU and `cpu` is
            not given.
    """
    known = {field.name for field in dataclasses.fields(Options) if field.init}
    if unknown := sorted(set(options) - known):
        raise ConfigurationError(f"rrfp.install({', '.join(unknown)}=...): no such option; there are {', '.join(sorted(known))} and cpu")
    _install(Options(**options), cpu=cpu)


def install_from_args(args: argparse.Namespace) -> None:
    """As `install`, from Megatron's parsed and validated arguments (with the flags of `add_arguments`).

    Raises:
        ConfigurationError: as `install`, or the job uses something that can't run by readiness.
    """
    options = options_from(args)
    if options.schedule == "rrfp":
        from rrfp.megatron.compatibility import refusal

        line = refusal(args, order=options.order)
        if line is None and options.split_backward and args.pipeline_model_parallel_size > 1:
            from rrfp.megatron import split_backward

            line = split_backward.refusal(args)
        if line is not None:
            raise ConfigurationError(line)
        _check_at_start(options, args)
    _install(options)


def check_parsed(args: argparse.Namespace) -> None:
    """What must be refused before Megatron validates its arguments, since it acts on it by then. Raises ConfigurationError."""
    from rrfp.megatron.compatibility import refusal

    if args.pipeline_schedule == "rrfp" and getattr(args, "inprocess_restart", False):
        raise ConfigurationError(refusal(argparse.Namespace(inprocess_restart=True)))


def _check_at_start(options: Options, args: argparse.Namespace) -> None:
    """Refuse now what a call would be refused for later: a list that does not fit, for any number of microbatches this run can have."""
    placement = Placement.looped(args.pipeline_model_parallel_size, getattr(args, "virtual_pipeline_model_parallel_size", None) or 1)
    sizes = sorted(_microbatches(args))
    if options.mode == "ready" and options.hint in BUILT_IN:
        sizes = sizes[-1:]  # these exist for any number
    for microbatches in sizes:
        options.policy_for(args).scheduler(placement, 0, microbatches)


def _microbatches(args: argparse.Namespace) -> set[int]:
    """Every number of microbatches per call that batch sizes, ramp-up and evaluation sizes lead to."""
    sizes = {args.global_batch_size}
    if getattr(args, "rampup_batch_size", None):
        start, increment = map(int, args.rampup_batch_size[:2])
        sizes |= set(range(start, args.global_batch_size, increment))
    if getattr(args, "step_batch_size_schedule", None):
        # "0:768 250B:1536": from so many samples (or tokens) on, so large a batch.
        sizes = {int(step.rpartition(":")[2]) for step in args.step_batch_size_schedule.split()}
    batches = {(size, args.micro_batch_size) for size in sizes}
    batches.add((getattr(args, "eval_global_batch_size", None) or args.global_batch_size,
                 getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size))
    return {max(1, size // (micro * args.data_parallel_size)) for size, micro in batches}


def _install(options: Options, *, cpu: bool = False) -> None:
    global _installed
    if options == _installed:
        return
    from rrfp.megatron import cpu as cpu_mode

    if cpu:
        cpu_mode.enable()
    _check_device(cpu_mode.is_enabled())
    from rrfp.megatron.compatibility import check_megatron

    check_megatron()
    if cpu_mode.is_enabled():
        cpu_mode.patch_megatron()
    elif options.schedule == "rrfp" and options.transport == "nccl":
        from rrfp.comm.nccl import check_environment

        check_environment()  # now: NCCL reads its settings when the job's first communicator is made
    uninstall()
    from megatron.core.pipeline_parallel import schedules

    originals = {name: getattr(schedules, name) for name in (_WITHOUT_INTERLEAVING, _INTERLEAVING)}
    if options.schedule == "rrfp":
        from rrfp.megatron.forward_backward import make_forward_backward

        for name, original in originals.items():
            _replace(schedules, name, make_forward_backward(options, original=original, interleaved=name == _INTERLEAVING))
        _connect_with_groups(options)
        if options.split_backward:
            from rrfp.megatron import split_backward

            split_backward.install(_replace)
        from rrfp.megatron.checkpoint_helper import watch_helper

        _undo.append(watch_helper())
    elif options.instruments:
        from rrfp.megatron.baseline import watch

        _undo.append(watch(options, originals=originals))
    _installed = options


def uninstall() -> None:
    """Put Megatron's own functions back, and close this process' pipeline."""
    global _installed
    while _undo:
        _undo.pop()()
    _installed = None


def _check_device(cpu_enabled: bool) -> None:
    import torch

    if not cpu_enabled and not torch.cuda.is_available():
        raise ConfigurationError(
            "this machine has no usable GPU (torch.cuda.is_available() is False): run `python -m rrfp --cpu SCRIPT ...`, or "
            "rrfp.install(cpu=True), to train on the CPU" + (" (--cpu goes before the script)" if "--cpu" in sys.argv[1:] else ""))


def _replace(owner, name: str, value) -> None:
    previous = getattr(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, previous))


def _connect_with_groups(options: Options) -> None:
    """Connect the pipeline as soon as its group exists, so that a rank lost while the model is built is seen too."""
    from megatron.core import parallel_state

    from rrfp.megatron import runtime

    def connect() -> None:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if ranks == 1:
            if torch_rank() == 0:
                print("[rrfp] --pipeline-schedule rrfp with --pipeline-model-parallel-size 1: one stage is no pipeline; "
                      "Megatron's own schedule runs", file=sys.stderr, flush=True)
        else:
            chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
            runtime.runtime_for(options, parallel_state.get_pipeline_model_parallel_group(), chunks=chunks)

    def initialize_model_parallel(*args, **kwargs):
        result = original(*args, **kwargs)
        connect()
        return result

    original = parallel_state.initialize_model_parallel
    _replace(parallel_state, "initialize_model_parallel", initialize_model_parallel)
    _undo.append(runtime.close_all)
    if parallel_state.model_parallel_is_initialized():
        connect()


def torch_rank() -> int:
    import torch

    return torch.distributed.get_rank()
