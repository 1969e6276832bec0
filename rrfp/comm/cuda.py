"""A GPU by torch.cuda. The only file that touches it for the transport; everything that decides anything is tested without it.

Not yet run on a GPU (README says what has). Handles of inter-process memory are torch's own, as torch.multiprocessing passes them.
"""

import struct
from collections.abc import Iterator

import numpy as np
import torch

_FIELDS = struct.Struct("<QQQ?HHH")  # bytes, offset, counter's offset, whether its event must be waited for, lengths of what follows


class CudaMemory:
    """`nbytes` bytes of a flat uint8 tensor."""

    __slots__ = ("_base", "_start", "nbytes", "__weakref__")

    def __init__(self, base: torch.Tensor, start: int = 0, nbytes: int | None = None):
        self._base, self._start = base, start
        self.nbytes = base.numel() - start if nbytes is None else nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, where: slice) -> "CudaMemory":
        start, stop, _ = where.indices(self.nbytes)
        return CudaMemory(self._base, self._start + start, max(0, stop - start))

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._base.data_ptr() + self._start, False), "version": 2}

    def view(self) -> torch.Tensor:
        """A tensor that shares the base's storage."""
        return self._base[self._start : self._start + self.nbytes]

    def tensor(self) -> torch.Tensor:
        # By the array interface torch makes a storage of its own, whose end is this object's end: a view would hide who still reads.
        return torch.as_tensor(self, device=self._base.device)


class CudaDevice:
    """The current device of the thread that makes it, whose current stream is the one that actions run on."""

    def __init__(self):
        self.index = torch.cuda.current_device()
        self.compute = torch.cuda.current_stream(self.index)
        # The allocator gives memory back at once to those who use it on the stream that it was asked for on. Slots are written by other
        # processes, which no stream orders: so they come from a stream on which nothing ever runs.
        self._allocations = torch.cuda.Stream(self.index)
        self._clock_hz = 1e3 * getattr(torch.cuda.get_device_properties(self.index), "clock_rate", 1_500_000)

    def enter(self) -> None:
        torch.cuda.set_device(self.index)

    def allocate(self, nbytes: int) -> CudaMemory:
        with torch.cuda.stream(self._allocations):
            return CudaMemory(torch.empty(nbytes, dtype=torch.uint8, device=("cuda", self.index)))

    def memory_of(self, tensor: torch.Tensor) -> CudaMemory:
        return CudaMemory(tensor.detach().reshape(-1).view(torch.uint8))

    def pinned(self, nbytes: int) -> np.ndarray:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.index, priority=-1)

    def copy(self, to, source, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            _tensor(to).copy_(_tensor(source), non_blocking=True)

    def delay(self, seconds: float, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._clock_hz))

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # blocking: the waiting thread sleeps
        event.record(stream)
        return event

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def share(self, memory: CudaMemory) -> bytes:
        try:
            _, handle, size, offset, counter, counter_offset, event, wait = memory._base.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise OSError(f"this GPU's memory can't be shared between processes: {error}") from None
        return _FIELDS.pack(size, offset, counter_offset, wait, len(handle), len(counter), len(event)) + handle + counter + event

    def open(self, handle: bytes) -> CudaMemory:
        try:
            size, offset, counter_offset, wait, *lengths = _FIELDS.unpack_from(handle)
            memory, counter, event = _pieces(handle[_FIELDS.size :], lengths)
            # On this process' own device: the address is valid on all, and the owner's may have another number here.
            storage = torch.UntypedStorage._new_shared_cuda(self.index, memory, size, offset, counter, counter_offset, event, wait)
        except (RuntimeError, struct.error) as error:
            raise OSError(f"the memory of the other GPU can't be opened here: {error}") from None
        return CudaMemory(torch.empty(0, dtype=torch.uint8, device=("cuda", self.index)).set_(storage))


def _tensor(data: CudaMemory | np.ndarray) -> torch.Tensor:
    return data.view() if isinstance(data, CudaMemory) else torch.from_numpy(data)


def _pieces(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    at = 0
    for length in lengths:
        yield data[at : at + length]
        at += length
