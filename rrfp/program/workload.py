"""What a program trains, from a user's Python: `{"model": {"python": "my_model.py:make"}}` in a program file."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rrfp.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from rrfp.program.capture import Captured

Batch = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Workload:
    """A model, its loss and its data.

    Args:
        model: with `annotate`d parts, on the device where it trains. Every rank makes it: seed it, so that all start from the same weights.
        loss: loss(model, batch) -> a scalar, the mean over the batch.
        batches: batches(replica) -> one batch for each step, of that replica (0, 1, ...) alone: tensors by name, first dimension the
            batch, of one size for all replicas. Every rank of the replica's pipeline reads the same: seed it by the replica.
        optimizer: optimizer(parameters) -> a `torch.optim.Optimizer`; None: AdamW as torch makes it.
    """

    model: "torch.nn.Module"
    loss: Callable[["torch.nn.Module", Batch], "torch.Tensor"]
    batches: Callable[[int], Iterator[Batch]]
    optimizer: Callable[[list], Any] | None = None

    def capture(self) -> "Captured":
        """The model captured with the first batch (`rrfp.program.capture`)."""
        from rrfp.program.capture import capture

        return capture(self.model, next(iter(self.batches(0))), loss=self.loss)


@dataclass(frozen=True)
class PythonModel:
    """Where a program's model comes from.

    python: `FILE.py:FUNCTION`, the file relative to `folder`, which is the program file's. arguments: the function is called with them,
        by name; it returns a `Workload`.
    """

    python: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    def make(self) -> Workload:
        """Runs that Python. Raises ConfigurationError if there is no such function, or it returns something else."""
        made = self.function(**self.arguments)
        if not isinstance(made, Workload):
            raise ConfigurationError(f"model {self.python}: returned a {type(made).__name__}; it must return an rrfp.program.workload.Workload")
        return made

    @property
    def function(self) -> Callable[..., Workload]:
        """Its file is run once in a process. Raises ConfigurationError if there is no such file or function."""
        name, _, function = self.python.rpartition(":")
        path = (self.folder / name).resolve()
        if not name or not path.is_file():
            raise ConfigurationError(f"model {self.python}: there is no file {name or self.python}; write FILE.py:FUNCTION, relative to the"
                                     " program's file")
        found = getattr(_module(path), function, None)
        if not callable(found):
            raise ConfigurationError(f"model {self.python}: {path.name} has no function {function!r}; name the one that returns a Workload")
        return found


def _module(path: Path) -> ModuleType:
    """A file, run as a module that may import its neighbours."""
    title = f"rrfp_program_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if title not in sys.modules:
        specification = importlib.util.spec_from_file_location(title, path)
        sys.modules[title] = importlib.util.module_from_spec(specification)
        sys.path.insert(0, str(path.parent))
        try:
            specification.loader.exec_module(sys.modules[title])
        except BaseException:
            del sys.modules[title]
            raise
        finally:
            sys.path.remove(str(path.parent))
    return sys.modules[title]
