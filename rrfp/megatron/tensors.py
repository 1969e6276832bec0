"""Tensors to messages and back. A message carries dtype and shape, so shapes may change from microbatch to microbatch."""

import math
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rrfp.comm.transport import Arrival, Part, Payload

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}


def to_payload(tensors: Sequence[torch.Tensor | None]) -> Payload:
    """The bytes of `tensors`, sharing their memory on a CPU. A missing gradient (None) stays a missing gradient at the other end.

    The storage is kept alive by the payload, so `deallocate_output_tensor` may swap the tensor's data at once.
    """
    return tuple(_part(tensor) for tensor in tensors)


def _part(tensor: torch.Tensor | None) -> Part:
    if tensor is None:
        return Part("float32", (), None)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.device.type != "cpu":
        flat = flat.cpu()
    return Part(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())


def from_arrival(arrival: Arrival, *, release: Callable[[Arrival], None], device: torch.device) -> list[torch.Tensor | None]:
    """The tensors of a message, sharing the receive buffer's memory on a CPU.

    Invariant 5: the buffer goes back to the pool (`release`) when the last tensor over it is gone. Its lifetime is that of the
    memory's users, whoever they are (autograd, a stage that passes its input on, a user's loss function), not a point in the schedule.
    """
    parts, arrival.payload = arrival.payload, ()
    memories = [part.data for part in parts if part.data is not None]
    if not memories:
        release(arrival)
        return [None for _ in parts]
    pending = len(memories)

    def gone() -> None:
        nonlocal pending
        pending -= 1
        if pending == 0:
            release(arrival)

    for memory in memories:
        # `memory` is the array that every tensor made below keeps alive, directly or as the base of its views.
        weakref.finalize(memory, gone).atexit = False
    return [_tensor(part, device) for part in parts]


def _tensor(part: Part, device: torch.device) -> torch.Tensor | None:
    if part.data is None:
        return None
    dtype = _DTYPES[part.dtype]
    if math.prod(part.shape) == 0:
        return torch.empty(part.shape, dtype=dtype, device=device)
    storage = _memory(part.data).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, 0, part.shape)  # not a view: Megatron frees outputs only if `_base is None`
    return tensor if device.type == "cpu" else tensor.to(device)


def _memory(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data)
