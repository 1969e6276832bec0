"""Which layers each stage has. Pure.

A layout is text: one part per stage, `v` a layer of the ViT, `t` a layer of the LLM, `x*3` and `(x|)*3` repetition (as in Megatron's
`--pipeline-model-parallel-layout`): `vv|vv|ttt|ttt`. Patches enter the first stage; the projector follows the last `v`; tokens enter where
the LLM begins, before its first `t` or at an `E`; the loss ends the last stage (`L` may say so, and may stand alone).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rrfp.balance.layout import best_cuts
from rrfp.errors import ConfigurationError

OPTION = "--vlm-layout"


@dataclass(frozen=True)
class Layout:
    """Layers of the ViT and of the LLM on every stage.

    vit, llm: by stage, 0..S-1. tokens: the stage that tokens enter.

    Raises:
        ConfigurationError: the stages are no ViT followed by an LLM.
    """

    vit: tuple[int, ...]
    llm: tuple[int, ...]
    tokens: int

    def __post_init__(self):
        text, last = str(self), len(self.vit) - 1
        if not self.vit or not sum(self.vit) or not sum(self.llm):
            _refuse(text, "needs layers of the ViT (v) and of the LLM (t)")
        if not all(self.vit[: self.patches_end + 1]):
            _refuse(text, "the ViT starts on stage 0 and skips none: each of its stages needs a v")
        if any(self.llm[: self.tokens]) or self.tokens not in (self.patches_end, self.patches_end + 1):
            _refuse(text, "the LLM (E, then t) follows the last v, on its stage or on the next")
        if empty := [stage for stage in range(self.tokens + 1, last) if not self.llm[stage]]:
            _refuse(text, f"stage {empty[0]} has nothing to do")

    @property
    def stages(self) -> int:
        return len(self.vit)

    @property
    def patches_end(self) -> int:
        """The last stage of the ViT, which has the projector."""
        return max(stage for stage, layers in enumerate(self.vit) if layers)

    def has_vit(self, stage: int) -> bool:
        return stage <= self.patches_end

    def has_llm(self, stage: int) -> bool:
        return stage >= self.tokens

    def megatron(self, tower: str) -> str:
        """The layers of `tower`, "vit" or "llm", as a `--pipeline-model-parallel-layout`: `||Ett|ttL`.

        Megatron counts and numbers layers by it; E and L only mark where the tower begins and ends.
        """
        layers = getattr(self, tower)
        first, last = (0, self.patches_end) if tower == "vit" else (self.tokens, self.stages - 1)
        return "|".join("E" * (stage == first) + "t" * count + "L" * (stage == last) for stage, count in enumerate(layers))

    def __str__(self) -> str:
        parts = []
        for stage, (v, t) in enumerate(zip(self.vit, self.llm, strict=True)):
            alone = "E" * (stage == self.tokens and not t) + "L" * (stage == len(self.vit) - 1 and not t)
            parts.append("v" * v + "t" * t + alone)
        return "|".join(parts)


def parse(text: str, *, ranks: int = 1, vit_layers: int | None = None, llm_layers: int | None = None) -> Layout:
    """The layout that `text` describes.

    Args:
        ranks: P; the number of stages must be a multiple of it.
        vit_layers, llm_layers: what the model has, to compare with.

    Raises:
        ConfigurationError: it describes none, or another model.
    """
    plain = _unrolled(text)
    if wrong := re.search(r"[^vtEL|]", plain):
        _refuse(text, f"{wrong[0]!r} is neither v, t, E, L nor |")
    rows = plain.split("|")
    whole = "".join(rows)
    if not re.fullmatch(r"v*E?t*L?", whole):
        _refuse(text, "first the layers of the ViT (v), then E at most once, the layers of the LLM (t), and L at most once")
    if whole.endswith("L") and not rows[-1].endswith("L"):
        _refuse(text, "L belongs to the last stage")
    begin = "E" if "E" in whole else "t"
    tokens = next((stage for stage, row in enumerate(rows) if begin in row), 0)
    layout = Layout(tuple(row.count("v") for row in rows), tuple(row.count("t") for row in rows), tokens)
    if layout.stages % ranks:
        _refuse(text, f"has {layout.stages} stages, no multiple of --pipeline-model-parallel-size {ranks}")
    for tower, option, wanted in (("vit", "--vit-num-layers", vit_layers), ("llm", "--num-layers", llm_layers)):
        if wanted is not None and sum(getattr(layout, tower)) != wanted:
            _refuse(text, f"has {sum(getattr(layout, tower))} layers {'v' if tower == 'vit' else 't'}, but {option} is {wanted}")
    return layout


def balanced(*, stages: int, vit: Sequence[float], llm: Sequence[float]) -> Layout:
    """The layout whose costliest stage is cheapest, and among those the most even one (`best_cuts`).

    Args:
        stages: S.
        vit, llm: the cost of every layer, with what stands beside it wherever stages are cut.

    Raises:
        ConfigurationError: there are fewer layers than stages, or a tower has none.
    """
    if not vit or not llm:
        _refuse("", f"{len(vit)} + {len(llm)} layers: needs layers of the ViT (--vit-num-layers) and of the LLM (--num-layers)", value="balanced")
    costs, border = [*vit, *llm], len(vit)
    if len(costs) < stages:
        _refuse("", f"{len(vit)} + {len(llm)} layers can't fill {stages} stages; use fewer, or write the layout", value="balanced")
    ends = list(accumulate(best_cuts(costs, stages), initial=0))
    of_vit = tuple(min(end, border) - min(begin, border) for begin, end in pairwise(ends))
    of_llm = tuple(end - begin - v for (begin, end), v in zip(pairwise(ends), of_vit, strict=True))
    return Layout(of_vit, of_llm, next(stage for stage, layers in enumerate(of_llm) if layers))


def embedding_ranks(layout: Layout, ranks: Sequence[int]) -> list[int]:
    """Those of a pipeline's `ranks` that hold the word embeddings or the output layer tied to them (Megatron's `get_embedding_ranks`)."""
    first, last = ranks[layout.tokens % len(ranks)], ranks[-1]
    return [first] if first == last else [first, last]


def _unrolled(text: str) -> str:
    plain = re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda found: found[1] * int(found[2]), plain)
    return plain


def _refuse(text: str, rule: str, *, value: str | None = None) -> None:
    raise ConfigurationError(f"{OPTION} {value or text!r}: {rule}; write one part per stage, like 'vv|vv|ttt|ttt'")
