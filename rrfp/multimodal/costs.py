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

    def embedding_operations(self, patches: int) -> float:
        """Of the patch embedding's forward."""
        return 2.0 * self.patch * self.vit.shape.hidden * patches

    def projector_operations(self, patches: int) -> float:
        """Of the forward of the projector's two linear layers."""
        return 2.0 * self.llm.shape.hidden * (self.vit.shape.hidden + self.llm.shape.hidden) * patches

    def output_operations(self, tokens: int) -> float:
        """Of the output layer's forward."""
        return 2.0 * self.vocabulary * self.llm.shape.hidden * tokens

    def layers_operations(self, load: "Load") -> tuple[list[float], list[float]]:
        """Of every layer's forward, of the ViT and of the LLM, with what stands beside it wherever stages are cut: the patch embedding beside
        the ViT's first layer, the projector beside its last, the output layer beside the LLM's last."""
        vit, llm = ([tower.layer_operations(lengths)] * tower.layers for tower, lengths in ((self.vit, load.patches), (self.llm, load.tokens)))
        if vit:
            vit[0] += self.embedding_operations(sum(load.patches))
            vit[-1] += self.projector_operations(sum(load.patches))
        if llm:
            llm[-1] += self.output_operations(sum(load.tokens))
        return vit, llm


@dataclass(frozen=True)
class Load:
    """What one microbatch holds. patches: of each image. tokens: of each sequence, image tokens included."""

    patches: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def stage_operations(model: Model, layout: Layout, load: Load) -> list[float]:
    """Operations of every stage's forward of one microbatch."""
    vit, llm = model.vit.layer_operations(load.patches), model.llm.layer_operations(load.tokens)
    costs = [layout.vit[stage] * vit + layout.llm[stage] * llm for stage in range(layout.stages)]
    costs[0] += model.embedding_operations(sum(load.patches))
    costs[layout.patches_end] += model.projector_operations(sum(load.patches))
    costs[-1] += model.output_operations(sum(load.tokens))
    return costs


def balanced_layout(model: Model, stages: int, load: Load) -> Layout:
    """The layout whose costliest stage is cheapest for a microbatch like `load`."""
    vit, llm = model.layers_operations(load)
    return balanced(stages=stages, vit=vit, llm=llm)
