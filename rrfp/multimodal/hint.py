"""A hint from what the data says: `--rrfp-hint rrfp.multimodal.hint:known_costs`. The order that would be kept if every action took as long
as its operations say."""

from megatron.core import parallel_state

from rrfp.errors import ConfigurationError
from rrfp.multimodal.costs import Model, stage_operations
from rrfp.multimodal.layout import Layout
from rrfp.multimodal.loader import Microbatches
from rrfp.policy import HintContext
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import chain
from rrfp.scheduler.hints import Alternate
from rrfp.scheduler.lists import as_row
from rrfp.simulate.clock import drive

_SHARES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Of a forward's operations."""
_provided: tuple[Microbatches, Model, Layout] | None = None


def provide(training: Microbatches, *, model: Model, layout: Layout) -> None:
    """What `known_costs` is to look at: this rank's training microbatches. On every rank."""
    global _provided
    _provided = training, model, layout


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
    training, model, layout = _provided
    costs = [stage_operations(model, layout, load) for load in training.upcoming(context.microbatches)]
    return rows_for(context, costs)


def rows_for(context: HintContext, costs: list[list[float]]) -> list[list]:
    """As `known_costs`. costs: of a forward, by microbatch and stage."""
    placement = context.placement
    schedulers = [
        Scheduler(chain(placement, rank, context.microbatches, split=context.split), Alternate(), limit=context.limits[rank])
        for rank in range(placement.ranks)]
    driven = drive(schedulers, lambda action: _SHARES[action.kind] * costs[action.microbatch][action.stage])
    return [as_row(row) for row in driven.rows]
