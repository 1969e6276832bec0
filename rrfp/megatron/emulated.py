"""Megatron's own 1F1B on stages without a model: its schedule function and its communication as they are, over gloo on the CPU.

A message is late by what was drawn, counted from when its sender handed it over, so that compute hides it as it would a slow link:
its first element carries the sender's time (all ranks share a monotonic clock: one host), and the receiving call returns when the
message is due. What Megatron itself costs stays: sends and receives are batched, and wait for each other on the compute path.
"""

import time
import warnings
from collections.abc import Callable
from itertools import count

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from rrfp.action import Action, Edge
from rrfp.compare.group import Job, Recorders, join_gloo
from rrfp.compare.work import Work
from rrfp.trace.recorder import Recorder


class MegatronStage:
    """One rank of `megatron-1f1b`, a baseline of `rrfp.compare.group.Contenders`. CPU mode must be on (`rrfp.megatron.cpu`).

    Runs `megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving`.
    """

    def __init__(self, rank: int, ranks: int, directory: str, *, work: Work):
        self._rank, self._ranks, self._work = rank, ranks, work
        warnings.filterwarnings("ignore", module=r"megatron\.")  # about what is not installed, and no stage here uses
        join_gloo(rank, ranks, directory)
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
        self._groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
        self._recorders = Recorders(rank, ranks)
        self._calls = count()

    def prepare(self, job: Job) -> Callable[[], tuple[int, dict[str, int]]]:
        """As the module `rrfp.compare.group` describes a baseline. RuntimeError in go: Megatron runs its stages in another way."""
        size = max(1, job.nbytes // 8)
        config = TransformerConfig(num_layers=self._ranks, hidden_size=size, num_attention_heads=1, pipeline_dtype=torch.float64,
                                   pipeline_model_parallel_size=self._ranks)
        run = _Run(job, self._rank, self._ranks, self._work, self._recorders.of(job, (self._rank,)))
        model = _Model(run, config, size if self._rank == 0 else None)
        communicator = _Communicator(run, self._groups.pp, config)

        def go():
            run.recorder.begin_call(next(self._calls), microbatches=job.microbatches, forward_only=False, now=time.monotonic())
            schedules.forward_backward_pipelining_without_interleaving(
                forward_step_func=lambda iterator, model: (model(), _loss), data_iterator=None, model=model,
                num_microbatches=job.microbatches, seq_length=1, micro_batch_size=1, p2p_communicator=communicator,
                pg_collection=self._groups)
            run.recorder.end_call(time.monotonic())
            run.check()
            return run.peak, run.recorder.last_call.parts()

        return go

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        self._recorders.close()


def _loss(output: torch.Tensor):
    return output.mean(), {}


class _Run:
    """One call of one rank: what its model and its communicator share. One thread."""

    def __init__(self, job: Job, rank: int, ranks: int, work: Work, recorder: Recorder):
        self.recorder, self.peak = recorder, 0
        self._job, self._rank, self._ranks, self._work = job, rank, ranks, work
        self._held = 0
        self._numbers = {what: count() for what in ("F", "sent F", "sent B", "received F", "received B")}
        # Messages by neighbour: the chain's ends have one.
        self._messages = 2 * job.microbatches * ((rank > 0) + (rank < ranks - 1))

    def next_forward(self) -> int:
        """The microbatch that runs forward now: Megatron takes them in order."""
        return next(self._numbers["F"])

    def act(self, kind: str, microbatch: int) -> None:
        action = Action(kind, self._rank, microbatch)
        self._held += kind == "F"
        self.peak = max(self.peak, self._held)
        start, held = time.monotonic(), self._held
        self._work.spend(self._job.duration(action))
        end = time.monotonic()
        self._held -= kind == "B"
        self.recorder.action(action, start, end, held, end - start if self._work.emulated else 0.0)

    def sent(self, kind: str, tensor: torch.Tensor) -> None:
        edge = Edge(self._rank, self._rank + (1 if kind == "F" else -1))
        now, microbatch = time.monotonic(), next(self._numbers[f"sent {kind}"])
        tensor.detach().view(-1)[0] = now
        self.recorder.sent(edge, microbatch, now)

    def received(self, kind: str, tensor: torch.Tensor) -> None:
        edge = Edge(self._rank + (-1 if kind == "F" else 1), self._rank)
        microbatch = next(self._numbers[f"received {kind}"])
        due = tensor.detach().view(-1)[0].item() + self._job.delay(edge, microbatch)
        time.sleep(max(0.0, due - time.monotonic()))
        self.recorder.arrival(edge, microbatch, time.monotonic())

    def check(self) -> None:
        """Every message must have gone through here, or its delay was not emulated."""
        seen = sum(next(number) for what, number in self._numbers.items() if what != "F")
        if seen != self._messages:
            raise RuntimeError(f"megatron-1f1b: {seen} messages of {self._messages} went through P2PCommunicator._communicate: this "
                               "megatron-core communicates in another way than 0.17.1 to 0.19.x")


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor, run):
        context.run, context.microbatch = run, run.next_forward()
        run.act("F", context.microbatch)
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        context.run.act("B", context.microbatch)
        return gradient.clone(), None


class _Model(torch.nn.Module):
    """What Megatron asks of a stage's model. `size`: numbers of the first stage's parameter, which makes its own input; else None."""

    def __init__(self, run: _Run, config: TransformerConfig, size: int | None):
        super().__init__()
        self.config, self.run, self.input = config, run, None
        self.weight = None if size is None else torch.nn.Parameter(torch.zeros(1, 1, size, dtype=torch.float64))

    def set_input_tensor(self, tensor):
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self):
        return _Spend.apply(self.weight if self.input is None else self.input, self.run)


class _Communicator(P2PCommunicator):
    """Megatron's, with late messages, and with the time in it recorded as waiting for what it receives, else for the send."""

    def __init__(self, run: _Run, group, config: TransformerConfig):
        super().__init__(group, config)
        self._run = run

    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, **options):
        start = time.monotonic()
        if tensor_send_next is not None:
            self._run.sent("F", tensor_send_next)
        if tensor_send_prev is not None:
            self._run.sent("B", tensor_send_prev)
        result = super()._communicate(tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, recv_prev=recv_prev,
                                      recv_next=recv_next, **options)
        if recv_prev:
            self._run.received("F", result[0])
        if recv_next:
            self._run.received("B", result[1])
        self._run.recorder.waited("F" if recv_prev else "B" if recv_next else "send", start, time.monotonic())
        return result
