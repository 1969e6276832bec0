"""A small real GPT on real Megatron (DDP, optimizer, RNG tracker), whose state can be put back, and one training step of it."""

import hashlib
import pydoc_data.topics

import torch
from attention import GatheringAttention, positions
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

SEQUENCE, BATCH, HIDDEN, LAYERS = 16, 2, 32, 4
TEXT = "".join(pydoc_data.topics.topics.values()).encode("utf-8", "replace")


def build(
    *, dropout: float = 0.1, recompute: bool = False, dtype=torch.float32, overlap: bool = False, layers: int = LAYERS, experts: int = 0,
    distributed: bool = False, gather: bool = False, align: bool = False, tied: bool = True, frozen: int = 0, **config
):
    """(model, optimizer): the model in DDP, or a `ModuleList` of the rank's chunks in DDP.

    The same weights whatever the number of stages: every parameter is seeded by its global name.

    experts: MoE layers of so many experts with an auxiliary loss, or 0. distributed: the distributed optimizer. gather: it overlaps its
    gathers with the forwards. align: collectives of data parallelism are started by the schedule, aligned over the pipeline. frozen: so many
    first ranks train nothing.
    """
    seed_generators()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    settings = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=chunks,
        deallocate_pipeline_outputs=True,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        # Batched messages between two ranks that are each other's neighbour on both sides are matched in order by gloo: wrong ones.
        **({"overlap_p2p_comm": True, "batch_p2p_comm": False} if chunks else {}),
        **({"num_moe_experts": experts, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": HIDDEN, "add_bias_linear": False} if experts else {}),
        **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}),
        **config,
    )
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap or gather, overlap_param_gather=gather, use_distributed_optimizer=distributed,
        grad_reduce_in_fp32=dtype != torch.float32, bucket_size=2000 if overlap or gather else None)
    models = [DistributedDataParallel(settings, ddp, chunk, disable_bucketing=vp_stage not in (None, 0))
              for vp_stage, chunk in _chunks(settings, chunks, experts, dtype, tied, frozen)]
    settings.finalize_model_grads_func = finalize_model_grads
    several = len(models) > 1
    if align:
        settings.grad_sync_func = [chunk.start_grad_sync for chunk in models] if several else models[0].start_grad_sync
        if gather:
            settings.param_sync_func = [chunk.start_param_sync for chunk in models] if several else models[0].start_param_sync
    settings.no_sync_func = [chunk.no_sync for chunk in models] if several else models[0].no_sync
    model = torch.nn.ModuleList(models) if several else models[0]
    model.config = settings
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Shards of a tensor differ between the ranks that share it.
            place = [parallel_state.get_tensor_model_parallel_rank() if getattr(parameter, "tensor_model_parallel", False) else 0,
                     0 if getattr(parameter, "allreduce", True) else parallel_state.get_expert_model_parallel_rank()]
            key = global_name(name, layers=layers) + (f"/{place}" if any(place) else "")
            generator = torch.Generator().manual_seed(int(hashlib.sha256(key.encode()).hexdigest()[:8], 16))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=settings.bf16,
            fp16=settings.fp16,
            params_dtype=dtype,
            clip_grad=1.0,
            use_distributed_optimizer=distributed,
            overlap_param_gather=gather,
            **({"initial_loss_scale": 2.0**20, "min_loss_scale": 1.0, "hysteresis": 1} if settings.fp16 else {}),
        ),
        models,
    )
    settings.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def _chunks(settings, chunks, experts, dtype, tied, frozen):
    """(vp_stage, module) of every chunk of this rank."""
    specification = get_gpt_layer_local_spec(num_experts=experts or None)
    if settings.context_parallel_size > 1:
        # Megatron's local one refuses it. With experts the specification lists its layers.
        specification.submodules.self_attention.submodules.core_attention = GatheringAttention
    for vp_stage in [None] if chunks is None else range(chunks):
        at = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = GPTModel(
            config=settings,
            transformer_layer_spec=specification,
            vocab_size=256,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            vp_stage=vp_stage,
        )
        if dtype != torch.float32:
            from megatron.core.transformer.module import Float16Module

            chunk = Float16Module(settings, chunk)
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.requires_grad_(parallel_state.get_pipeline_model_parallel_rank() >= frozen)
        yield vp_stage, chunk


def global_name(name: str, *, layers: int = LAYERS) -> str:
    """A parameter's name with its layer counted over the whole model; the output weight is the embedding it is tied to."""
    chunk, dot, rest = name.partition(".")
    chunk, name = (int(chunk), rest) if chunk.isdecimal() else (0, name)
    name = name.removeprefix("module.").removeprefix("module.")
    if name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if "layers" in parts:
        index = parts.index("layers") + 1
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        per_stage = layers // (ranks * (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1))
        parts[index] = str(int(parts[index]) + per_stage * (chunk * ranks + parallel_state.get_pipeline_model_parallel_rank()))
    return ".".join(parts)


