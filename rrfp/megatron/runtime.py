"""The pipeline of this process: transport, engine and watcher, from the first moment the pipeline group exists to process exit.

Who owns what: a `Runtime` belongs to the main thread; its transport and watcher have threads of their own. A forked child (data
loader workers, asynchronous checkpoints) inherits the object and must not use it: everything checks the process id.
"""

import atexit
import functools
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from rrfp.comm.nccl_transport import NcclTransport
from rrfp.comm.rendezvous import Fact, compare
from rrfp.comm.transport import Departure, Failure
from rrfp.engine.failure import FailureLatch, came_home, describe
from rrfp.engine.launches import Launches
from rrfp.engine.loop import FIRST_CALL, Engine
from rrfp.engine.watchdog import Watcher
from rrfp.errors import ConfigurationError, PipelineError
from rrfp.megatron.chord import Chord
from rrfp.megatron.device import device_facts, find_device, transport_for
from rrfp.megatron.domain import NamedAgreement, find_domain, groups_of
from rrfp.megatron.facts import job_facts
from rrfp.megatron.failures import FailureReport, name_run
from rrfp.megatron.frozen import FrozenPrefix
from rrfp.megatron.options import Options
from rrfp.megatron.padding import Emulation, Injection
from rrfp.megatron.replicas import Replicas
from rrfp.megatron.scalars import Scalars
from rrfp.mode import mode_name
from rrfp.placement import Placement
from rrfp.scheduler.dependencies import chain
from rrfp.tp_coord.opening import open_agreement
from rrfp.trace.recorder import Recorder

OPEN_DEADLINE = 300.0
CLOSE_DEADLINE = 10.0
SWITCH_INTERVAL = 1e-4
"""Seconds for which a thread may keep the interpreter lock while another wants it. Python's 5 ms would let an arrival wait that long
behind a main thread that runs Python code (docs/transport.md has the figures)."""
SILENCE = 2.4
"""Times the timeout: how long a member of the domain may give no sign of life. As outside calls: neighbours in the pipeline see it sooner."""
SETTLE = 1.0
"""Seconds in which the news of a lost peer arrives after its first effects."""


