"""The order of a program at the granularity of pipeline stages: rows that any hint file, simulation or Megatron run can take."""

import math
from collections.abc import Sequence
from pathlib import Path

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.program.dag import DAG, Node
from rrfp.program.directives import Directive, Order, Split
from rrfp.program.files import is_text, read_dag, read_program
from rrfp.program.filters import Filter
from rrfp.program.order import rows
from rrfp.program.traced import EXPERT_PARTS, Traced, sketch
from rrfp.scheduler.hints import Row
from rrfp.scheduler.lists import ListFile, actions_of

STAGE = "PP"


def stage_rows(dag: DAG, *, stage: str = STAGE) -> list[Row]:
    """One row per group of devices: every (pass, stage, microbatch) once, where the last of its computations stands.

    Sub-DAGs that run interleaved become a tie, which torch's notation writes as an OVERLAP_F_B group.

    Args:
        stage: the tag whose index is the pipeline stage.

    Raises:
        ConfigurationError: naming a computation without that tag, or one that is split in more ways than microbatches.
    """
    found = []
    for groups in rows(dag).values():
        last: dict[Action, int] = {}
        for position, group in enumerate(groups):
            for action in dict.fromkeys(_action(dag, node, stage) for node in group):
                last.pop(action, None)
                last[action] = position
        ties: dict[int, list[Action]] = {}
        for action, position in last.items():
            ties.setdefault(position, []).append(action)
        found.append(tuple(tuple(ties[position]) for position in sorted(ties)))
    return found


def hint_of(path: str | Path) -> ListFile:
    """The order of a program file as a hint file would give it. A row's line is the number of its order, a column its position in that.

    Of a model in Python, or none, an outline with the stages that the program speaks of gives the same order: nothing is run for it.
    """
    found = stage_rows(_dag(path))
    return ListFile(found, None, list(range(1, len(found) + 1)), [list(range(1, len(actions_of(row)) + 1)) for row in found])


def stages_of(directives: Sequence[Directive]) -> int:
    """How many stages a strategy speaks of."""
    return 1 + max((filter[STAGE] for filter in _filters(directives) if type(filter.get(STAGE)) is int), default=0)


def _filters(directives: Sequence[Directive]) -> list[Filter]:
    ordered = [filter for each in directives if isinstance(each, Order) for group in each.row for filter in group]
    return [each.filter for each in directives if not isinstance(each, Order)] + ordered


def _dag(path: str | Path) -> DAG:
    if is_text(path):
        return read_dag(path)
    program = read_program(path)
    if isinstance(program.model, Traced):
        return program.dag()
    try:
        experts = any("EP" in filter for filter in _filters(program.directives))
        pieces = math.prod(each.count for each in program.directives if isinstance(each, Split))
        return program.dag(sketch(stages_of(program.directives), parts=EXPERT_PARTS if experts else (), batch=pieces))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _action(dag: DAG, node: Node, stage: str) -> Action:
    if stage not in node.tags:
        raise ConfigurationError(f"program: {node}: has no tag {stage}, by which stages are numbered; annotate it, or name another tag")
    if len(node.dims) > 1:
        raise ConfigurationError(f"program: {node}: is split in {' and '.join(node.dims)}; a hint of stages knows one microbatch number")
    return Action(node.phase, node.tags[stage], next(iter(node.dims.values()), 0))
