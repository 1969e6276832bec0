"""What registered hints look at, made equal on every rank, and the check that every rank follows the same order.

Small collectives over the pipeline group, before a call: once per number of microbatches, and in every call only for hints that are
functions. Without the check a hint file that differs on one host would be a wait for ever, or worse.
"""

from collections.abc import Mapping

import torch

from rrfp.errors import ConfigurationError


def gather_durations(own: Mapping[str, float], pp_group) -> dict[tuple[str, int], float]:
    """Every stage's moving averages, seconds by (kind, stage). Empty until each stage has run forwards and backwards."""
    everyone: list[dict[str, float]] = [{}] * pp_group.size()
    torch.distributed.all_gather_object(everyone, dict(own), group=pp_group)
    if not all("F" in measured and "B" in measured for measured in everyone):
        return {}  # after evaluation alone there are forwards only
    return {(kind, stage): seconds for stage, measured in enumerate(everyone) for kind, seconds in measured.items()}


def agree(digest: str, pp_group, *, hint: str) -> None:
    """Compare what every rank made of the policy: a digest of its rows, or why it refused them.

    Raises:
        ConfigurationError: on every rank, naming those that differ from rank 0 and the first refusal.
    """
    everyone: list[str] = [""] * pp_group.size()
    torch.distributed.all_gather_object(everyone, digest, group=pp_group)
    if not (different := [rank for rank, other in enumerate(everyone) if other != everyone[0]]):
        return
    refusal = next((f" (rank {rank}: {text.removeprefix(REFUSED)})" for rank, text in enumerate(everyone) if text.startswith(REFUSED)), "")
    raise ConfigurationError(
        f"--rrfp-hint {hint}: pipeline ranks {', '.join(map(str, different))} got other rows than rank 0{refusal}; every rank needs the same "
        "options and the same hint file, and a registered hint must be a function of its HintContext alone")


REFUSED = "refused: "
