"""What the engine takes, what it refuses, and what it leaves to Megatron: by name, with the rule and the way out."""

import inspect
from collections.abc import Callable
from typing import Any

from rrfp.errors import ConfigurationError

OLDEST, NEWEST = (0, 17), (0, 19)

_KEYWORDS = {
    "forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length", "forward_only",
    "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection", "force_all_reduce",
}
"""The keyword contract of `forward_backward_func` (megatron.core.pipeline_parallel.schedules, 0.17.1 to 0.19.x)."""


def check_megatron() -> None:
    """Raises ConfigurationError when the installed megatron-core is one whose schedule contract we don't know."""
    try:
        import megatron.core as core
        from megatron.core.pipeline_parallel import schedules
    except ImportError as error:
        raise ConfigurationError(f"megatron-core can't be imported ({error}): pip install 'megatron-core>=0.17.1,<0.20'") from error
    version = tuple(int(part) for part in core.__version__.split(".")[:2])
    if not OLDEST <= version <= NEWEST:
        raise ConfigurationError(f"megatron-core {core.__version__}: supported are 0.17.1 to 0.19.x; install one of those")
    for function in (schedules.forward_backward_pipelining_without_interleaving, schedules.forward_backward_pipelining_with_interleaving):
        unknown = set(inspect.signature(getattr(function, "__wrapped__", function)).parameters) - _KEYWORDS
        if unknown:
            raise ConfigurationError(
                f"megatron-core {core.__version__}: its schedules take {', '.join(sorted(unknown))}, which this release of rrfp doesn't know; "
                "install megatron-core 0.19.x"
            )


# What a later release of this package may take. Each: a test on the config, and the option as a user spells it.
_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda c: (getattr(c, "expert_gtp_weight_remat_size", None) or 1) > 1, "--expert-tensor-parallel-num-weight-shards",
     "its gathers run inside actions over ranks with other data"),
    (lambda c: getattr(c, "gtp_weight_remat_size", 1) not in (None, 1), "GTP (gtp_weight_remat_size)",
     "its gathers run inside actions over ranks with other data"),
    (lambda c: getattr(c, "use_megatron_fsdp", False), "--use-megatron-fsdp", "its collectives run inside actions over data-parallel ranks"),
    (lambda c: (getattr(c, "fp8", None) and getattr(c, "fp8_recipe", None) == "delayed" and not getattr(c, "tp_only_amax_red", False)),
     "--fp8-recipe delayed without --tp-only-amax-red", "its amax reduction runs inside actions over data-parallel ranks"),
    (lambda c: "global_aux_loss" in str(getattr(c, "moe_router_load_balancing_type", "")), "--moe-router-load-balancing-type global_aux_loss",
     "its reduction runs inside actions over data-parallel ranks"),
    (lambda c: getattr(c, "inprocess_restart", False), "--inprocess-restart",
     "after a failure every process ends, so that none waits for a lost one, and a new one starts (torchrun --max-restarts N)"),
)

# What Megatron's own schedule does better, or alone: one line, and Megatron runs it.
_DELEGATED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda c: getattr(c, "hybrid_context_parallel", False), "--hybrid-context-parallel", "it has a schedule of its own"),
    (lambda c: getattr(c, "overlap_moe_expert_parallel_comm", False), "--overlap-moe-expert-parallel-comm", "it has a schedule of its own"),
    (lambda c: getattr(c, "cuda_graph_impl", "none") not in (None, "none"), "--cuda-graph-impl", "graphs are captured in one fixed order"),
    (lambda c: getattr(c, "moe_paged_stash", False), "moe_paged_stash", "it records one order and asserts it later"),
    (lambda c: getattr(c, "fine_grained_activation_offloading", False), "--fine-grained-activation-offloading", "it replays one recorded order"),
    (lambda c: getattr(c, "cpu_offloading", False), "--cpu-offloading", "it runs without a pipeline only"),
)


def refusal(config: Any, *, order: str = "microbatch", split: bool = False) -> str | None:
    """One line if a job with this Megatron config can't run by readiness and must not run silently otherwise; else None.

    split: the backward is split, for which `delay_wgrad_compute` is set by this package.
    """
    if getattr(config, "delay_wgrad_compute", False) and not split:
        return "--pipeline-schedule rrfp with --delay-wgrad-compute: nothing would run what is put off; use --rrfp-split-backward instead"
    for applies, option, rule in _REFUSED:
        if applies(config):
            return f"--pipeline-schedule rrfp with {option}: {rule}; use --pipeline-schedule 1f1b"
    if getattr(config, "defer_embedding_wgrad_compute", False) and order == "free":
        return ("--rrfp-order free with --defer-embedding-wgrad-compute: activations and gradients are paired by order there; "
                "use --rrfp-order microbatch")
    return None


def delegation(config: Any) -> str | None:
    """Why Megatron's own schedule runs this call instead, or None."""
    for applies, option, reason in _DELEGATED:
        if applies(config):
            return f"{option}: {reason}"
    return None


def check_call(config: Any, *, order: str, split: bool = False) -> None:
    """Raises ConfigurationError for what `refusal` names."""
    if (line := refusal(config, order=order, split=split)) is not None:
        raise ConfigurationError(line)
