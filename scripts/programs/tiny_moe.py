"""A tiny transformer with experts in plain torch, annotated for programs: next characters of sequences that count.

    rrfp program build dualpipev dual.json --ranks 2 --microbatches 4 --replicas 2 --experts --model scripts/programs/tiny_moe.py:make
    torchrun --nproc-per-node 4 -m rrfp program run dual.json
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from rrfp.program.capture import annotate
from rrfp.program.workload import Workload

WORDS, LENGTH, HIDDEN, HEADS, EXPERTS, ROWS = 32, 16, 32, 4, 4, 16


class Layer(nn.Module):
    """Attention, then experts: the router sends each token to the best of them, weighed by its probability."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out, self.router = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) * (2 * HIDDEN) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, hidden))
        y = self.norms[1](x)
        weights = self.router(y).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), EXPERTS).to(x.dtype)
        tokens = torch.einsum("rle,rlh->erlh", chosen, y).flatten(1, 2)  # every expert has room for every token: shapes are fixed
        with annotate("EP"):  # what goes in and out is experts x tokens x hidden, and holds for any number of experts
            tokens = torch.bmm(torch.bmm(tokens, self.up).relu(), self.down)
        return x + torch.einsum("rle,erlh->rlh", weights * chosen, tokens.view(EXPERTS, rows, length, hidden))


class Model(nn.Module):
    """One layer per stage; the embedding in the first, the head in the last."""

    def __init__(self, stages: int):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(stages)), nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for index, layer in enumerate(self.layers):
            with annotate("PP"):
                x = self.words(x) + self.places.weight if index == 0 else x
                x = layer(x)
                if index == len(self.layers) - 1:
                    x = self.head(x)
        return x


def loss(model: Model, batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def batches(replica: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that count upwards from anywhere, by steps of 1 to 3."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        start = torch.randint(WORDS, (ROWS, 1), generator=generator)
        step = torch.randint(1, 4, (ROWS, 1), generator=generator)
        words = (start + step * torch.arange(LENGTH + 1)) % WORDS
        yield {"tokens": words[:, :-1], "labels": words[:, 1:]}


def make(stages: int = 4) -> Workload:
    torch.manual_seed(1)  # every rank makes the same weights
    return Workload(Model(stages), loss, batches, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
