"""One stage of a ViT + LLM as Megatron's schedules, DDP, optimizer and checkpoints want a model."""

import math
import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from rrfp.errors import ConfigurationError
from rrfp.multimodal.freezing import is_frozen, matched
from rrfp.multimodal.language import LanguageSlice
from rrfp.multimodal.layout import Layout
from rrfp.multimodal.vision import VisionSlice


class VlmStage(MegatronModule):
    """A slice of the ViT, of the LLM, or the end of one and the beginning of the other.

    Args:
        config: the LLM's; `variable_seq_lengths` is set in it, because stages' messages differ in shape.
        vision: the ViT's.
        layout: of all stages. stage: this one.
        vocab_size: padded. image_token: the id that stands for a patch.
        patch: numbers in one patch. grid: patches along an image's side, at most.
        zero_gradients: as `VisionSlice`: set it with gradient reduction that overlaps with backwards.
        gpt: more arguments of `GPTModel`.

    Attributes that Megatron reads: config, pg_collection, model_type, pre_process, post_process, vp_stage,
    share_embeddings_and_output_weights.
    """

    def __init__(
        self, config: TransformerConfig, vision: TransformerConfig, *, layout: Layout, stage: int, vocab_size: int, image_token: int,
        patch: int, grid: int, max_sequence_length: int, share_embeddings_and_output_weights: bool = True, vp_stage: int | None = None,
        transformer_engine: bool = False, zero_gradients: bool = False, pg_collection=None, **gpt,
    ):
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.layout, self.stage, self.vp_stage = layout, stage, vp_stage
        self.pre_process, self.post_process = stage == 0, stage == layout.stages - 1
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self._input: torch.Tensor | None = None
        self.evaluation: dict[str, torch.Tensor] = {}
        config.variable_seq_lengths = True
        self.vision = self.language = None
        self.pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        shared = {"vp_stage": vp_stage, "pg_collection": self.pg_collection}
        if layout.has_vit(stage):
            self.vision = VisionSlice(
                vision, pre_process=stage == 0, post_process=stage == layout.patches_end, patch=patch, grid=grid, language=config,
                transformer_engine=transformer_engine, zero_gradients=zero_gradients, **shared)
        if layout.has_llm(stage):
            specification = get_gpt_layer_with_transformer_engine_spec if transformer_engine else get_gpt_layer_local_spec
            norm = {} if transformer_engine else {"normalization": config.normalization}
            self.language = LanguageSlice(
                config=config, transformer_layer_spec=specification(qk_layernorm=config.qk_layernorm, **norm), vocab_size=vocab_size,
                max_sequence_length=max_sequence_length, pre_process=stage == layout.tokens, post_process=self.post_process,
                share_embeddings_and_output_weights=share_embeddings_and_output_weights, image_token=image_token, **shared, **gpt)

    def set_input_tensor(self, input_tensor) -> None:
        """The previous stage's message, or None: Megatron's schedules call this before every forward."""
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        return None if self.language is None else self.language.shared_embedding_or_output_weight()

    def forward(self, batch: dict) -> torch.Tensor:
        """A message, or on the last stage the loss of every token, [b, s].

        batch: what `rrfp.multimodal.batch.collate` gives for `parts_of` this stage, on the device.
        """
        hidden, self._input = self._input, None
        self.evaluation = {}
        if self.vision is not None:
            hidden = self.vision(batch.get("patches"), batch["grids"], hidden)
        if self.language is None:
            return hidden
        if self.language.pre_process:
            hidden = self.language.embed(batch["tokens"], hidden, batch["grids"])
        else:
            self.language.set_input_tensor(hidden)
            hidden = None
        if "captions" in batch and not torch.is_grad_enabled():
            return self._evaluated(hidden, batch)
        return self.language(None, None, None, decoder_input=hidden, labels=batch.get("labels"))

    def _evaluated(self, hidden: torch.Tensor | None, batch: dict) -> torch.Tensor:
        """As in training, and in `evaluation` [right, all] of the captions: right is one whose every token is the likeliest."""
        language, labels = self.language, batch["labels"]
        logits = language(None, None, None, decoder_input=hidden)  # [b, s, a rank's share of the vocabulary]
        best = tensor_parallel.gather_from_tensor_model_parallel_region(logits).argmax(-1)
        captions, wrong = batch["captions"], best != labels
        keys = captions + torch.arange(len(captions), device=captions.device)[:, None] * (captions.max() + 1)
        every, missed = keys[captions > 0].unique(), keys[(captions > 0) & wrong].unique()
        self.evaluation = {"right captions": torch.tensor([len(every) - len(missed), len(every)], dtype=torch.float, device=labels.device)}
        return language.compute_language_model_loss(labels, logits.transpose(0, 1).contiguous())

    # ------------------------------------------------------------------ names and freezing
    def global_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Its parameters by names that don't depend on the layout: layers are numbered over their whole tower."""
        for name, parameter in self.named_parameters():
            tower = "vit" if name.startswith("vision.") else "llm"
            before = sum(getattr(self.layout, tower)[: self.stage])
            yield re.sub(r"\.layers\.(\d+)\.", lambda found: f".layers.{int(found[1]) + before}.", name), parameter

    def freeze(self, patterns: Sequence[str], *, but: Sequence[str] = ()) -> None:
        """No gradients for what `freezing.is_frozen` says of its global name. Before DDP wraps the model. Raises as that."""
        for name, parameter in self.global_parameters():
            if self.share_embeddings_and_output_weights:
                # One weight on two stages: frozen on one alone, the other would wait for its gradient.
                name = name.replace("language.output_layer.weight", "language.embedding.word_embeddings.weight")
            if is_frozen(name, patterns, but=but):
                parameter.requires_grad_(False)


    def trained_share(self) -> float | None:
        """The share of its layers' weights, by elements, whose gradients are computed; None if no parameter of the stage has one."""
        tied = "output_layer" if self.share_embeddings_and_output_weights else "embedding"
        weights = [p for name, p in self.named_parameters() if p.dim() > 1 and "embedding" not in name and tied not in name]
        if not any(parameter.requires_grad for parameter in self.parameters()):
            return None
        return sum(p.numel() for p in weights if p.requires_grad) / max(sum(p.numel() for p in weights), 1)


