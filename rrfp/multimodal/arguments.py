"""The command-line flags of a ViT + LLM beside Megatron's own (which describe the LLM), and what they mean to Megatron."""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rrfp.balance.shapes import Attention, Feedforward, Shape
from rrfp.errors import ConfigurationError
from rrfp.multimodal.costs import Load, Model, Tower, balanced_layout
from rrfp.multimodal.freezing import is_frozen
from rrfp.multimodal.layout import OPTION, Layout, parse

BUILT_IN = ("digits", "digits-blank")
"""Values of --vlm-data that are no folder."""
_FEEDS = ("as-is", "by-size")


class _LayoutAction(argparse.Action):
    """Megatron counts the LLM's layers by a layout of its own, which it must have when it validates its arguments."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.vlm_layout = values
        namespace.pipeline_model_parallel_layout = parse(values).megatron("llm")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "vision and language": an `extra_args_provider` of Megatron's."""
    group = parser.add_argument_group(title="vision and language")
    group.add_argument(OPTION, action=_LayoutAction, default=None, metavar="LAYOUT",
                       help="layers of every stage, v of the ViT and t of the LLM, like 'vv|vv|ttt|ttt'. Default: balanced by operations.")
    group.add_argument("--vit-num-layers", type=int, required=True)
    group.add_argument("--vit-hidden-size", type=int, required=True)
    group.add_argument("--vit-num-attention-heads", type=int, required=True)
    group.add_argument("--vit-ffn-hidden-size", type=int, default=None, help="Default: four times the hidden size.")
    group.add_argument("--vit-patch", type=int, default=14, metavar="PIXELS", help="side of a patch. Default: %(default)s.")
    group.add_argument("--vit-grid", type=int, default=32, metavar="N", help="patches along an image's longest side, at most. Default: %(default)s.")
    group.add_argument("--vit-channels", type=int, default=3, help="of an image. Default: %(default)s.")
    group.add_argument("--image-token-id", type=int, default=None, metavar="ID",
                       help="the id that stands for a patch. Default: the last of the padded vocabulary, which no text may use.")
    group.add_argument("--vlm-data", default="digits", metavar="DATA",
                       help="digits: scikit-learn's images with captions. digits-blank: the same, black: the text-only control. A folder: a "
                       "WebDataset prepared for Megatron-Energon (docs/multimodal.md). Default: %(default)s.")
    group.add_argument("--vlm-feed", default="as-is", choices=_FEEDS,
                       help="by-size: every step's microbatches in organ-pipe order of their operations (docs/scheduling.md). Default: %(default)s.")
    group.add_argument("--freeze", nargs="+", default=[], metavar="WHAT",
                       help="vit, projector, llm, all, or regular expressions on parameters' names. Stages before the first that trains run "
                       "no backward.")
    group.add_argument("--unfreeze", nargs="+", default=[], metavar="WHAT", help="what of it trains nevertheless.")
    return parser


def check_given(argv: Sequence[str]) -> None:
    """What can be known to be wrong before any process starts, without torch. `argv`: the command line.

    Raises:
        ConfigurationError: --vlm-data is no data, nothing is left to train, or a pattern is no regular expression.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--vlm-data", nargs="?", default=BUILT_IN[0])
    for option in ("--freeze", "--unfreeze"):
        parser.add_argument(option, nargs="*", default=[])
    given, _ = parser.parse_known_args(argv)
    is_frozen("", given.freeze, but=given.unfreeze)
    if "all" in given.freeze and not given.unfreeze:
        refuse_all_frozen(given.freeze)
    if given.vlm_data is not None:
        check_data(given.vlm_data)


def check_data(text: str) -> None:
    """Raises ConfigurationError if --vlm-data is neither built in nor a folder prepared for Megatron-Energon."""
    if text not in BUILT_IN and not (Path(text) / ".nv-meta").is_dir():
        raise ConfigurationError(
            f"--vlm-data {text}: is neither {', '.join(BUILT_IN)} nor a folder that `energon prepare` has indexed (docs/multimodal.md)")


def refuse_all_frozen(freeze: Sequence[str]) -> NoReturn:
    """Raises ConfigurationError. freeze: what has frozen everything."""
    raise ConfigurationError(f"--freeze {' '.join(freeze)}: leaves nothing to train; take something out with --unfreeze, or freeze less, for example "
                             "--freeze vit projector")


def with_layout(argv: Sequence[str]) -> list[str]:
    """The command line, with the balanced layout if it has none. For images and text alike: as many patches as text tokens.

    Raises:
        ConfigurationError: layers can't fill the stages, or a given layout has other stages than ranks can share.
    """
    if any(one in ("-h", "--help") for one in argv):
        return list(argv)
    first = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    first.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    first.add_argument(OPTION)
    given, _ = first.parse_known_args(argv)
    if given.vlm_layout is not None:
        parse(given.vlm_layout, ranks=given.pipeline_model_parallel_size)  # Megatron would refuse it in other words
        return list(argv)
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    for option in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        parser.add_argument(option, type=int, required=True)
    for option in ("--ffn-hidden-size", "--num-query-groups", "--kv-channels", "--vocab-size"):
        parser.add_argument(option, type=int, default=None)
    for option in ("--swiglu", "--group-query-attention"):
        parser.add_argument(option, action="store_true")
    args, _ = parser.parse_known_args(argv)
    # As Megatron fills it in.
    args.ffn_hidden_size = args.ffn_hidden_size or (int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size)
    args.padded_vocab_size = args.vocab_size or 128
    layout = balanced_layout(model_of(args), given.pipeline_model_parallel_size, Load((args.seq_length,), (args.seq_length,)))
    return [*argv, OPTION, str(layout)]


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout that Megatron's parsed arguments ask for. Raises ConfigurationError."""
    return parse(args.vlm_layout, ranks=args.pipeline_model_parallel_size, vit_layers=args.vit_num_layers, llm_layers=args.num_layers)


