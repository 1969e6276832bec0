"""Builds every rank's part of small GPTs, and of ViTs with an LLM, in one process on a pretended world, and prints how many parameters it has.

    python count_parameters.py < CASES     CASES: a JSON list of lists of Megatron's arguments

prints a JSON list: for each case {"ranks": {pipeline rank: parameters per chunk of its first tensor- and expert-parallel rank},
"operations": what Megatron's own formula says of an iteration}.
"""

import contextlib
import functools
import importlib.util
import json
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

from rrfp.megatron import cpu  # noqa: E402

cpu.enable(device_count=1)
cpu.patch_megatron()

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.training import arguments, global_vars  # noqa: E402
from megatron.training.training import num_floating_point_operations  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

ALWAYS = ("--transformer-impl local --attention-backend unfused --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
          "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-bias-swiglu-fusion --lr 1e-3 "
          "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --use-cpu-initialization").split()


@functools.cache
def pretrain_vlm():
    """scripts/pretrain_vlm.py as a module."""
    specification = importlib.util.spec_from_file_location("pretrain_vlm", Path(__file__).parents[2] / "scripts/pretrain_vlm.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def size_of(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build(argv: list[str], rank: int, world: int) -> tuple[list[int], float]:
    vision = "--vit-num-layers" in argv
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    sys.argv = ["count_parameters.py", *ALWAYS, *(["--dataloader-type", "external"] if vision else []), *argv]
    args = arguments.parse_args(pretrain_vlm().add_arguments if vision else None)
    args.rank, args.world_size = rank, world
    arguments.validate_args(args)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size, expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = arguments.core_transformer_config_from_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    global_vars.set_args(args)
    chunks = args.virtual_pipeline_model_parallel_size
    counts = []
    for chunk in range(chunks or 1):
        stage = chunk if chunks else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        if vision:
            counts.append(size_of(pretrain_vlm().model_provider(vp_stage=stage)))
            continue
        if args.num_experts:
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization, vp_stage=stage)
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
            pre_process=first, post_process=last, share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, vp_stage=stage)
        counts.append(size_of(model))
    operations = None if vision else num_floating_point_operations(args, args.global_batch_size)
    global_vars.unset_global_variables()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return counts, operations


def main() -> None:
    found = []
    for argv in json.load(sys.stdin):
        def size(name: str) -> int:
            return int(argv[argv.index(name) + 1]) if name in argv else 1

        pipeline, inner = size("--pipeline-model-parallel-size"), max(size("--tensor-model-parallel-size"), size("--expert-model-parallel-size"))
        ranks = {}
        for rank in range(pipeline):
            with contextlib.redirect_stdout(sys.stderr):  # Megatron prints all of its arguments
                ranks[rank], operations = build(argv, rank * inner, pipeline * inner)
        found.append({"ranks": ranks, "operations": operations})
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
