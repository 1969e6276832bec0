"""What an activation holds and what memory is idle, measured on this rank's device while Megatron's own number of activations is in flight.

Allocators count what they have handed out, exactly and at no cost: torch's on a GPU, the C library's on a CPU (torch takes its memory from
there). What a forward leaves allocated is what its activation holds, whoever holds it: autograd, a checkpointed region, a layer's own cache.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from rrfp import heap

_CGROUPS = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"))
"""What a container may use and what it uses: control groups version 2, version 1."""
_PROBE = 1 << 24


class Device(Protocol):
    """A rank's memory, in bytes."""

    received: bool
    """Whether messages that came in lie outside what `held` counts."""

    def held(self) -> int:
        """What tensors hold now."""

    def peak(self) -> int:
        """The most that this process has ever taken from the device."""

    def budget(self, fraction: float) -> float:
        """What this process may take: a fraction of the device's memory, without what others have taken."""

    def absent(self) -> str | None:
        """Why `held` can't be known here, or None."""


class Gpu:
    """torch's caching allocator. What it has reserved counts as taken."""

    received = True  # in buffers that were there before them

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved()

    def budget(self, fraction: float) -> float:
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()  # contexts, NCCL's buffers, other processes
        return fraction * total - others

    def absent(self) -> str | None:
        return None


class Host:
    """A CPU: the C library's count of what it handed out, the kernel's of what this process has resident.

    ranks: how many share this host's memory.
    """

    received = True  # in shared memory

    def __init__(self, *, ranks: int):
        self._ranks = ranks

    def held(self) -> int:
        return heap.held() or 0  # `absent` says so

    def peak(self) -> int:
        return _status("VmHWM")

    def budget(self, fraction: float) -> float:
        return fraction * (_status("VmRSS") + _available() / self._ranks)

    def absent(self) -> str | None:
        if heap.held() is None:
            return "the C library does not count allocations (mallinfo2: glibc 2.33 or newer)"
        before = self.held()
        probe = torch.empty(_PROBE, dtype=torch.uint8)
        seen = self.held() - before
        del probe
        return None if seen >= _PROBE else "another allocator than the C library's serves torch (LD_PRELOAD)"


class Meter:
    """Measures one call of one rank. Belongs to the thread that runs actions."""

    def __init__(self, device: Device):
        self.device = device
        self._before = 0
        self._most: dict[str, int] = {}

    @property
    def activation(self) -> int:
        """Bytes that one microbatch in flight held at most, of any chunk: after its forward, or while its weight gradient is pending."""
        return self._most.get("F", 0) + max(0, self._most.get("I", 0))

    def before(self) -> None:
        """An action begins: its inputs aren't on the device yet."""
        self._before = self.device.held()

    def after(self, kind: str, inputs: Iterable[torch.Tensor | None]) -> None:
        """It has run, and nothing of what it made was given away yet."""
        held = self.device.held() - self._before
        if kind == "F" and self.device.received:
            held += sum(tensor.nbytes for tensor in inputs if tensor is not None)
        self._most[kind] = max(self._most.get(kind, held), held)


def device() -> Device:
    """This rank's."""
    from rrfp.megatron import cpu

    if not cpu.is_enabled() and torch.cuda.is_available():
        return Gpu()
    return Host(ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or torch.distributed.get_world_size()))


def _status(name: str) -> int:
    """A field of /proc/self/status that counts memory, in bytes."""
    return _field(Path("/proc/self/status"), name)


def _available() -> int:
    """Bytes that can still be taken on this host, or in this container."""
    available = _field(Path("/proc/meminfo"), "MemAvailable")
    for most, used in _CGROUPS:
        try:
            allowed = int(Path(most).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # not that version, or no bound ("max")
            continue
        available = min(available, max(0, allowed))
    return available


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{file} has no field {name}")
