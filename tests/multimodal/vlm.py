"""A small ViT + LLM on real Megatron (DDP, optimizer), whose microbatches have given numbers of images, and one training step of it."""

import functools
import hashlib
import itertools

import model as gpt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from rrfp.multimodal.batch import collate, parts_of
from rrfp.multimodal.digits import CHANNELS, GRID, VOCABULARY, Digits
from rrfp.multimodal.layout import parse
from rrfp.multimodal.stage import VlmStage
from rrfp.multimodal.step import forward_step

PATCH, IMAGE_TOKEN, PADDED = 4, VOCABULARY, 384
SIZES = {"vit": dict(hidden_size=24, num_attention_heads=2), "llm": dict(hidden_size=32, num_attention_heads=4)}


def build(layout: str, *, freeze=(), unfreeze=(), tied=True, dropout=0.1, dtype=torch.float32, overlap=False, distributed=False, sp=False,
          recompute=False, **config):
    """(model, optimizer), as model.build: the same weights whatever the layout."""
    gpt.seed_generators()
    layout, tp = parse(layout), parallel_state.get_tensor_model_parallel_world_size()
    ranks, rank = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    common = dict(
        pipeline_dtype=dtype, params_dtype=dtype, bf16=dtype == torch.bfloat16, hidden_dropout=dropout, attention_dropout=dropout,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=chunks,
        use_cpu_initialization=True, deallocate_pipeline_outputs=True, attention_softmax_in_fp32=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        **({"overlap_p2p_comm": True, "batch_p2p_comm": False} if chunks else {}),
        **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}), **config)
    towers = {
        tower: TransformerConfig(
            num_layers=sum(getattr(layout, tower)), pipeline_model_parallel_layout=layout.megatron(tower), **SIZES[tower],
            sequence_parallel=sp and tower == "llm", **common)
        for tower in ("llm", "vit")}
    settings = towers["llm"]
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, use_distributed_optimizer=distributed, grad_reduce_in_fp32=dtype != torch.float32,
        bucket_size=2000 if overlap else None)
    models = []
    for chunk in range(chunks or 1):
        stage = VlmStage(
            settings, towers["vit"], layout=layout, stage=chunk * ranks + rank, vocab_size=PADDED, image_token=IMAGE_TOKEN,
            patch=CHANNELS * PATCH**2, grid=GRID, max_sequence_length=512, share_embeddings_and_output_weights=tied,
            position_embedding_type="rope", vp_stage=chunk if chunks else None, zero_gradients=overlap)
        stage.freeze(freeze, but=unfreeze)
        for name, parameter in stage.global_parameters():
            if parameter.dim() > 1:
                shard = parallel_state.get_tensor_model_parallel_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
                key = name.replace("output_layer.weight", "embedding.word_embeddings.weight") + (f"/{shard}" if shard else "")
                generator = torch.Generator().manual_seed(int(hashlib.sha256(key.encode()).hexdigest()[:8], 16))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        wrapped = stage if dtype == torch.float32 else Float16Module(settings, stage)
        models.append(DistributedDataParallel(settings, ddp, wrapped, disable_bucketing=chunk > 0))
    several = len(models) > 1
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = [chunk.no_sync for chunk in models] if several else models[0].no_sync
    model = torch.nn.ModuleList(models) if several else models[0]
    model.config = settings
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=settings.bf16, params_dtype=dtype, clip_grad=1.0, use_distributed_optimizer=distributed),
        models)
    settings.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def stage_of(chunk) -> VlmStage:
    return next(module for module in chunk.modules() if isinstance(module, VlmStage))


def chunks_of(model) -> list:
    return list(model) if isinstance(model, torch.nn.ModuleList) else [model]


@functools.cache
def _samples(images: int) -> list[int]:
    """Indices of samples with so many images."""
    digits = Digits("train")
    return list(itertools.islice((index for index in itertools.count() if len(digits[index].images) == images), 40))


def sample(images: int, number: int):
    return Digits("train")[_samples(images)[number % 40]]


def batches(counts, parts, *, start: int = 0, every: int = 1, size: int = 1, multiple: int = 1):
    """Endless microbatches of `size` samples with counts[k], counts[k + 1], ... images: a replica's are those at start + k * every."""
    for k in itertools.count(start, every):
        samples = [sample(counts[(k * size + j) % len(counts)], k * size + j) for j in range(size)]
        yield collate(samples, patch=PATCH, image_token=IMAGE_TOKEN, parts=parts, multiple=multiple) | {"index": k}


def step(schedule, model, optimizer, iterator, microbatches: int, *, forward_only: bool = False, update: bool = True, step_func=forward_step,
         size: int = 1) -> dict:
    """As model.step."""
    models = chunks_of(model)
    if not forward_only:
        for chunk in models:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
    with torch.no_grad() if forward_only else torch.enable_grad():
        stored = schedule(
            forward_step_func=step_func, data_iterator=iterator, model=models, num_microbatches=microbatches, seq_length=1,
            micro_batch_size=size, forward_only=forward_only)
    result = {"losses": [{name: value.clone() for name, value in entry.items()} for entry in stored]}
    if not forward_only:
        result["gradients"] = {name: p.main_grad.clone() for name, p in named(model) if p.requires_grad}
        if update:
            result["updated"], result["norm"], _ = optimizer.step()
    return result


def named(model):
    return [pair for chunk in chunks_of(model) for pair in stage_of(chunk).global_parameters()]


def iterators(model, counts, **options):
    """This rank's data, one iterator per chunk."""
    found = [batches(counts, parts_of(stage_of(chunk).layout, stage_of(chunk).stage), **options) for chunk in chunks_of(model)]
    return found if len(found) > 1 else found[0]


def train(schedule, model, optimizer, counts, microbatches: int, *, steps: int = 2, size: int = 1, multiple: int = 1) -> list[dict]:
    """`steps` iterations from where the model is, then the weights."""
    dp, of = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    iterator = iterators(model, counts, start=dp, every=of, size=size, multiple=multiple)
    results = [step(schedule, model, optimizer, iterator, microbatches, size=size) for _ in range(steps)]
    results.append({"weights": {name: p.detach().clone() for name, p in named(model)}})
    return results
