"""Which Megatron models can be captured as programs: what cannot is refused by name, with the rule and the way out."""

from collections.abc import Callable
from typing import Any

import torch

from rrfp.errors import ConfigurationError

_KNOWN = set(
    "GPTModel LanguageModelEmbedding VocabParallelEmbedding Embedding RotaryEmbedding TransformerBlock TransformerLayer ModuleList SelfAttention"
    " DotProductAttention FusedScaleMaskSoftmax Dropout ColumnParallelLinear RowParallelLinear LayerNorm RMSNorm MLP IdentityOp IdentityFuncOp"
    " MoELayer TopKRouter SequentialMLP SharedExpertMLP".split()
)
"""Classes of modules that tests/megatron/test_annotations.py captures. A new one may write what outlasts a call, or wait for a value."""

_SIZES = {
    "tensor_model_parallel_size": "its collectives would be traced as one process'", "context_parallel_size": "a sequence is whole here",
    "pipeline_model_parallel_size": "a capture takes the whole model, and `place` cuts it",
    "expert_model_parallel_size": "a capture takes all experts, and `shard` cuts them",
}  # fmt: skip

_PADDED = "what lies in no fixed shape cannot be traced; set moe_pad_expert_input_to_capacity and moe_expert_capacity_factor" \
          " (num_moe_experts / moe_router_topk drops nothing)"

_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda c: c.hidden_dropout > 0, "hidden_dropout", "a program's order must not change what is drawn; set it to 0"),
    (lambda c: c.attention_dropout > 0, "attention_dropout", "a program's order must not change what is drawn; set it to 0"),
    (lambda c: c.recompute_granularity is not None, "recompute_granularity", "a trace keeps what it computes; leave it out"),
    (lambda c: c.cpu_offloading or c.fine_grained_activation_offloading, "offloading of activations", "its hooks cannot be traced; leave it out"),
    (lambda c: c.cuda_graph_impl != "none", "cuda_graph_impl", "a trace cannot hold a graph; leave it at none"),
    (lambda c: bool(c.fp8 or c.fp4), "fp8 and fp4", "they need Transformer Engine, which cannot be traced; leave them out"),
    (lambda c: c.masked_softmax_fusion, "masked_softmax_fusion", "is a compiled kernel; set it to False"),
    (lambda c: c.apply_rope_fusion, "apply_rope_fusion", "is a compiled kernel; set it to False"),
    (lambda c: c.qk_clip or c.log_max_attention_logit, "qk_clip and log_max_attention_logit", "they keep values beside the model; leave them out"),
)  # fmt: skip

_REFUSED_EXPERTS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda c: not c.moe_pad_expert_input_to_capacity, "how many tokens an expert gets", _PADDED),
    (lambda c: c.moe_token_dispatcher_type != "alltoall", "moe_token_dispatcher_type", "must be alltoall"),
    (lambda c: c.add_bias_linear, "add_bias_linear with experts", "a bias is weighed apart; set it to False"),
    (lambda c: c.moe_router_load_balancing_type != "none" and _any(c.moe_aux_loss_coeff), "moe_aux_loss_coeff",
     "its gradient is added in a hand-written backward, which a trace loses; set it to 0"),
    (lambda c: c.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"), "moe_router_load_balancing_type",
     "is computed without gradients or keeps values; use none"),
    (lambda c: bool(c.moe_z_loss_coeff), "moe_z_loss_coeff", "its gradient is added in a hand-written backward, which a trace loses; leave it out"),
    (lambda c: c.moe_router_enable_expert_bias, "moe_router_enable_expert_bias", "counts tokens in a buffer; leave it out"),
    (lambda c: c.moe_input_jitter_eps is not None or c.moe_router_force_load_balancing or c.moe_router_force_biased is not None,
     "moe_input_jitter_eps and forced routing", "a program's order must not change what is drawn; leave them out"),
    (lambda c: c.moe_permute_fusion or c.moe_router_fusion, "moe_permute_fusion and moe_router_fusion", "are compiled kernels; set them to False"),
    (lambda c: c.moe_apply_probs_on_input, "moe_apply_probs_on_input", "experts' outputs are weighed here; set it to False"),
    (lambda c: c.moe_shared_expert_overlap, "moe_shared_expert_overlap", "the program's order decides what overlaps; set it to False"),
    (lambda c: c.moe_latent_size is not None, "moe_latent_size", "is not known to trace; leave it out"),
)  # fmt: skip


def _any(coefficient: float | list[float]) -> bool:
    return any(coefficient) if isinstance(coefficient, list) else bool(coefficient)


def check_traceable(model: torch.nn.Module) -> None:
    """Raises ConfigurationError naming the module or the option of a Megatron model that cannot be captured, and the way out."""
    if type(model).__name__ != "GPTModel":
        raise ConfigurationError(f"model: is a {type(model).__name__}; give Megatron-core's GPTModel itself, not wrapped")
    if "forward" in vars(model):
        raise ConfigurationError("model: is annotated already; annotate a model once")
    config = model.config
    if not (model.pre_process and model.post_process):
        raise ConfigurationError("model: is one pipeline stage's; build it with pre_process and post_process, a capture takes the whole model")
    for option, rule in _SIZES.items():
        if (size := getattr(config, option)) > 1:
            raise ConfigurationError(f"model: {option} {size}: {rule}; build the model with 1")
    for applies, option, rule in (*_REFUSED, *(_REFUSED_EXPERTS if config.num_moe_experts else ())):
        if applies(config):
            raise ConfigurationError(f"model: {option}: {rule}")
    for name, module in model.named_modules():
        if type(module).__name__ not in _KNOWN:
            raise ConfigurationError(f"model: {name}: is a {type(module).__name__}, which is not known to trace; build the model with"
                                     " get_gpt_layer_local_spec, with torch's norms")