def model_of(args: argparse.Namespace) -> Model:
    """The model's sizes, for what depends on costs."""
    heads, hidden = args.vit_num_attention_heads, args.vit_hidden_size
    vit = Shape(hidden=hidden, attention=Attention(heads=heads, groups=heads, head=hidden // heads, causal=False),
                feedforward=Feedforward(width=args.vit_ffn_hidden_size or 4 * hidden))
    heads, hidden = args.num_attention_heads, args.hidden_size
    groups = args.num_query_groups if args.group_query_attention else heads  # Megatron's default is 1, and means nothing without that flag
    llm = Shape(hidden=hidden, attention=Attention(heads=heads, groups=groups, head=args.kv_channels or hidden // heads),
                feedforward=Feedforward(width=args.ffn_hidden_size, gated=args.swiglu))
    return Model(vit=Tower(args.vit_num_layers, vit), llm=Tower(args.num_layers, llm), vocabulary=args.padded_vocab_size,
                 patch=args.vit_channels * args.vit_patch**2)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigurationError for validated arguments that a ViT + LLM can't run with."""
    layout, ranks = layout_of(args), args.pipeline_model_parallel_size
    refused = (
        (args.context_parallel_size > 1, f"--context-parallel-size {args.context_parallel_size}", "images are attended to whole; use 1"),
        (bool(args.num_experts), f"--num-experts {args.num_experts}", "the LLM is dense here; leave it out"),
        (bool(getattr(args, "mtp_num_layers", None)), "--mtp-num-layers", "one token is predicted here; leave it out"),
        (args.dataloader_type != "external", f"--dataloader-type {args.dataloader_type}", "microbatches differ in size, so this data "
         "has a loader of its own; leave it out"),
        (args.vlm_feed == "by-size" and (args.rampup_batch_size or getattr(args, "step_batch_size_schedule", None)), "--vlm-feed by-size",
         "needs the same number of microbatches in every step; leave out batch sizes that grow"),
        (layout.stages > ranks and not args.untie_embeddings_and_output_weights and not _tied_in_reach(layout, ranks), f"{OPTION} {layout}",
         "with several chunks per rank Megatron adds the gradients of tied embeddings only over the first chunk of the rank that tokens "
         "enter; use --untie-embeddings-and-output-weights"),
    )
    for applies, option, rule in refused:
        if applies:
            raise ConfigurationError(f"{option} with a ViT + LLM: {rule}")
    if args.image_token_id is None:
        args.image_token_id = args.padded_vocab_size - 1
    if not 0 <= args.image_token_id < args.padded_vocab_size:
        raise ConfigurationError(
            f"--image-token-id {args.image_token_id}: the padded vocabulary has {args.padded_vocab_size} ids; choose one of them")


def _tied_in_reach(layout: Layout, ranks: int) -> bool:
    """Whether `finalize_model_grads._allreduce_embedding_grad` takes the chunk with the embeddings on their rank."""
    return layout.tokens < ranks and layout.tokens != layout.stages - 1 and layout.tokens % ranks != ranks - 1


def config_of_llm(args: argparse.Namespace):
    """Megatron's `TransformerConfig` of the LLM."""
    from megatron.training import arguments

    return arguments.core_transformer_config_from_args(args)


def config_of_vit(args: argparse.Namespace):
    """Megatron's `TransformerConfig` of the ViT: the LLM's choices of precision, parallelism, dropout and recomputation, other sizes."""
    from megatron.training import arguments

    layout, args = layout_of(args), copy.copy(args)
    args.num_layers, args.hidden_size = args.vit_num_layers, args.vit_hidden_size
    args.num_attention_heads = args.vit_num_attention_heads
    args.ffn_hidden_size = args.vit_ffn_hidden_size or 4 * args.vit_hidden_size
    args.kv_channels = args.hidden_size // args.num_attention_heads
    args.pipeline_model_parallel_layout = layout.megatron("vit")
    args.group_query_attention, args.num_query_groups = False, None
    args.swiglu = args.squared_relu = args.qk_layernorm = args.sequence_parallel = False
    args.add_bias_linear, args.add_qkv_bias, args.normalization = True, False, "LayerNorm"
    return arguments.core_transformer_config_from_args(args)
