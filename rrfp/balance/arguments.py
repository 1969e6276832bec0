"""From Megatron's arguments to a model cut into stages. Reads only what says how large the model is; imports neither torch nor megatron."""

import argparse
import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rrfp.balance import vision
from rrfp.balance.layout import best_cuts, even_layout, parse_layout, unroll
from rrfp.balance.shapes import Attention, Feedforward, Part, Sample, Shape, VisionLayer, embedding, output
from rrfp.errors import ConfigurationError

IMAGES = (2.5, 0, 8)
"""Per sample: what docs/paper.md assumes in the mean, the least and the most."""
NOT_COUNTED = ("multi-latent-attention", "hybrid-layer-pattern", "hybrid-override-pattern", "heterogeneous-layers-config-path", "mtp-num-layers",
               "moe-latent-size", "attention-output-gate", "moe-shared-expert-gate", "experimental-attention-variant", "yaml-cfg")
"""Megatron's options under which layers are others than those counted here."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, cut into stages.

    stages: what each holds, in order along the model: `ranks` x chunks of them, stage s on pipeline rank s % ranks.
    samples: by what they are called, the samples whose costs are to be shown.
    """

    stages: tuple[tuple[Part, ...], ...]
    ranks: int
    samples: dict[str, Sample]
    micro_batch: int = 1
    global_batch: int | None = None
    tensor: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def chunks(self) -> int:
        return len(self.stages) // self.ranks

    @property
    def has_vision(self) -> bool:
        return any(isinstance(part, VisionLayer) for stage in self.stages for part in stage)


def read_model(argv: Sequence[str], *, even: bool = False, images: Sequence[float] = IMAGES) -> Model:
    """The model that Megatron builds of these arguments; those that don't change its size are passed over.

    Args:
        even: cut it into as many stages as the arguments say, but so that the busiest is as light as can be, whatever layout they give.
        images: with a vision tower, how many the samples have whose costs are shown; the first is what stages are compared for.

    Raises:
        ConfigurationError: something is missing, contradicts something else, or is not counted here.
    """
    args = parse(argv)
    shape = language_shape(args)
    parts = [embedding(args.hidden_size, vocabulary(args), positions=_positions(args)), *language_layers(args, shape)]
    sample, samples = Sample(args.seq_length), {}
    if args.vit_num_layers is not None:
        require(args, "vit-num-layers", "vit-hidden-size", "vit-num-attention-heads", "vit-grid")
        parts = [*vision.tower(args, language=args.hidden_size), *parts]
        samples = vision.samples(args, images)
        sample = next(iter(samples.values()))

    def last(copied: bool) -> Part:
        tied = not args.untie_embeddings_and_output_weights
        return output(args.hidden_size, vocabulary(args), norm=shape.norm, tied=tied, copied=copied)

    stages = args.pipeline_model_parallel_size * _chunks(args)
    counts = even_cuts([*parts, last(True)], sample, stages) if even else _counts(args, argv)
    # The last stage holds a copy of the tied embedding, unless it is the stage that has the embedding.
    embedded = next(index for index, part in enumerate(parts) if part.name == "E")
    parts.append(last(embedded < len(parts) + 1 - counts[-1]))
    return Model(stages=cut(parts, counts), ranks=args.pipeline_model_parallel_size, samples=samples or {"": sample}, **sizes(args))


def cut(parts: Sequence[Part], counts: Sequence[int]) -> tuple[tuple[Part, ...], ...]:
    """Consecutive parts, so many to each stage."""
    ends = list(accumulate(counts, initial=0))
    return tuple(tuple(parts[low:high]) for low, high in pairwise(ends))


def even_cuts(parts: Sequence[Part], sample: Sample, stages: int) -> list[int]:
    """How many parts each stage gets so that the busiest is as light as can be. Embeddings and projector stay beside a layer.

    Raises:
        ConfigurationError: there are too few.
    """
    groups: list[list[Part]] = []
    for index, part in enumerate(parts):
        beside = part.name == "J" or (index > 0 and parts[index - 1].name in ("P", "E"))
        if beside:
            groups[-1].append(part)
        else:
            groups.append([part])
    try:
        cuts = best_cuts([sum(part.operations(sample) for part in group) for group in groups], stages)
    except ValueError:
        raise ConfigurationError(f"--pipeline-model-parallel-size: {len(groups)} layers can't fill {stages} stages; use fewer") from None
    return [sum(map(len, groups[end - count : end])) for count, end in zip(cuts, accumulate(cuts), strict=True)]


