"""A list, looked at: where its stages are, whether it can run, and what it does at unit durations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.policy import BUILT_IN, RULES, SPLIT_ONLY, UNIT_DURATIONS, Policy, read_hint
from rrfp.policy_rows import check_generator
from rrfp.schedule.published import published_steps
from rrfp.scheduler import lists
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import Dependencies, chain
from rrfp.scheduler.hints import Row, Strict
from rrfp.scheduler.limits import is_measured
from rrfp.scheduler.lists.file import ListFile
from rrfp.scheduler.validate import check_microbatch_order, check_rows, replay
from rrfp.simulate.clock import Result, drive

NAMES = (*BUILT_IN, *lists.PUBLISHED)


@dataclass(frozen=True)
class Plan:
    """One list, for one placement and number of microbatches.

    Args:
        name: the hint's, or the file's path.
        steps: one row per rank, idle steps (empty groups) included.
        file: where it was read, if from a file.
    """

    name: str
    steps: Sequence[Row]
    placement: Placement
    microbatches: int
    file: ListFile | None = None

    @cached_property
    def rows(self) -> list[Row]:
        return lists.without_idle(self.steps)

    @cached_property
    def split(self) -> bool:
        return any(action.kind in ("I", "W") for action in lists.every_action(self.rows))

    @cached_property
    def pipeline(self) -> list[Dependencies]:
        whole = lists.whole_backwards(self.rows) if self.split else ()
        return [chain(self.placement, rank, self.microbatches, split=self.split, whole=whole) for rank in range(self.placement.ranks)]

    @property
    def looped(self) -> bool:
        """Whether its stages go round as Megatron places chunks."""
        return self.placement == Placement.looped(self.placement.ranks, max(1, self.placement.stages // self.placement.ranks))

    def check(self) -> None:
        """Raises ConfigurationError that names the first entry that cannot run, or the generator that makes no list like it."""
        where = {} if self.file is None else {"where": self.file.where}
        check_rows(self.rows, self.pipeline, source=self.name, **where)
        if self.file is not None and self.file.generator is not None:
            self.check_generator(self.file.generator, source=f"{self.name}: its line generator={self.file.generator}")

    def check_generator(self, name: str, *, source: str) -> None:
        """Raises ConfigurationError if training would refuse `name` as the hint that makes this list for other numbers of microbatches.

        `module:function` is left to training, which imports it.
        """
        if ":" not in name:
            check_generator(name, split=self.split, source=source)

    @cached_property
    def result(self) -> Result:
        """The list obeyed at unit durations (`policy.UNIT_DURATIONS`), messages taking no time."""
        schedulers = [Scheduler(dependencies, Strict(row), limit=sum(map(len, row)), order="free", admission="plain")
                      for dependencies, row in zip(self.pipeline, self.rows, strict=True)]
        return drive(schedulers, lambda action: UNIT_DURATIONS[action.kind])

    @cached_property
    def idle(self) -> list[float]:
        """Per rank, units of time before the makespan in which nothing runs."""
        return [self.result.makespan - sum(UNIT_DURATIONS[action.kind] for action in row) for row in self.result.rows]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, until the last one ends, in which nothing runs."""
        return sum(self.idle) / (self.result.makespan * len(self.idle))

    @cached_property
    def peaks(self) -> tuple[list[int], list[int]]:
        """Per rank, most activations in flight and most pending weight gradients."""
        outcome = replay(self.rows, self.pipeline)
        return outcome.peak, outcome.peak_pending

    def out_of_order(self) -> str | None:
        """Where the list leaves microbatch order, which strict mode keeps unless the order is free; None: nowhere."""
        try:
            check_microbatch_order(self.rows, source=self.name)
        except ConfigurationError as error:
            return str(error).removeprefix(f"{self.name}: ").partition(" leaves")[0]
        return None

    def describe(self) -> str:
        """Its sizes in words."""
        placement = self.placement
        chunks = placement.stages / placement.ranks
        shape = "" if chunks == 1 else f" of {chunks:g} chunks"
        if not self.looped:
            v = placement == Placement.v(placement.ranks, max(1, int(chunks)))
            shape += " in a V" if v else f" (stages on ranks {' '.join(map(str, placement.owners))})"
        parts = lists.whole_backwards(self.rows)
        backward = ("some backwards split into I and W" if parts else "backward split into I and W") if self.split else "backward whole"
        ranks = f"{placement.ranks} rank{'s' if placement.ranks > 1 else ''}{shape}"
        return f"{ranks}, {self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}, {backward}"


