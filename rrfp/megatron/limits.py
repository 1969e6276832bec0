"""Limits that are measured: `auto` and `memory:<GiB>` (--rrfp-limit). docs/limits.md says what they do.

Until the choice is made, calls run at Megatron's own number of activations, under a `Meter`, with their trace kept. It is made at the
end of such a call: by one rank, from the least room that any replica has, and the same on every rank of the job, since ranks at one stage
of all replicas may share collectives. All of it is said in small collectives over Megatron's own groups, once; at the end of a call, since
whoever has run it is there to answer, while a rank may be late for the next one, which the engine would name and a collective would not.
"""

import json
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rrfp.errors import ConfigurationError
from rrfp.megatron.memory import Meter, device
from rrfp.megatron.options import Options
from rrfp.policy import Policy
from rrfp.scheduler.limits import gibibytes, holding, is_measured, listed
from rrfp.simulate.measured import costs_of
from rrfp.simulate.memory import Choice, Room, choose, fitting, within
from rrfp.trace.files import assemble

GIB = 2**30
STATE = 8
"""Bytes per trainable parameter that an optimizer may still take at its first step: two moments in fp32 (Adam)."""
_LONGEST = 10
"""Measured calls after which the choice is made although no optimizer has stepped; room is left for what it may take."""
_SECONDS = 10.0
"""How long simulations may take, in the one call that they delay."""


class Shape(NamedTuple):
    """What a choice holds for: with other numbers an activation holds something else, or other limits are best."""

    microbatches: int
    micro_batch_size: int
    seq_length: int


@dataclass
class _Case:
    """What is known for one policy and shape.

    policy: what was asked for. base: the same at 1F1B's limit.
    """

    policy: Policy
    base: Policy
    microbatches: int
    chosen: Policy | None = None
    calls: int = 0
    meter: Meter | None = None
    stepped: bool = False
    """Whether an optimizer had stepped before the last measured call, so that what it keeps was there."""
    budget: float | None = None
    """Bytes that this rank may take under what was chosen, until that was seen to be so."""


