"""What registered hints look at, made equal on every rank: one small collective over the pipeline group before each call of such a hint."""

import math
from collections.abc import Mapping

import torch

KINDS = ("F", "B", "I", "W")


def gather_durations(own: Mapping[str, float], pp_group) -> dict[tuple[str, int], float]:
    """Every stage's moving averages, seconds by (kind, stage). Empty until each stage has run forwards and backwards (B, or I)."""
    mine = torch.tensor([own.get(kind, math.nan) for kind in KINDS], dtype=torch.float64, device="cuda")
    everyone = [torch.empty_like(mine) for _ in range(pp_group.size())]
    torch.distributed.all_gather(everyone, mine, group=pp_group)
    measured = {(kind, stage): seconds for stage, row in enumerate(everyone) for kind, seconds in zip(KINDS, row.tolist(), strict=True)}
    missing = {key for key, seconds in measured.items() if math.isnan(seconds)}
    if any(("F", stage) in missing or {("B", stage), ("I", stage)} <= missing for stage in range(len(everyone))):
        return {}  # after evaluation alone there are forwards only
    return {key: seconds for key, seconds in measured.items() if key not in missing}