def plan_of(
    name: str,
    *,
    ranks: int | None = None,
    chunks: int | None = None,
    microbatches: int | None = None,
    limit: str | None = None,
    split: bool = False,
    renumber: bool = False,
) -> Plan:
    """The list that a hint's name makes for these sizes, or that a file holds.

    Args:
        name: a built-in hint (of a rule: the list that it yields at unit durations), a published list, or a file's path.
        ranks, microbatches: of a file: what it must be for, if given.
        chunks: stages per rank; default 2 for published lists, else 1.
        limit: activations per rank that the list is made for; default `1f1b` for 1f1b and rules, elsewhere what the list takes.
        split: the backward in two parts, where the hint works either way.
        renumber: microbatches in ascending order at every stage (`lists.in_microbatch_order`).

    Raises:
        ConfigurationError: there is no such list, or none for these sizes.
    """
    if name in NAMES:
        plan = _named(name, ranks=ranks, chunks=chunks, microbatches=microbatches, limit=limit, split=split)
    elif Path(name).is_file():
        for option, given in (("--limit", limit), ("--split", split)):
            if given:
                raise ConfigurationError(f"{option}: {name} is a file, which says itself what runs; leave the option out")
        plan = _from_file(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    else:
        raise ConfigurationError(f"NAME|FILE {name}: is neither a list nor a file; use one of {', '.join(NAMES)}, or a CSV file's path")
    if not renumber:
        return plan
    return Plan(plan.name, lists.in_microbatch_order(plan.steps), plan.placement, plan.microbatches, plan.file)


def _named(name: str, *, ranks: int | None, chunks: int | None, microbatches: int | None, limit: str | None, split: bool) -> Plan:
    for option, given in (("--ranks", ranks), ("--microbatches", microbatches)):
        if given is None:
            raise ConfigurationError(f"{option}: is missing, and {name} is made for any size; give {option} N")
    published = lists.PUBLISHED.get(name)
    if published is not None:
        if limit is not None or split:
            raise ConfigurationError(f"{'--limit' if limit else '--split'}: {name} is a published list, which is what it is; leave the option out")
        placement = published.placement(ranks, chunks or 2)
        return Plan(name, published_steps(name, placement, microbatches), placement, microbatches)
    placement = Placement.looped(ranks, chunks or 1)
    if limit is not None and is_measured(limit):
        raise ConfigurationError(f"--limit {limit}: is measured in training; give a number or a shape, for example 1f1b or 2p")
    if limit is None:
        limit = "1f1b" if name == "1f1b" or name in RULES else str(placement.stages * microbatches)
    policy = Policy(hint=name, mode="strict", limit=limit, split=split or name in SPLIT_ONLY)
    return Plan(name, policy.list_for(placement, microbatches), placement, microbatches)


def _from_file(name: str, *, ranks: int | None, chunks: int | None, microbatches: int | None) -> Plan:
    file = read_hint(name) if Path(name).suffix == ".json" else lists.read_file(name, source=name)  # a program's order is a list, too
    owners: dict[int, int] = {}
    for rank, row in enumerate(file.rows):
        for action in lists.actions_of(row):
            owners.setdefault(action.stage, rank)
    if missing := [stage for stage in range(max(owners)) if stage not in owners]:
        raise ConfigurationError(f"{name}: stage {missing[0]} stands nowhere, and stage {max(owners)} does; number stages from 0 on")
    if idle := [rank for rank, row in enumerate(file.rows) if not row]:
        raise ConfigurationError(f"{name}: line {file.lines[idle[0]]} (rank {idle[0]}) holds no action; give every rank a stage")
    if homeless := [rank for rank in range(len(file.rows)) if rank not in owners.values()]:
        rank, stage = homeless[0], lists.actions_of(file.rows[homeless[0]])[0].stage
        raise ConfigurationError(f"{name}: line {file.lines[rank]} (rank {rank}) holds stage {stage}, as line {file.lines[owners[stage]]} (rank"
                                 f" {owners[stage]}) does; a stage lives on one rank, so give rank {rank} one of its own")
    placement = Placement.of([owners[stage] for stage in range(len(owners))])
    for option, given, own in (("--ranks", ranks, placement.ranks), ("--chunks", chunks, placement.stages // placement.ranks),
                               ("--microbatches", microbatches, file.microbatches)):
        if given not in (None, own):
            raise ConfigurationError(f"{option} {given}: {name} is for {own}; leave the option out, or name a list that is made for any size")
    return Plan(name, file.steps, placement, file.microbatches, file)