def sizes(args: argparse.Namespace) -> dict[str, int | None]:
    """The sizes of batches and of every kind of parallelism, as `Model` takes them."""
    return {
        "micro_batch": args.micro_batch_size, "global_batch": args.global_batch_size, "tensor": args.tensor_model_parallel_size,
        "expert": args.expert_model_parallel_size, "expert_tensor": args.expert_tensor_parallel_size,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments that say how large a language model is, with Megatron's defaults filled in. Raises ConfigurationError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    whole, flag = {"type": int}, {"action": "store_true"}
    for name in ("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "kv-channels", "seq-length", "max-position-embeddings",
                 "vocab-size", "padded-vocab-size", "global-batch-size", "num-experts", "moe-ffn-hidden-size", "expert-tensor-parallel-size",
                 "moe-shared-expert-intermediate-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
                 "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        parser.add_argument(f"--{name}", **whole)
    for name in ("num-query-groups", "micro-batch-size", "tensor-model-parallel-size", "pipeline-model-parallel-size",
                 "expert-model-parallel-size"):
        parser.add_argument(f"--{name}", default=1, **whole)
    for name in ("group-query-attention", "swiglu", "quick-geglu", "add-qkv-bias", "qk-layernorm", "untie-embeddings-and-output-weights",
                 "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "disable-bias-linear", "no-pad-vocab-size"):
        parser.add_argument(f"--{name}", **flag)
    parser.add_argument("--make-vocab-size-divisible-by", default=128, **whole)
    parser.add_argument("--moe-router-topk", default=2, **whole)
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--pipeline-model-parallel-layout")
    vision.add_arguments(parser)
    for name in NOT_COUNTED:
        parser.add_argument(f"--{name}", nargs="?", const=True)
    try:
        args, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"{error.argument_name}: {error.message}") from None
    for name in NOT_COUNTED:
        if getattr(args, name.replace("-", "_")) is not None:
            raise ConfigurationError(f"--{name}: its layers are not counted here; leave it out to see the balance of the rest")
    return args


def require(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigurationError for the first option that is not given, or not above 0."""
    for name in names:
        value = getattr(args, name.replace("-", "_"))
        if value is None:
            raise ConfigurationError(f"--{name}: is missing, and says how large the model is; give all of the model's arguments")
        if value < 1:
            raise ConfigurationError(f"--{name} {value}: must be at least 1")


def language_shape(args: argparse.Namespace) -> Shape:
    """Widths of the language model's layers, as Megatron fills in what is not given. Raises ConfigurationError."""
    require(args, "num-layers", "hidden-size", "num-attention-heads", "seq-length", "tensor-model-parallel-size", "pipeline-model-parallel-size")
    gated = args.swiglu or args.quick_geglu
    hidden, heads = args.hidden_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    if args.kv_channels is None and hidden % heads:
        raise ConfigurationError(f"--num-attention-heads {heads}: does not divide --hidden-size {hidden}; give --kv-channels, or another number")
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    return Shape(
        hidden=hidden,
        attention=Attention(
            heads=heads, groups=groups, head=args.kv_channels or hidden // heads, qkv_bias=args.add_qkv_bias, qk_norm=args.qk_layernorm),
        feedforward=Feedforward(width=ffn, gated=gated),
        bias=not args.disable_bias_linear,
        norm_bias=args.normalization == "LayerNorm",
    )


def language_layers(args: argparse.Namespace, shape: Shape) -> list[Part]:
    """All layers of the language model in order, dense or with experts."""
    if not args.num_experts:
        return [shape.layer()] * args.num_layers
    experts = Feedforward(
        width=args.moe_ffn_hidden_size or shape.feedforward.width, gated=shape.feedforward.gated, experts=args.num_experts,
        chosen=args.moe_router_topk, shared=args.moe_shared_expert_intermediate_size or 0)
    sparse = Shape(hidden=shape.hidden, attention=shape.attention, feedforward=experts, bias=shape.bias, norm_bias=shape.norm_bias)
    return [(sparse if is_sparse else shape).layer() for is_sparse in _expert_pattern(args.moe_layer_freq, args.num_layers)]


def vocabulary(args: argparse.Namespace) -> int:
    """Rows of the embedding: padded so that every tensor-parallel rank gets as many. Raises ConfigurationError."""
    if args.padded_vocab_size:
        return args.padded_vocab_size
    if args.vocab_size is None:
        raise ConfigurationError("--vocab-size: is missing; Megatron asks the tokenizer, this needs the number (or --padded-vocab-size)")
    if args.no_pad_vocab_size:
        return args.vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil(args.vocab_size / multiple) * multiple


def _positions(args: argparse.Namespace) -> int:
    if args.position_embedding_type != "learned_absolute":
        return 0
    require(args, "max-position-embeddings")
    return args.max_position_embeddings


def _counts(args: argparse.Namespace, argv: Sequence[str]) -> list[int]:
    """Parts of every stage."""
    ranks = args.pipeline_model_parallel_size
    if args.vit_num_layers is not None:
        return vision.counts(args.vlm_layout or _default_layout(argv), ranks=ranks, vision=args.vit_num_layers, language=args.num_layers)
    if args.pipeline_model_parallel_layout:
        stages = parse_layout(args.pipeline_model_parallel_layout, ranks=ranks, counts={"E": 1, "t": args.num_layers, "L": 1})
    else:
        stages = even_layout(
            args.num_layers, ranks=ranks, chunks=_chunks(args), first=args.decoder_first_pipeline_num_layers,
            last=args.decoder_last_pipeline_num_layers, embedding=args.account_for_embedding_in_pipeline_split,
            loss=args.account_for_loss_in_pipeline_split)
    return [len(letters) for letters in stages]


def _default_layout(argv: Sequence[str]) -> str:
    """What training takes without one."""
    from rrfp.multimodal.arguments import with_layout

    return with_layout(argv)[-1]


def _chunks(args: argparse.Namespace) -> int:
    ranks = args.pipeline_model_parallel_size
    if layout := args.vlm_layout or args.pipeline_model_parallel_layout:
        return max(1, len(unroll(layout)) // ranks)
    if args.num_layers_per_virtual_pipeline_stage:
        return max(1, args.num_layers // ranks // args.num_layers_per_virtual_pipeline_stage)
    return args.num_virtual_stages_per_pipeline_rank or 1


def _expert_pattern(text: str, layers: int) -> list[bool]:
    """Which layers have experts: every n-th, or a list like `([0]*1+[1]*3)` as Megatron takes it."""
    if text.isdecimal() and int(text):
        return [index % int(text) == 0 for index in range(layers)]
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        pattern = None
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise ConfigurationError(f"--moe-layer-freq {text}: must be a number, or a list of {layers} zeros and ones; for example 2 or ([0]*1+[1]*3)")
    return [bool(entry) for entry in pattern]


def _value(node: ast.expr) -> int | list:
    """A number, a list, or a sum or product of them; ValueError for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
    raise ValueError(ast.unparse(node))
