"""Pretrain a GPT with Megatron, for those who have megatron-core's wheel but no Megatron-LM checkout.

The wheel carries `megatron.training` but not the checkout's pretrain_gpt.py. This is a small entry of our own over
`megatron.training.pretrain`: dense GPT, Megatron's own arguments, megatron-core 0.17.1 to 0.19.x. With a checkout use its script.
"""

import functools
import inspect

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments, get_args, get_timers, pretrain
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """This rank's chunk of the GPT."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    te = args.transformer_impl == "transformer_engine"
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec if te else gpt_layer_specs.get_gpt_layer_local_spec
    norm = {} if te else {"normalization": args.normalization}
    return GPTModel(
        config=config,
        transformer_layer_spec=spec(qk_layernorm=args.qk_layernorm, **norm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def datasets_provider(samples, vp_stage=None):
    """Training, validation and test sets of `samples` each. Every tensor-parallel rank reads them: same seed, same data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, samples, lambda: is_first_or_last_pipeline_stage(vp_stage), config).build()


datasets_provider.is_distributed = True  # Megatron then asks every rank for its datasets


def get_batch(data_iterator, vp_stage=None) -> dict:
    """The next microbatch, on the GPU, tensors [micro batch size, sequence length]; nothing on a stage that needs no data."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    return {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items() if torch.is_tensor(value)}


def loss_func(loss_mask, output_tensor):
    """Masked sum of the token losses, the number of tokens, and what is logged: Megatron divides by the tokens."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask)
    tokens = loss_mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    """One microbatch through this rank's chunk: its output, and the function that makes a loss of it on the last stage."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    output = model(
        batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"),
        labels=batch.get("labels"), loss_mask=batch.get("loss_mask"),
    )  # fmt: skip
    return output, functools.partial(loss_func, batch.get("loss_mask"))


def main():
    options = {"args_defaults": {"tokenizer_type": "NullTokenizer"}}
    run = functools.partial(
        pretrain,
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # 0.17: pretrain() parses the command line
        return run(**options)
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    run(pretrain_cfg_container_from_args(arguments.parse_and_validate_args(**options)))


if __name__ == "__main__":
    main()