class Runtime:
    """One pipeline group of this process.

    Args:
        options: the user's.
        global_ranks: the ranks of the pipeline group, in pipeline order.
        rank: this process' place in it.
        chunks: how many it owns.
        store: the job's key-value store, as `torch.distributed`'s; a part of it that is this pipeline's.
        job_store: a part that all pipelines share.
        groups: ranks of the process groups whose collectives run inside this rank's actions.

    Raises:
        ConfigurationError: on every rank, if two disagree on a version, a flag or the size of the job.
        PipelineError: some rank did not come in time; names it.
    """

    def __init__(self, options: Options, *, global_ranks: list[int], rank: int, store, job_store, groups=(), chunks: int = 1):
        self.options = options
        self.rank = rank
        self.placement = Placement.looped(len(global_ranks), chunks)
        self.padding = make_padding(options, stages=self.placement.stages)
        self.recorder = make_recorder(options, global_ranks=global_ranks, rank=rank, placement=self.placement)
        self.scalars = Scalars(rank=rank, ranks=len(global_ranks), store=store)
        self.durations: dict[str, float] = {}
        self._store = store
        self._frozen = FrozenPrefix(store, self.placement, rank)
        self._met = False
        self._global_ranks = global_ranks
        self._departed: set[int] = set()
        self._pid = os.getpid()
        self._closed = False
        owner = dict(enumerate(self.placement.owners))
        edges = {edge for each in range(self.placement.ranks) for task in chain(self.placement, each, 1).tasks.values() for edge in task.arrivals}
        edges_in = sorted(edge for edge in edges if owner[edge.destination] == rank)
        job_rank, until = global_ranks[rank], time.monotonic() + OPEN_DEADLINE
        domain = find_domain(groups, rank=job_rank, stage=rank, store=job_store, until=until)
        agreement = open_agreement(
            options.agreement, domain=domain, rank=job_rank, store=job_store, edges=edges_in, lanes=options.lanes,
            deadline=OPEN_DEADLINE, heartbeat_s=_heartbeat(options), silence_s=SILENCE * options.patience,
            interface=options.interface)
        self.alone = len(domain.members) * len(global_ranks) == torch.distributed.get_world_size()
        """Whether this rank's gradients are reduced over nobody outside its domain."""
        facts = job_facts(options, world_size=torch.distributed.get_world_size(), pipeline_size=len(global_ranks))
        facts |= device_facts(options, domain, job_rank)
        compare(store, "facts", "hello", job_rank, global_ranks, facts, until=time.monotonic() + OPEN_DEADLINE)
        self.device = find_device(options)
        self.transport = transport_for(
            options, device=self.device, edges=edges, rank=rank, owner=owner, store=store, leads=agreement.leads,
            until=time.monotonic() + OPEN_DEADLINE, lanes=options.lanes, interface=options.interface,
            delay=getattr(self.padding, "delay", None), heartbeat_s=_heartbeat(options))
        self.agreement = NamedAgreement(agreement, rank=rank, name=self.name, member=functools.partial(self._name, rank))
        self.engine = Engine(
            rank=rank,
            owner=self.placement.rank_of,
            transport=self.transport,
            agreement=self.agreement,
            recorder=self.recorder,
            timeout=options.patience,
            decide_ahead=options.decide_ahead,
            latch=FailureLatch(name=self.name),
            issuer=self.transport if isinstance(self.transport, NcclTransport) else None,
        )
        self.launches = None if self.device is None else Launches(self.device, run_ahead=options.run_ahead, fail=self._device_failed)
        _many_descriptors()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))
        self.transport.open(self._post, deadline=OPEN_DEADLINE)
        self.agreement.open(self.engine.wake, self._hear)
        world = torch.distributed.get_world_size()
        self._failure_report = FailureReport(
            run=name_run(job_store), directory=options.trace, world=world, pipeline=global_ranks,
            names=[self.name(each) for each in range(len(global_ranks))], rank=rank)
        self.replicas = None
        if (pipelines := world // len(global_ranks)) > 1:
            self.replicas = Replicas(
                pipelines=pipelines, rank=rank, name=self.name(rank), store=torch.distributed.PrefixStore(f"ring/{rank}", job_store),
                post=self._hear, interface=options.interface, heartbeat_s=_heartbeat(options))
        self._chord = None
        if rank in (0, len(global_ranks) - 1) and len(global_ranks) > 2:
            self._chord = Chord(rank=rank, ranks=len(global_ranks), store=store, hear=self.engine.hear, interface=options.interface,
                                heartbeat_s=_heartbeat(options), deadline=OPEN_DEADLINE)
        self.watcher = Watcher(self.engine, departed=self._departed, report=self._report, abort=self._tell_further,
                               silences=dict if self.replicas is None else self.replicas.silences)

    def name(self, rank: int) -> str:
        """A pipeline rank as errors call it: by its stages and its rank in the whole job."""
        return self._name(rank, self._global_ranks[rank])

    def _name(self, rank: int, job_rank: int) -> str:
        stages = self.placement.stages_of(rank)
        return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))} (rank {job_rank})"

    @property
    def met(self) -> bool:
        """Whether all ranks have entered the first call, and agree on what it is."""
        return self._met

    def meet(self, facts: Mapping[str, Fact]) -> None:
        """In the first call, before its first action: wait for all ranks, and compare.

        Raises:
            ConfigurationError: on every rank, if two disagree. The pipeline is closed then; the next call connects anew.
            PipelineError: a rank was lost meanwhile, or has not come; names it.
        """
        until = time.monotonic() + FIRST_CALL * self.engine.timeout
        try:
            compare(self._store, "facts", "first call", self._global_ranks[self.rank], self._global_ranks, facts, until=until,
                    look=self.engine.latch.raise_if_set, explain=self._absent)
        except ConfigurationError:
            self.discard()
            raise
        self._met = True

    @property
    def frozen_stages(self) -> int:
        """How many stages at the beginning are frozen, once that has been agreed on; 0 before."""
        return self._frozen.stages

    def first_trainable(self, models) -> int:
        """The first stage that trains; those before it run forwards only. Raises as `FrozenPrefix.first_trainable`."""
        return self._frozen.first_trainable(
            models, timeout=FIRST_CALL * self.engine.timeout, look=self.engine.latch.raise_if_set,
            explain=lambda missing, seconds: self._absent([self._global_ranks[rank] for rank in missing], seconds))

    def _absent(self, missing: list[int], seconds: float) -> str:
        """Latches and tells that ranks of the job have not entered the first call. All that wait see the same, and say it alike."""
        others = f", nor has {' or '.join(self.name(self._global_ranks.index(rank)) for rank in missing[1:])}" if missing[1:] else ""
        text = (f"has not entered this call within {seconds:.0f} s{others}, and is not known to be lost: it is elsewhere, for example in "
                "its data loader")
        failure = Failure(self._global_ranks.index(missing[0]), "call 0", text)
        if self.engine.latch.set(failure):
            self.engine.abort(failure)
        return describe(self.engine.latch.failure, self.name)

    def _post(self, event) -> None:
        if type(event) is Departure:
            self._departed.add(event.rank)
        self.engine.post(event)

    def _device_failed(self, where: str, text: str, trace: str) -> None:
        """From the thread that waits for actions."""
        failure = Failure(self.rank, where, text, trace)
        self.engine.post(failure)
        self.transport.abort(failure)

    def _hear(self, failure: Failure) -> None:
        """From the replicas' thread, or the domain's: another pipeline failed, or this one, and the news went round."""
        failure = came_home(failure, {rank: self.name(rank) for rank in range(self.placement.ranks)})
        self.engine.post(failure)
        self.transport.abort(failure)

    def _tell_further(self, failure: Failure) -> None:
        if self._chord is not None:
            self._chord.tell(failure)
        if self.replicas is not None:
            self.replicas.tell(failure, name=self.name)

    def _report(self, text: str, view: dict) -> str | None:
        _record_for_torchrun(text)
        return self._failure_report.write(text, view)

    def tell(self, error: BaseException) -> None:
        """`error` ends this process: tell the others, so that none waits for it. Returns when the watcher has said its own."""
        if os.getpid() != self._pid or self._closed:
            return
        latch = self.engine.latch
        # A collective that breaks because a peer died raises here at once; who died is told a moment later, and matters more.
        if not latch.set_event.wait(SETTLE):
            text = f"{type(error).__name__}: {error}"
            if self._departed:
                text += f" (after {', '.join(map(self.name, sorted(self._departed)))} had left)"
            failure = Failure(self.rank, "outside the schedule", text, "".join(traceback.format_exception(error)))
            if latch.set(failure):
                self.engine.abort(failure)
        self.watcher.told.wait(SETTLE)

    def close(self, *, exiting: bool = False) -> None:
        """Say goodbye to the neighbours and join every thread. Safe to call twice; does nothing in a forked child.

        exiting: the interpreter is shutting down; after a failure its end stays enforced.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.watcher.close(exiting=exiting)
        for link in (self.replicas, self._chord, self.transport, self.launches):
            try:
                if link is not None:
                    link.close(deadline=CLOSE_DEADLINE)
            except PipelineError as error:
                print(f"[rrfp] {self.name(self.rank)}: {error}", file=sys.stderr, flush=True)
        self.agreement.close()
        self.scalars.close()
        self.recorder.close()
        if self.padding is not None:
            print(f"[rrfp] rank {self.rank}: {self.padding.summary()}", flush=True)

    def discard(self) -> None:
        """Close, and let the next call of the schedule connect anew: for what every rank refuses alike before the first action."""
        self.close()
        for key in [key for key, runtime in _runtimes.items() if runtime is self]:
            del _runtimes[key]


def _heartbeat(options: Options) -> float:
    return min(2.0, options.patience / 10)


def _many_descriptors() -> None:
    """Every receive buffer is a descriptor, at both ends: take as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _record_for_torchrun(text: str) -> None:
    """Where torchrun looks for a worker's error (TORCHELASTIC_ERROR_FILE); its summary then shows it. Else nothing."""
    try:
        raise PipelineError(text)
    except PipelineError as error:  # what the summary prints is the traceback of the exception that is being handled
        get_error_handler().record_exception(error)


