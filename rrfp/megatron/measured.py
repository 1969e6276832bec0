"""What registered hints look at, made equal on every rank, and the check that every rank made the same of it.

Only for hints that are functions: two small collectives per call over the pipeline group, between iterations.
"""

from collections.abc import Mapping

import torch

from rrfp.errors import ConfigurationError


def gather_durations(own: Mapping[str, float], pp_group) -> dict[tuple[str, int], float]:
    """Every stage's moving averages, seconds by (kind, stage). Empty until each stage has one."""
    everyone: list[dict[str, float]] = [{}] * pp_group.size()
    torch.distributed.all_gather_object(everyone, dict(own), group=pp_group)
    if not all(everyone):
        return {}
    return {(kind, stage): seconds for stage, measured in enumerate(everyone) for kind, seconds in measured.items()}


def check_equal(digest: str, pp_group, *, hint: str) -> None:
    """Raises ConfigurationError naming the ranks whose rows differ from rank 0's."""
    everyone: list[str] = [""] * pp_group.size()
    torch.distributed.all_gather_object(everyone, digest, group=pp_group)
    if different := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
        raise ConfigurationError(
            f"--rrfp-hint {hint}: pipeline ranks {', '.join(map(str, different))} got other rows than rank 0; a registered hint must be a "
            "function of its HintContext alone (no clock, no unseeded randomness)")
