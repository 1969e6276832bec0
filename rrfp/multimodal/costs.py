"""What microbatches cost each stage, from sizes alone: floating-point operations of a forward. Pure.

A backward costs twice a forward. A layer's are counted by `rrfp.balance.shapes`, which counts parameters too (`rrfp balance` shows both); here
images and sequences of a microbatch may be of any sizes. Norms, biases and activations are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rrfp.balance.shapes import Shape
from rrfp.multimodal.layout import Layout, balanced


@dataclass(frozen=True)
class Tower:
    """One transformer, the ViT or the LLM: how many layers, and their widths."""

    layers: int
    shape: Shape

    def layer_operations(self, lengths: Iterable[int]) -> float:
        """Operations of one layer's forward over sequences of these lengths."""
        return sum(map(self.shape.operations, lengths), 0.0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a ViT with an LLM. vocabulary: padded. patch: numbers in one patch (channels x height x width)."""

    vit: Tower
    llm: Tower
    vocabulary: int
    patch: int

    def output_operations(self, tokens: int) -> float:
        """Of the output layer's forward."""
        return 2.0 * self.vocabulary * self.llm.shape.hidden * tokens


@dataclass(frozen=True)
class Load:
    """What one microbatch holds. patches: of each image. tokens: of each sequence, image tokens included."""

    patches: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def stage_operations(model: Model, layout: Layout, load: Load) -> list[float]:
    """Operations of every stage's forward of one microbatch."""
    vit, llm = model.vit.layer_operations(load.patches), model.llm.layer_operations(load.tokens)
    vision, language, patches = model.vit.shape.hidden, model.llm.shape.hidden, sum(load.patches)
    costs = [layout.vit[stage] * vit + layout.llm[stage] * llm for stage in range(layout.stages)]
    costs[0] += 2.0 * model.patch * vision * patches
    costs[layout.patches_end] += 2.0 * language * (vision + language) * patches  # the projector
    costs[-1] += model.output_operations(sum(load.tokens))
    return costs


def balanced_layout(model: Model, stages: int, load: Load) -> Layout:
    """The layout whose costliest stage is cheapest for a microbatch like `load`."""
    return balanced(
        stages=stages, vit_layers=model.vit.layers, llm_layers=model.llm.layers, vit_cost=model.vit.layer_operations(load.patches),
        llm_cost=model.llm.layer_operations(load.tokens), head_cost=model.output_operations(sum(load.tokens)))