def trained_shares(stages: Sequence[VlmStage], group: torch.distributed.ProcessGroup) -> list[float | None]:
    """`VlmStage.trained_share` of every stage of a pipeline. All its ranks call it alike, each with its chunks. group: the pipeline's."""
    mine = torch.tensor([math.nan if (share := stage.trained_share()) is None else share for stage in stages], dtype=torch.float64, device="cuda")
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(everyone, mine, group=group)
    return [None if math.isnan(share) else share for chunk in zip(*(one.tolist() for one in everyone), strict=True) for share in chunk]


def check_patterns(stages: Sequence[VlmStage], freeze: Sequence[str], unfreeze: Sequence[str]) -> None:
    """Every pattern must mean a parameter of some stage of the job. All ranks call it alike, each with its chunks.

    Raises:
        ConfigurationError: on every rank, for one that means nothing: a typing error would train what was to be frozen.
    """
    names = [name for stage in stages for name, _ in stage.global_parameters()]
    for option, patterns in (("--freeze", freeze), ("--unfreeze", unfreeze)):
        if not patterns:
            continue
        found = torch.tensor(matched(names, patterns, option=option), dtype=torch.int32, device="cuda")
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        for pattern, there in zip(patterns, found.tolist(), strict=True):
            if not there:
                raise ConfigurationError(f"{option} {pattern}: means no parameter; give vit, projector, llm, all, or a regular expression on names like "
                                         "language.decoder.layers.3.mlp.linear_fc1.weight")
