"""The pipeline of this process: transport, engine and watcher, from the first moment the pipeline group exists to process exit.

Who owns what: a `Runtime` belongs to the main thread; its transport and watcher have threads of their own. A forked child (data
loader workers, asynchronous checkpoints) inherits the object and must not use it: everything checks the process id.
"""

import atexit
import os
import sys
from collections.abc import Callable

import torch

from rrfp.comm.transport import Failure
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.engine.loop import Engine
from rrfp.engine.watchdog import Watcher, write_report
from rrfp.errors import PipelineError
from rrfp.megatron.options import Options
from rrfp.megatron.padding import Emulation, Injection
from rrfp.placement import Placement
from rrfp.scheduler.dependencies import chain
from rrfp.tp_coord.agreement import Solo
from rrfp.trace.recorder import Recorder

OPEN_DEADLINE = 300.0
CLOSE_DEADLINE = 10.0


class Runtime:
    """One pipeline group of this process.

    Args:
        options: the user's.
        global_ranks: the ranks of the pipeline group, in pipeline order.
        rank: this process' place in it.
        store: the job's key-value store, as `torch.distributed`'s.

    Raises:
        PipelineError: some rank did not come in time; names it.
    """

    def __init__(self, options: Options, *, global_ranks: list[int], rank: int, store):
        self.options = options
        self.rank = rank
        self.placement = Placement.looped(len(global_ranks))
        self.padding = make_padding(options, stages=self.placement.stages)
        self.recorder = make_recorder(options, rank=rank, placement=self.placement)
        self.durations: dict[str, float] = {}
        self._pid = os.getpid()
        self._closed = False
        tasks = chain(self.placement, rank, 1).tasks.values()
        owner = dict(enumerate(self.placement.owners))
        self.transport = ZmqTransport(
            rank=rank,
            edges_in=sorted({edge for task in tasks for edge in task.arrivals}),
            edges_out=sorted({edge for task in tasks for edge in task.sends}),
            owner=owner,
            store=store,
            lanes=options.lanes,
            interface=options.interface,
            delay=getattr(self.padding, "delay", None),
        )
        self.engine = Engine(
            rank=rank,
            owner=self.placement.rank_of,
            transport=self.transport,
            agreement=Solo(),
            recorder=self.recorder,
            timeout=options.timeout or 600.0,
        )
        self.transport.open(self.engine.post, deadline=OPEN_DEADLINE)
        self.watcher = Watcher(self.engine, report=self._report)
        _at_exit(self)

    def _report(self, text: str) -> None:
        write_report(text, rank=self.rank, directory=self.options.trace)

    def raised(self) -> None:
        """The main thread is about to raise what the latch holds."""
        failure = self.engine.latch.failure
        if failure is not None:
            self.watcher.raised(failure)

    def tell(self, error: BaseException, *, where: str) -> None:
        """An exception that ends this process outside the schedule: tell the others, so that none waits for it."""
        failure = Failure(self.rank, where, f"{type(error).__name__}: {error}")
        if os.getpid() == self._pid and not self._closed and self.engine.latch.set(failure):
            self.transport.abort(failure)

    def close(self) -> None:
        """Say goodbye to the neighbours and join every thread. Safe to call twice; does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.watcher.close()
        try:
            self.transport.close(deadline=CLOSE_DEADLINE)
        except PipelineError as error:
            print(f"[rrfp] rank {self.rank}: {error}", file=sys.stderr, flush=True)
        self.recorder.close()
        if self.padding is not None:
            print(f"[rrfp] rank {self.rank}: {self.padding.summary()}", flush=True)


def make_padding(options: Options, *, stages: int) -> Emulation | Injection | None:
    """What lengthens actions, if anything does."""
    if options.emulate is not None:
        return Emulation(options.emulate, stages=stages)
    if options.inject is not None:
        return Injection(options.inject)
    return None


def make_recorder(options: Options, *, rank: int, placement: Placement) -> Recorder:
    """The trace of one rank."""
    return Recorder(rank=rank, stages=placement.stages_of(rank), directory=options.trace, ranks=placement.ranks, nvtx=options.nvtx)


_runtimes: dict[tuple[int, ...], Runtime] = {}
_openings: dict[tuple[int, ...], int] = {}


def runtime_for(options: Options, pp_group: "torch.distributed.ProcessGroup") -> Runtime:
    """The runtime of this pipeline group, connected at first use. The same ranks get the same runtime again."""
    ranks = torch.distributed.get_process_group_ranks(pp_group)
    key = tuple(ranks)
    if key not in _runtimes:
        # Every opening has keys of its own: what an earlier one left in the store must not be taken for this one's.
        _openings[key] = _openings.get(key, 0) + 1
        store = torch.distributed.PrefixStore(f"rrfp/{'-'.join(map(str, ranks))}/{_openings[key]}", torch.distributed.distributed_c10d._get_default_store())
        _runtimes[key] = Runtime(options, global_ranks=ranks, rank=pp_group.rank(), store=store)
    return _runtimes[key]


def close_all() -> None:
    """Close every runtime of this process."""
    for runtime in list(_runtimes.values()):
        runtime.close()
    _runtimes.clear()


def _at_exit(runtime: Runtime) -> None:
    if len(_runtimes) == 0 and not getattr(sys, "_rrfp_hooked", False):
        sys._rrfp_hooked = True
        atexit.register(close_all)
        _tell_on_exception(sys.excepthook)


def _tell_on_exception(previous: Callable) -> None:
    def hook(kind, error, trace):
        for runtime in _runtimes.values():
            runtime.tell(error, where="outside the schedule")
        previous(kind, error, trace)

    sys.excepthook = hook
