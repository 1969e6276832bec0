"""The lists that policies rank by or obey: built in, published, of a file, of a registered function, or what a rule yields. Rows of all ranks,
checked, and the same on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.errors import ConfigurationError
from rrfp.hint_names import RULES, SPLIT_ONLY, HintContext, registered
from rrfp.placement import Placement
from rrfp.scheduler import hints, lists
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.choice import Case, Over, announced_over, choose
from rrfp.scheduler.dependencies import Dependencies, chain
from rrfp.scheduler.limits import is_paper, limit_of
from rrfp.scheduler.validate import (
    check_first_forward,
    check_forward_order,
    check_message_order,
    check_microbatch_order,
    check_mixed_backwards,
    check_rows,
    replay,
)
from rrfp.simulate.clock import drive

if TYPE_CHECKING:
    from rrfp.policy import Policy

UNIT_DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def rows_of(policy: "Policy", placement: Placement, microbatches: int, measured: Mapping[tuple[str, int], float]) -> Sequence[hints.Row] | None:
    """The rows of the hint's list; None if it is a rule without one. measured: as `HintContext.measured`."""
    if policy.adapts:
        return called_rows(policy, placement, microbatches, measured)
    return ready_rows(policy, placement, microbatches)


def strict_rows(policy: "Policy", placement: Placement, microbatches: int, measured: Mapping[tuple[str, int], float]) -> list[hints.Row]:
    """The rows that strict mode obeys; of a rule, the list that it yields at unit durations.

    Raises:
        ConfigurationError: if the list is incomplete, impossible, or needs more in flight than the limit.
    """
    if policy.adapts:
        return _checked(policy, called_rows(policy, placement, microbatches, measured), placement, microbatches)
    return _strict_rows(policy, placement, microbatches)


def called_rows(policy: "Policy", placement: Placement, microbatches: int, measured: Mapping[tuple[str, int], float]) -> list[hints.Row]:
    """What the registered function gives for this call, validated."""
    context = HintContext(placement, microbatches, tuple(policy.limits(placement, microbatches)), policy.split, measured)
    rows = []
    for rank, entries in enumerate(registered[policy.hint](context)):
        try:
            rows.append(lists.as_row(entries))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"--rrfp-hint {policy.hint}: its function's row {rank} is no list of actions ({error});"
                " return rows of tokens like 2F0") from error
    _check_list(policy, rows, placement, microbatches)
    return rows


def _checked(policy: "Policy", rows: Sequence[hints.Row], placement: Placement, microbatches: int) -> list[hints.Row]:
    """Refuses rows that strict mode cannot obey under this policy."""
    source = f"--rrfp-hint {policy.hint}"
    if policy.order != "free":
        check_microbatch_order(rows, source=source)
    else:
        check_first_forward(rows, source=source)
        check_message_order(rows, pipeline_of(rows, placement, microbatches, policy.split), source=source)
    if policy.order == "megatron":
        check_forward_order(rows, placement, microbatches, source=source)
    outcome = replay(rows, pipeline_of(rows, placement, microbatches, policy.split))
    for rank, (need, limit) in enumerate(zip(outcome.peak, policy.limits(placement, microbatches), strict=True)):
        stage, pending = placement.stages_of(rank)[0], outcome.peak_pending[rank]
        if need > limit:
            raise ConfigurationError(
                f"{source}: its list holds {need} activations at stage {stage}, but --rrfp-limit {policy.limit} allows {limit};"
                f" use --rrfp-limit {need} or --rrfp-mode ready")
        if policy.max_pending_w is not None and pending > policy.max_pending_w:
            raise ConfigurationError(
                f"{source}: its list leaves {pending} weight gradients pending at stage {stage}, above --rrfp-max-pending-w"
                f" {policy.max_pending_w}; use --rrfp-max-pending-w {pending} or --rrfp-mode ready")
    return list(rows)


def _case(policy: "Policy", placement: Placement, microbatches: int) -> Case:
    limits = tuple(limit_of(policy.limit, placement, rank, microbatches) for rank in range(placement.ranks))
    fits = placement.stages == placement.ranks or _fits_interleaved(replace(policy, order="megatron"), placement, microbatches)
    return Case(placement, microbatches, limits, policy.split, policy.order, fits)


