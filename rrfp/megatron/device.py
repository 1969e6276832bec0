"""This process' GPU, and the way that its pipeline's payloads take."""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.device import Device
from rrfp.comm.nccl_transport import Nccl
from rrfp.comm.paths import make_transport, probe, settle
from rrfp.comm.transport import Transport
from rrfp.engine.loop import FIRST_CALL
from rrfp.errors import ConfigurationError
from rrfp.megatron.options import Options
from rrfp.tp_coord.agreement import COLLECTIVE
from rrfp.tp_coord.domain import Domain

_WORDS = {"ipc": "the copy engine (CUDA IPC)", "host": "host memory", "nccl": "NCCL (experimental)"}


def find_device(options: Options) -> Device | None:
    """The GPU that tensors live on; None in CPU mode, where `torch.cuda` only pretends.

    Raises:
        ConfigurationError: a transport that needs a GPU, on the CPU.
    """
    from rrfp.megatron import cpu

    if not cpu.is_enabled() and torch.cuda.is_available():
        from rrfp.comm.cuda import CudaDevice

        return CudaDevice()
    if options.transport in ("ipc", "nccl"):
        raise ConfigurationError(f"--rrfp-transport {options.transport}: it moves memory of a GPU, and training runs on the CPU; use auto")
    return None


def transport_for(
    options: Options, *, device: Device | None, edges: Iterable[Edge], rank: int, owner: Mapping[int, int], store: rendezvous.Store,
    leads: bool, until: float, **more,
) -> Transport:
    """This rank's end of the pipeline, not open yet; on a GPU, by the path of each edge that all ranks have found to work.

    Args:
        edges: all edges of the pipeline that cross ranks.
        until: time.monotonic() by which all ranks must have come.
        more: options of `rrfp.comm.zmq_transport.ZmqTransport`.

    Raises:
        ConfigurationError: on every rank, if the path that was asked for does not work on some edge.
        PipelineError: a rank did not come; names it.
    """
    if device is None:
        paths = dict.fromkeys(edges, "host")
    else:
        reach = {}
        if options.transport in ("auto", "ipc"):
            reach = probe(device, rank=rank, edges=edges, owner=owner, store=store, until=until)
        paths = settle(options.transport, edges=edges, owner=owner, reach=reach)
        if rank == 0:
            print(f"[rrfp] what stages send each other goes by {_summary(paths)}; --rrfp-run-ahead {options.run_ahead}", file=sys.stderr, flush=True)
    return make_transport(paths, device, rank=rank, owner=owner, store=store, leads=leads,
                          nccl=lambda: _nccl(options, rank, store, device, until), **more)


def _summary(paths: Mapping[Edge, str]) -> str:
    kinds = sorted(set(paths.values()), reverse=True)
    if len(kinds) == 1:
        return _WORDS[kinds[0]]
    return "; ".join(f"{_WORDS[kind]}: {', '.join(str(edge) for edge, path in paths.items() if path == kind)}" for kind in kinds)


def _nccl(options: Options, rank: int, store, device: Device, until: float) -> Nccl:
    from rrfp.comm.nccl import TorchNccl, check_environment

    check_environment()
    patience = 2 * FIRST_CALL * options.patience
    return TorchNccl(rank, store, device, timeout=max(1.0, until - time.monotonic()), patience=patience)


def check_overlap(options: Options, ddp_config: Any, *, chunks: int, alone: bool) -> None:
    """Raises ConfigurationError for reductions and gathers whose place among transfers by NCCL differs between data-parallel replicas.

    Nobody agrees on that place, and each device may run one operation at a time (CUDA_DEVICE_MAX_CONNECTIONS=1, or CUDA before 12.3).
    With one chunk per rank it is forced all the same. Say a stage reduces in its last backward, which comes after the last one of the
    stage behind it, with a transfer between: then of two stages' reductions the deeper one's comes first in every replica, before or
    behind whichever transfers, and nothing can wait in a circle. (Gathers come in first forwards: the other way round.) With several
    chunks Megatron aligns them over the pipeline: a later action starts them, whichever that is.

    chunks: of this rank. alone: gradients are reduced over nobody outside this rank's domain, whose sequence has them in one place.
    """
    overlapping = [flag for flag in ("overlap_grad_reduce", "overlap_param_gather") if getattr(ddp_config, flag, False)]
    if options.transport == "nccl" and overlapping and chunks > 1 and not alone:
        flag = f"--{overlapping[0].replace('_', '-')}"
        raise ConfigurationError(f"--rrfp-transport nccl with {flag} and {chunks} chunks per rank: data-parallel replicas start its collectives at "
                                 f"different places among their transfers, and could wait for each other for ever; use --rrfp-transport auto, "
                                 f"or leave {flag} out")


def device_facts(options: Options, domain: Domain, rank: int) -> dict[str, rendezvous.Fact]:
    """What all ranks of a pipeline must have alike for NCCL: the leaders of two stages decide in which order both stages' members post.

    Raises:
        ConfigurationError: an agreement in which nobody leads.
    """
    if options.transport != "nccl":
        return {}
    way_out = "use --rrfp-transport auto"
    if options.agreement in COLLECTIVE[1:] and len(domain.members) > 1:
        raise ConfigurationError(f"--rrfp-agreement {options.agreement} with --rrfp-transport nccl: members must post transfers in the order of "
                                 "one of them; use --rrfp-agreement auto")
    return {"the number of ranks that agree on a stage's actions": rendezvous.Fact(len(domain.members), way_out),
            "the place of a rank among those that agree on its stage's actions": rendezvous.Fact(domain.members.index(rank), way_out)}
