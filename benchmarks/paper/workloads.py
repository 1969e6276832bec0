"""The paper's workloads as stage costs: everything that is assumed about them stands in this file.

The paper (arXiv 2605.18750) gives the models, the parallel layout and the global batch. It gives no sequence length, no micro-batch
size, no partition of the layers, no images per sample and no kernel speed. What is assumed instead, and why:

- **Shapes** of the models are the published ones (`LANGUAGE`, `VISION`). The paper names a "ViT-5B" that has no published shape: 64
  layers of width 2560. "ViT-Big" is taken for ViT-bigG, the next after L, H and g.
- **Micro-batch 1**: the paper's figure 5 has 192 entries in flight at worst for a global batch of 192.
- **Lengths**: GPT-3 trains on its published 2,048 tokens. A multimodal sample has 960 tokens of text and 0 to 8 images (`Variation`, each
  number equally likely); an image is 1,024 patches in the vision tower and 256 tokens in the language model (448 pixels, patches of 14, merged
  2 x 2, as InternVL does). 40% of the tokens then are images. The spread is a choice: see `fit`.
- **Costs** follow the products' floating-point operations, a backward twice a forward and split evenly into I and W, with a log-normal
  variation of 0.1 per action on top (the paper measured up to 0.22, as (p95 - p5) / p50 = 0.73 in the worst of its samples).
- **Partition**: contiguous; the output layer is on the last stage, which gets as few other layers as leave it the busiest, the others
  are divided evenly. This is the paper's figure 6 again: the last stage is the bottleneck, the busiest other one at 0.84 of it.
- **Speed**: not known, so one number per row of a table is taken from the paper (`repro.calibrate` says which). Only what is left, the
  ratios between the columns, is a prediction.
- **Messages** (`Variation`): the paper measured its communication under 1F1B at about 0.5 ms in the median and up to 31 ms, (p95 - p5) /
  p50 up to 58.74. So a message takes 0.5 ms, and with some probability up to 31 ms more, evenly spread. The probability is not
  published and was chosen to agree with table 1; the experiment `fit` says what other values would mean.
- **Tensor parallelism** divides the costs (the speed is calibrated per row anyhow) and adds the paper's own measured agreement, 0.16 ms
  per action at TP 2 and 0.23 ms at TP 4 (its table 3), where actions are chosen by readiness. Data parallelism divides the batch.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random

from rrfp.simulate.costs import Costs

MEAN_IMAGES = 2.5
TEXT_TOKENS, TOKENS_PER_IMAGE, PATCHES_PER_IMAGE = 960, 256, 1024
GPT3_TOKENS = 2048
BUSIEST_OTHER = 0.84
COMPUTE_VARIATION = 0.1
AGREEMENT = {1: 0.0, 2: 0.16e-3, 4: 0.23e-3}
"""Seconds per action, by tensor-parallel size."""


@dataclass(frozen=True)
class Variation:
    """What differs between samples and between messages.

    images: of a sample, each equally likely, `MEAN_IMAGES` in the mean.
    base: seconds of every message.
    late: probability of being late.
    most: a late message takes up to that many seconds more, evenly spread.
    """

    images: tuple[float, ...] = (0, 0, 1, 2, 4, 8)
    base: float = 0.5e-3
    late: float = 0.3
    most: float = 31e-3

    def message(self, rng: Random) -> float:
        return self.base + (self.most * rng.random() if rng.random() < self.late else 0.0)


ASSUMED = Variation()


@dataclass(frozen=True)
class Transformer:
    """Width and depth. parameters: of one layer; heads: width of all attention heads together; vocabulary: 0 without output layer."""

    layers: int
    width: int
    parameters: int
    heads: int
    vocabulary: int = 0


def _gpt(layers: int, width: int, vocabulary: int = 0, *, mlp: int | None = None) -> Transformer:
    return Transformer(layers, width, 4 * width**2 + 2 * width * (mlp or 4 * width), width, vocabulary)


def _gated(layers: int, width: int, mlp: int, heads: int, groups: int, vocabulary: int) -> Transformer:
    """With gated MLPs and grouped queries, heads of 128."""
    attention = 2 * width * 128 * (heads + groups)
    return Transformer(layers, width, attention + 3 * width * mlp, 128 * heads, vocabulary)


LANGUAGE = {
    "GPT3-Large": _gpt(24, 1536, 50304),
    "Qwen3-1.7B": _gated(28, 2048, 6144, 16, 8, 151936),
    "Qwen3-4B": _gated(36, 2560, 9728, 32, 8, 151936),
    "Qwen3-32B": _gated(64, 5120, 25600, 64, 8, 151936),
    "LLaMA3-8B": _gated(32, 4096, 14336, 32, 8, 128256),
    "LLaMA3-70B": _gated(80, 8192, 28672, 64, 8, 128256),
}
VISION = {
    "ViT-L": _gpt(24, 1024),
    "ViT-H": _gpt(32, 1280),
    "ViT-g": _gpt(40, 1408, mlp=6144),
    "ViT-Big": _gpt(48, 1664, mlp=8192),
    "ViT-5B": _gpt(64, 2560),
    "InternViT": _gpt(45, 3200, mlp=12800),
    "ViT-22B": _gpt(48, 6144, mlp=24576),
}


@dataclass(frozen=True)
class Workload:
    """A model under a layout, for one pipeline replica.

    stages: pipeline stages, one per rank; tensor, data: parallel sizes; batch: global batch in samples.
    """

    model: str
    stages: int
    batch: int
    tensor: int = 1
    data: int = 1

    @property
    def microbatches(self) -> int:
        return self.batch // self.data

    @property
    def multimodal(self) -> bool:
        return "+" in self.model

    @property
    def layout(self) -> str:
        return f"{self.tensor}/{self.stages}" + (f"/{self.data}" if self.data > 1 else "")

    def __str__(self) -> str:
        return f"{self.model} {self.layout}"

    # -- from shapes to seconds ----------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[tuple[str, Transformer]]:
        """The model in order: ("vision" | "language" | "output", shape) per layer."""
        language, _, vision = self.model.partition("+")
        shape = LANGUAGE[language]
        tower = [("vision", VISION[vision])] * VISION[vision].layers if vision else []
        return [*tower, *[("language", shape)] * shape.layers, ("output", shape)]

    def operations(self, kind: str, shape: Transformer, images: float) -> float:
        """Floating-point operations of one layer's forward for a sample with that many images."""
        tokens = TEXT_TOKENS + TOKENS_PER_IMAGE * images if self.multimodal else GPT3_TOKENS
        if kind == "vision":  # attention within an image
            return 2 * images * PATCHES_PER_IMAGE * (shape.parameters + 2 * PATCHES_PER_IMAGE * shape.heads)
        if kind == "output":
            return 2 * tokens * shape.width * shape.vocabulary
        return 2 * tokens * (shape.parameters + tokens * shape.heads)  # causal attention

    @property
    def last_operations(self) -> float:
        """Of the last stage's forward, for a sample with the mean number of images."""
        return _stage_operations(self, MEAN_IMAGES)[-1]

    def costs(self, last_stage: float, seed: int, *, variation: Variation = ASSUMED) -> Costs:
        """One iteration.

        Args:
            last_stage: mean seconds of the last stage's forward.
            seed: same seed, same draws.
        """
        rng = Random(f"{self}/{seed}")
        images = [rng.choice(variation.images) if self.multimodal else 0 for _ in range(self.microbatches)]
        weights = {count: _stage_operations(self, count) for count in set(images)}
        durations, delays = {}, {}
        for s in range(self.stages):
            for m, count in enumerate(images):
                base = last_stage * weights[count][s] / self.last_operations
                for kind in "FIW":
                    durations[kind, s, m] = base * _factor(rng)
                durations["B", s, m] = durations["I", s, m] + durations["W", s, m]
                for kind in "FB":
                    delays[kind, s, m] = variation.message(rng)
        return Costs(self.stages, 1, self.microbatches, durations, delays)

    @property
    def partition(self) -> list[int]:
        """Layers per stage."""
        return list(_partition(self))


