"""A small real GPT on real Megatron (DDP, optimizer, RNG tracker), whose state can be put back, and one training step of it."""

import hashlib
import pydoc_data.topics

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

SEQUENCE, BATCH, HIDDEN, LAYERS = 16, 2, 32, 4
TEXT = "".join(pydoc_data.topics.topics.values()).encode("utf-8", "replace")


def build(
    *, dropout: float = 0.1, recompute: bool = False, dtype=torch.float32, overlap: bool = False, layers: int = LAYERS, **config
):
    """(model in DDP, optimizer). The same weights whatever the number of stages: every parameter is seeded by its global name."""
    seed_generators()
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
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        deallocate_pipeline_outputs=True,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}),
        **config,
    )
    model = GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    if dtype != torch.float32:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(settings, model)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, grad_reduce_in_fp32=dtype != torch.float32, bucket_size=2000 if overlap else None
    )
    model = DistributedDataParallel(settings, ddp, model)
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = model.no_sync
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(int(hashlib.sha256(global_name(name).encode()).hexdigest()[:8], 16))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=settings.bf16,
            fp16=settings.fp16,
            params_dtype=dtype,
            clip_grad=1.0,
            **({"initial_loss_scale": 2.0**20, "min_loss_scale": 1.0, "hysteresis": 1} if settings.fp16 else {}),
        ),
        [model],
    )
    settings.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def global_name(name: str) -> str:
    """A parameter's name with its layer counted over the whole model; the output weight is the embedding it is tied to."""
    name = name.removeprefix("module.").removeprefix("module.")
    if name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if "layers" in parts:
        index = parts.index("layers") + 1
        per_stage = LAYERS // parallel_state.get_pipeline_model_parallel_world_size()
        parts[index] = str(int(parts[index]) + per_stage * parallel_state.get_pipeline_model_parallel_rank())
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
    position_ids = torch.arange(length).expand(BATCH, -1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    output = model(batch["tokens"], position_ids, mask, labels=batch["labels"])

    def loss_func(losses):
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()]), "index": batch["index"]}

    return output, loss_func


def step(
    schedule, model, optimizer, iterator, microbatches: int, *, forward_only: bool = False, update: bool = True, **keywords
) -> dict:
    """One iteration. Returns losses (per microbatch, last stage) and every gradient, before the optimizer's step."""
    if not forward_only:
        model.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
    ends = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    with torch.no_grad() if forward_only else torch.enable_grad():
        stored = schedule(
            forward_step_func=keywords.pop("forward_step_func", forward_step),
            data_iterator=iterator if ends else None,
            model=[model],
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            decoder_seq_length=SEQUENCE,
            forward_only=forward_only,
            **keywords,
        )
    result = {"losses": [entry["lm loss"].clone() for entry in stored], "indices": [entry["index"] for entry in stored]}
    if not forward_only:
        result["gradients"] = {global_name(name): p.main_grad.clone() for name, p in model.named_parameters()}
        if update:
            result["updated"], norm, _ = optimizer.step()
            result["norm"] = norm
    return result


def train(schedule, model, optimizer, microbatches: int, *, steps: int = 3, **keywords) -> list[dict]:
    """`steps` iterations from where the model is; then the weights, as a last entry."""
    iterator = batches(0)
    results = [step(schedule, model, optimizer, iterator, microbatches, **dict(keywords)) for _ in range(steps)]
    results.append({"weights": {global_name(name): p.detach().clone() for name, p in model.named_parameters()}})
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
