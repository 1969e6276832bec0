"""Rows of the published lists, made by PyTorch's own classes. Imports torch when rows are asked for, not before.

Their names in `torch.distributed.pipelining.schedules` are private, so what is used of them stands here alone: the constructor
`cls(stages, n_microbatches)`, which reads of a stage how many there are and who owns them; `pipeline_order`, by rank a list of actions or
None; the string of an action; and `_prepare_schedule_with_comms`, the lowering for PyTorch's own runtime, which is left out.
"""

from functools import lru_cache
from types import SimpleNamespace

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler.hints import Row
from rrfp.scheduler.lists.file import parse_cell
from rrfp.scheduler.lists.names import PUBLISHED, check_placement

_LOWERING = "_prepare_schedule_with_comms"


@lru_cache(maxsize=8)
def published_steps(name: str, placement: Placement, microbatches: int) -> list[Row]:
    """The rows of a list of `PUBLISHED`, idle steps (empty groups) included, microbatches as published.

    Raises:
        ConfigurationError: for a placement or a number of microbatches that the list does not exist for, and where torch is not
            installed or of a release whose classes are others.
    """
    chunks, torch_class = check_placement(name, placement), _torch_class(name)
    try:
        order = _torch_order(torch_class, placement.ranks, chunks, microbatches)
        return [tuple(() if action is None else _cell(str(action)) for action in order[rank]) for rank in range(placement.ranks)]
    except ValueError as error:  # torch's own rules for these numbers
        raise ConfigurationError(f"--rrfp-hint {name}: does not exist for M = {microbatches} on {placement.ranks} ranks of {chunks}"
                                 f" chunks ({str(error).rstrip(".")}); use another number, or 1f1b, which exists for any") from None
    except (AttributeError, TypeError, KeyError, AssertionError) as error:
        raise _other_torch(name, f"{type(error).__name__}: {error}") from error


def _torch_class(name: str) -> type:
    try:
        from torch.distributed.pipelining import schedules
    except ImportError as error:
        raise ConfigurationError(f"--rrfp-hint {name}: is made by PyTorch's torch.distributed.pipelining, which cannot be imported ({error});"
                                 " install torch, or use a file that `rrfp schedule convert` wrote where it is") from None
    made = getattr(schedules, PUBLISHED[name].torch_class, None)
    if made is None or not hasattr(made, _LOWERING):
        raise _other_torch(name, f"no {PUBLISHED[name].torch_class} with {_LOWERING}")
    return made


def _other_torch(name: str, what: str) -> ConfigurationError:
    import torch

    return ConfigurationError(f"--rrfp-hint {name}: torch {torch.__version__} makes this list in another way than 2.13, for which this was"
                              f" written ({what}); use a file that `rrfp schedule convert` wrote with torch 2.13, or another hint")


def _torch_order(torch_class: type, ranks: int, chunks: int, microbatches: int) -> dict[int, list]:
    # The lowering takes far longer than the list, and nobody here reads what it makes.
    bare = type(torch_class.__name__, (torch_class,), {_LOWERING: lambda self, *args, **options: None})
    stages = [SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=None) for _ in range(chunks)]
    return bare(stages, microbatches).pipeline_order


def _cell(text: str) -> tuple[Action, ...]:
    try:
        group = parse_cell(text)
    except ValueError as error:
        raise TypeError(str(error)) from None
    if isinstance(group, str):
        raise TypeError(f"{text} is in its list")
    return group
