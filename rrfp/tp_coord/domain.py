"""Which ranks must run the same sequence of actions. Pure."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from rrfp.errors import ConfigurationError


@dataclass(frozen=True)
class Domain:
    """The ranks at one stage that must dispatch the same sequence, in ascending order. The first one leads."""

    members: tuple[int, ...]

    def __post_init__(self):
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ConfigurationError(
                f"a domain's members are distinct ranks in ascending order, at least one, got {self.members}")

    @property
    def leader(self) -> int:
        return self.members[0]

    def others(self, rank: int) -> tuple[int, ...]:
        """All members but `rank`."""
        return tuple(member for member in self.members if member != rank)


def domain_of(rank: int, groups: Iterable[Sequence[int]], *, stage_of: Callable[[int], Hashable]) -> Domain:
    """The connected component of `rank` in the graph whose edges are the groups (invariant 6).

    Two groups that share a rank are one domain: with expert parallelism over data-parallel replicas, a replica that runs
    another action than its peers stands in another all-to-all, so the tensor-parallel groups of all these replicas join.

    Args:
        rank: this rank, in the numbering of the groups.
        groups: ranks of every process group whose collectives run inside actions (tensor, context, expert parallelism).
        stage_of: what tells stages apart: the pipeline rank of a rank.

    Raises:
        ConfigurationError: a group has ranks of several stages: its collectives cannot run inside actions of one of them.
    """
    neighbours: dict[int, set[int]] = {}
    for group in groups:
        if len(stages := {stage_of(member) for member in group}) > 1:
            raise ConfigurationError(
                f"the group of ranks {', '.join(map(str, group))} spans the pipeline ranks "
                f"{', '.join(map(str, sorted(stages)))}: collectives inside actions stay within one; leave the group out of the "
                "domain")
        for member in group:
            neighbours.setdefault(member, set()).update(group)
    found, todo = {rank}, [rank]
    while todo:
        new = neighbours.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return Domain(tuple(sorted(found)))