class MeasuredLimits:
    """The policy of each call, as long as its limit is not known beforehand. One per installed schedule."""

    def __init__(self, options: Options):
        self._fraction = options.memory_fraction
        self._cases: weakref.WeakKeyDictionary[Any, dict[tuple[Policy, Shape], _Case]] = weakref.WeakKeyDictionary()
        self._stepped = False
        self._hook = None
        self._open: _Case | None = None
        """What the running call may decide."""

    def begin(self, policy: Policy, runtime, shape: Shape, *, forward_only: bool) -> tuple[Policy, Meter | None]:
        """The policy of the call that begins, and what measures it, if anything does. All ranks of the job call it alike.

        Args:
            policy: what was asked for.
        """
        self._open = None
        if not is_measured(policy.limit):
            return policy, None
        base = replace(policy, limit="1f1b")
        if _is_control(policy):
            return base, None
        cases = self._cases.setdefault(runtime, {})
        if forward_only:  # holds no activation
            return getattr(cases.get((policy, shape)), "chosen", None) or base, None
        first = not cases  # warms up: what it allocates once is no activation's
        case = cases.setdefault((policy, shape), _Case(policy, base, shape.microbatches, calls=0 if first else 1))
        self._open = case
        if case.chosen is not None:
            return case.chosen, None
        self._watch_steps()
        case.calls += 1
        case.meter, case.stepped = Meter(device()), self._stepped
        runtime.recorder.keep_next()
        return base, case.meter

    def end(self, runtime, groups, pp_group, models) -> None:
        """After a call's last action. All ranks of the job call it alike.

        Args:
            groups: Megatron's process groups; of tp and dp_cp together come all ranks at one place of their pipelines.
            models: the rank's chunks.

        Raises:
            ConfigurationError: on every rank, if `memory:<GiB>` is too little, or can't be kept to.
        """
        case, self._open = self._open, None
        if case is None:
            return
        if case.chosen is None and case.calls >= 2:
            self._consult(runtime, groups, pp_group, models, case)
        elif case.chosen is not None and case.budget is not None:
            self._check(runtime, groups, pp_group, case)

    def _watch_steps(self) -> None:
        """Has `_stepped` set by the next optimizer that steps: not by one that skips its step for want of a loss scale."""
        if self._stepped and self._hook is not None:
            self._hook.remove()  # not by itself: torch goes through its hooks then
            self._hook = None
        elif not self._stepped and self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note_step)

    def _note_step(self, *_) -> None:
        self._stepped = True

    def _consult(self, runtime, groups, pp_group, models, case: _Case) -> None:
        """Sets `case.chosen`, unless some rank has to measure on."""
        runtime.engine.latch.raise_if_set()  # who is lost takes part in no collective
        meter = case.meter
        known = case.stepped or gibibytes(case.policy.limit) is not None
        reserve = 0 if known else STATE * sum(p.numel() for model in models for p in model.parameters() if p.requires_grad)
        absent = meter.device.absent()
        if absent is not None:
            print(f"[rrfp] {runtime.name(runtime.rank)}: what an activation holds can't be measured: {absent}", file=sys.stderr, flush=True)
        budget = meter.device.budget(self._fraction)
        idle = budget - meter.device.peak() - reserve
        mine = [float(known or case.calls > _LONGEST), float(absent is None), -float(meter.activation), idle]
        everyone = _least(mine, groups, pp_group)
        if not all(ready for ready, *_ in everyone):
            return
        answer = None
        if _speaks(groups):
            traces = _gathered(runtime.recorder.kept, pp_group)
            if runtime.rank == 0:
                rooms = None
                if all(there for _, there, *_ in everyone):
                    holds = holding(runtime.placement, runtime.frozen_stages)
                    rooms = [Room(-least if held else 0.0, idle) for held, (_, _, least, idle) in zip(holds, everyone, strict=True)]
                given = gibibytes(case.policy.limit)
                answer = _within(case, runtime, rooms) if given else self._auto(case, runtime, rooms, traces)
        limits, line = _told(answer, groups, pp_group, runtime.rank)
        if limits is None:
            raise ConfigurationError(line)
        if answer is not None:
            print(f"[rrfp] {line}", file=sys.stderr, flush=True)
        own = case.base.limits(runtime.placement, case.microbatches)
        case.chosen = case.base if limits == own else replace(case.base, limit=listed(limits))
        case.budget = budget if case.policy.limit == "auto" and limits != own else None
        case.meter, runtime.recorder.kept = None, []

    def _check(self, runtime, groups, pp_group, case: _Case) -> None:
        """After the first call under what `auto` chose: back to 1F1B's, should any rank have taken more than it may."""
        runtime.engine.latch.raise_if_set()
        left = [left for [left] in _least([case.budget - device().peak()], groups, pp_group)]
        case.budget = None
        if min(left) < 0:
            case.chosen = case.base
            if runtime.rank == 0 and _speaks(groups):
                print(f"[rrfp] limit auto with {case.microbatches} microbatches: back to Megatron's 1F1B: rank {left.index(min(left))} took "
                      f"{_size(-min(left))} more than --rrfp-memory-fraction {self._fraction:g} allows, which was not foreseen",
                      file=sys.stderr, flush=True)

    def _auto(self, case: _Case, runtime, rooms: list[Room] | None, traces: list[list]) -> tuple[list[int], str]:
        """The limits for `auto`, and the line that says why."""
        placement = runtime.placement
        own, start = case.base.limits(placement, case.microbatches), f"limit auto with {case.microbatches} microbatches"
        holds = holding(placement, runtime.frozen_stages)
        stays = f"{start}: stays at Megatron's 1F1B, {_counts(own, holds)} activations in flight per stage"
        if rooms is None:
            return own, f"{stays}: what one holds can't be measured on every rank"
        if not any(holds):
            return own, f"{stays}: no stage trains"
        most = fitting(placement, case.microbatches, rooms)
        if most == own:
            rank = min((rank for rank, held in enumerate(holds) if held), key=lambda rank: rooms[rank].idle / max(rooms[rank].activation, 1))
            return own, (f"{stays}: rank {rank} has {_size(max(0.0, rooms[rank].idle))} idle below --rrfp-memory-fraction {self._fraction:g}, and "
                         f"one more holds {_size(rooms[rank].activation)}")
        try:
            choice = choose(case.base, costs_of(assemble(dict(enumerate(traces)))), most, seconds=_SECONDS)
        except ConfigurationError as error:
            return own, f"{stays}: what more would bring can't be simulated ({error})"
        return list(choice.limits), _chosen(start, choice, own, most, rooms, holds)


def describe_limit(asked: Policy, policy: Policy) -> str | None:
    """The limit of a call under `policy`, in words; None if it was said when it was chosen."""
    if policy.limit == asked.limit:
        return asked.limit
    if policy.limit != "1f1b":
        return None
    return f"{asked.limit} (1f1b {'in strict mode' if _is_control(asked) else 'until memory is measured'})"


def _is_control(policy: Policy) -> bool:
    """Strict is the control: Megatron's own memory, unless another limit is asked for."""
    return policy.mode == "strict" and policy.limit == "auto"


