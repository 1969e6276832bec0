"""How the ranks of a pipeline find each other: two short records per rank in the job's store, and who counts as one host."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote

from rrfp.errors import ConfigurationError, PipelineError


class Store(Protocol):
    """What is used of torch's `TCPStore`."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there, at once."""


class FileStore:
    """A `Store` in a directory that all ranks see. For tests and benchmarks, which need no torch."""

    def __init__(self, directory):
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(value)
        partial.replace(path)  # readers see all of it or nothing

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)


def publish(store: Store, namespace: str, phase: str, rank: int, record: dict) -> None:
    store.set(f"{namespace}/{phase}/{rank}", json.dumps(record).encode())


def collect(
    store: Store, namespace: str, phase: str, ranks: Iterable[int], *, until: float,
    look: Callable[[], None] = lambda: None, explain: Callable[[list[int], float], str] | None = None,
) -> dict[int, dict]:
    """The records of `ranks`. It asks with `check`, which returns at once, because torch's `get` blocks for the store's own time-out.

    Args:
        until: time.monotonic() at which to give up.
        look: called while waiting; what it raises ends the wait.
        explain: explain(missing ranks, seconds waited), the words for it.

    Raises:
        PipelineError: some rank did not come; names it.
    """
    start, pause = time.monotonic(), 0.001
    keys = {rank: f"{namespace}/{phase}/{rank}" for rank in sorted(ranks)}
    while not store.check(list(keys.values())):
        look()
        if time.monotonic() >= until:
            if missing := [rank for rank, key in keys.items() if not store.check([key])]:
                raise PipelineError((explain or (lambda ranks, seconds: absent(ranks, seconds, phase)))(missing, time.monotonic() - start))
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def absent(ranks: list[int], seconds: float, phase: str) -> str:
    """The words for ranks that did not come."""
    return (f"{rank_list(ranks)} did not come within {seconds:.0f} s ({phase}): "
            "look for their first error, or raise the start-up deadline")


def rank_list(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2, 3`."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Fact(NamedTuple):
    """Something that must be equal on every rank of a pipeline. Whoever states it knows what it means; here it is only compared.

    value: what JSON can hold.
    way_out: what to do when it differs, as an imperative.
    """

    value: str | int | float | bool | None
    way_out: str


_FAREWELL_S = 5.0  # so long the ranks of a refused job wait for each other to read why: one of them may keep the store


def compare(
    store: Store, namespace: str, phase: str, rank: int, ranks: Iterable[int], facts: Mapping[str, Fact], *, until: float,
    look: Callable[[], None] = lambda: None, explain: Callable[[list[int], float], str] | None = None,
) -> None:
    """Every rank states its facts and reads those of all others, so that all refuse a difference alike, in the same words.

    Args: as `collect`; facts: by name, in order of what to name first.

    Raises:
        ConfigurationError: on every rank, if any two differ: which fact, which ranks have which value, the way out.
        PipelineError: some rank did not come; names it.
    """
    ranks = sorted(ranks)
    publish(store, namespace, phase, rank, {name: fact.value for name, fact in facts.items()})
    stated = collect(store, namespace, phase, ranks, until=until, look=look, explain=explain)
    differing = {}
    for name in dict.fromkeys([*facts, *(name for record in stated.values() for name in record)]):
        values: dict[str, list[int]] = {}
        for other, record in stated.items():
            values.setdefault(str(record.get(name, "unknown")), []).append(other)
        if len(values) > 1:
            differing[name] = "; ".join(f"{value} on {rank_list(others)}" for value, others in values.items())
    if not differing:
        return
    with contextlib.suppress(Exception):  # the store may end with whoever has read everything first
        publish(store, namespace, f"{phase}, read", rank, {})
        collect(store, namespace, f"{phase}, read", ranks, until=time.monotonic() + _FAREWELL_S)
    (name, values), *others = differing.items()
    more = f" (also different: {', '.join(other for other, _ in others)})" if others else ""
    way_out = facts[name].way_out if name in facts else "install the same release on every rank"
    raise ConfigurationError(f"{name} must be the same on every rank of a pipeline: {values}{more}; {way_out}")


def host_identity() -> str:
    """Equal for two processes exactly if they share the kernel, the network and the process ids.

    Then abstract sockets, /proc/<pid>/fd and process descriptors work between them. Where the kernel does not tell, no two
    processes share a host.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return ":".join([boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")])
    except OSError:
        return f"unknown:{os.urandom(16).hex()}"


def network_of(host: str) -> str:
    """The part of a `host_identity` that tells network stacks apart: a loopback address leads nowhere else."""
    return host.rpartition(":")[0]


def started_at(pid: int) -> int:
    """Start time of a process in clock ticks since boot: tells a process from a later one with the same id. 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def watch(pid: int, started: int) -> int | None:
    """A descriptor that becomes readable when the process ends, None if this kernel has none. Raises ProcessLookupError."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
    if started_at(pid) != started:
        os.close(descriptor)
        raise ProcessLookupError(f"process {pid} is another one by now")
    return descriptor


def own_address(interface: str | None) -> str:
    """What to bind for peers on other hosts: `interface` (a name or an address), else the address that faces MASTER_ADDR."""
    if interface is not None:
        return interface
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: asks the routing table
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigurationError(
            f"no address of this host faces {master} ({error}): name the network with --rrfp-interface"
        ) from None


def check_match(rank: int, mine: dict, peer: int, theirs: dict, owner: Callable[[int], int]) -> None:
    """Both ends must list the same edges between them, and the same lanes, credits and limit. Raises ConfigurationError."""

    def between(edges, a, b):
        return sorted(tuple(edge) for edge in edges if owner(edge[0]) == a and owner(edge[1]) == b)

    for name, here, there in [
        ("edges", between(mine["out"], rank, peer), between(theirs["in"], rank, peer)),
        ("edges", between(mine["in"], peer, rank), between(theirs["out"], peer, rank)),
        ("lanes", mine["lanes"], theirs["lanes"]),
        ("credits", mine["credits"], theirs["credits"]),
        ("max_message_bytes", mine["max_message_bytes"], theirs["max_message_bytes"]),
    ]:
        if here != there:
            raise ConfigurationError(f"rank {rank} and rank {peer} disagree on {name}: {here} here, {there} there")
