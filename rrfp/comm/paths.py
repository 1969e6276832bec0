"""Which way the payloads of each edge take to a GPU, settled by all ranks of a pipeline alike, and the transport that follows from it.

    ipc     inside a host: the sender's copy engine writes into the receiver's buffer     (cuda_ipc)
    nccl    NCCL, experimental                                                            (nccl_transport)
    host    through host memory at both ends                                              (host_staged)
    auto    ipc where the sender can open the receiver's memory, else host
"""

import secrets
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rrfp.action import Edge
from rrfp.comm import rendezvous
from rrfp.comm.device import Device, Memory
from rrfp.comm.host_staged import HostStaged
from rrfp.comm.nccl_transport import Nccl, NcclTransport, answering
from rrfp.comm.transport import Transport
from rrfp.comm.zmq_transport import ZmqTransport
from rrfp.errors import ConfigurationError

NONCE_BYTES = 64


def settle(choice: str, *, edges: Iterable[Edge], owner: Mapping[int, int], reach: Mapping[tuple[int, int], str]) -> dict[Edge, str]:
    """The path of every edge. Pure: all ranks come to the same.

    Args:
        choice: one of CHOICES.
        reach: (sender, receiver) -> why the sender can't write to the receiver's memory, empty if it can.

    Raises:
        ConfigurationError: `ipc`, and there is an edge that can't.
    """
    paths = {}
    for edge in sorted(edges):
        why = reach.get((owner[edge.source], owner[edge.destination]), "")
        if choice == "ipc" and why:
            raise ConfigurationError(f"--rrfp-transport ipc: edge {edge} from rank {owner[edge.source]} to rank {owner[edge.destination]} "
                                     f"can't: {why}; take --rrfp-transport auto, which sends such edges through host memory")
        paths[edge] = ("host" if why else "ipc") if choice == "auto" else choice
    return paths


def probe(
    device: Device, *, rank: int, edges: Iterable[Edge], owner: Mapping[int, int], store: rendezvous.Store, until: float,
    host: str | None = None, namespace: str = "rrfp-paths",
) -> dict[tuple[int, int], str]:
    """Who can write to whose memory, tried between all neighbours. The same on every rank.

    until: time.monotonic() by which every rank of the pipeline must have come. host: who shares a host, by default the kernel's answer.

    Raises:
        PipelineError: a rank did not come; names it.
    """
    host = host or rendezvous.host_identity()
    ranks = set(owner.values())
    memory, nonce = device.allocate(NONCE_BYTES), np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
    _write(device, memory, nonce)
    try:
        offer = {"host": host, "handle": device.share(memory).hex(), "nonce": nonce.tobytes().hex()}
    except OSError as error:
        offer = {"host": host, "handle": "", "why": str(error)}
    rendezvous.publish(store, namespace, "offer", rank, offer)
    offers = rendezvous.collect(store, namespace, "offer", ranks, until=until)
    receivers = {owner[edge.destination] for edge in edges if owner[edge.source] == rank}
    found = {str(other): _try(device, host, offers[other]) for other in sorted(receivers)}
    rendezvous.publish(store, namespace, "reach", rank, found)
    told = rendezvous.collect(store, namespace, "reach", ranks, until=until)  # until then everybody's memory stays
    return {(sender, int(receiver)): why for sender, record in told.items() for receiver, why in record.items()}


def _try(device: Device, host: str, offer: dict) -> str:
    if offer["host"] != host:
        return "they are on different hosts"
    if not offer["handle"]:
        return offer["why"]
    try:
        memory = device.open(bytes.fromhex(offer["handle"]))
    except OSError as error:
        return str(error)
    return "" if _read(device, memory).tobytes().hex() == offer["nonce"] else "what it opens is not the other's memory"


def _write(device: Device, memory: Memory, data: np.ndarray) -> None:
    staging, stream = device.pinned(len(data)), device.stream()
    np.copyto(staging, data)
    device.copy(memory, staging, stream)
    device.synchronize(device.record(stream))


def _read(device: Device, memory: Memory) -> np.ndarray:
    staging, stream = device.pinned(memory.nbytes), device.stream()
    device.copy(staging, memory, stream)
    device.synchronize(device.record(stream))
    return staging.view(np.ndarray)


def make_transport(
    paths: Mapping[Edge, str], device: Device | None, *, rank: int, owner: Mapping[int, int],
    nccl: Callable[[], Nccl] | None = None, leads: bool = True, **options,
) -> Transport:
    """This rank's end, not open yet. An `Issuer` too if the path is nccl.

    Args:
        paths: of all edges of the pipeline that cross ranks; their values don't matter without a device.
        nccl: makes this rank's end of NCCL.
        leads: whether this rank leads its domain.
        options: further ones of `ZmqTransport`.
    """
    incoming = [edge for edge in paths if owner[edge.destination] == rank]
    outgoing = [edge for edge in paths if owner[edge.source] == rank]
    own = sorted(incoming + outgoing)
    if device is None:
        return ZmqTransport(rank=rank, edges_in=incoming, edges_out=outgoing, owner=owner, **options)
    if "nccl" in paths.values():
        stages = max(owner) + 1
        words = {word for edge in own for word in (answering(edge, stages), Edge(edge.source + stages, edge.destination + stages))}
        everyone = {**owner, **{stage + stages: other for stage, other in owner.items()}}
        words_in, words_out = ([word for word in words if everyone[word[end]] == rank] for end in (1, 0))
        inner = ZmqTransport(rank=rank, owner=everyone, device=device, edges_in=incoming + words_in, edges_out=outgoing + words_out, **options)
        peers = {edge: owner[edge.source] if edge in incoming else owner[edge.destination] for edge in own}
        order = [(edge, (owner[edge.source], owner[edge.destination])) for edge in sorted(paths)]
        return NcclTransport(inner, device, rank=rank, edges=own, stages=stages, peers=peers, order=order, nccl=nccl(), leads=leads)
    inner = ZmqTransport(rank=rank, edges_in=incoming, edges_out=outgoing, owner=owner, device=device,
                         device_edges=[edge for edge in own if paths[edge] == "ipc"], **options)
    staged = [edge for edge in own if paths[edge] == "host"]
    return HostStaged(inner, device, rank=rank, edges=staged) if staged else inner
