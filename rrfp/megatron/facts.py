"""What every rank of a pipeline must have alike, compared before the first action (`rrfp.comm.rendezvous.compare`).

Not compared, because they may differ: --rrfp-interface and --rrfp-trace (each host's own), patch releases of Python, builds (torch's `+cpu`
and `+cu128`; megatron-core puts the commit of whatever checkout it is run from after its `+`), numpy, pyzmq.
"""

import platform
from typing import Any

from rrfp.comm.rendezvous import Fact
from rrfp.megatron.options import Options

_FLAGS = ("hint", "mode", "limit", "memory_fraction", "order", "lanes", "split_backward", "max_pending_w", "agreement", "decide_ahead", "transport",
          "run_ahead", "timeout", "emulate", "inject")


def job_facts(options: Options, *, world_size: int, pipeline_size: int) -> dict[str, Fact]:
    """What is known when the pipeline connects: installed versions, flags, the size of the job."""
    import megatron.core
    import torch

    import rrfp

    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"rrfp": rrfp.__version__, "torch": torch.__version__, "megatron-core": megatron.core.__version__, "Python": python}
    facts = {name: Fact(version.partition("+")[0], f"install one {name} on all hosts") for name, version in versions.items()}
    for name in _FLAGS:
        flag = f"--rrfp-{name.replace('_', '-')}"
        facts[flag] = _option(flag, getattr(options, name))
    facts["the number of ranks in the job"] = Fact(world_size, "start all ranks with the same WORLD_SIZE")
    facts["--pipeline-model-parallel-size"] = _option("--pipeline-model-parallel-size", pipeline_size)
    return facts


def first_call_facts(
    config: Any, groups: Any, *, microbatches: int, micro_batch_size: int, seq_length: int, forward_only: bool, rows: str,
) -> dict[str, Fact]:
    """What the first call of the schedule adds.

    Args:
        config: Megatron's, of the model.
        groups: the process groups.
        rows: digest of the hint's rows, or why this rank refuses them.
    """
    facts = {
        "evaluation instead of training in the first call": Fact(forward_only, "call the schedule alike on every rank"),
        "the number of microbatches in the first call": Fact(
            microbatches, "give every rank the same --global-batch-size, --micro-batch-size and --rampup-batch-size"),
        "--micro-batch-size": _option("--micro-batch-size", micro_batch_size),
        "--seq-length": _option("--seq-length (of the decoder, if it has its own)", seq_length),
        "--hidden-size": _option("--hidden-size", getattr(config, "hidden_size", None)),
        "the pipeline's dtype": Fact(_dtype(getattr(config, "pipeline_dtype", None)), "give every rank the same --bf16 or --fp16"),
        "variable sequence lengths": Fact(
            bool(getattr(config, "variable_seq_lengths", False)), "give every rank the same model configuration"),
        "--num-layers-per-virtual-pipeline-stage (chunks per rank)": _option(
            "--num-layers-per-virtual-pipeline-stage", getattr(config, "virtual_pipeline_model_parallel_size", None) or 1),
        "the hint's rows": Fact(rows, "give every rank the same hint file; a registered hint must be a function of its HintContext alone"),
    }
    sizes = {"tp": "--tensor-model-parallel-size", "cp": "--context-parallel-size", "dp_cp": "the number of data-parallel replicas"}
    for name, option in sizes.items():
        if (group := getattr(groups, name, None)) is not None:
            facts[option] = Fact(group.size(), "start all ranks with the same parallelism")
    return facts


def _option(flag: str, value: Any) -> Fact:
    return Fact(value, f"give every rank the same {flag}")


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
