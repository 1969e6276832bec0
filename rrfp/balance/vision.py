"""A vision tower before a language model, as scripts/pretrain_vlm.py builds it (`rrfp.multimodal.arguments`): parts and stages.

Letters of its layouts: `v` a layer of the tower, `t` one of the language model. Beside them stand `P`, the patch embedding, on the first
stage, `J`, the last norm and the projector, behind the last `v`, `E` before the first `t`, and `L` at the end.
"""

import argparse
from collections.abc import Sequence

from rrfp.balance.layout import unroll
from rrfp.balance.shapes import Attention, Feedforward, Parameters, Part, Product, Sample, Shape
from rrfp.errors import ConfigurationError

LAYOUT = "--vlm-layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `scripts/pretrain_vlm.py` that say how large the tower is, with its defaults."""
    for name in ("vit-num-layers", "vit-hidden-size", "vit-num-attention-heads", "vit-ffn-hidden-size"):
        parser.add_argument(f"--{name}", type=int)
    for name, default in (("vit-patch", 14), ("vit-grid", 32), ("vit-channels", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(LAYOUT)


def tower(args: argparse.Namespace, *, language: int) -> list[Part]:
    """Patch embedding, layers and projector.

    Args:
        args: parsed, with all of the tower's sizes.
        language: hidden size of the language model.

    Raises:
        ConfigurationError: its heads don't divide it.
    """
    hidden, heads = args.vit_hidden_size, args.vit_num_attention_heads
    if hidden % heads:
        raise ConfigurationError(f"--vit-num-attention-heads {heads}: does not divide --vit-hidden-size {hidden}; give another number")
    shape = Shape(
        hidden=hidden, attention=Attention(heads=heads, groups=heads, head=hidden // heads),
        feedforward=Feedforward(width=args.vit_ffn_hidden_size or 4 * hidden))
    patch = args.vit_channels * args.vit_patch**2 * hidden
    projector = language * (hidden + language)
    return [
        Product("P", Parameters(replicated=patch + hidden + args.vit_grid**2 * hidden), weights=patch, per="patch"),
        *[shape.vision_layer()] * args.vit_num_layers,
        Product("J", Parameters(sharded=projector + language, replicated=shape.norm + language), weights=projector, per="patch"),
    ]


def samples(args: argparse.Namespace, images: Sequence[float]) -> dict[str, Sample]:
    """Samples of --seq-length text tokens with so many images, each --vit-grid patches high and wide, every patch a token."""
    patches = args.vit_grid**2
    return {f"{count:g} image{'s' * (count != 1)}": Sample(args.seq_length + count * patches, count, patches) for count in images}


def counts(text: str, *, ranks: int, vision: int, language: int) -> list[int]:
    """How many parts, in the order P v... J E t... L, each stage of a layout has.

    Args:
        text: the layout. vision, language: layers of each.

    Raises:
        ConfigurationError: it is none of this model.
    """
    stages, where = unroll(text), f"{LAYOUT} {text}"
    order = "".join(stages).replace("E", "").replace("L", "")
    if order != "v" * vision + "t" * language:
        raise ConfigurationError(f"{where}: must hold {vision} v and then {language} t, at most an E before the first t and an L at the end")
    if len(stages) % ranks:
        raise ConfigurationError(f"{where}: has {len(stages)} stages, no multiple of --pipeline-model-parallel-size {ranks}")
    last_v = max(stage for stage, letters in enumerate(stages) if "v" in letters)
    begin = "E" if any("E" in letters for letters in stages) else "t"
    first = next(stage for stage, letters in enumerate(stages) if begin in letters)
    held = [letters.count("v") + letters.count("t") for letters in stages]
    for stage in (0, last_v, first, len(stages) - 1):  # P, J, E, L
        held[stage] += 1
    return held


def vision_letters(stages: Sequence[str]) -> list[str]:
    """Stages as a layout writes them: without P and J, and E and L only where nothing else tells."""
    plain = [stage.replace("P", "").replace("J", "") for stage in stages]
    return [stage if set(stage) <= {"E", "L"} else stage.replace("E", "").replace("L", "") for stage in plain]
