"""What a program comes down to: per pipeline rank a plan, which an executor runs under the engine.

Two views of the same plan. For the engine: *actions* with dependencies and a hint row. Computation, reductions and updates are
actions; SEND and RECV, and an ALL_TO_ALL, are messages on an edge, so what they bring is an arrival, as from any transport; a ZeRO-3
gather belongs to the action that reads it. For streams: every node, communication too, in the order of issue.

An action's stage is the number of a *unit*: a segment, or a bucket that is reduced. Nothing in the engine learns what a unit is.

What an executor must do beyond running segments: scale the loss's gradient by 1 / (microbatches x replicas), for all reductions are
sums; run a reduction's action by issuing it, and wait for it in the update that reads it; return every microbatch's loss.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rrfp.action import Action, Edge
from rrfp.errors import ConfigurationError
from rrfp.program.dag import DAG, Node
from rrfp.program.text import print_dag
from rrfp.scheduler.arbiter import Scheduler
from rrfp.scheduler.dependencies import Dependencies
from rrfp.scheduler.hints import Announced, Row, Strict

MODES = ("strict", "ready")
SLACK = 3.0
"""How long announced work is waited for beyond its time, in own forwards: as `announced` with several chunks."""


@dataclass(frozen=True)
class Message:
    """What travels on an edge: `tensors`, from action to action of equal microbatch, point to point or by an all-to-all of `node`'s groups.

    nodes: by microbatch, the SEND or ALL_TO_ALL that moves it.
    """

    edge: Edge
    kind: str
    tensors: tuple[str, ...]
    stream: str
    nodes: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class Plan:
    """What one pipeline rank does. Its devices (replicas) all do it, each with its peers.

    Args:
        rank: pipeline rank: the number of its group of devices.
        row: its order: what strict mode obeys, and what readiness ranks by.
        dependencies: of its actions.
        nodes: action -> the node that it is.
        messages: by edge, those that begin or end here.
        gathers: action -> the bucket that must be gathered for it (ZeRO-3), and `prefetch` buckets may be gathered ahead of it, along
            the row; so the pool holds prefetch + 1.
        streams: stream -> the nodes that this rank issues on it, in that order.
        peak: most activations (forwards of units without their backward) that the row holds.
    """

    rank: int
    devices: tuple[int, ...]
    row: Row
    dependencies: Dependencies
    nodes: Mapping[Action, Node]
    messages: Mapping[Edge, Message]
    gathers: Mapping[Action, str]
    streams: Mapping[str, tuple[str, ...]]
    peak: int


@dataclass(frozen=True)
class Lowered:
    """A program, ready to run.

    units: unit number -> its name: `layer0`, `layer0[SUB=1]`, `bucket0`. owners: unit number -> pipeline rank.
    order: "microbatch" if every row keeps that order within a (unit, kind), else "free".
    """

    dag: DAG
    units: tuple[str, ...]
    owners: tuple[int, ...]
    plans: tuple[Plan, ...]
    order: str

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """Device -> pipeline rank."""
        return {device: plan.rank for plan in self.plans for device in plan.devices}

    def scheduler(self, rank: int, *, mode: str = "strict", limit: int | None = None) -> Scheduler:
        """A fresh scheduler for one rank and one call.

        Args:
            mode: "strict" obeys the row. "ready" drops its temporal edges: data decides, the row ranks, and what a neighbour has
                announced is waited for (`rrfp.scheduler.hints.Announced`); the engine must announce then.
            limit: activations (of units) that the rank may hold in ready mode. By default what its row holds, and then forwards
                keep the row's order, so that the last free slot never goes to one that the row wants later.

        Raises:
            ConfigurationError: for a mode that does not exist, or a limit below the row's.
        """
        plan = self.plans[rank]
        if mode not in MODES:
            raise ConfigurationError(f"mode {mode}: must be one of {', '.join(MODES)}")
        if limit is not None and limit < plan.peak:
            raise ConfigurationError(f"limit {limit}: the program's own order holds {plan.peak} activations on rank {rank}; use at least that")
        if mode == "strict":
            return Scheduler(plan.dependencies, Strict(plan.row), limit=plan.peak, order=self.order, admission="plain", digest=self.digest)
        forwards = [action for group in plan.row for action in group if action.kind == "F"] if limit in (None, plan.peak) else ()
        return Scheduler(plan.dependencies, Announced(plan.row, skips=None, slack=SLACK), limit=limit or plan.peak, order=self.order,
                         admission="plain" if forwards else "reserve", forwards=forwards, digest=self.digest)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly if they run the same program."""
        return hashlib.sha256(print_dag(self.dag).encode()).hexdigest()
