"""Megatron's experts as one parameter per weight matrix, and their capacity as a whole number for every batch size.

Megatron's router, its dispatcher (padded to capacity) and its combination run as they are. Its `SequentialMLP` holds a module for each
expert, which no device can have a piece of.
"""

import functools
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from rrfp.errors import ConfigurationError
from rrfp.program.capture import annotate


class StackedExperts(torch.nn.Module):
    """All experts of a layer at once. Same mathematics as Megatron's `SequentialMLP` without biases, with its weights.

    Parameters: `fc1`, experts x hidden x ffn (twice that for gated units); `fc2`, experts x ffn x hidden.
    """

    def __init__(self, experts: torch.nn.Module):
        super().__init__()
        local = experts.local_experts
        self.config = experts.config
        self.fc1 = torch.nn.Parameter(torch.stack([expert.linear_fc1.weight.detach().T for expert in local]))
        self.fc2 = torch.nn.Parameter(torch.stack([expert.linear_fc2.weight.detach().T for expert in local]))

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        """tokens: experts * capacity x hidden, each expert's next to each other. weights: what the router gives each of them."""
        slots = tokens.view(self.config.num_moe_experts, -1, tokens.shape[-1])
        with annotate("EP"):
            made = torch.bmm(self._activate(torch.bmm(slots, self.fc1)), self.fc2)
        return (made.view(tokens.shape) * weights.unsqueeze(-1)).to(tokens.dtype), None

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, linear = x.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return config.activation_func(gate) * (linear + config.glu_linear_offset)


def stack_experts(model: torch.nn.Module) -> None:
    """Prepare every `MoELayer` of a Megatron model for a trace, in place."""
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = StackedExperts(layer.mlp.experts)
            layer.mlp.token_dispatcher.num_local_experts = 1  # to it they are one: in one process there is nothing to sort by expert
            layer.mlp.router.gating = functools.partial(_gating, layer.mlp.router)


def _gating(router: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As `Router.gating`, which would move a weight to the GPU first."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router.config.moe_router_dtype, x.dtype)
    return F.linear(x.to(dtype), router.weight.to(dtype), None if router.bias is None else router.bias.to(dtype))


def capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """As `megatron.core.transformer.moe.moe_utils.get_capacity`, where it needs no rounding: then it grows with the batch, which is a symbol.

    num_tokens: tokens x experts per token.

    Raises:
        ConfigurationError: if it would have to be rounded.
    """
    share = Fraction(capacity_factor).limit_denominator(2**16) / num_experts
    if not statically_known_true(num_tokens * share.numerator % share.denominator == 0):
        raise ConfigurationError(f"moe_expert_capacity_factor {capacity_factor}: sequence length x moe_router_topk x factor / {num_experts} experts"
                                 " must be a whole number, so that capacity grows with the batch; choose another")
    return num_tokens * share.numerator // share.denominator
