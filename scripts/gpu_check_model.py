"""What scripts/gpu_check_rank.py trains: a small GPT on Megatron's own parts, on whatever device Megatron takes for `cuda`."""

import hashlib

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "sequence": 32, "batch": 2}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "sequence": 1024, "batch": 2}
VOCABULARY = 256
_size = dict(SMALL)


def build(*, seed: int, large: bool = False):
    """(model, optimizer, state) of this rank: two layers per stage, every parameter seeded by its name in the whole model."""
    _size.update(LARGE if large else SMALL)
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    config = _config(ranks)
    chunk = _module(config, first=parallel_state.is_pipeline_first_stage(), last=parallel_state.is_pipeline_last_stage())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    _fill(model, seed)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, params_dtype=torch.float32), [model])
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, State(model, optimizer, seed)


def _config(ranks: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2 * parallel_state.get_pipeline_model_parallel_world_size(), hidden_size=_size["hidden_size"],
        num_attention_heads=_size["num_attention_heads"], pipeline_model_parallel_size=ranks, pipeline_dtype=torch.float32,
        params_dtype=torch.float32, use_cpu_initialization=True, deallocate_pipeline_outputs=True, hidden_dropout=0.1, attention_dropout=0.1, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        deterministic_mode=False)


def _module(config: TransformerConfig, *, first: bool, last: bool) -> GPTModel:
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=_size["sequence"],
                     pre_process=first, post_process=last, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    model.model_type = ModelType.encoder_or_decoder
    return model.cuda()


def names(model, *, first_layer: int | None = None):
    """(name in the whole model, parameter)."""
    if first_layer is None:
        first_layer = 2 * parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("module.").split(".")
        if "layers" in parts:
            index = parts.index("layers") + 1
            parts[index] = str(int(parts[index]) + first_layer)
        yield ".".join(parts), parameter


def _fill(model, seed: int, **where) -> None:
    for name, parameter in names(model, **where):
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{name}/{seed}".encode()).hexdigest()[:8], 16))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


class State:
    """Weights, optimizer and random generators, put back before every run."""

    def __init__(self, model, optimizer, seed: int):
        self._model, self._optimizer, self.seed = model, optimizer, seed
        self._weights = [parameter.detach().clone() for parameter in model.parameters()]

    def restore(self) -> None:
        for parameter, weight in zip(self._model.parameters(), self._weights, strict=True):
            parameter.data.copy_(weight)
        for chained in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            chained.optimizer.state.clear()
            if hasattr(chained, "reload_model_params"):
                chained.reload_model_params()
        self._optimizer.zero_grad()
        tensor_parallel.model_parallel_cuda_manual_seed(1234 + self.seed, force_reset_rng=True)
        torch.manual_seed(self.seed)


def batches(start: int = 0):
    """Endless microbatches, in order: the bytes of a text that every Python has."""
    import pydoc_data.topics

    text = "".join(pydoc_data.topics.topics.values()).encode("utf-8", "replace")
    index, length = start, _size["sequence"]
    while True:
        rows = [text[((index * _size["batch"] + row) * length * 3) % (len(text) - 2 * length) :][: length + 1] for row in range(_size["batch"])]
        block = torch.tensor([list(row) for row in rows]).cuda()
        yield block[:, :-1].contiguous(), block[:, 1:].contiguous()
        index += 1


def forward_step(iterator, model):
    tokens, labels = next(iterator)
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    output = model(tokens, positions, mask, labels=labels)

    def loss_func(losses):
        total = losses.float().sum()
        return total, torch.tensor(losses.numel(), dtype=torch.int, device=total.device), {"loss": total.detach() / losses.numel()}

    return output, loss_func


def train(schedule, model, optimizer, microbatches: int, *, steps: int, keep: bool = True, update: bool = True) -> list[dict]:
    """Losses and gradients of every step if `keep`; then the weights, as a last entry."""
    iterator, results = batches(), []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        stored = schedule(forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=microbatches,
                          seq_length=_size["sequence"], micro_batch_size=_size["batch"], forward_only=False)
        if keep:
            results.append({"losses": [entry["loss"].clone() for entry in stored],
                            "gradients": {name: parameter.main_grad.clone() for name, parameter in names(model)}})
        if update:
            optimizer.step()
    return [*results, {"weights": {name: parameter.detach().clone() for name, parameter in names(model)}}]


def distance_to_one_stage(own, model, optimizer, state, *, microbatches: int) -> float:
    """Without dropout: how far losses and gradients of the pipeline are from those of the whole model in one piece, relative, at most."""
    state.restore()
    model.eval()
    pipelined = train(own, model, optimizer, microbatches, steps=1, update=False)[0]
    model.train()
    whole = _module(_config(1), first=True, last=True).eval()
    _fill(whole, state.seed, first_layer=0)
    iterator, losses = batches(), []
    for _ in range(microbatches):
        output, loss_func = forward_step(iterator, whole)
        total, count, said = loss_func(output)
        (total / count / microbatches).backward()
        losses.append(said["loss"])
    pairs = list(zip(losses, pipelined["losses"], strict=False))
    gradients = dict(names(whole, first_layer=0))
    pairs += [(gradients[name].grad, got) for name, got in pipelined["gradients"].items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)


def difference(a, b, path: str = "") -> str | None:
    """Where two results are not bitwise equal: the first place, or None."""
    if torch.is_tensor(a):
        same = a.shape == b.shape and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
        return None if same else f"{path}: differ by {(a.double() - b.double()).abs().max():.3g}"
    if isinstance(a, dict):
        return next((found for key in a if (found := difference(a[key], b[key], f"{path}/{key}"))), None)
    return next((found for index, pair in enumerate(zip(a, b, strict=True)) if (found := difference(*pair, f"{path}[{index}]"))), None)


def any_rank(value: bool) -> bool:
    """Whether it holds anywhere."""
    everywhere = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, bool(value))
    return any(everywhere)


def stage_messages_through_the_host() -> None:
    """Let Megatron's own messages between stages go over gloo, which moves host memory only."""
    batched = torch.distributed.batch_isend_irecv

    class Received:
        def __init__(self, work, copy, tensor):
            self._work, self._copy, self._tensor = work, copy, tensor

        def wait(self):
            self._work.wait()
            self._tensor.data.copy_(self._copy)  # it requires a gradient already

    class Sent:
        def __init__(self, work, copy):
            self._work, self._copy = work, copy

        def wait(self):
            self._work.wait()

    def staged(operations):
        copies = [operation.tensor.cpu() if operation.op is torch.distributed.isend else torch.empty_like(operation.tensor, device="cpu")
                  for operation in operations]
        works = batched([torch.distributed.P2POp(operation.op, copy, operation.peer, operation.group)
                         for operation, copy in zip(operations, copies, strict=True)])
        return [Received(work, copy, operation.tensor) if operation.op is torch.distributed.irecv else Sent(work, copy)
                for work, copy, operation in zip(works, copies, operations, strict=True)]

    torch.distributed.batch_isend_irecv = staged