@lru_cache(maxsize=8)
def settled(policy: "Policy", placement: Placement, microbatches: int) -> "Policy":
    """What `auto` picks for the case."""
    hint, order = choose(_case(policy, placement, microbatches))
    return replace(policy, hint=hint, order=order)


@lru_cache(maxsize=8)
def waited_over(policy: "Policy", placement: Placement, microbatches: int) -> Over:
    """What `announced` waits over."""
    return announced_over(_case(policy, placement, microbatches))


def _fits_interleaved(policy: "Policy", placement: Placement, microbatches: int) -> bool:
    try:
        check_megatron_order(policy, placement, microbatches)
    except ConfigurationError:
        return False
    return True


@lru_cache(maxsize=8)
def _pipeline(placement: Placement, microbatches: int, split: bool, whole: frozenset[tuple[int, int]] = frozenset()) -> list[Dependencies]:
    return [chain(placement, rank, microbatches, split=split, whole=whole) for rank in range(placement.ranks)]


def whole_of(rows: Sequence[hints.Row] | None, split: bool) -> frozenset[tuple[int, int]]:
    """The backwards that a list runs whole although the others are split."""
    return lists.whole_backwards(rows) if split and rows is not None else frozenset()


def pipeline_of(rows: Sequence[hints.Row] | None, placement: Placement, microbatches: int, split: bool) -> list[Dependencies]:
    """The dependencies of every rank under a list, which says of each backward whether it is split."""
    return _pipeline(placement, microbatches, split, whole_of(rows, split))


def read_hint(path: str) -> lists.ListFile:
    """What a hint file says: PyTorch's CSV notation, or of a program (`.json`) its order of stages. Raises ConfigurationError."""
    if Path(path).suffix != ".json":
        return lists.read_file(path)
    from rrfp.program.hint_rows import hint_of

    return hint_of(path)


@cache
def read_once(path: str) -> lists.ListFile:
    """A hint file is read once in a process, when the policy is made: what all ranks agreed on cannot change under a run."""
    return read_hint(path)


def check_generator(name: str, *, split: bool, source: str) -> None:
    """Raises ConfigurationError for a hint that makes no list, or none for backwards that are split, or whole. source: who names it."""
    if not (name in lists.LISTS or name in lists.PUBLISHED or name in registered):
        raise ConfigurationError(f"{source} names no list; name one of {', '.join((*lists.LISTS, *lists.PUBLISHED, *registered))}")
    if name in SPLIT_ONLY and not split:
        raise ConfigurationError(f"{source} names a list with a backward split into I and W, and here backwards are whole; name one without,"
                                 " for example 1f1b, or split them (training: --rrfp-split-backward)")


def _from_file(policy: "Policy", placement: Placement, microbatches: int) -> Sequence[hints.Row]:
    """The file's rows, or what its generator makes where the file is for another number of microbatches."""
    file = read_once(policy.hint)
    if microbatches == file.microbatches:
        _check_list(policy, file.rows, placement, microbatches, where=file.where)
        return file.rows
    if file.generator is None:
        program = Path(policy.hint).suffix == ".json"
        out = "build the program for as many" if program else "let a first line `# rrfp: generator=NAME` name the list for other numbers"
        raise ConfigurationError(f"--rrfp-hint {policy.hint}: is for {file.microbatches} microbatches, and this run has calls of {microbatches};"
                                 f" {out}, or use a hint that exists for any, for example 1f1b")
    return rows_of(replace(policy, hint=file.generator), placement, microbatches, {})


@lru_cache(maxsize=8)
def ready_rows(policy: "Policy", placement: Placement, microbatches: int) -> Sequence[hints.Row] | None:
    """The rows of a hint that is no registered function; None if it is a rule without a list."""
    if policy.hint in lists.LISTS or policy.hint == "announced":
        return _built_in(policy, placement, microbatches)
    if policy.hint in RULES:
        return None
    if policy.hint in lists.PUBLISHED:
        return _published(policy, placement, microbatches)
    return _from_file(policy, placement, microbatches)


def _published(policy: "Policy", placement: Placement, microbatches: int) -> Sequence[hints.Row]:
    from rrfp.schedule.published import published_steps  # which imports torch when it is asked

    rows = lists.without_idle(published_steps(policy.hint, placement, microbatches))
    if policy.order != "free":
        rows = lists.in_microbatch_order(rows)
    _check_list(policy, rows, placement, microbatches)
    return rows


