"""Megatron's own 1F1B, watched: the same trace, emulated durations, message delays and jitter, for comparisons.

Its schedule functions run untouched. Around them, their forward and backward steps are timed (and lengthened if asked), and so are
the communicator's calls, which is where they wait; with several chunks messages are asynchronous, and everything between two steps
is a wait. Only installed when a trace, an emulation or an injection was asked for.
"""

import atexit
import functools
import itertools
import time
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.megatron.options import Options
from rrfp.megatron.padding import Emulation
from rrfp.megatron.runtime import make_padding, make_recorder
from rrfp.megatron.scalars import Scalars
from rrfp.placement import Placement

# What each of the communicator's methods that Megatron's non-interleaved schedule uses sends and receives: "F", "B" or neither.
_METHODS = {
    "recv_forward": (None, "F"),
    "recv_backward": (None, "B"),
    "send_forward": ("F", None),
    "send_backward": ("B", None),
    "send_forward_recv_backward": ("F", "B"),
    "send_backward_recv_forward": ("B", "F"),
}


SHORTEST_WAIT = 1e-5
"""Seconds."""


class Baseline:
    """Watches one rank of Megatron's 1F1B, interleaved if it has several chunks."""

    def __init__(self, options: Options):
        self._options = options
        self._call = -1
        self._in_call = False
        self._recorder = None

    # ------------------------------------------------------------------ the schedule function
    def schedule(self, original: Callable, *, interleaved: bool) -> Callable:
        """What takes the place of `original`, one of Megatron's two pipeline schedules."""

        @functools.wraps(original)
        def forward_backward(**kwargs):
            communicator, model = kwargs.get("p2p_communicator"), kwargs["model"]
            group = communicator.pp_group if communicator is not None else parallel_state.get_pipeline_model_parallel_group()
            microbatches = kwargs["num_microbatches"]
            self._connect(group, chunks=len(model) if interleaved else 1)
            self._call += 1
            self._next = {key: itertools.count() for key in ("F", "B", "sent F", "sent B", "received F", "received B")}
            self._table = None
            if interleaved:
                size = get_model_config(model[0]).microbatch_group_size_per_vp_stage
                self._table = schedules.get_schedule_table(microbatches, len(model), size)
            self._in_flight = 0
            if self._padding is not None:
                self._padding.begin(self._call, microbatches)
                if interleaved and getattr(self._padding, "delays_messages", False):
                    raise ConfigurationError(
                        f"--rrfp-emulate {self._options.emulate} with --pipeline-schedule 1f1b and several chunks per rank: Megatron's "
                        "asynchronous messages can't be made late; use a scenario without message delays, or one chunk")
            self._in_call = True
            self._finished = time.monotonic()
            self._recorder.begin_call(self._call, microbatches=microbatches, forward_only=kwargs.get("forward_only", False), now=self._finished)
            try:
                result = original(**kwargs)
            finally:
                self._in_call = False
            self._recorder.end_call(self._finished)
            self._scalars.add(self._recorder.last_call)
            self._scalars.write()
            return result

        return forward_backward

    def _connect(self, group, *, chunks: int) -> None:
        if self._recorder is not None:
            return
        self._rank, ranks = group.rank(), group.size()
        self._last = ranks - 1
        self._chunks = chunks
        placement = Placement.looped(ranks, chunks)
        members = torch.distributed.get_process_group_ranks(group)
        self._recorder = make_recorder(self._options, global_ranks=members, rank=self._rank, placement=placement)
        self._padding = make_padding(self._options, stages=placement.stages)
        name = "-".join(map(str, members))
        store = torch.distributed.distributed_c10d._get_default_store()
        self._stamps = torch.distributed.PrefixStore(f"rrfp/sent/{name}", store)
        self._scalars = Scalars(rank=self._rank, ranks=ranks, store=torch.distributed.PrefixStore(f"rrfp/baseline/{name}", store))

    def close(self) -> None:
        """Write what is left of the trace and say how the emulation went."""
        if self._recorder is not None:
            self._scalars.close()
            self._recorder.close()
            if self._padding is not None:
                print(f"[rrfp] rank {self._rank}: {self._padding.summary()}", flush=True)
            self._recorder = None

    # ------------------------------------------------------------------ its steps
    def step(self, function: Callable, kind: str) -> Callable:
        """`forward_step` or `backward_step`, timed and lengthened."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if not self._in_call:
                return function(*args, **kwargs)
            action = self._action(kind, next(self._next[kind]))
            self._in_flight += kind == "F"
            held = self._in_flight
            start = time.monotonic()
            if self._table is not None and start - self._finished > SHORTEST_WAIT:
                self._recorder.waited(kind, self._finished, start)
            self._recorder.start_action(action)
            if self._padding is not None:
                self._padding.start()
            result = function(*args, **kwargs)
            padded = self._padding.finish(self._call, action) if self._padding is not None else 0.0
            self._finished = time.monotonic()
            self._in_flight -= kind == "B"
            self._recorder.action(action, start, self._finished, held, padded)
            return result

        return timed

    def _action(self, kind: str, index: int) -> Action:
        """The index-th action of a kind, in Megatron's order."""
        if self._table is None:
            return Action(kind, self._rank, index)
        microbatch, chunk = self._table[index]
        if kind == "B":
            chunk = self._chunks - 1 - chunk
        return Action(kind, chunk * (self._last + 1) + self._rank, microbatch)

    def communicate(self, function: Callable, sends: str | None, receives: str | None) -> Callable:
        """One method of the communicator: waits are recorded, and received messages are late as emulated."""

        @functools.wraps(function)
        def timed(communicator, *args, **kwargs):
            if not self._in_call or self._table is not None:
                return function(communicator, *args, **kwargs)
            start = time.monotonic()
            if sends is not None:
                self._sent(sends)
            result = function(communicator, *args, **kwargs)
            if receives is not None:
                self._received(receives)
            end = time.monotonic()
            if end - start > SHORTEST_WAIT:
                self._recorder.waited(receives or "send", start, end)
            self._finished = end
            return result

        return timed

    def _edge(self, kind: str, *, out: bool) -> Edge | None:
        """The edge on which this rank sends or receives `kind`, or None at the ends of the pipeline."""
        other = self._rank + (1 if (kind == "F") == out else -1)
        if not 0 <= other <= self._last:
            return None
        return Edge(self._rank, other) if out else Edge(other, self._rank)

    def _sent(self, kind: str) -> None:
        edge = self._edge(kind, out=True)
        if edge is None:
            return
        microbatch, now = next(self._next[f"sent {kind}"]), time.monotonic()
        self._recorder.sent(edge, microbatch, now)
        if isinstance(self._padding, Emulation) and self._padding.delay(edge, microbatch):
            self._stamps.set(f"{self._call}/{edge}/{microbatch}", repr(now))

    def _received(self, kind: str) -> None:
        edge = self._edge(kind, out=False)
        if edge is None:
            return
        microbatch = next(self._next[f"received {kind}"])
        if isinstance(self._padding, Emulation) and (late := self._padding.delay(edge, microbatch)):
            key = f"{self._call}/{edge}/{microbatch}"
            due = float(self._stamps.get(key)) + late
            self._stamps.delete_key(key)
            time.sleep(max(0.0, due - time.monotonic()))
        self._recorder.arrival(edge, microbatch, time.monotonic())


def watch(options: Options, *, originals: dict[str, Callable]) -> Callable[[], None]:
    """Put a `Baseline` around Megatron's schedule. Returns a function that takes it away again."""
    baseline = Baseline(options)
    undo = []

    def replace(owner, name: str, value) -> None:
        undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for name, original in originals.items():
        replace(schedules, name, baseline.schedule(original, interleaved=name.endswith("with_interleaving")))
    for name, kind in (("forward_step", "F"), ("backward_step", "B")):
        replace(schedules, name, baseline.step(getattr(schedules, name), kind))
    for name, (sends, receives) in _METHODS.items():
        replace(P2PCommunicator, name, baseline.communicate(getattr(P2PCommunicator, name), sends, receives))

    atexit.register(baseline.close)

    def remove() -> None:
        baseline.close()
        atexit.unregister(baseline.close)
        for step in reversed(undo):
            step()

    return remove