def make_padding(options: Options, *, stages: int) -> Emulation | Injection | None:
    """What lengthens actions, if anything does."""
    if options.emulate is not None:
        return Emulation(options.emulate, stages=stages)
    if options.inject is not None:
        return Injection(options.inject)
    return None


def make_recorder(options: Options, *, global_ranks: list[int], rank: int, placement: Placement) -> Recorder:
    """The trace of one rank. Data-parallel replicas write to folders of their own, named by their first rank."""
    directory = Path(options.trace) if options.trace is not None else None
    if directory is not None and torch.distributed.get_world_size() > len(global_ranks):
        directory /= f"pipeline{global_ranks[0]}"
    mode = mode_name(options.policy) if options.schedule == "rrfp" else "megatron-1f1b"
    return Recorder(rank=rank, stages=placement.stages_of(rank), directory=directory, ranks=placement.ranks, nvtx=options.nvtx, mode=mode)


_runtimes: dict[tuple, Runtime] = {}
"""By ranks of the pipeline, groups inside actions, and chunks per rank."""
_openings: Counter[str] = Counter()
"""How often this process has connected, by the name under which it did."""


def runtime_for(options: Options, pp_group: "torch.distributed.ProcessGroup", *, collection=None, chunks: int = 1) -> Runtime:
    """The runtime of this pipeline group, connected at first use. The same groups and chunks get the same runtime again.

    collection: the process groups that the schedule was given, if any.
    """
    ranks = torch.distributed.get_process_group_ranks(pp_group)
    groups = groups_of(collection)
    key = (tuple(ranks), groups, chunks)
    if key not in _runtimes:
        own, job = (_store(f"{whose}/{chunks}") for whose in ("-".join(map(str, ranks)), f"job/{len(ranks)}"))
        _runtimes[key] = Runtime(options, global_ranks=ranks, rank=pp_group.rank(), store=own, job_store=job, groups=groups, chunks=chunks)
        _hook_exit()
    return _runtimes[key]


