"""The user's choice of schedule, checked and composed: hint, mode, limit, order, lanes, split.

A `Policy` makes one `Scheduler` per rank and call. Everything it refuses is a `ConfigurationError` that names the flag.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.placement import Placement
from rrfp.scheduler import hints, lists
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.choice import Case, Over, announced_over, choose
from rrfp.scheduler.dependencies import Dependencies, chain, first_forward_first, without_weights
from rrfp.scheduler.limits import check_limit, is_paper, limit_of
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

RULES = ("auto", "announced", "bf", "fb", "b-first", "f-first", "alt", "fill", "fill-alt", "bfw", "fill-r")
BUILT_IN = (*RULES, *lists.LISTS)
SPLIT_ONLY = ("bfw", "fill-r", "zb-h1", "zb-h2", *(name for name, each in lists.PUBLISHED.items() if each.split))
UNIT_DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class HintContext:
    """What a registered hint may look at. Equal on every rank, so that every rank computes equal rows.

    measured: seconds by (kind, stage), as the caller passed them; empty in the first call.
    """

    placement: Placement
    microbatches: int
    limits: tuple[int, ...]
    split: bool
    measured: Mapping[tuple[str, int], float] = field(default_factory=dict)


HintFunction = Callable[[HintContext], Sequence[Sequence]]
_registered: dict[str, HintFunction] = {}


def register_hint(name: str, fn: HintFunction) -> None:
    """Make `name` a value of --rrfp-hint.

    Args:
        name: not a built-in's.
        fn: takes a `HintContext`, returns one row per rank: actions, tokens like `2F0`, or tuples of them (ties). It is asked
            anew for every call and must give the same rows on every rank; `Scheduler.digest` lets the ranks compare.

    Raises:
        ConfigurationError: if the name is taken by a built-in.
    """
    if name in (*BUILT_IN, *lists.PUBLISHED):
        raise ConfigurationError(f"register_hint {name}: is a built-in hint; choose another name")
    _registered[name] = fn


@dataclass(frozen=True)
class Policy:
    """How a rank picks its next action.

    Args:
        hint: --rrfp-hint, a rule, a list, a registered name, or a CSV file. "auto": what `settled` picks for the case.
        mode: --rrfp-mode, "ready": the hint ranks what is ready. "strict": its list is obeyed (for a rule: the list that it
            yields at unit durations, F=1, B=2, I=W=1; for `announced`: the list that it waits over).
        limit: --rrfp-limit, activations in flight per rank.
        order: --rrfp-order, "microbatch", "megatron" or "free".
        lanes: --rrfp-lanes, FIFO lanes per edge.
        split: --rrfp-split-backward, whether the backward runs as I and W.
        max_pending_w: --rrfp-max-pending-w, bound on pending weight gradients per rank; None for none but the limit, since what
            waits for its W holds its slot.

    Raises:
        ConfigurationError: on a value that does not exist, or a combination that cannot work.
    """

    hint: str = "auto"
    mode: str = "ready"
    limit: str = "1f1b"
    order: str = "microbatch"
    lanes: int = 1
    split: bool = False
    max_pending_w: int | None = None

    def __post_init__(self):
        _one_of("--rrfp-mode", self.mode, ("ready", "strict"))
        _one_of("--rrfp-order", self.order, ("microbatch", "megatron", "free"))
        check_limit(self.limit)
        if self.lanes < 1:
            raise ConfigurationError(f"--rrfp-lanes {self.lanes}: must be at least 1; use 1 for one FIFO per edge")
        if self._is_file and not Path(self.hint).is_file():
            names = ", ".join(name for name in (*BUILT_IN, *lists.PUBLISHED, *_registered) if self.split or name not in SPLIT_ONLY)
            raise ConfigurationError(
                f"--rrfp-hint {self.hint}: is neither a hint nor a file; use one of {names}, or a CSV file's path or a program's")
        if self.hint in SPLIT_ONLY and not self.split:
            raise ConfigurationError(
                f"--rrfp-hint {self.hint}: needs a backward split into I and W; add --rrfp-split-backward, or use fill-alt or 1f1b")
        if self._is_file:
            object.__setattr__(self, "hint", str(Path(self.hint).resolve()))  # whatever directory the run changes to
            _check_generator(self, _read(self.hint).generator)
        if self.max_pending_w is not None and (not self.split or self.max_pending_w < 1):
            raise ConfigurationError(
                f"--rrfp-max-pending-w {self.max_pending_w}: must be at least 1, with a split backward (--rrfp-split-backward); leave it out"
                " for no bound but --rrfp-limit")

    @property
    def adapts(self) -> bool:
        """Whether the hint is a registered function, which is asked anew for every call with what was measured."""
        return self.hint in _registered

    def settled(self, placement: Placement, microbatches: int) -> "Policy":
        """This policy with a hint that names one way of choosing: for `auto` the best for this case, equal on every rank.

        The order of forwards may become "megatron" with it, never weaker than what was asked for.
        """
        return _settled(self, placement, microbatches) if self.hint == "auto" else self

    def describe(self, placement: Placement, microbatches: int) -> str:
        """The hint as a line for people: what `auto` has settled on, and what `announced` waits over."""
        settled = self.settled(placement, microbatches)
        text = settled.hint
        if text == "announced":
            over = _over(settled, placement, microbatches).name
            text += f" over {over}" if over in lists.LISTS else f" over the list that {over} yields"
        if settled.order != self.order:
            text += f", order {settled.order}"
        return f"auto: {text}" if self.hint == "auto" else text

    # -- limits --------------------------------------------------------------------------------------------------------

    def limits(self, placement: Placement, microbatches: int) -> list[int]:
        """Most activations that each rank can hold under this policy, all its chunks together."""
        bounds = []
        for rank in range(placement.ranks):
            chunks = len(placement.stages_of(rank))
            bound = limit_of(self.limit, placement, rank, microbatches)
            # Appendix C: one microbatch may still pass through every chunk at the limit.
            over = chunks if is_paper(self.limit) and chunks > 1 else 0
            bounds.append(min(bound + over, microbatches * chunks))
        return bounds

    def _check_shape(self, placement: Placement, microbatches: int) -> None:
        """The deadlock rules: refuses what could stop for ever."""
        if all(len(placement.stages_of(rank)) == 1 for rank in range(placement.ranks)):
            return
        if self.order == "megatron":
            _check_megatron_order(self, placement, microbatches)
        elif is_paper(self.limit) and self.mode == "ready" and self.order == "free":
            # The one action that may go at the limit could wait for a message behind others that may not: they hold all credits.
            raise ConfigurationError(f"--rrfp-limit {self.limit}: finishes microbatches one by one, which deadlocks with several"
                                     " chunks and --rrfp-order free; use --rrfp-order microbatch, or another limit")
        elif not is_paper(self.limit) and self.mode == "ready":
            for rank, limit in enumerate(self.limits(placement, microbatches)):
                if limit < (chunks := len(placement.stages_of(rank))):
                    raise ConfigurationError(
                        f"--rrfp-limit {self.limit}: rank {rank} holds {chunks} chunks and {limit} activations, which deadlocks;"
                        f" use at least {chunks}")

    # -- lists ---------------------------------------------------------------------------------------------------------

    def list_for(
        self, placement: Placement, microbatches: int, *, measured: Mapping[tuple[str, int], float] | None = None
    ) -> list[hints.Row]:
        """The rows that strict mode obeys, one per rank: groups of actions, a group of several being a tie.

        Raises:
            ConfigurationError: if the list is incomplete, impossible, or needs more in flight than the limit.
        """
        self = self.settled(placement, microbatches)  # all that follows is about one hint
        if self.adapts:
            return self._checked(self._called(placement, microbatches, measured or {}), placement, microbatches)
        return _strict_rows(self, placement, microbatches)

    def _checked(self, rows: Sequence[hints.Row], placement: Placement, microbatches: int) -> list[hints.Row]:
        """Refuses rows that strict mode cannot obey under this policy."""
        source = f"--rrfp-hint {self.hint}"
        if self.order != "free":
            check_microbatch_order(rows, source=source)
        else:
            check_first_forward(rows, source=source)
            check_message_order(rows, _pipeline_of(rows, placement, microbatches, self.split), source=source)
        if self.order == "megatron":
            check_forward_order(rows, placement, microbatches, source=source)
        outcome = replay(rows, _pipeline_of(rows, placement, microbatches, self.split))
        for rank, (need, limit) in enumerate(zip(outcome.peak, self.limits(placement, microbatches), strict=True)):
            stage, pending = placement.stages_of(rank)[0], outcome.peak_pending[rank]
            if need > limit:
                raise ConfigurationError(
                    f"{source}: its list holds {need} activations at stage {stage}, but --rrfp-limit {self.limit} allows {limit};"
                    f" use --rrfp-limit {need} or --rrfp-mode ready")
            if self.max_pending_w is not None and pending > self.max_pending_w:
                raise ConfigurationError(
                    f"{source}: its list leaves {pending} weight gradients pending at stage {stage}, above --rrfp-max-pending-w"
                    f" {self.max_pending_w}; use --rrfp-max-pending-w {pending} or --rrfp-mode ready")
        return list(rows)

    def _rows(
        self, placement: Placement, microbatches: int, measured: Mapping[tuple[str, int], float]
    ) -> Sequence[hints.Row] | None:
        """The rows of the hint's list; None if it is a rule without one."""
        if self.adapts:
            return self._called(placement, microbatches, measured)
        return _ready_rows(self, placement, microbatches)

    def _called(self, placement: Placement, microbatches: int, measured: Mapping[tuple[str, int], float]) -> list[hints.Row]:
        """What the registered function gives for this call, validated."""
        context = HintContext(placement, microbatches, tuple(self.limits(placement, microbatches)), self.split, measured)
        rows = []
        for rank, entries in enumerate(_registered[self.hint](context)):
            try:
                rows.append(lists.as_row(entries))
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"--rrfp-hint {self.hint}: its function's row {rank} is no list of actions ({error});"
                    " return rows of tokens like 2F0") from error
        _check_list(self, rows, placement, microbatches)
        return rows

    @property
    def _is_file(self) -> bool:
        return not (self.hint in BUILT_IN or self.hint in lists.PUBLISHED or self.hint in _registered)

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def scheduler(
        self,
        placement: Placement,
        rank: int,
        microbatches: int,
        *,
        forward_only: bool = False,
        first_trainable: int = 0,
        weightless: Collection[int] = (),
        durations: Mapping[str, float] | None = None,
        measured: Mapping[tuple[str, int], float] | None = None,
    ) -> Scheduler:
        """A fresh scheduler for one rank and one call.

        Args:
            placement: which rank owns which stage of the chain.
            rank: this pipeline rank.
            microbatches: how many run in this call.
            forward_only: evaluation: of a list only its forwards are used.
            first_trainable: stages below it have no backward.
            weightless: stages of this rank without a weight whose gradient can wait: they have no W.
            durations: start values of this rank's moving averages, seconds by kind (the last call's `Scheduler.durations`).
            measured: for a registered hint, seconds by (kind, stage); must be equal on all ranks.

        Raises:
            ConfigurationError: if this placement or number of microbatches does not go with the policy.
        """
        self = self.settled(placement, microbatches)  # all that follows is about one hint
        self._check_shape(placement, microbatches)
        strict = self.mode == "strict"
        if strict:
            rows = self.list_for(placement, microbatches, measured=measured)
        else:
            rows = self._rows(placement, microbatches, measured or {})
        if strict and not forward_only and not first_trainable:
            dependencies = _pipeline_of(rows, placement, microbatches, self.split)[rank]  # its list was checked against them
        else:
            whole = _whole(rows, self.split)
            dependencies = chain(placement, rank, microbatches, forward_only=forward_only, split=self.split, whole=whole,
                                 first_trainable=first_trainable)
        if self.order == "free":
            dependencies = first_forward_first(dependencies)
        if self.split and weightless:
            dependencies = without_weights(dependencies, weightless)
        row = None if rows is None else _only(rows[rank], dependencies)
        forwards = ()
        if len(dependencies.stages) > 1 and not strict:
            if self.order == "megatron":
                forwards = lists.interleaved_forwards(dependencies.stages, microbatches, placement.ranks)
            elif self.hint == "announced" and self.order == "microbatch" and _fits(self, placement, microbatches):
                # Waiting for the head gains nothing if a forward of another chunk may take the slot that it waits for.
                forwards = [action for action in lists.actions_of(row) if action.kind == "F"]
        limit, admission = limit_of(self.limit, placement, rank, microbatches), "reserve"
        if is_paper(self.limit) and not strict:
            admission = "paper"
        elif strict or forwards or len(dependencies.stages) == 1:
            # Known to fit: the list, or a list with this order of forwards, was checked against the limits of all ranks.
            limit, admission = self.limits(placement, microbatches)[rank], "plain"
        return Scheduler(
            dependencies,
            hints.Strict(row) if strict else self._hint(placement, rank, microbatches, row),
            limit=limit,
            order="free" if self.order == "free" else "microbatch",
            max_pending_w=self.max_pending_w,
            admission=admission,
            forwards=forwards,
            durations=durations,
            digest=self._digest(placement, microbatches, rows),
        )

    def _hint(self, placement: Placement, rank: int, microbatches: int, row: hints.Row | None) -> hints.Hint:
        target = limit_of("1f1b", placement, rank, microbatches)
        eager = limit_of("eager", placement, rank, microbatches)
        if self.hint == "announced":
            over = _over(self, placement, microbatches)
            return hints.Announced(row, skips=over.skips, slack=over.slack)
        if row is not None:
            return hints.Ranked(row)
        return {
            "bf": lambda: hints.Rounds("BF"),
            "bfw": lambda: hints.Rounds("BF"),
            "fb": lambda: hints.Rounds("FB"),
            "b-first": lambda: hints.Prefer("BF"),
            "f-first": lambda: hints.Prefer("FB"),
            "alt": hints.Alternate,
            "fill": lambda: hints.Fill(target),
            "fill-alt": lambda: hints.Fill(eager, alternate=True),
            "fill-r": lambda: hints.FillRelease(eager),
        }[self.hint]()

    def _digest(self, placement: Placement, microbatches: int, rows: Sequence[hints.Row] | None) -> str:
        """Equal on two ranks exactly if they follow the same policy and rows: to be compared across ranks."""
        text = repr((self, placement.owners, microbatches))
        if self.adapts or self._is_file or self.hint in lists.PUBLISHED:
            # Built-in lists follow from the line above; what torch makes may differ from release to release.
            text += "\n".join(",".join(map(lists.token, row)) for row in rows)
        return hashlib.sha256(text.encode()).hexdigest()


