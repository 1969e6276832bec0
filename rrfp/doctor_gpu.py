"""`rrfp doctor`, the part about GPUs: what torch sees, the settings that transports and Megatron depend on, and the optional extras.

Nothing is imported but torch, which the caller has: so a broken Transformer Engine or Apex does not matter here.
"""

import os
from collections.abc import Callable, Mapping

OLDEST_TE = (1, 13)
"""What Megatron 0.17.1 and later use of Transformer Engine; its own protocol for a delayed weight gradient came with DELAYED_TE."""
DELAYED_TE = (2, 3)
FUSED = "fused_weight_gradient_mlp_cuda"
"""The extension of Apex that accumulates weight gradients inside the matrix product (--gradient-accumulation-fusion)."""


def gpu_lines(torch, environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Lines of (what, how it is); none without a GPU.

    torch: the module.
    """
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "not in this torch"
    return [
        ("GPU", f"compute capability {major}.{minor}, CUDA {torch.version.cuda}, NCCL {nccl}"),
        ("GPU to GPU", _access(torch, count)),
        ("CUDA connections", _connections(environment.get("CUDA_DEVICE_MAX_CONNECTIONS"))),
        ("NCCL launch order", _launch_order(environment.get("NCCL_LAUNCH_ORDER_IMPLICIT"))),
        ("memory between processes", _allocator(environment)),
    ]


def _access(torch, count: int) -> str:
    if count == 1:
        return "one GPU: its processes reach each other's memory (ipc) if the system lets them; training tries it and says"
    without = [f"{a}>{b}" for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)]
    if not without:
        return "every GPU reaches every other: --rrfp-transport auto takes the copy engine (ipc)"
    return f"no access {', '.join(without[:6])}{' and more' if len(without) > 6 else ''}: such edges go through host memory"


def _connections(value: str | None) -> str:
    if value == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron asks for tensor parallelism: fine, nothing here makes a stream wait for a peer"
    return f"CUDA_DEVICE_MAX_CONNECTIONS={value or 'not set'}: Megatron refuses tensor parallelism before Blackwell unless it is 1"


def _launch_order(value: str | None) -> str:
    if value in (None, "1"):
        return "NCCL_LAUNCH_ORDER_IMPLICIT will be 1 with --rrfp-transport nccl"
    return f"NCCL_LAUNCH_ORDER_IMPLICIT={value}: --rrfp-transport nccl refuses it; unset it"


def _allocator(environment: Mapping[str, str]) -> str:
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" in settings.replace(" ", ""):
        return "expandable segments: not every torch and driver can share them between processes; where not, --rrfp-transport auto takes host memory"
    return "by CUDA's handles"


def transformer_engine(installed: bool, version: str | None) -> str:
    """What Megatron and this package can do with it. version: of the distribution, None if it has none."""
    if not installed:
        return "not installed: train with --transformer-impl local"
    if version is None:
        return "installed, its version is not known"
    numbers = numbers_of(version)
    if numbers < OLDEST_TE:
        return f"{version}: Megatron 0.17.1 and later want {'.'.join(map(str, OLDEST_TE))} or newer"
    return version + ("" if numbers >= DELAYED_TE else f" (no delayed weight gradients: those came with {'.'.join(map(str, DELAYED_TE))})")


def fusion(find: Callable[[str], object], te: bool) -> str:
    """Whether --gradient-accumulation-fusion, which is on unless switched off, has what it needs."""
    if te:
        return "by Transformer Engine"
    return "by Apex" if find(FUSED) else "none: train with --no-gradient-accumulation-fusion, or Megatron stops at its first layer"


def numbers_of(version: str) -> tuple[int, ...]:
    """`2.9.0+cu13` -> (2, 9, 0); what is no number ends it."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
