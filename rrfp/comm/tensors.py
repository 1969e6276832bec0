"""Tensors to messages and back. A message carries dtype and shape, so shapes may change from microbatch to microbatch.

What is checked on arrival is what the receiver says it expects: an activation's shape and dtype, a gradient's output.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rrfp.comm.device import Device, Memory
from rrfp.comm.transport import Arrival, Part, Payload
from rrfp.errors import PipelineError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}


def to_payload(tensors: Sequence[torch.Tensor | None], *, device: Device | None = None) -> Payload:
    """The bytes of `tensors`, sharing their memory. A missing gradient (None) stays a missing gradient at the other end.

    The storage is kept alive by the payload, so the sender may swap the tensor's data at once, or let go of it.

    device: the GPU that the tensors are on; nothing here waits for it. None: they are on the CPU.
    """
    return tuple(_part(tensor, device) for tensor in tensors)


def _part(tensor: torch.Tensor | None, device: Device | None) -> Part:
    if tensor is None:
        return Part("float32", (), None)
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if device is None else device.memory_of(flat)
    return Part(_name(tensor.dtype), tuple(tensor.shape), data)


def from_arrival(arrival: Arrival, *, release: Callable[[Arrival], None], device: torch.device) -> list[torch.Tensor | None]:
    """The tensors of a message, sharing the receive buffer's memory, which is on `device`.

    Invariant 5: the buffer goes back to the pool (`release`) when the last tensor over it is gone. Its lifetime is that of the
    memory's users, whoever they are (autograd, a stage that passes its input on, a user's loss function), not a point in the schedule.
    """
    parts, arrival.payload = arrival.payload, ()
    memories = [part.data for part in parts if part.data is not None]
    if not memories:
        release(arrival)
        return [None for _ in parts]
    pending = len(memories)
    # Finalizers are global: one that kept the transport alive would keep what it leads to, and so, perhaps, `memory` itself.
    owner = weakref.WeakMethod(release) if inspect.ismethod(release) else lambda: release

    def gone() -> None:
        nonlocal pending
        pending -= 1
        if pending == 0 and (give_back := owner()) is not None:
            give_back(arrival)

    for memory in memories:
        # `memory` is the array that every tensor made below keeps alive, directly or as the base of its views.
        weakref.finalize(memory, gone).atexit = False
    return [_tensor(part, device) for part in parts]


class Expected(NamedTuple):
    """What a message must hold: one tensor of this dtype and shape. source: where that comes from, for the error.

    dtype: torch's name, None for any. shape: None for any.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    source: str

    @classmethod
    def like(cls, tensor: torch.Tensor, source: str) -> "Expected":
        return cls(_name(tensor.dtype), tuple(tensor.shape), source)


def check_arrival(arrival: Arrival, expected: Expected, *, may_be_missing: bool) -> None:
    """Raises PipelineError naming edge, microbatch, what was expected and what came.

    may_be_missing: a gradient that does not exist is fine too.
    """
    parts = arrival.payload
    if len(parts) == 1 and parts[0].data is None and may_be_missing:
        return
    if len(parts) == 1 and parts[0].data is not None and expected.dtype in (None, parts[0].dtype) and expected.shape in (None, parts[0].shape):
        return
    came = ", ".join("no tensor" if part.data is None else f"{part.dtype} {list(part.shape)}" for part in parts) or "nothing"
    wanted = f"{expected.dtype or 'any dtype'} {'of any shape' if expected.shape is None else list(expected.shape)}"
    raise PipelineError(
        f"edge {arrival.edge}, microbatch {arrival.microbatch}: {came} came, expected {wanted} ({expected.source})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(part: Part, device: torch.device) -> torch.Tensor | None:
    if part.data is None:
        return None
    dtype = _DTYPES[part.dtype]
    if math.prod(part.shape) == 0:
        return torch.empty(part.shape, dtype=dtype, device=device)
    storage = _memory(part.data).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, part.shape)  # not a view: whoever frees outputs early asks for `_base is None`


def _memory(data: np.ndarray | Memory) -> torch.Tensor:
    """Keeps `data`, this very object, alive as long as its storage has users."""
    return data.tensor() if hasattr(data, "tensor") else torch.from_numpy(data)