def _one_of(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{flag} {value}: must be one of {', '.join(allowed)}")


def _only(row: hints.Row, dependencies: Dependencies) -> hints.Row:
    """A row without what this call does not run: backwards when forward only, or below the first trainable stage."""
    kept = (tuple(action for action in group if action in dependencies.tasks) for group in row)
    return tuple(group for group in kept if group)


def _case(policy: Policy, placement: Placement, microbatches: int) -> Case:
    limits = tuple(limit_of(policy.limit, placement, rank, microbatches) for rank in range(placement.ranks))
    fits = placement.stages == placement.ranks or _fits_interleaved(replace(policy, order="megatron"), placement, microbatches)
    return Case(placement, microbatches, limits, policy.split, policy.order, fits)


@lru_cache(maxsize=8)
def _settled(policy: Policy, placement: Placement, microbatches: int) -> Policy:
    hint, order = choose(_case(policy, placement, microbatches))
    return replace(policy, hint=hint, order=order)


@lru_cache(maxsize=8)
def _over(policy: Policy, placement: Placement, microbatches: int) -> Over:
    return announced_over(_case(policy, placement, microbatches))


def _fits_interleaved(policy: Policy, placement: Placement, microbatches: int) -> bool:
    try:
        _check_megatron_order(policy, placement, microbatches)
    except ConfigurationError:
        return False
    return True


@lru_cache(maxsize=8)
def _pipeline(placement: Placement, microbatches: int, split: bool, whole: frozenset[tuple[int, int]] = frozenset()) -> list[Dependencies]:
    return [chain(placement, rank, microbatches, split=split, whole=whole) for rank in range(placement.ranks)]


def _whole(rows: Sequence[hints.Row] | None, split: bool) -> frozenset[tuple[int, int]]:
    """The backwards that a list runs whole although the others are split."""
    return lists.whole_backwards(rows) if split and rows is not None else frozenset()


def _pipeline_of(rows: Sequence[hints.Row] | None, placement: Placement, microbatches: int, split: bool) -> list[Dependencies]:
    """The dependencies of every rank under a list, which says of each backward whether it is split."""
    return _pipeline(placement, microbatches, split, _whole(rows, split))


def read_hint(path: str) -> lists.ListFile:
    """What a hint file says: PyTorch's CSV notation, or of a program (`.json`) its order of stages. Raises ConfigurationError."""
    if Path(path).suffix != ".json":
        return lists.read_file(path)
    from rrfp.program.hint_rows import hint_of

    return hint_of(path)


@cache
def _read(path: str) -> lists.ListFile:
    """A hint file is read once in a process, when the policy is made: what all ranks agreed on cannot change under a run."""
    return read_hint(path)


def _check_generator(policy: Policy, name: str | None) -> None:
    """Refuses a file that names a hint which makes no list, or none under this policy."""
    if name is None:
        return
    if not (name in lists.LISTS or name in lists.PUBLISHED or name in _registered):
        raise ConfigurationError(f"--rrfp-hint {policy.hint}: its line generator={name} names no list; name one of"
                                 f" {', '.join((*lists.LISTS, *lists.PUBLISHED, *_registered))}")
    replace(policy, hint=name)


def _from_file(policy: Policy, placement: Placement, microbatches: int) -> Sequence[hints.Row]:
    """The file's rows, or what its generator makes where the file is for another number of microbatches."""
    file = _read(policy.hint)
    if microbatches == file.microbatches:
        _check_list(policy, file.rows, placement, microbatches, where=file.where)
        return file.rows
    if file.generator is None:
        program = Path(policy.hint).suffix == ".json"
        out = "build the program for as many" if program else "let a first line `# rrfp: generator=NAME` name the list for other numbers"
        raise ConfigurationError(f"--rrfp-hint {policy.hint}: is for {file.microbatches} microbatches, and this run has calls of {microbatches};"
                                 f" {out}, or use a hint that exists for any, for example 1f1b")
    return replace(policy, hint=file.generator)._rows(placement, microbatches, {})


@lru_cache(maxsize=8)
def _ready_rows(policy: Policy, placement: Placement, microbatches: int) -> Sequence[hints.Row] | None:
    if policy.hint in lists.LISTS or policy.hint == "announced":
        return _built_in(policy, placement, microbatches)
    if policy.hint in RULES:
        return None
    if policy.hint in lists.PUBLISHED:
        return _published(policy, placement, microbatches)
    return _from_file(policy, placement, microbatches)


def _published(policy: Policy, placement: Placement, microbatches: int) -> Sequence[hints.Row]:
    from rrfp.schedule.published import published_steps  # which imports torch when it is asked

    rows = lists.without_idle(published_steps(policy.hint, placement, microbatches))
    if policy.order != "free":
        rows = lists.in_microbatch_order(rows)
    _check_list(policy, rows, placement, microbatches)
    return rows


def _check_list(policy: Policy, rows: Sequence[hints.Row], placement: Placement, microbatches: int, **where: Callable[[int, int], str]) -> None:
    """What every list must be, in either mode."""
    source = f"--rrfp-hint {policy.hint}"
    check_rows(rows, _pipeline_of(rows, placement, microbatches, policy.split), source=source, **where)
    if policy.order != "free":
        check_mixed_backwards(rows, source=source)


@lru_cache(maxsize=8)
def _strict_rows(policy: Policy, placement: Placement, microbatches: int) -> list[hints.Row]:
    rows = _ready_rows(policy, placement, microbatches)
    if rows is None:
        rows = _rule_rows(replace(policy, mode="ready"), placement, microbatches)
    return policy._checked(rows, placement, microbatches)


def _rule_rows(policy: Policy, placement: Placement, microbatches: int) -> list[hints.Row]:
    """What a rule does at unit durations, with messages that take no time."""
    schedulers = [policy.scheduler(placement, rank, microbatches) for rank in range(placement.ranks)]
    return [lists.as_row(row) for row in drive(schedulers, lambda action: UNIT_DURATIONS[action.kind]).rows]


def _built_in(policy: Policy, placement: Placement, microbatches: int) -> list[hints.Row]:
    """The rows of a built-in list, or of the list that `announced` waits over."""
    name, one_chunk = policy.hint, placement.stages == placement.ranks
    limits = [limit_of(policy.limit, placement, rank, microbatches) for rank in range(placement.ranks)]
    if name == "announced":
        over = _over(policy, placement, microbatches)
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
def _fits(policy: Policy, placement: Placement, microbatches: int) -> bool:
    """Whether the hint's list runs within the limits of every rank."""
    rows = _ready_rows(policy, placement, microbatches)
    needs = replay(rows, _pipeline_of(rows, placement, microbatches, policy.split)).peak
    limits = policy.limits(placement, microbatches)
    return not is_paper(policy.limit) and all(need <= limit for need, limit in zip(needs, limits, strict=True))


@lru_cache(maxsize=8)
def _check_megatron_order(policy: Policy, placement: Placement, microbatches: int) -> None:
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
