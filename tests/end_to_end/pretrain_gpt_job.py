"""Runs whole trainings of a tiny GPT, by readiness or as Megatron does, and reads what they logged and saved."""

import atexit
import functools
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import job  # noqa: E402
from job import ROOT  # noqa: E402

OWN_SCRIPT = ROOT / "scripts/pretrain_gpt.py"
TINY = "--hidden-size 32 --seq-length 32 --max-position-embeddings 32".split()
"""Wins over scripts/tiny_gpt.args: half the size."""


def trees() -> list[Path]:
    """The checkouts at MEGATRON_LM: one, or those in a folder that holds several; the newest first."""
    root = os.environ.get("MEGATRON_LM")
    if not root or not Path(root).is_dir():
        return []
    found = [path for path in [Path(root), *Path(root).iterdir()] if (path / "megatron/core/package_info.py").is_file()]
    return sorted(found, key=release, reverse=True)


def release(tree: Path) -> tuple[int, int, int]:
    text = (tree / "megatron/core/package_info.py").read_text()
    return tuple(int(re.search(rf"^{name} = (\d+)", text, re.M)[1]) for name in ("MAJOR", "MINOR", "PATCH"))


@functools.cache
def ready_tree(tree: Path) -> Path:
    """The checkout in links, unmodified, with the dataset helpers that the installed wheel has compiled from the same source."""
    import importlib.util

    directory = tempfile.TemporaryDirectory(prefix="rrfp-tree-")
    atexit.register(directory.cleanup)
    copy = Path(directory.name) / tree.name
    datasets = Path("megatron/core/datasets")
    for part in (Path("."), Path("megatron"), Path("megatron/core"), datasets):
        (copy / part).mkdir(parents=True)
        for entry in (tree / part).iterdir():
            if not datasets.is_relative_to(part / entry.name):
                (copy / part / entry.name).symlink_to(entry)
    wheel = Path(importlib.util.find_spec("megatron.core").origin).parent / "datasets"
    for built in wheel.glob("helpers_cpp*.so"):
        if (wheel / "helpers.cpp").read_bytes() == (tree / datasets / "helpers.cpp").read_bytes():
            shutil.copy(built, copy / datasets)
    return copy


def make_data() -> list[str]:
    """The arguments of a tiny GPT on real text."""
    return [*job.prepare_data(), *TINY]


@dataclass
class Run:
    """One training that has ended."""

    codes: list[int]
    outputs: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)

    @property
    def log(self) -> list[str]:
        return log(self.text)


def log(text: str) -> list[str]:
    """Megatron's log of iterations and validations, in order, digit for digit, without the times."""
    found = re.findall(r"(?:iteration +\d+/ *\d+ \|| validation loss at ).*", text)
    return [re.sub(r"elapsed time per iteration \(ms\): \S+ \| ", "", line).strip() for line in found]


def value(line: str, name: str) -> float | None:
    found = re.search(rf"{name}: +([-\d.E+]+)", line)
    return float(found[1]) if found else None


class Trainings:
    """Jobs of one script's server, with arguments that all of them share."""

    def __init__(self, script: Path, arguments: list[str], *, untouched: bool = True):
        self._server, self._arguments = job.server(script, untouched=untouched), arguments

    def run(
        self,
        way: str,
        folder: Path,
        *arguments: str,
        ranks: int,
        pipeline: int | None = None,
        codes: list[int] | None = None,
        world: int | None = None,
        deadline: float = 100.0,
        places: list[dict[str, str]] | None = None,
        **variables: str,
    ) -> Run:
        """Train with `way` "rrfp" or "1f1b" (both under `python -m rrfp`, with that --pipeline-schedule) or "megatron".

        world: how many ranks each believes there are, for what ends before they meet (default: `ranks`).
        places: more of each rank's environment. variables: more of all ranks'.

        Raises AssertionError with the ranks' outputs if they end otherwise than with `codes` (default: all 0), or not in time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        schedule = {"rrfp": ["--pipeline-schedule", "rrfp"], "1f1b": ["--pipeline-schedule", "1f1b"], "megatron": []}[way]
        argv = [*self._arguments, "--pipeline-model-parallel-size", str(pipeline or ranks), *schedule, *arguments]
        environments = job.environments(world or ranks, RRFP_REPORT_DIR=str(folder), **variables)[:ranks]
        environments = [environment | place for environment, place in zip(environments, places or [{}] * len(environments), strict=True)]
        started = self._server.start("megatron" if way == "megatron" else "rrfp", argv, variables=environments, folder=folder)
        started.wait(deadline=deadline)
        run = Run([started.codes[rank] for rank in range(ranks)], [started.output(rank) for rank in range(ranks)])
        assert run.codes == (codes or [0] * ranks), "\n".join(
            f"--- {way}, rank {rank}: exit status {run.codes[rank]} ---\n{run.outputs[rank][-4000:]}" for rank in range(ranks)
        )
        return run


def tensors(checkpoint: Path) -> dict:
    """The tensors of a torch_dist checkpoint by name: weights and the optimizer's state."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata.items()
    found = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in stored if isinstance(m, TensorStorageMetadata)}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def different(one: Path, other: Path) -> list[str]:
    """The tensors in which two checkpoints are not bitwise equal."""
    a, b = tensors(one), tensors(other)
    assert len(a) > 20 and any("exp_avg" in name for name in a), sorted(a)
    return sorted(set(a) ^ set(b)) + [name for name in a if name in b and not bits(a[name], b[name])]


def bits(a, b) -> bool:
    import torch

    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    )
