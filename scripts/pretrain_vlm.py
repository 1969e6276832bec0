"""Pretrain a ViT + LLM with Megatron, the ViT on as many early stages as --vlm-layout gives it. megatron-core 0.17.1 to 0.19.x.

Megatron's own arguments describe the LLM and the training; `rrfp.multimodal.arguments` adds the ViT, the layout, the data and what is frozen:

    torchrun --nproc-per-node 4 -m rrfp --cpu scripts/pretrain_vlm.py $(cat scripts/tiny_vlm.args) --pipeline-model-parallel-size 4 \
        --vlm-layout 'vv|vv|tt|tt' --pipeline-schedule rrfp
"""

import functools
import inspect
import sys

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import arguments, get_args, get_tokenizer, pretrain

from rrfp.multimodal import hint, loader, webdataset
from rrfp.multimodal.arguments import (
    BUILT_IN,
    add_arguments,
    check,
    check_given,
    config_of_llm,
    config_of_vit,
    layout_of,
    model_of,
    refuse_all_frozen,
    with_layout,
)
from rrfp.multimodal.batch import parts_of
from rrfp.multimodal.digits import Digits
from rrfp.multimodal.layout import embedding_ranks
from rrfp.multimodal.stage import VlmStage, check_patterns, trained_shares
from rrfp.multimodal.step import forward_step

_chunks: list[VlmStage] = []
"""This rank's, until all are made."""
_trained: list[float | None] = []
"""What every stage trains, when all are made (`trained_shares`)."""


def stage_of(vp_stage) -> int:
    """The virtual pipeline stage of this rank's chunk."""
    ranks, rank = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    return (vp_stage or 0) * ranks + rank


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """This rank's chunk. What comes before and behind it is in the layout."""
    args = get_args()
    check(args)
    stage = VlmStage(
        config or config_of_llm(args),
        config_of_vit(args),
        layout=layout_of(args),
        stage=stage_of(vp_stage),
        vocab_size=args.padded_vocab_size,
        image_token=args.image_token_id,
        patch=args.vit_channels * args.vit_patch**2,
        grid=args.vit_grid,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        transformer_engine=args.transformer_impl == "transformer_engine",
        zero_gradients=args.overlap_grad_reduce,
        pg_collection=pg_collection,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )
    stage.freeze(args.freeze, but=args.unfreeze)
    _chunks.append(stage)
    if len(_chunks) == (args.virtual_pipeline_model_parallel_size or 1):
        check_patterns(_chunks, args.freeze, args.unfreeze)
        _trained[:] = trained_shares(_chunks, parallel_state.get_pipeline_model_parallel_group())
        _chunks.clear()
        if all(share is None for share in _trained):
            refuse_all_frozen(args.freeze)
    return stage


def datasets_provider(samples, vp_stage=None):
    """Iterators over training, validation and test microbatches: what this stage reads of them. Every tensor-parallel rank makes the same."""
    args = get_args()
    check(args)
    layout = layout_of(args)
    collating = {
        "patch": args.vit_patch,
        "image_token": args.image_token_id,
        "parts": parts_of(layout, stage_of(vp_stage)),
        "multiple": args.tensor_model_parallel_size if args.sequence_parallel else 1,
    }
    sizes = {"train": args.micro_batch_size, "eval": getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size}

    def split(name, consumed):
        dealing = {
            "size": sizes["train" if name == "train" else "eval"],
            "replica": parallel_state.get_data_parallel_rank(),
            "replicas": parallel_state.get_data_parallel_world_size(),
            "consumed": consumed,
        }
        if args.vlm_data in BUILT_IN:
            digits = Digits(name, seed=args.seed, blank=args.vlm_data == "digits-blank")
            return loader.microbatches(digits, **dealing, **collating)
        return webdataset.microbatches(
            args.vlm_data,
            split={"valid": "val"}.get(name, name),
            # Megatron's NullTokenizer knows numbers alone: a byte is a token then.
            tokenize=str.encode if args.tokenizer_type == "NullTokenizer" else get_tokenizer().tokenize,
            grid=args.vit_grid,
            channels=args.vit_channels,
            workers=args.num_workers,
            seed=args.seed,
            report=parallel_state.get_pipeline_model_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 0,
            **dealing,
            **collating,
        )

    training = loader.fed(
        split("train", args.consumed_train_samples),
        by_size=args.vlm_feed == "by-size",
        model=model_of(args),
        microbatches=get_num_microbatches(),
        ranks=args.pipeline_model_parallel_size,
    )
    if not vp_stage:
        hint.provide(training, model=model_of(args), layout=layout, trained=_trained)
    evaluation = [split("valid", args.consumed_valid_samples), split("test", 0)] if args.eval_iters else [None, None]
    return training, *evaluation


datasets_provider.is_distributed = True  # Megatron then asks every rank for its data


def main():
    check_given(sys.argv)
    sys.argv = with_layout(sys.argv)
    options = {"extra_args_provider": add_arguments, "args_defaults": {"tokenizer_type": "NullTokenizer", "dataloader_type": "external"}}
    run = functools.partial(
        pretrain,
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=lambda ranks, *_: embedding_ranks(layout_of(get_args()), ranks),
    )
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # 0.17: pretrain() parses the command line
        return run(**options)
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    run(pretrain_cfg_container_from_args(arguments.parse_and_validate_args(**options)))


if __name__ == "__main__":
    main()
