"""How the ranks of a pipeline find each other: two short records per rank in the job's store, and who counts as one host."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol
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


def collect(store: Store, namespace: str, phase: str, ranks: Iterable[int], *, until: float) -> dict[int, dict]:
    """The records of `ranks`. Raises PipelineError that names the missing ones when time.monotonic() reaches `until`.

    It asks with `check`, which returns at once, because torch's `get` blocks for the store's own time-out.
    """
    start, pause = time.monotonic(), 0.001
    missing, records = sorted(ranks), {}
    while True:
        for rank in list(missing):
            key = f"{namespace}/{phase}/{rank}"
            if store.check([key]):
                records[rank] = json.loads(store.get(key))
                missing.remove(rank)
        if not missing:
            return records
        if time.monotonic() >= until:
            raise PipelineError(
                f"ranks {', '.join(map(str, missing))} did not come within {time.monotonic() - start:.0f} s ({phase}): "
                "look for their first error, or raise the start-up deadline"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


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
    """Both ends must list the same edges between them, and the same lanes and limit. Raises ConfigurationError."""

    def between(edges, a, b):
        return sorted(tuple(edge) for edge in edges if owner(edge[0]) == a and owner(edge[1]) == b)

    for name, here, there in [
        ("edges", between(mine["out"], rank, peer), between(theirs["in"], rank, peer)),
        ("edges", between(mine["in"], peer, rank), between(theirs["out"], peer, rank)),
        ("lanes", mine["lanes"], theirs["lanes"]),
        ("max_message_bytes", mine["max_message_bytes"], theirs["max_message_bytes"]),
    ]:
        if here != there:
            raise ConfigurationError(f"rank {rank} and rank {peer} disagree on {name}: {here} here, {there} there")