class State:
    """Weights, optimizer and random generators, to be put back before every run."""

    def __init__(self, model, optimizer):
        self._model, self._optimizer = model, optimizer
        self._weights = [parameter.detach().clone() for parameter in model.parameters()]
        seed_generators()

    def restore(self) -> None:
        for parameter, weight in zip(self._model.parameters(), self._weights, strict=True):
            parameter.data.copy_(weight)
        for chained in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            chained.optimizer.state.clear()
            if hasattr(chained, "reload_model_params"):
                chained.reload_model_params()
        self._optimizer.zero_grad()
        seed_generators()


def seed_generators() -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    torch.manual_seed(99)


def batches(start: int, *, length=lambda index: SEQUENCE):
    """Endless microbatches of real text, in order: tokens and labels [batch, sequence], and the index they came from."""
    index = start
    while True:
        size = length(index)
        rows = [TEXT[(index * BATCH + row) * SEQUENCE * 3 :][: size + 1] for row in range(BATCH)]
        block = torch.tensor([list(row) for row in rows])
        yield {"tokens": block[:, :-1], "labels": block[:, 1:], "index": index}
        index += 1


def forward_step(data_iterator, model):
    """As pretrain_gpt's: reads tokens on the first stage and labels on the last, and pulls an item on every stage that has an iterator."""
    batch = next(data_iterator) if data_iterator is not None else {"tokens": None, "labels": None, "index": None}
    length = batch["tokens"].shape[1] if batch["tokens"] is not None else SEQUENCE
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        here = positions(length, size=size, rank=parallel_state.get_context_parallel_rank())
        batch = batch | {name: batch[name][:, here] for name in ("tokens", "labels") if batch[name] is not None}
    position_ids = torch.arange(length).expand(BATCH, -1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    output = model(batch["tokens"], position_ids, mask, labels=batch["labels"])

    def loss_func(losses):
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()]), "index": batch["index"]}

    return output, loss_func


def named(model):
    """Its parameters by global name."""
    return [(global_name(name, layers=model.config.num_layers), parameter) for name, parameter in model.named_parameters()]


def iterators():
    """This replica's data: an iterator, or one per chunk where the rank has several and the chunk is at an end of the pipeline."""
    start = 1000 * parallel_state.get_data_parallel_rank()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if chunks is None:
        return batches(start)
    ends = [{"ignore_virtual": False, "vp_stage": chunk} for chunk in range(chunks)]
    return [batches(start) if parallel_state.is_pipeline_first_stage(**at) or parallel_state.is_pipeline_last_stage(**at) else None
            for at in ends]


def step(
    schedule, model, optimizer, iterator, microbatches: int, *, forward_only: bool = False, update: bool = True, **keywords
) -> dict:
    """One iteration. Returns losses (per microbatch, last stage) and every gradient, before the optimizer's step."""
    models = list(model) if isinstance(model, torch.nn.ModuleList) else [model]
    if not forward_only:
        for chunk in models:
            chunk.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
    ends = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    with torch.no_grad() if forward_only else torch.enable_grad():
        stored = schedule(
            forward_step_func=keywords.pop("forward_step_func", forward_step),
            data_iterator=iterator if isinstance(iterator, list) or ends else None,
            model=models,
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            decoder_seq_length=SEQUENCE,
            forward_only=forward_only,
            **keywords,
        )
    result = {"losses": [entry["lm loss"].clone() for entry in stored], "indices": [entry["index"] for entry in stored]}
    if not forward_only:
        result["gradients"] = {name: p.main_grad.clone() for name, p in named(model) if p.requires_grad}
        if update:
            result["updated"], norm, _ = optimizer.step()
            result["norm"] = norm
    return result


def train(schedule, model, optimizer, microbatches: int, *, steps: int = 3, **keywords) -> list[dict]:
    """`steps` iterations from where the model is; then the weights, as a last entry."""
    iterator = iterators()
    results = [step(schedule, model, optimizer, iterator, microbatches, **dict(keywords)) for _ in range(steps)]
    results.append({"weights": {name: p.detach().clone() for name, p in named(model)}})
    return results


def difference(a, b, path: str = "") -> str | None:
    """Where two results are not bitwise equal: the first place, or None."""
    if torch.is_tensor(a):
        # By bytes: a skipped step's gradients hold NaN, which is not equal to itself.
        same = (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
        )
        return None if same else f"{path}: differ by {(a.double() - b.double()).abs().max():.3g}"
    if isinstance(a, dict):
        return next(
            (d for key in a if (d := difference(a[key], b[key], f"{path}/{key}"))),
            None if a.keys() == b.keys() else f"{path}: other keys",
        )
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: {len(a)} entries and {len(b)}"
        return next((d for i, pair in enumerate(zip(a, b)) if (d := difference(*pair, f"{path}[{i}]"))), None)
    return None if a == b else f"{path}: {a} and {b}"