def _check_list(policy: "Policy", rows: Sequence[hints.Row], placement: Placement, microbatches: int, **where: Callable[[int, int], str]) -> None:
    """What every list must be, in either mode."""
    source = f"--rrfp-hint {policy.hint}"
    check_rows(rows, pipeline_of(rows, placement, microbatches, policy.split), source=source, **where)
    if policy.order != "free":
        check_mixed_backwards(rows, source=source)


@lru_cache(maxsize=8)
def _strict_rows(policy: "Policy", placement: Placement, microbatches: int) -> list[hints.Row]:
    rows = ready_rows(policy, placement, microbatches)
    if rows is None:
        rows = _rule_rows(replace(policy, mode="ready"), placement, microbatches)
    return _checked(policy, rows, placement, microbatches)


def _rule_rows(policy: "Policy", placement: Placement, microbatches: int) -> list[hints.Row]:
    """What a rule does at unit durations, with messages that take no time."""
    schedulers = [policy.scheduler(placement, rank, microbatches) for rank in range(placement.ranks)]
    return [lists.as_row(row) for row in drive(schedulers, lambda action: UNIT_DURATIONS[action.kind]).rows]


def _built_in(policy: "Policy", placement: Placement, microbatches: int) -> list[hints.Row]:
    """The rows of a built-in list, or of the list that `announced` waits over."""
    name, one_chunk = policy.hint, placement.stages == placement.ranks
    limits = [limit_of(policy.limit, placement, rank, microbatches) for rank in range(placement.ranks)]
    if name == "announced":
        over = waited_over(policy, placement, microbatches)
        name, limits = over.name, over.limits
        if name in RULES:
            return _rule_rows(replace(policy, hint=name, mode="ready"), placement, microbatches)
    rows = lists.generate(name, placement, microbatches, limits, split=policy.split)
    if one_chunk:
        return rows
    pipeline = _pipeline(placement, microbatches, policy.split)
    if not replay(rows, pipeline).stuck:
        return rows
    # Interleaved 1F1B as Megatron writes it needs its placement and its multiples of P. Elsewhere its positions only rank.
    ranked = [Scheduler(d, hints.Ranked(row), limit=max(limit, len(d.stages)))
              for d, row, limit in zip(pipeline, rows, limits, strict=True)]
    return [lists.as_row(row) for row in drive(ranked, lambda action: UNIT_DURATIONS[action.kind]).rows]


@lru_cache(maxsize=8)
def fits(policy: "Policy", placement: Placement, microbatches: int) -> bool:
    """Whether the hint's list runs within the limits of every rank."""
    rows = ready_rows(policy, placement, microbatches)
    needs = replay(rows, pipeline_of(rows, placement, microbatches, policy.split)).peak
    limits = policy.limits(placement, microbatches)
    return not is_paper(policy.limit) and all(need <= limit for need, limit in zip(needs, limits, strict=True))


@lru_cache(maxsize=8)
def check_megatron_order(policy: "Policy", placement: Placement, microbatches: int) -> None:
    """Raises ConfigurationError if forwards in Megatron's order across chunks could stop for ever."""
    # Forwards in a fixed order across chunks are safe exactly when a list with that order runs within the limits.
    if is_paper(policy.limit):
        raise ConfigurationError(f"--rrfp-limit {policy.limit}: finishes microbatches one by one, against --rrfp-order megatron;"
                                 " use --rrfp-order microbatch")
    pipeline = _pipeline(placement, microbatches, policy.split)
    rows = [lists.as_row(lists.interleaved(placement.stages_of(r), r, microbatches, placement.ranks, split=policy.split))
            for r in range(placement.ranks)]
    outcome = replay(rows, pipeline)
    if outcome.stuck:
        raise ConfigurationError(f"--rrfp-order megatron: interleaved 1F1B does not exist for {microbatches} microbatches on this"
                                 f" placement of {placement.ranks} ranks; use --rrfp-order microbatch")
    for rank, (need, limit) in enumerate(zip(outcome.peak, policy.limits(placement, microbatches), strict=True)):
        if need > limit:
            raise ConfigurationError(
                f"--rrfp-limit {policy.limit}: rank {rank} may hold {limit}, but --rrfp-order megatron needs {need};"
                " use --rrfp-limit 1f1b")
