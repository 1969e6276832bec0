"""What the ranks of a `Group` run, and the models that they train."""

import contextlib
import functools
import importlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from torch import distributed as dist

import rrfp.program
from rrfp.errors import RRFPError
from rrfp.program.capture import Captured, capture
from rrfp.program.execute import collectives, executor
from rrfp.program.execute.parameters import Store, _Flat
from rrfp.program.execute.run import Emulation
from tests.program import models
from tests.program.transformer import GPT, loss, make_batch


class Shown:
    """An optimizer, in turn: in one step the parameters become their gradients, so that whoever compares parameters compares each of those; in the
    next they are what they were, and the optimizer takes its step with the gradients that were shown."""

    def __init__(self, parameters, make: Callable):
        self._optimizer, self._kept = make(parameters), None
        self.param_groups = self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        leaves = [leaf for group in self.param_groups for leaf in group["params"]]
        if self._kept is None:
            self._kept = [(leaf.clone(), leaf.grad.clone()) for leaf in leaves]
            for leaf in leaves:
                leaf.copy_(leaf.grad)
        else:
            for leaf, (value, gradient) in zip(leaves, self._kept, strict=True):
                leaf.copy_(value)
                leaf.grad = gradient
            self._kept = None
            self._optimizer.step()


OPTIMIZERS = {name: functools.partial(Shown, make=make) for name, make in {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    # Where a gradient is next to nothing, Adam's quotient would make rounding visible: not with this eps.
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
}.items()}


class Subject(NamedTuple):
    """A model to train. batch: (rows, seed) -> a batch. reference: (batches, pieces, optimizer) -> per step losses and parameters."""

    captured: Callable[[], Captured]
    batch: Callable
    reference: Callable


@functools.cache
def gpt(stages: int, experts: bool = False, tied: bool = False, frozen: bool = False) -> Subject:
    """A transformer in float32, captured. Equal in every process. frozen: a whole half of the first block, and a norm."""
    def make() -> GPT:
        torch.manual_seed(1)
        model = GPT(stages, experts=experts, tied=tied)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not frozen or not name.startswith(("blocks.0.0.", "blocks.1.1.norm."))
        return model

    def reference(batches, pieces, optimizer):
        model = make()
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        update = OPTIMIZERS[optimizer](list(trained.values()))
        for batch in batches:
            losses = []
            for piece in range(pieces):  # summed one after the other, as microbatches are
                losses.append(loss(model, {key: value.chunk(pieces)[piece] for key, value in batch.items()}))
                (losses[-1] / pieces).backward()
            update.step()
            model.zero_grad()
            yield torch.stack(losses).detach(), {name: value.detach().clone() for name, value in trained.items()}

    return Subject(functools.cache(lambda: capture(make(), make_batch(8, 0), loss=loss)), make_batch, reference)


@functools.cache
def plain(name: str, *arguments, **options) -> Subject:
    """A model of `tests/program/models.py`, in float64: its graph is written down, not captured."""
    model = getattr(models, name)(*arguments, **options)

    def reference(batches, pieces, optimizer):
        found = model.reference(batches, pieces=pieces, optimizer=OPTIMIZERS[optimizer])
        return ((torch.tensor(losses, dtype=torch.float64), weights) for losses, weights in found)

    return Subject(lambda: Captured(model.traced, model.functions, model.parameters), model.batch, reference)


def subject(which: tuple) -> Subject:
    """("gpt", stages, experts, tied, frozen), or ("chain", stages, rows, "tied") and the like: what is a string is switched on."""
    name, *arguments = which
    if name == "gpt":
        return gpt(*arguments)
    return plain(name, *(each for each in arguments if not isinstance(each, str)), **{each: True for each in arguments if isinstance(each, str)})


def batches(which: tuple, rows: int, steps: int) -> list:
    """Other data in every step."""
    return [subject(which).batch(rows, 100 + step) for step in range(steps)]


def late(seed: int | None) -> Emulation | None:
    """Random delays of actions, collectives and messages, other ones on each rank."""
    if seed is None:
        return None

    def draw(*key) -> float:
        rng = random.Random(f"{seed} {dist.get_rank()} {key}")
        return 0.004 * rng.random() if rng.random() < 0.3 else 0.0

    return Emulation(seconds=lambda node: draw(node.name), delay=lambda edge, microbatch: draw(edge, microbatch))


class _Done:
    def wait(self, timeout) -> None:
        pass


