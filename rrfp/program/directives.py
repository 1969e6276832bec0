"""Directives: what a strategy says about a model. Each is a value; applied, each is a pure rewrite of the training DAG.

They are applied in one fixed order, whatever order they are written in: split, split of backwards (asked for by I and W in an
`Order`), place, shard, replicate, order. Within a kind they go as written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from rrfp.errors import ConfigurationError
from rrfp.program.dag import DAG
from rrfp.program.filters import Filter, check_filter


@dataclass(frozen=True)
class Split:
    """Cut the batch of the matched part into `count` pieces (microbatches), tagged `dim`=0..count-1. UPDATE is not cut.

    A filter of everything cuts the whole step. A part may be cut again, under another `dim`: what comes in is sliced, what goes out
    is joined.
    """

    filter: Filter
    dim: str
    count: int


@dataclass(frozen=True)
class Place:
    """Run the matched segments on `devices` (global ranks): one, or as many as hold replicas or shards of them.

    Data between different devices becomes SEND and RECV, on `stream` (of the sender), by default `up` towards higher devices and
    `down` towards lower ones. Devices at the same position of two groups talk to each other.
    """

    filter: Filter
    devices: tuple[int, ...]
    stream: str | None = None


@dataclass(frozen=True)
class Shard:
    """Expert parallelism: the matched segments' parameters lie on `devices` in `ways` pieces along their first dimension (default: one
    per device); an ALL_TO_ALL before and after them, on `stream`, brings tokens to their experts and back. What it moves is experts x
    tokens x ...: on the way in (`SEGMENT.in`) the first dimension is dealt out and the second joined, on the way out the reverse.
    """

    filter: Filter
    devices: tuple[int, ...]
    stream: str = "all_to_all"
    ways: int | None = None


@dataclass(frozen=True)
class Replicate:
    """Data parallelism: the matched segments have a replica on each of `devices`. Gradients are summed over them.

    Args:
        shard_optimizer: ZeRO-1: each replica updates its part of the parameters, and gathers the rest.
        shard_grads: ZeRO-2: so, and gradients are scattered after every backward.
        shard_params: ZeRO-3: so, and parameters are gathered for each pass and let go after it.
        bucket_size: MB of gradients in one collective. Small segments share a bucket, a larger one is reduced in parts. None: one
            bucket per segment.
        reduce_stream, gather_stream: where reductions and gathers run.
        prefetch: ZeRO-3: how many buckets may be gathered ahead of the one in use; prefetch + 1 buckets are all that is held.
        slotted: reductions go between two all-to-alls of their stream, one at a time. They need the all-to-alls' stream.
    """

    filter: Filter
    devices: tuple[int, ...]
    shard_optimizer: bool = False
    shard_grads: bool = False
    shard_params: bool = False
    bucket_size: float | None = None
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    prefetch: int = 1
    slotted: bool = False

    @property
    def zero(self) -> int:
        """The ZeRO stage: 0, 1, 2 or 3."""
        return 3 if self.shard_params else 2 if self.shard_grads else int(self.shard_optimizer)


@dataclass(frozen=True)
class Order:
    """One device's (or group of replicas') order of computation: groups one after the other, each of one or several filters.

    The filters of a group run interleaved: while one waits for an all-to-all, the other computes. I and W instead of B splits that
    backward.
    """

    row: tuple[tuple[Filter, ...], ...]


Directive = Split | Place | Shard | Replicate | Order


def apply(dag: DAG, directives: Sequence[Directive]) -> DAG:
    """The training DAG under a strategy, validated.

    Raises:
        ConfigurationError: naming the directive, its filter or tag, and the node.
    """
    from rrfp.program.communicate import check_parameters, replicate, shard
    from rrfp.program.gathers import bound_gathers
    from rrfp.program.order import order
    from rrfp.program.place import place
    from rrfp.program.split import split, split_backwards
    from rrfp.program.validate import validate

    for number, directive in enumerate(directives):
        _check(directive, where=f"directive {number} ({type(directive).__name__.lower()})")

    def each(kind: type) -> list:
        return [directive for directive in directives if isinstance(directive, kind)]

    dag = reduce(split, each(Split), dag)
    dag = split_backwards(dag, each(Order))
    dag = place(dag, each(Place))
    dag = reduce(shard, each(Shard), dag)
    dag = reduce(replicate, each(Replicate), dag)
    check_parameters(dag)
    dag = bound_gathers(order(dag, each(Order)))
    validate(dag)
    return dag.sorted()


def _check(directive: Directive, *, where: str) -> None:
    if isinstance(directive, Order):
        for position, group in enumerate(directive.row):
            if not group:
                raise ConfigurationError(f"{where}: position {position}: is empty; name at least one filter")
            for filter in group:
                check_filter(filter, where=f"{where}: position {position}")
        return
    check_filter(directive.filter, where=where)
    if isinstance(directive, Split):
        if directive.count < 1:
            raise ConfigurationError(f"{where}: count {directive.count}: must be at least 1")
        return
    devices = directive.devices
    if not devices or len(set(devices)) < len(devices) or min(devices) < 0:
        raise ConfigurationError(f"{where}: devices {list(devices)}: must be different ranks, at least one")
    if isinstance(directive, Shard) and len(devices) % (directive.ways or len(devices)):
        raise ConfigurationError(f"{where}: ways {directive.ways}: must divide the {len(devices)} devices")
    if isinstance(directive, Replicate):
        if directive.prefetch < 0:
            raise ConfigurationError(f"{where}: prefetch {directive.prefetch}: must be at least 0")
        if directive.bucket_size is not None and not 1 <= directive.bucket_size * 2**20 < math.inf:
            raise ConfigurationError(f"{where}: bucket_size {directive.bucket_size}: must be above 0 MB, at least a byte, and finite; leave it out for one bucket per segment")
