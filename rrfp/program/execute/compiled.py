"""A program, opened on the ranks of a `torch.distributed` job: `compile(model, directives).step(batch, loss)`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import distributed as dist

from rrfp.errors import ConfigurationError
from rrfp.program.capture import Captured, capture
from rrfp.program.directives import Directive, apply
from rrfp.program.execute.parameters import MakeOptimizer
from rrfp.program.execute.run import Emulation, Peak, Run
from rrfp.program.lower import lower
from rrfp.program.plan import MODES, Lowered
from rrfp.program.training import training_dag

Loss = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


def compile(
    model: torch.nn.Module | Captured,
    directives: Sequence[Directive],
    *,
    example_batch: Mapping[str, torch.Tensor] | None = None,
    loss: Loss | None = None,
    mode: str = "ready",
    limit: int | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    trace: str | Path | None = None,
    timeout: float = 600.0,
    interface: str | None = None,
    emulation: Emulation | None = None,
) -> "Compiled":
    """A strategy over a model, ready to train. Every rank of the job calls it alike; global rank = device of the directives.

    `torch.distributed` must be initialised (torchrun's variables and `init_process_group("gloo")`). The model is captured with the
    example batch, here or, if that is not given, with the first step's. Its parameters at that time are where training begins: they are
    copied, and must be equal on all ranks.

    Args:
        model: with `annotate`d parts (`rrfp.program.capture`), or what `capture` made of it.
        example_batch: of one replica, by name, first dimension the batch.
        loss: loss(model, batch) -> a scalar, the mean over the batch. May be given to the first step.
        mode: "ready", or "strict": the order of the directives is obeyed (`Lowered.scheduler`).
        limit: ready mode: activations that a rank may hold; by default what its order holds.
        optimizer: makes one from a list of parameters. With ZeRO these are flat shards, which lie across parameters: then only
            optimizers that treat every number for itself (SGD, Adam, AdamW) compute what they would without. Others are refused where
            their name tells (LBFGS, Muon, Adafactor, LAMB).
        trace: directory for traces, one below it per pipeline.
        timeout: seconds without progress, of an action, a message or a collective, after which the step fails on every rank.
        interface: network name or address for messages to other hosts.

    Raises:
        ConfigurationError: for what the directives, the model or this job do not allow; and on every rank, if two were given different
            ones.
        PipelineError: a rank did not come; names it.
    """
    if mode not in MODES:
        raise ConfigurationError(f"mode {mode}: must be one of {', '.join(MODES)}")
    if not dist.is_initialized():
        raise ConfigurationError('compile: torch.distributed is not initialised; start with torchrun, and call init_process_group("gloo") first')
    settings = {"mode": mode, "limit": limit, "optimizer": optimizer, "trace": trace, "timeout": timeout, "interface": interface,
                "emulation": emulation or Emulation()}
    compiled = Compiled(model, tuple(directives), loss, settings)
    if isinstance(model, Captured):
        compiled._open(model)
    elif example_batch is not None:
        compiled._capture(example_batch, None)
    return compiled


class Compiled:
    """One rank's end. Use as a context manager, or `close` it; all ranks do the same calls in the same order."""

    def __init__(self, model, directives: tuple[Directive, ...], loss: Loss | None, settings: Mapping):
        self._model, self._directives, self._loss, self._settings = model, directives, loss, settings
        self._run: Run | None = None
        self.peak = Peak()
        self.mode: str = settings["mode"]
        """May be changed between two steps, on all ranks."""

    def step(self, batch: Mapping[str, torch.Tensor], loss: Loss | None = None) -> torch.Tensor:
        """Forward, backward and update of one batch.

        Args:
            batch: this replica's part of the batch, by name, on every rank of its pipeline that reads any of it. Replicas get equally
                many rows. It is cut into microbatches here.
            loss: as `compile`'s, in the first step, if that was not given one.

        Returns:
            The losses of all microbatches of this replica, on every rank: microbatches.

        Raises:
            ConfigurationError: the batch does not fit the program, or has other rows than a replica's.
            PipelineError: a rank failed or was lost, or nothing moved for too long: on every rank, naming the first to fail.
        """
        if self._run is None:
            self._capture(batch, loss)
        found = self._run.step(batch, mode=self.mode)
        self.peak = self._run.peak
        return found

    def mean(self, losses: torch.Tensor) -> float:
        """Of what `step` returned, over all replicas too. All ranks call it. Raises PipelineError as `step`."""
        return self._opened("mean").mean(losses)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters that this rank holds pieces of, whole, by the model's names. All ranks call it: shards are gathered."""
        return self._opened("state_dict").state_dict()

    @property
    def program(self) -> Lowered:
        return self._opened("program").program

    def close(self) -> None:
        """Say goodbye to the other ranks and join every thread. Safe to call twice and after a failure."""
        if self._run is not None:
            self._run.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def _opened(self, what: str) -> "Run":
        if self._run is None:
            raise ConfigurationError(f"{what}: the model is captured with the first step's batch; make a step first, or give compile example_batch")
        return self._run

    def _capture(self, batch: Mapping[str, torch.Tensor], loss: Loss | None) -> None:
        loss = loss or self._loss
        if loss is None:
            raise ConfigurationError("loss: none was given; give one to compile, or to the first step")
        self._open(capture(self._model, batch, loss=loss))

    def _open(self, captured: Captured) -> None:
        self._run = Run(captured, lower(apply(training_dag(captured.traced), self._directives)), **self._settings)
        self._model = None  # every rank has its part: the whole model goes, unless its maker holds it