def _left_out(what: str | None):
    """Breaks what a directive's communication does, or one gradient by a thousandth, for negative controls."""
    if what == "reduction":
        return mock.patch.object(_Flat, "all_reduce", lambda *_: None)
    if what == "exchange":
        def stay(received, sent, **_):
            received.copy_(sent)
            return _Done()

        return mock.patch.object(collectives.dist, "all_to_all_single", stay)
    if what == "scatter":
        def own(received, sent, group, **_):
            received.copy_(sent.chunk(dist.get_world_size(group))[dist.get_rank(group)])
            return _Done()

        return mock.patch("torch.distributed.reduce_scatter_single", own)
    if what == "gradient":
        add = Store.add
        return mock.patch.object(Store, "add", lambda store, name, gradient, piece: add(
            store, name, gradient * 1.001 if name == "head.weight" else gradient, piece))
    return contextlib.nullcontext()


def train(which: tuple, directives: list, *, replicas: int, rows: int, optimizer: str, modes: list[str], seed: int | None = None,
          wrong: str | None = None, trace: str | None = None, emulation: Emulation | None = None):
    """One step for each of `modes`, on `rows` rows of all replicas. Returns per step losses and all parameters after it, and the peak."""
    found = []
    with _left_out(wrong), rrfp.program.compile(subject(which).captured(), directives, optimizer=OPTIMIZERS[optimizer], timeout=60.0,
                                                emulation=emulation or late(seed), trace=trace) as run:
        for mode, batch in zip(modes, batches(which, rows, len(modes)), strict=True):
            run.mode = mode
            losses = run.step({key: value.chunk(replicas)[dist.get_rank() % replicas] for key, value in batch.items()})
            found.append((losses.numpy(), {key: value.numpy() for key, value in run.state_dict().items()}))
        return found, run.peak


def fail(which: tuple, directives: list, *, replicas: int, rows: int, culprit: int, how: str, timeout: float = 60.0):
    """A good step, then one in which a rank does `how`. Returns what every rank saw, and how many seconds the second step took."""
    captured, armed = subject(which).captured(), []

    def wrap(function):
        def run(weights, inputs):
            if armed and dist.get_rank() == culprit:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("on purpose")
            return function(weights, inputs)

        return run

    functions = {name: wrap(function) for name, function in captured.functions.items()}
    first, second = batches(which, rows, 2)
    run = rrfp.program.compile(Captured(captured.traced, functions, captured.weights), directives, optimizer=OPTIMIZERS["sgd"], timeout=timeout)
    try:
        run.step(_own(first, replicas))
        dist.barrier()  # what fails next fails in the second step of every rank
        batch, start = _own(second, replicas), time.monotonic()
        if how in ("raise", "kill"):
            armed.append(True)
        if how == "batch" and dist.get_rank() == culprit:
            batch = {key: value[:-1] for key, value in batch.items()}
        if how == "alike" or (how == "rows" and dist.get_rank() == culprit) or (how == "unseen" and dist.get_rank() % replicas == culprit):
            batch = {key: value[:4] for key, value in batch.items()}
        if how == "unseen":
            run._run._compare_rows = lambda rows: None
        if how == "width" and dist.get_rank() == culprit:
            batch = {key: value if value.dim() == 1 else value[:, :-1] for key, value in batch.items()}
        if how == "list" and dist.get_rank() == culprit:
            batch = list(batch.values())
        if how == "absent" and dist.get_rank() == culprit:
            run._run._collectives.issue = lambda node, after: collectives.Operation(node.name, lambda: None)
        try:
            found = run.step(batch)
            if how == "mean":
                if dist.get_rank() == culprit:
                    os.kill(os.getpid(), signal.SIGKILL)
                run.mean(found)
        except RRFPError as error:
            return type(error).__name__, str(error), time.monotonic() - start
        except ValueError as error:
            return type(error).__name__, str(error), time.monotonic() - start
        return "nothing", "", time.monotonic() - start
    finally:
        run.close()


def refuse(which: tuple, directives: list, *, change: int | None = None, optimizer: str = "SGD") -> str:
    """What `compile` says. change: the rank whose parameters are other ones. optimizer: a class of torch.optim."""
    captured = subject(which).captured()
    if change == dist.get_rank():
        captured = Captured(captured.traced, captured.functions, {name: value + 1 for name, value in captured.weights.items()})
    try:
        rrfp.program.compile(captured, directives, optimizer=getattr(torch.optim, optimizer)).close()
    except RRFPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def page(code: str) -> dict:
    """Runs an example of the documentation as torchrun would."""
    variables: dict = {}
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec(code, variables)
    return {name: value for name, value in variables.items() if isinstance(value, (int, float, str, list))}


def benchmark(module: str, name: str, arguments: tuple, ahead: int = executor.AHEAD):
    """Runs a function of a benchmark. ahead: reductions that may be under way."""
    with mock.patch.object(executor, "AHEAD", ahead):
        return getattr(importlib.import_module(f"benchmarks.{module}"), name)(*arguments)


def _own(batch, replicas: int):
    return {key: value.chunk(replicas)[dist.get_rank() % replicas] for key, value in batch.items()}

