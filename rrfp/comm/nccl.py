"""NCCL by torch.distributed: one process group of two ranks per directed edge. Not yet run on a GPU.

Every group has a stream of its own inside torch, so nothing of another edge or of Megatron's groups queues behind a transfer here. What
has ended is asked of the work, never made a stream's wait: `rrfp.comm.device` says why.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupNCCL, distributed_c10d

from rrfp.action import Edge
from rrfp.comm.cuda import CudaDevice, CudaMemory
from rrfp.errors import ConfigurationError

_PAUSES = (1e-4, 1e-3)  # seconds between looks at a work: the first, and the longest


def check_environment() -> None:
    """Before NCCL is used at all. Raises ConfigurationError."""
    if os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1") != "1":
        raise ConfigurationError(
            f"--rrfp-transport nccl with NCCL_LAUNCH_ORDER_IMPLICIT={os.environ['NCCL_LAUNCH_ORDER_IMPLICIT']}: transfers and Megatron's "
            "collectives must start in the order in which they are issued; unset it, or set it to 1")


class TorchNccl:
    """As `rrfp.comm.nccl_transport.Nccl`.

    Args:
        rank: this pipeline rank.
        store: torch's, a part of it that is this pipeline's.
        timeout: seconds for a communicator to be made.
        patience: seconds after which torch's own watchdog may end the process for a transfer that does not end. Longer than the
            engine's, which tells every rank who owes what.
    """

    def __init__(self, rank: int, store: "torch.distributed.Store", device: CudaDevice, *, timeout: float, patience: float):
        self._rank, self._store, self._device, self._timeout, self._patience = rank, store, device, timeout, max(timeout, patience)
        self._groups: dict[Edge, ProcessGroupNCCL] = {}
        self._works: dict[Edge, list] = {}

    def connect(self, edge: Edge, ranks: tuple[int, int]) -> None:
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self._patience)
        group = ProcessGroupNCCL(PrefixStore(f"nccl/{edge}", self._store), ranks.index(self._rank), 2, options)
        # torch makes the communicator at the first use: that is now, with a byte, and not in the middle of a call.
        byte = torch.zeros(1, dtype=torch.uint8, device=("cuda", self._device.index))
        work = group.send([byte], 1, 0) if ranks[0] == self._rank else group.recv([byte], 0, 0)
        self._groups[edge], self._works[edge] = group, []
        _wait([work], self._timeout)

    def send(self, edge: Edge, memory: CudaMemory, peer: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self._works[edge].append(self._groups[edge].send([memory.view()], 1, 0))

    def recv(self, edge: Edge, memory: CudaMemory, peer: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            self._works[edge].append(self._groups[edge].recv([memory.view()], 0, 0))

    def finish(self, edge: Edge, stream: torch.cuda.Stream) -> Callable[[], None]:
        works, self._works[edge] = self._works[edge], []
        return lambda: _wait(works, None)

    def abort(self) -> None:
        # All at once with the job's own: one after another they can wait for each other.
        backend = next(iter(self._groups.values()), None)
        if backend is None:
            return
        backend._group_start()
        for group in self._groups.values():
            group.abort()
        backend._group_end()
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            distributed_c10d._abort_process_group()


def _wait(works: list, timeout: float | None) -> None:
    until, pause = None if timeout is None else time.monotonic() + timeout, _PAUSES[0]
    for work in works:
        while not work.is_completed():
            if until is not None and time.monotonic() > until:
                raise RuntimeError("the other end of a communicator did not come in time")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        work.wait()  # raises what went wrong