def _factor(rng: Random) -> float:
    sigma = math.sqrt(math.log(1 + COMPUTE_VARIATION**2))
    return rng.lognormvariate(-sigma * sigma / 2, sigma)


@cache
def _stage_operations(workload: Workload, images: float) -> list[float]:
    each = [workload.operations(kind, shape, images) for kind, shape in workload.layers]
    ends = [sum(_partition(workload)[:s]) for s in range(workload.stages + 1)]
    return [sum(each[low:high]) for low, high in pairwise(ends)]


@cache
def _partition(workload: Workload) -> tuple[int, ...]:
    each = [workload.operations(kind, shape, MEAN_IMAGES) for kind, shape in workload.layers]
    for last in range(1, len(each)):
        others = _even(each[:-last], workload.stages - 1)
        ends = [sum(others[:s]) for s in range(workload.stages)]
        if BUSIEST_OTHER * sum(each[-last:]) >= max(sum(each[low:high]) for low, high in pairwise(ends)):
            return (*others, last)
    raise ValueError(f"{workload}: more stages than layers")


def _even(weights: list[float], parts: int) -> list[int]:
    """How many consecutive weights go to each part, none empty, so that the heaviest part is as light as can be."""
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    best = [(total[end], [end]) for end in range(len(weights) + 1)]
    for part in range(2, parts + 1):
        best = [min(((max(best[cut][0], total[end] - total[cut]), [*best[cut][1], end - cut]) for cut in range(part - 1, end)),
                    default=(math.inf, [])) for end in range(len(weights) + 1)]
    return best[-1][1]
