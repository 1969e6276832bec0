"""PyTorch's own pipeline schedules on emulated stages: `torch-1f1b` and `torch-zbv`, the baselines that Megatron is not.

`torch.distributed.pipelining` runs as it is, on gloo: its schedules, its autograd calls, its sends and receives. Only the stage
is ours, a subclass that overrides public methods of `PipelineStage`: every action lasts as long as was drawn for it, torch's own
work in it included where that is shorter, and a received tensor counts as late until the drawn delay has passed since it was
sent. The sender writes the time into the message's first element, so all ranks must share a monotonic clock (one host).

`torch-zbv` cuts every stage in two: 2P stages on P ranks, rank r has stages r and 2P-1-r. Both halves of stage s last half of
what was drawn for s, so the model's work is the same. Delays belong to the wire: a message between two ranks is late by
what was drawn for that pair of ranks in that direction, whichever halves it connects; within a rank nothing is sent.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

from rrfp.action import Action, Edge
from rrfp.compare.group import Job, Recorders, join_gloo
from rrfp.compare.work import Work
from rrfp.errors import ConfigurationError
from rrfp.trace.recorder import Recorder

TORCH_MODES = ("torch-1f1b", "torch-zbv")
AT_ONCE = 1e-4
"""Seconds between an action and its send that are torch's own work, and no wait for an earlier send."""


