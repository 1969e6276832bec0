"""What layers and microbatches cost, from sizes alone: parameters, and floating-point operations of a forward. Pure.

A backward costs twice a forward. Counted are matrix products, two operations per multiply-add, attention's half where it is causal
(Narayanan et al. 2021, section 5.1, kept per layer and per stage). Norms, biases and activations are left out of the operations.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rrfp.multimodal.layout import Layout, balanced


@dataclass(frozen=True, kw_only=True)
class Tower:
    """Sizes of one transformer, the ViT or the LLM.

    layers: how many. hidden: width of a token. heads: of attention; groups: of keys and values. channels: width of a head.
    ffn: inner width of the MLP. gated: it has three matrices (SwiGLU) instead of two.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    groups: int | None = None
    channels: int | None = None
    gated: bool = False
    causal: bool = False

    @property
    def attention(self) -> int:
        """Width of all queries."""
        return self.heads * (self.channels or self.hidden // self.heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's matrices."""
        keys = (self.groups or self.heads) * (self.channels or self.hidden // self.heads)
        return self.hidden * (2 * self.attention + 2 * keys) + (3 if self.gated else 2) * self.hidden * self.ffn

    def layer_flops(self, lengths: Iterable[int]) -> float:
        """Operations of one layer's forward over sequences of these lengths."""
        total = 0.0
        for length in lengths:
            total += 2.0 * self.layer_parameters * length + 4.0 * self.attention * length**2 * (0.5 if self.causal else 1.0)
        return total


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a ViT with an LLM.

    vocabulary: padded. patch: numbers in one patch (channels x height x width). grid: patches along an image's longest side.
    tied: input and output embeddings are one.
    """

    vit: Tower
    llm: Tower
    vocabulary: int
    patch: int
    grid: int
    tied: bool = True


@dataclass(frozen=True)
class Load:
    """What one microbatch holds. patches: of each image. tokens: of each sequence, image tokens included."""

    patches: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def projector_parameters(model: Model) -> int:
    return model.vit.hidden * model.llm.hidden + model.llm.hidden**2


def stage_parameters(model: Model, layout: Layout) -> list[int]:
    """Weights of every stage. Tied embeddings are on two stages, and count on both."""
    counts = []
    for stage in range(layout.stages):
        count = layout.vit[stage] * model.vit.layer_parameters + layout.llm[stage] * model.llm.layer_parameters
        if stage == 0:
            count += model.patch * model.vit.hidden + model.grid**2 * model.vit.hidden
        if stage == layout.patches_end:
            count += projector_parameters(model)
        embeddings = (stage == layout.tokens) + (stage == layout.stages - 1)
        if embeddings == 2 and model.tied:
            embeddings = 1
        counts.append(count + embeddings * model.vocabulary * model.llm.hidden)
    return counts


def stage_flops(model: Model, layout: Layout, load: Load) -> list[float]:
    """Operations of every stage's forward of one microbatch."""
    vit, llm = model.vit.layer_flops(load.patches), model.llm.layer_flops(load.tokens)
    patches, tokens = sum(load.patches), sum(load.tokens)
    costs = [layout.vit[stage] * vit + layout.llm[stage] * llm for stage in range(layout.stages)]
    costs[0] += 2.0 * model.patch * model.vit.hidden * patches
    costs[layout.patches_end] += 2.0 * projector_parameters(model) * patches
    costs[-1] += 2.0 * model.vocabulary * model.llm.hidden * tokens
    return costs


def balanced_layout(model: Model, stages: int, load: Load) -> Layout:
    """The layout whose costliest stage is cheapest for a microbatch like `load`."""
    return balanced(
        stages=stages, vit_layers=model.vit.layers, llm_layers=model.llm.layers, vit_cost=model.vit.layer_flops(load.patches),
        llm_cost=model.llm.layer_flops(load.tokens), head_cost=2.0 * model.vocabulary * model.llm.hidden * sum(load.tokens))
