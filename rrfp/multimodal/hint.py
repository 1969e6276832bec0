"""A hint from what the data says: `--rrfp-hint rrfp.multimodal.hint:known_costs`. The order that would be kept if every action took as long
as its operations say, less what is frozen."""

from collections.abc import Iterator, Sequence

from megatron.core import parallel_state

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.multimodal.costs import Model, stage_operations
from rrfp.multimodal.layout import Layout
from rrfp.multimodal.loader import Microbatches
from rrfp.policy import HintContext
from rrfp.scheduler.arbiter import MOST_UNSENT, Scheduler
from rrfp.scheduler.dependencies import chain, without_weights
from rrfp.scheduler.hints import Alternate
from rrfp.scheduler.lists import as_row
from rrfp.simulate.clock import drive

_provided: tuple[Microbatches, Model, Layout, Sequence[float | None]] | None = None


def provide(training: Microbatches, *, model: Model, layout: Layout, trained: Sequence[float | None]) -> None:
    """What `known_costs` is to look at: this rank's training microbatches, and what every stage trains (`stage.trained_shares`). On every rank."""
    global _provided
    _provided = training, model, layout, trained


def known_costs(context: HintContext) -> list[list]:
    """One row per rank: the actions in the order in which rule `alt` runs them within the limits, each taking as long as its operations.

    Raises:
        ConfigurationError: nothing was provided, though the job has begun.
    """
    if _provided is None:
        if parallel_state.model_parallel_is_initialized():
            raise ConfigurationError(
                "--rrfp-hint rrfp.multimodal.hint:known_costs: it ranks by the microbatches of scripts/pretrain_vlm.py; leave it out elsewhere")
        # Before there is data the list is only checked: any costs will do.
        return rows_for(context, [[1.0] * context.placement.stages] * context.microbatches)
    training, model, layout, trained = _provided
    costs = [stage_operations(model, layout, load) for load in training.upcoming(context.microbatches)]
    return rows_for(context, costs, trained)


def rows_for(context: HintContext, costs: Sequence[Sequence[float]], trained: Sequence[float | None] = ()) -> list[list]:
    """As `known_costs`.

    Args:
        costs: of a forward, by microbatch and stage.
        trained: by stage, the share of its weights whose gradients are computed, None where nothing at all trains; empty: everything does.
            Stages before the first that trains run forwards only, and one without such weights leaves nothing for W.
    """
    placement, shares = context.placement, trained or [1.0] * context.placement.stages
    first = next((stage for stage, share in enumerate(shares) if share is not None), placement.stages)
    weights = [share or 0.0 for share in shares]
    schedulers = []
    for rank in range(placement.ranks):
        tasks = chain(placement, rank, context.microbatches, split=context.split, first_trainable=first)
        if context.split:
            tasks = without_weights(tasks, [stage for stage, share in enumerate(weights) if not share])
        schedulers.append(Scheduler(tasks, Alternate(), limit=context.limits[rank]))
        if min(tasks.stages) < first:
            schedulers[-1].bound_unsent(MOST_UNSENT)  # as in training: no activation, so no limit, holds its forwards

    def work(action: Action) -> float:
        share = {"F": 1.0, "B": 1.0 + weights[action.stage], "I": 1.0, "W": weights[action.stage]}[action.kind]
        return share * costs[action.microbatch][action.stage]

    return [as_row(_completed(row, rank, first, context)) for rank, row in enumerate(drive(schedulers, work).rows)]


def _completed(row: Sequence[Action], rank: int, first: int, context: HintContext) -> Iterator[Action]:
    """The row with what frozen stages don't run: a list holds every action of the call, also those that training then leaves out.

    first: the first stage that trains.
    """
    placement, kinds, present = context.placement, ("I", "W") if context.split else ("B",), set(row)
    frozen = [stage for stage in reversed(placement.stages_of(rank)) if stage < first]
    # Within the limit where a rank has one stage (strict mode asks for it), but not before the first stage that trains has to have run its own.
    behind = context.microbatches
    if frozen and first < placement.stages == placement.ranks:
        behind = max(context.limits[rank], context.limits[placement.rank_of(first)])

    def backwards(microbatch: int) -> Iterator[Action]:
        return (Action(kind, stage, microbatch) for stage in frozen for kind in kinds)

    for action in row:
        if frozen and action.kind == "F" and action.microbatch >= behind:
            yield from backwards(action.microbatch - behind)
        yield action
        if action.kind == "I" and (weight := action._replace(kind="W")) not in present:
            yield weight
    for microbatch in range(max(context.microbatches - behind, 0), context.microbatches):
        yield from backwards(microbatch)
