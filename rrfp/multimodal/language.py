"""One stage's slice of the LLM: Megatron's GPT, whose first stage need not be the pipeline's first, and takes image embeddings."""

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel

from rrfp.multimodal.vision import own_patches


class LanguageSlice(GPTModel):
    """As `GPTModel`; `pre_process` is the LLM's own beginning, anywhere in the pipeline.

    image_token: the id that stands for a patch.
    """

    def __init__(self, *args, image_token: int, **keywords):
        # The embeddings skip the scatter of sequence parallelism: images are put among the tokens before it.
        super().__init__(*args, scatter_embedding_sequence_parallel=False, **keywords)
        self._image_token = image_token
        if self.pre_process and self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1:
            # What `setup_embeddings_and_output_layer` does only for the first stage of the pipeline.
            weight = self.shared_embedding_or_output_weight()
            setattr(weight, "zero_out_wgrad" if self.post_process else "shared_embedding", True)

    def _is_in_embd_group(self) -> bool:
        """Megatron's own knows the group's first rank by being the pipeline's first stage; here it is the stage with the tokens."""
        return self.embd_group is not None and (self.pre_process or self.post_process)

    def embed(self, tokens: torch.Tensor, images: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """[s, b, hidden] (a rank's share of s with sequence parallelism): embeddings of tokens, with images in place of image tokens.

        Args:
            tokens: int [b, s]. images: [p, n, hidden], in the order in which their tokens stand. grids: int [n, 2].

        Raises:
            ValueError: there are more or fewer image tokens than patches.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        words = self.embedding(input_ids=tokens, position_ids=positions)  # [s, b, hidden]
        length, batch, hidden = words.shape
        places = (tokens == self._image_token).reshape(-1).nonzero().squeeze(1)
        # An empty message goes the same way: its sender waits for a gradient, as every sender does.
        patches = images.transpose(0, 1)[own_patches(grids)] if len(grids) else images.reshape(-1, hidden)
        if len(places) != len(patches):
            raise ValueError(f"a microbatch has {len(places)} image tokens in its text, but {len(patches)} patches in its images")
        mixed = words.transpose(0, 1).reshape(-1, hidden).index_copy(0, places, patches.to(words.dtype))
        mixed = mixed.reshape(batch, length, hidden).transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            mixed = tensor_parallel.scatter_to_sequence_parallel_region(mixed, group=self.pg_collection.tp)
        return mixed
