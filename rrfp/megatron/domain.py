"""Which ranks of the job must agree with this one on every action: read off Megatron's process groups (invariant 6)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import parallel_state

from rrfp.comm import rendezvous
from rrfp.comm.transport import Failure
from rrfp.engine.failure import ELSEWHERE, describe, is_hearsay
from rrfp.tp_coord.agreement import Agreement
from rrfp.tp_coord.domain import Domain, domain_of

_GROUPS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "expt_tp": parallel_state.get_expert_tensor_parallel_group,
}
"""Groups whose collectives run inside actions: by their name in a `ProcessGroupCollection`, and where Megatron keeps them otherwise."""


def groups_of(collection: Any = None) -> tuple[tuple[int, ...], ...]:
    """Ranks of the groups of more than one rank whose collectives run inside this rank's actions.

    collection: the `ProcessGroupCollection` that the schedule was given; what it does not name is taken from `parallel_state`.
    """
    found = set()
    for name, get in _GROUPS.items():
        group = getattr(collection, name, None)
        if group is None and parallel_state.model_parallel_is_initialized():
            group = get(check_initialized=False)
        if group is not None and group.size() > 1:
            found.add(tuple(torch.distributed.get_process_group_ranks(group)))
    return tuple(sorted(found))


def find_domain(groups: Iterable[tuple[int, ...]], *, rank: int, stage: int, store: rendezvous.Store, until: float) -> Domain:
    """The domain of `rank`: the members of its groups, those of theirs, and so on. Every member asks at the same point.

    Args:
        groups: this rank's, in ranks of the job.
        rank: of the job.
        stage: its pipeline rank.
        store: a part of the job's store that all pipelines share; each opening needs its own.
        until: time.monotonic() by which all members must have come.

    Raises:
        PipelineError: members did not come; names them.
    """
    rendezvous.publish(store, "domain", "groups", rank, {"stage": stage, "groups": list(groups)})
    records, missing = {}, {rank}
    while missing:
        records |= rendezvous.collect(store, "domain", "groups", missing, until=until)
        missing = {member for record in records.values() for group in record["groups"] for member in group} - set(records)
    return domain_of(rank, [group for record in records.values() for group in record["groups"]], stage_of=lambda one: records[one]["stage"])


class NamedAgreement:
    """An `Agreement` whose members say in words which rank of the job failed: each of them is in another pipeline.

    Args:
        agreement: the members', by ranks of the job.
        rank: this rank's place in its pipeline.
        name: how errors call a rank of this pipeline.
        member: how errors call another member of the domain.
    """

    def __init__(self, agreement: Agreement, *, rank: int, name: Callable[[int], str], member: Callable[[int], str]):
        self._agreement, self._rank, self._name, self._member = agreement, rank, name, member
        self.begin, self.arrived, self.common, self.decide = agreement.begin, agreement.arrived, agreement.common, agreement.decide
        self.state, self.close, self.bell = agreement.state, agreement.close, agreement.bell
        self.size, self.leads = agreement.size, agreement.leads

    def open(self, wake: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        """As `Agreement.open`."""
        self._agreement.open(wake, lambda failure: fail(self._elsewhere(failure, self._member)))

    def abort(self, failure: Failure) -> None:
        """As `Agreement.abort`."""
        self._agreement.abort(self._elsewhere(failure, self._name))

    def _elsewhere(self, failure: Failure, name: Callable[[int], str]) -> Failure:
        if is_hearsay(failure):
            return failure._replace(rank=self._rank)
        return Failure(self._rank, ELSEWHERE, describe(failure._replace(traceback=""), name), failure.traceback)