def _within(case: _Case, runtime, rooms: list[Room] | None) -> tuple[list[int] | None, str]:
    """The limits for `memory:<GiB>`, and the line that says why; no limits: why it is refused."""
    limit, memory = case.policy.limit, gibibytes(case.policy.limit) * GIB
    if rooms is None:
        return None, f"--rrfp-limit {limit}: what an activation holds can't be measured on every rank; use a number of activations"
    placement, held = runtime.placement, [room.activation for room in rooms]
    holds = holding(placement, runtime.frozen_stages)
    own, limits = case.base.limits(placement, case.microbatches), within(placement, case.microbatches, held, memory)
    needs = max(number * one for number, one in zip(own, held, strict=True))
    try:
        if limits[-1] < 1:
            raise ConfigurationError("not even one activation fits")
        replace(case.base, limit=listed(limits)).scheduler(placement, 0, case.microbatches)
    except ConfigurationError as error:
        return None, (f"--rrfp-limit {limit}: too little ({error}): an activation holds up to {_size(max(held))}, Megatron's 1F1B "
                      f"({_counts(own)} per stage) {_size(needs)}; use memory:{math.ceil(1000 * needs / GIB) / 1000:g} or more")
    fewer = ""
    if any(number < one for number, one in zip(limits, own, strict=True)):
        fewer = f", which needs {_size(needs)}: with fewer a call is slower"
    return limits, (f"limit {limit} with {case.microbatches} microbatches: {_counts(limits, holds)} activations in flight per stage "
                    f"(Megatron's 1F1B: {_counts(own)}{fewer}); one holds up to {_size(max(held))}")


def _chosen(start: str, choice: Choice, own: Sequence[int], most: Sequence[int], rooms: Sequence[Room], holds: Sequence[bool]) -> str:
    """The line for `auto`."""
    gain = f"{choice.before / choice.seconds:.2f} times as fast in simulation" if list(choice.limits) != list(own) else "more would not help"
    part = "" if choice.whole else f", of {choice.tried} limits that {_SECONDS:g} s were enough for"
    return (f"{start}: {_counts(choice.limits, holds)} activations in flight per stage (Megatron's 1F1B: {_counts(own)}; memory takes "
            f"{_counts(most, holds)}): {gain}{part}; one holds up to {_size(max(room.activation for room in rooms))}")


def _least(mine: list[float], groups, pp_group) -> list[list[float]]:
    """For each rank of the pipeline, the least of each of these numbers over all ranks of its place: equal on every rank of the job."""
    numbers = torch.tensor(mine, dtype=torch.float64, device="cuda")
    for group in _place(groups):
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=group)
    everyone = [torch.empty_like(numbers) for _ in range(pp_group.size())]
    torch.distributed.all_gather(everyone, numbers, group=pp_group)
    return [each.tolist() for each in everyone]


def _place(groups) -> list:
    """Megatron's groups of ranks at one place of their pipelines: those that share tensors, then replicas. Both together reach all of them."""
    return [group for group in (groups.tp, getattr(groups, "dp_cp", None)) if group is not None]


def _speaks(groups) -> bool:
    """Whether this rank's pipeline is the one that chooses."""
    return all(group.rank() == 0 for group in _place(groups))


def _told(answer, groups, pp_group, rank: int):
    """What the choosing rank says, on every rank: first to its replicas and peers at the head of their pipelines, then down each pipeline."""
    if rank == 0:
        tensor, *replicas = _place(groups)
        for group in replicas if tensor.rank() == 0 else []:
            answer = _spread(answer, group)
        answer = _spread(answer, tensor)
    return _spread(answer, pp_group)


def _spread(value, group):
    """The value of the group's first rank on all of them, as JSON: nothing is unpickled."""
    data = _bytes(value) if group.rank() == 0 else None
    size = torch.tensor([0 if data is None else len(data)], device="cuda")
    torch.distributed.broadcast(size, src=_global(group, 0), group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device="cuda") if data is None else data
    torch.distributed.broadcast(data, src=_global(group, 0), group=group)
    return _read(data)


def _gathered(value, group) -> list:
    """Everybody's value by rank of the group."""
    data = _bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(group.size())]
    torch.distributed.all_gather(sizes, torch.tensor([len(data)], device="cuda"), group=group)
    room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cuda")
    room[: len(data)] = data
    everyone = [torch.empty_like(room) for _ in sizes]
    torch.distributed.all_gather(everyone, room, group=group)
    return [_read(each[: int(size)]) for each, size in zip(everyone, sizes, strict=True)]


def _bytes(value) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to("cuda")


def _read(data: torch.Tensor):
    return json.loads(bytes(data.tolist()))


def _global(group, rank: int) -> int:
    return torch.distributed.get_global_rank(group, rank)


def _counts(numbers: Sequence[int], holds: Sequence[bool] | None = None) -> str:
    """holds: which ranks hold anything; the others' numbers are 0."""
    return " ".join(str(number if held else 0) for number, held in zip(numbers, holds or [True] * len(numbers), strict=True))


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= 0.1 * GIB else f"{size / 2**20:.2f} MiB"
