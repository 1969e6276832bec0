"""A small transformer as an ordinary module with annotations: what the tests of captures and of real processes train."""

import torch
import torch.nn.functional as F
from torch import nn

from rrfp.program.capture import annotate

WORDS, HIDDEN, LENGTH, EXPERTS = 11, 8, 3, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, hidden // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))


class Experts(nn.Module):
    """A mixture of experts with real routing: experts x tokens x hidden goes into them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) / 3)

    def forward(self, x):
        rows, length, hidden = x.shape
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), EXPERTS).to(x.dtype)
        tokens = torch.einsum("rle,rlh->erlh", chosen, x).flatten(1, 2)
        with annotate("EP"):
            tokens = torch.bmm(torch.bmm(tokens, self.up).relu(), self.down)
        return x + torch.einsum("rle,erlh->rlh", weights * chosen, tokens.view(EXPERTS, rows, length, hidden))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """The mask is a buffer. tied: its output weight is its embedding, one parameter of the first and the last stage."""

    def __init__(self, stages, *, experts=True, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(Attention(), Experts() if experts else MLP()) for _ in range(stages))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("place", torch.linspace(0, 1, LENGTH).unsqueeze(1))

    def forward(self, words):
        x = words
        for index, block in enumerate(self.blocks):
            with annotate("PP"):
                x = block(self.embedding(x) + self.place if index == 0 else x)
                x = x if index < len(self.blocks) - 1 else self.head(x)
        return x


def loss(model, batch):
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["next"].flatten())


def make_batch(rows, seed):
    words = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return {"words": words[:, :-1], "next": words[:, 1:]}
