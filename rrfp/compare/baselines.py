"""Schedules of others that `rrfp compare` runs beside RRFP's: Megatron's 1F1B and PyTorch's, by the names of their modes."""

import importlib.util
import warnings
from collections.abc import Callable, Iterable

from rrfp.errors import ConfigurationError

BASELINES = ("megatron-1f1b", "torch-1f1b", "torch-zbv")


def check_baseline(name: str, *, stages: int, microbatches: int) -> None:
    """Raises ConfigurationError if `name` needs what is not installed, or does not go with these sizes."""
    for module in ("torch", "megatron.core") if name == "megatron-1f1b" else ("torch",):
        if not _installed(module):
            raise ConfigurationError(f"--modes {name}: needs {module}, which is not installed; install it, or leave this mode out")
    if name != "megatron-1f1b":
        from rrfp.compare.torch_stage import check

        check(name, stages, microbatches)


def make_baselines(names: Iterable[str]) -> dict[str, Callable]:
    """What `Contenders` makes baselines with. Imports torch and Megatron, so that the ranks forked after it need not.

    Turns this process' CPU mode on for Megatron (`rrfp.megatron.cpu`).
    """
    made: dict[str, Callable] = {}
    if "megatron-1f1b" in (names := set(names)):  # first: CPU mode comes before torch's users
        from rrfp.megatron import cpu

        cpu.enable(device_count=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's own, about what is not installed
            cpu.patch_megatron()
            from rrfp.megatron.emulated import MegatronStage
        made["megatron-1f1b"] = MegatronStage
    if names & set(BASELINES[1:]):
        from rrfp.compare.torch_stage import TorchStage

        made |= dict.fromkeys(names & set(BASELINES[1:]), TorchStage)
    return made


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
