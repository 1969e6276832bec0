"""A core attention for context parallelism, which Megatron's local one refuses: keys and values are gathered from all its ranks."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def positions(length: int, *, size: int, rank: int) -> torch.Tensor:
    """Which of `length` positions a rank holds, as Megatron's `get_batch_on_this_cp_rank` deals them: a block and its mirror image."""
    blocks = torch.arange(length).view(2 * size, -1)
    return torch.cat([blocks[rank], blocks[2 * size - 1 - rank]])


class GatheringAttention(torch.nn.Module):
    """Causal attention of this rank's queries over everybody's keys. Takes the arguments of Megatron's core attentions."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()
        self.config = config

    def forward(self, query, key, value, attention_mask=None, **_):
        """query, key, value: [sequence, batch, heads, width] of this rank. Returns [sequence, batch, heads x width]."""
        group = parallel_state.get_context_parallel_group()
        size, rank = group.size(), group.rank()
        keys, values = (gather_from_sequence_parallel_region(each.contiguous(), group=group) for each in (key, value))
        length = keys.shape[0]
        here = positions(length, size=size, rank=rank)
        everywhere = torch.cat([positions(length, size=size, rank=each) for each in range(size)])
        scores = torch.einsum("sbhd,tbhd->bhst", query, keys) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(everywhere[None, :] > here[:, None], float("-inf"))
        mixed = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), values)
        return mixed.reshape(*mixed.shape[:2], -1)
