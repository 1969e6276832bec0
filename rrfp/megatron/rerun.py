"""Megatron's rerun state machine tells results apart by how many came before. Under a free order that count has to be set."""

from collections import defaultdict


def in_rerun() -> bool:
    """Whether Megatron runs this iteration again to see if its results reproduce: then it must run in the order of the indices."""
    machine = _machine()
    return machine is not None and machine.state.name.startswith("RERUNNING")


def number_results(microbatch: int) -> None:
    """Before the last stage's forward of `microbatch`: the next result that it validates is number `microbatch` + 1.

    `RerunStateMachine.validate_result` identifies a result by (message, rank, k-th invocation); a rerun in another order would
    compare one microbatch's loss with another's and end the job as irreproducible.
    """
    machine = _machine()
    if machine is not None:
        machine.validation_counts = defaultdict(lambda: microbatch)


def _machine():
    from megatron.core import rerun_state_machine

    # Read, never create: `get_rerun_state_machine` would make one for users who have none.
    return rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
