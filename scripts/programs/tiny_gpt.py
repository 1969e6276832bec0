"""A tiny Megatron GPT, annotated for programs: next characters of sequences that count. On the CPU where there is no GPU.

    rrfp program build interleaved gpt.json --ranks 2 --microbatches 4 --model scripts/programs/tiny_gpt.py:make
    torchrun --nproc-per-node 2 -m rrfp program run gpt.json
"""

from collections.abc import Iterator

import torch

from rrfp.megatron import cpu

if not torch.cuda.is_available():
    cpu.enable()  # before Megatron is imported
    cpu.patch_megatron()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from rrfp.megatron.annotations import annotate_gpt, language_model_loss, whole_models  # noqa: E402
from rrfp.program.workload import Workload  # noqa: E402

WORDS, LENGTH, HIDDEN, ROWS = 32, 16, 32, 16


def model(stages: int) -> GPTModel:
    """One layer per stage."""
    config = TransformerConfig(
        num_layers=stages, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
        masked_softmax_fusion=False, apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False)  # fmt: skip
    return GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH,
                    position_embedding_type="rope", share_embeddings_and_output_weights=True)


def batches(replica: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that count upwards from anywhere, by steps of 1 to 3."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        start = torch.randint(WORDS, (ROWS, 1), generator=generator)
        step = torch.randint(1, 4, (ROWS, 1), generator=generator)
        words = (start + step * torch.arange(LENGTH + 1)) % WORDS
        yield {"tokens": words[:, :-1].cuda(), "labels": words[:, 1:].cuda()}


def make(stages: int = 4) -> Workload:
    whole_models(seed=1)
    return Workload(annotate_gpt(model(stages), stages=stages).cuda(), language_model_loss, batches,
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