class TorchStage:
    """One rank of PyTorch's schedules, in its process: a baseline of `rrfp.compare.group`, for both of `TORCH_MODES`.

    Args:
        rank, ranks: this rank and their number, P.
        directory: shared by the ranks, for the group's file store.
        work: spends the actions' seconds.
        timeout: seconds after which a rank that waits for another fails.
    """

    def __init__(self, rank: int, ranks: int, directory: str, *, work: Work, timeout: float = 120.0):
        self._rank, self._ranks, self._work = rank, ranks, work
        self._ready: dict[tuple[str, int, int], tuple] = {}
        self._recorders = Recorders(rank, ranks)
        self._calls = 0
        join_gloo(rank, ranks, directory, timeout=timeout)

    def prepare(self, job: Job) -> Callable[[], tuple[float, dict[str, int]]]:
        """Everything that is not timed: buffers, connections, one call without durations. All ranks at once, as `go` itself.

        Returns:
            go() -> (peak in flight in whole stages' worth: a half of `torch-zbv` counts 0.5, nanoseconds by cause as
            `Breakdown.parts`). It raises RuntimeError if torch fails, or no longer calls what the stage overrides.

        Raises:
            ConfigurationError: fewer microbatches than stages under `torch-1f1b`.
        """
        check(job.mode, self._ranks, job.microbatches)
        own = stages(job.mode, self._rank, self._ranks)
        key = (job.mode, job.microbatches, job.nbytes)
        if key not in self._ready:
            self._ready[key] = self._make(own, *key)
            nowhere = Recorder(rank=self._rank, stages=own, directory=None)
            self._step(key, _Run(self._ranks, own, lambda action: 0.0, {}, nowhere, self._work))
        recorder = self._recorders.of(job, own)

        def duration(action: Action) -> float:
            return _duration(job, action._replace(stage=action.stage // len(own))) / len(own)

        def go():
            run = _Run(self._ranks, own, duration, job.delays, recorder, self._work)
            recorder.begin_call(self._calls, microbatches=job.microbatches, forward_only=False, now=time.monotonic())
            self._calls += 1
            self._step(key, run)
            recorder.end_call(run.sending())
            peak = run.peak / len(own)
            return int(peak) if peak == int(peak) else peak, recorder.last_call.parts()

        return go

    def close(self) -> None:
        self._ready.clear()
        self._recorders.close()

    def _make(self, own: tuple[int, ...], mode: str, microbatches: int, nbytes: int) -> tuple:
        count, numbers = self._ranks * len(own), max(1, nbytes // 8)
        parts = [_EmulatedStage(stage, count, numbers) for stage in own]
        schedule = (Schedule1F1B(parts[0], microbatches, loss_fn=_loss) if mode == "torch-1f1b" else
                    ScheduleZBVZeroBubble(parts, microbatches, loss_fn=_loss))
        return schedule, parts, torch.zeros(microbatches, numbers, dtype=torch.float64)

    def _step(self, key: tuple[str, int, int], run: "_Run") -> None:
        schedule, parts, batch = self._ready[key]
        for part in parts:
            part.run = run
            part.submod.weight.grad = None
        first, last = any(part.is_first for part in parts), any(part.is_last for part in parts)
        schedule.step(*[batch] * first, target=batch[:, :1] if last else None, return_outputs=False)
        # Each stage must have run M forwards and M backwards through what it overrides, or nothing was emulated.
        wanted = {(stage, kind): key[1] for stage in run.stages for kind in "FB"}
        if run.counts != wanted:
            raise RuntimeError(
                f"{key[0]}: torch {torch.__version__} does not run its stages through PipelineStage.forward_one_chunk and "
                f"backward_one_chunk as torch 2.13 does: ran {dict(run.counts)}, expected {wanted}")


def stages(mode: str, rank: int, ranks: int) -> tuple[int, ...]:
    """The stages that `rank` has under `mode`: its own, or one on each arm of the V."""
    return (rank,) if mode == "torch-1f1b" else (rank, 2 * ranks - 1 - rank)


def check(mode: str, ranks: int, microbatches: int) -> None:
    """Raises ConfigurationError for what PyTorch's schedules refuse."""
    if mode == "torch-1f1b" and microbatches < ranks:
        raise ConfigurationError(
            f"--microbatches {microbatches}: torch-1f1b takes at least as many microbatches as stages; use {ranks}, or leave it out")


def wire(ranks: int, stage: int, kind: str, *, count: int) -> tuple[str, int] | None:
    """Where the message that makes `kind` at `stage` ready came from, as the key (kind, receiving rank) of its drawn delay.

    None if nothing was sent: the first forward, the last backward, and a hand-off within a rank.

    Args:
        count: how many stages there are: ranks, or 2 x ranks laid out as a V.
    """

    def rank_of(s: int) -> int:
        return s if s < ranks else 2 * ranks - 1 - s

    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < count or rank_of(source) == rank_of(stage):
        return None
    return "F" if rank_of(source) < rank_of(stage) else "B", rank_of(stage)


def _duration(job: Job, action: Action) -> float:
    kind, stage, microbatch = action
    if kind in ("I", "W") and kind not in job.durations and action not in job.durations:
        return job.duration(Action("B", stage, microbatch)) / 2
    return job.duration(action)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


class _Run:
    """One call of one rank: what its stages share. One thread."""

    def __init__(
        self, ranks: int, stages: tuple[int, ...], duration: Callable[[Action], float], delays: Mapping, recorder: Recorder,
        work: Work,
    ):
        self.stages, self.recorder = stages, recorder
        self.counts: Counter[tuple[int, str]] = Counter()
        """Forwards, and backwards that released their activation, by stage."""
        self.peak = 0
        """Most activations held by all stages of the rank at once."""
        self._held = dict.fromkeys(stages, 0)
        self._ranks, self._count = ranks, ranks * len(stages)
        self._duration, self._delays, self._work = duration, delays, work
        self._idle_since = time.monotonic()

    def idle(self) -> None:
        """The rank has asked for its next message: from here on it waits for that."""
        self._idle_since = time.monotonic()

    def sending(self) -> float:
        """What was sent before has been taken, for gloo's sends last until the receiver asks, and torch waits. Returns now."""
        now = time.monotonic()
        if now - self._idle_since > AT_ONCE:
            self.recorder.waited("send", self._idle_since, now)
        self._idle_since = now
        return now

    def act(self, action: Action, message: torch.Tensor | None, compute: Callable):
        kind, stage, microbatch = action
        if message is not None:
            direction = "F" if kind == "F" else "B"
            late = self._delays.get((*wire(self._ranks, stage, direction, count=self._count), microbatch), 0.0)
            time.sleep(max(0.0, message.detach()[0, 0].item() + late - time.monotonic()))
            now = time.monotonic()
            self.recorder.waited(direction, self._idle_since, now)
            self.recorder.arrival(Edge(stage - 1 if kind == "F" else stage + 1, stage), microbatch, now)
        start = time.monotonic()
        if kind == "F":
            self.counts[stage, "F"] += 1
            self._held[stage] += 1
            self.peak = max(self.peak, sum(self._held.values()))
        held = self._held[stage]
        result = compute()
        working = time.monotonic()
        self._work.spend(start + self._duration(action) - working)
        if kind in ("B", "W"):
            self.counts[stage, "B"] += 1
            self._held[stage] -= 1
        self._idle_since = time.monotonic()
        self.recorder.action(action, start, self._idle_since, held, self._idle_since - working if self._work.emulated else 0.0)
        return result


class _Scale(torch.nn.Module):
    """The least module that has an input gradient and a weight gradient."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, tensor):
        return tensor * self.weight


class _EmulatedStage(PipelineStage):
    """A stage whose actions and messages last as long as its `run` says. float64, because times are sent in it."""

    run: _Run

    def __init__(self, index: int, count: int, numbers: int):
        # With shapes given nothing is inferred by running the module, which would need the emulation switched off.
        example = torch.empty(1, numbers, dtype=torch.float64)
        super().__init__(
            _Scale(), index, count, torch.device("cpu"), input_args=example.clone().requires_grad_(index > 0),
            output_args=example.clone().requires_grad_())
        self._incoming: dict[tuple[str, int], torch.Tensor] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id):
        return self._expect("F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id):
        return self._expect("B", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id):
        return self._stamp(self.stage_index + 1, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id):
        return self._stamp(self.stage_index - 1, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        return self._act("F", fwd_chunk_id, lambda: super(_EmulatedStage, self).forward_one_chunk(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        # The schedules wait for the gradient right before this, and for the input right before forward_one_chunk.
        return self._act("B" if full_backward else "I", bwd_chunk_id, lambda: super(_EmulatedStage, self).backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward))

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        return self._act("W", bwd_chunk_id, lambda: super(_EmulatedStage, self).backward_weight_one_chunk(
            bwd_chunk_id, last_backward=last_backward))

    def _act(self, kind: str, microbatch: int, work: Callable):
        message = None if kind == "W" else self._incoming.pop(("F" if kind == "F" else "B", microbatch), None)
        return self.run.act(Action(kind, self.stage_index, microbatch), message, work)

    def _expect(self, direction: str, microbatch: int, operations: list) -> list:
        if operations:
            self._incoming[direction, microbatch] = operations[0].tensor
        self.run.idle()
        return operations

    def _stamp(self, target: int, microbatch: int, operations: list) -> list:
        # Both schedules start a send as soon as they have asked for it, and 1F1B waits for the one before in front of that.
        now = self.run.sending()
        for operation in operations:
            operation.tensor.detach()[0, 0] = now
            self.run.recorder.sent(Edge(self.stage_index, target), microbatch, now)
        self.run.idle()
        return operations

