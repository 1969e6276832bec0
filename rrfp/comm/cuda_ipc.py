"""Payloads between GPUs of one host: the sender's copy engine writes into a buffer on the receiver's GPU, then the header goes.

As `memory`, on a device: the receiver owns every buffer, and a credit carries the handle by which the sender opens it. No kernel and no
multiprocessor is involved, and nothing waits on a stream: the sender's thread waits for its copy, so that a header says what is there,
and a buffer is granted again when all that the receiver had queued before it let go of it has run.
"""

from rrfp.comm.device import Device, Event, Memory
from rrfp.comm.memory import MAX_MAPPED, Grant
from rrfp.errors import PipelineError


class DeviceBuffer:
    """One slot of an incoming edge, as `memory.Buffer`, on a device."""

    __slots__ = ("slot", "size", "_device", "_share", "_memory", "_handle", "_used")

    def __init__(self, device: Device, slot: int, size: int, *, share: bool):
        self.slot, self.size, self._device, self._share = slot, size, device, share
        self._memory: Memory | None = None
        self._handle = b""
        self._used: Event | None = None
        """After the last thing that may read this buffer."""
        if size:
            try:
                self._memory = device.allocate(size)
                if share:
                    self._handle = device.share(self._memory)
            except (RuntimeError, OSError) as error:
                reason = str(error).partition("\n")[0]
                raise PipelineError(f"no receive buffer of {size} bytes can be had on the GPU: {reason}; "
                                    "take a smaller --rrfp-limit, or --rrfp-transport host") from error

    def grant(self) -> Grant:
        return Grant(self.slot, self.size, handle=self._handle)

    def view(self, start: int, nbytes: int) -> Memory:
        return self._memory[start : start + nbytes]

    def given_back(self) -> None:
        # Nobody on the host reads it any more; what was queued may, until the stream gets here.
        self._used = self._device.record(self._device.compute)

    @property
    def busy(self) -> bool:
        # Invariant 5, on a device: reuse hangs on completion, never on what the host has let go of.
        return self._used is not None and not self._device.done(self._used)

    def close(self) -> None:
        self._memory = None


class DeviceSlots:
    """Makes the buffers of a pool. share: with a handle for another process; else only this one writes to them."""

    def __init__(self, device: Device, *, share: bool = True):
        self._device, self._share = device, share

    def make(self, slot: int, size: int) -> DeviceBuffer:
        return DeviceBuffer(self._device, slot, size, share=self._share)


class DeviceMappings:
    """The sender's view of a peer's buffers, by slot. Belongs to the send thread."""

    def __init__(self, device: Device):
        self._device = device
        self._stream = device.stream()
        self._opened: dict[int, Memory] = {}

    def write(self, grant: Grant, starts: list[int], arrays: list[Memory]) -> None:
        """Copy to their places, and wait for the copies. Raises PipelineError if this process cannot reach the peer's buffer."""
        memory = self._opened.get(grant.slot)
        if memory is None:
            memory = self._open(grant)
        for start, array in zip(starts, arrays, strict=True):
            if array.nbytes:
                self._device.copy(memory[start : start + array.nbytes], array, self._stream)
        self._device.synchronize(self._device.record(self._stream))

    def _open(self, grant: Grant) -> Memory:
        for slot in [slot for slot, memory in self._opened.items() if memory.nbytes < grant.size]:
            del self._opened[slot]  # the receiver grows its buffers together; one still in use is opened again
        while len(self._opened) >= MAX_MAPPED:
            del self._opened[next(iter(self._opened))]
        try:
            memory = self._device.open(grant.handle)
        except OSError as error:
            raise PipelineError(f"{error}; it could be when training started: look for the first error of its owner, "
                                "or take --rrfp-transport host") from None
        if memory.nbytes < grant.size:
            raise PipelineError(f"a slot of {grant.size} bytes has {memory.nbytes} on the other GPU")
        self._opened[grant.slot] = memory
        return memory

    def close(self) -> None:
        self._opened.clear()