def _store(name: str) -> "torch.distributed.Store":
    """Every opening has keys of its own: what an earlier one left in the store must not be taken for this one's.

    So openings are counted by just what is in the name. All that use a name open alike: a pipeline's ranks theirs, all ranks of the
    job those with pipelines of one length.
    """
    _openings[name] += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep one store over its restarts
    return torch.distributed.PrefixStore(
        f"rrfp/{name}/{restart}.{_openings[name]}", torch.distributed.distributed_c10d._get_default_store())


def close_all() -> None:
    """Close every runtime of this process. It may go on without them, after a failure too."""
    for runtime in list(_runtimes.values()):
        runtime.close()
    _runtimes.clear()


def tell_all(error: BaseException) -> None:
    """`error` ends this process: tell every pipeline that it is in."""
    for runtime in list(_runtimes.values()):
        runtime.tell(error)


def _at_exit() -> None:
    if (error := getattr(sys, "last_exc", None)) is not None:
        tell_all(error)  # somebody replaced our hook: peers must not take this for a goodbye
    for runtime in list(_runtimes.values()):
        runtime.close(exiting=True)


@functools.cache
def _hook_exit() -> None:
    """Once per process."""
    previous = sys.excepthook

    def hook(kind, error, trace):
        tell_all(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_at_exit)
