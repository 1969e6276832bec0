"""What the benchmarks of programs share: a model, and real processes that run one job each."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

from rrfp.program.capture import Captured, annotate, capture

EXPERTS = 4
ROWS = 480
"""Of the example: most numbers of microbatches divide it."""


class Dense(nn.Module):
    """A layer: two products of hidden x 2 hidden."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """A layer: a product, then experts with real routing, each row to one of them."""

    def __init__(self, hidden: int):
        super().__init__()
        self.mix, self.gate = nn.Linear(hidden, hidden), nn.Linear(hidden, EXPERTS)
        self.expert = nn.Parameter(torch.randn(EXPERTS, hidden, hidden) / hidden)

    def forward(self, x):
        x = x + self.mix(x).tanh()
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), EXPERTS).to(x.dtype)
        tokens = torch.einsum("re,rh->erh", chosen, x)
        with annotate("EP"):
            tokens = torch.bmm(tokens, self.expert).tanh()
        return x + torch.einsum("re,erh->rh", weights * chosen, tokens)


class Model(nn.Module):
    """Layers, each tagged PP."""

    def __init__(self, layers: int, hidden: int, kind: type):
        super().__init__()
        self.layers = nn.ModuleList(kind(hidden) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x)
        return x


def make(layers: int, hidden: int, kind: type) -> Captured:
    torch.manual_seed(1)
    return capture(Model(layers, hidden, kind), {"x": torch.randn(ROWS, hidden)}, loss=lambda model, batch: model(batch["x"]).square().mean())


def in_stages(captured: Captured, stages: int) -> Captured:
    """The same model, its layers dealt to as many stages."""
    count = 1 + max(segment.tags["PP"] for segment in captured.traced.segments)
    segments = tuple(replace(segment, tags={**segment.tags, "PP": segment.tags["PP"] * stages // count}) for segment in captured.traced.segments)
    return replace(captured, traced=replace(captured.traced, segments=segments))


def run(ranks: int, job: Callable, *arguments, deadline: float = 600.0) -> list:
    """job(*arguments) on `ranks` forked processes in one gloo job. Returns each one's result; RuntimeError with the first traceback if one raised."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [context.Process(target=_work, args=(rank, ranks, Path(directory) / "store", sender, job, arguments), daemon=True)
                     for rank, (_, sender) in enumerate(pipes)]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        until, found, waiting = time.monotonic() + deadline, {}, {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        try:
            while waiting:
                ready = wait(list(waiting), max(0.0, until - time.monotonic()))
                if not ready:
                    raise RuntimeError(f"ranks {sorted(waiting.values())} gave no result within {deadline:.0f} s")
                for receiver in ready:
                    rank = waiting.pop(receiver)
                    good, found[rank] = receiver.recv()
                    if not good:
                        raise RuntimeError(f"rank {rank} failed:\n{found[rank]}")
        finally:
            for process in processes:
                if waiting:
                    process.terminate()
                process.join(20)
        return [found[rank] for rank in range(ranks)]


def _work(rank: int, ranks: int, store: Path, sender, job: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        sender.send((True, job(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    dist.destroy_process_group()
