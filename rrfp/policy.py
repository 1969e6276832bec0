"""The user's choice of schedule, checked and composed: hint, mode, limit, order, lanes, split.

A `Policy` makes one `Scheduler` per rank and call. Everything it refuses is a `ConfigurationError` that names the flag.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.hint_names import BUILT_IN, RULES, SPLIT_ONLY, HintContext, HintFunction, register_hint, registered
from rrfp.placement import Placement
from rrfp.policy_rows import (
    UNIT_DURATIONS,
    check_generator,
    check_megatron_order,
    fits,
    pipeline_of,
    read_hint,
    read_once,
    rows_of,
    settled,
    strict_rows,
    waited_over,
    whole_of,
)
from rrfp.scheduler import hints, lists
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import Dependencies, chain, first_forward_first, without_weights
from rrfp.scheduler.limits import check_limit, is_paper, limit_of

__all__ = ["BUILT_IN", "RULES", "SPLIT_ONLY", "UNIT_DURATIONS", "HintContext", "HintFunction", "Policy", "read_hint", "register_hint"]


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
            names = ", ".join(name for name in (*BUILT_IN, *lists.PUBLISHED, *registered) if self.split or name not in SPLIT_ONLY)
            raise ConfigurationError(
                f"--rrfp-hint {self.hint}: is neither a hint nor a file; use one of {names}, or a CSV file's path or a program's")
        if self.hint in SPLIT_ONLY and not self.split:
            raise ConfigurationError(
                f"--rrfp-hint {self.hint}: needs a backward split into I and W; add --rrfp-split-backward, or use fill-alt or 1f1b")
        if self._is_file:
            object.__setattr__(self, "hint", str(Path(self.hint).resolve()))  # whatever directory the run changes to
            if (generator := read_once(self.hint).generator) is not None:
                check_generator(generator, split=self.split, source=f"--rrfp-hint {self.hint}: its line generator={generator}")
        if self.max_pending_w is not None and (not self.split or self.max_pending_w < 1):
            raise ConfigurationError(
                f"--rrfp-max-pending-w {self.max_pending_w}: must be at least 1, with a split backward (--rrfp-split-backward); leave it out"
                " for no bound but --rrfp-limit")

    @property
    def adapts(self) -> bool:
        """Whether the hint is a registered function, which is asked anew for every call with what was measured."""
        return self.hint in registered

    def settled(self, placement: Placement, microbatches: int) -> "Policy":
        """This policy with a hint that names one way of choosing: for `auto` the best for this case, equal on every rank.

        The order of forwards may become "megatron" with it, never weaker than what was asked for.
        """
        return settled(self, placement, microbatches) if self.hint == "auto" else self

    def describe(self, placement: Placement, microbatches: int) -> str:
        """The hint as a line for people: what `auto` has settled on, and what `announced` waits over."""
        settled = self.settled(placement, microbatches)
        text = settled.hint
        if text == "announced":
            over = waited_over(settled, placement, microbatches).name
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
            check_megatron_order(self, placement, microbatches)
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
        return strict_rows(self, placement, microbatches, measured or {})

    @property
    def _is_file(self) -> bool:
        return not (self.hint in BUILT_IN or self.hint in lists.PUBLISHED or self.hint in registered)

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
            rows = rows_of(self, placement, microbatches, measured or {})
        if strict and not forward_only and not first_trainable:
            dependencies = pipeline_of(rows, placement, microbatches, self.split)[rank]  # its list was checked against them
        else:
            whole = whole_of(rows, self.split)
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
            elif self.hint == "announced" and self.order == "microbatch" and fits(self, placement, microbatches):
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
            over = waited_over(self, placement, microbatches)
            return hints.Announced(row, skips=over.skips[rank], slack=over.slack)
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
