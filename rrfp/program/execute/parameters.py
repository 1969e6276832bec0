"""The parameters of one device: which it holds, whole or in part, their gradients, and their optimizers.

A *store* holds the parameters that are reduced and updated together (a bucket of the program; a segment that has no replicas is one for
itself), laid end to end in one flat tensor per type. A flat is padded to parts x replicas x shard numbers: ZeRO's shard of a replica is
its column, and so every collective moves contiguous memory.

    ZeRO-0  data, gradients and states whole
    ZeRO-1  states of the shard (rajbhandari2020zero, arXiv 1910.02054, section 5); updated parameters are gathered
    ZeRO-2  so, and gradients of the shard: those of each microbatch are scattered, and let go
    ZeRO-3  so, and of the data too only the shard; the whole lies there between `gather` and `free`
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist

from rrfp.errors import ConfigurationError
from rrfp.program.dag import ALL_GATHER, ALL_REDUCE, DAG, REDUCE_SCATTER
from rrfp.program.plan import Lowered

Piece = tuple[tuple[str, int], ...]
"""Which microbatch gradients are of, as (dimension, index) pairs; empty: of the whole call."""
Finish = Callable[[object], None]
"""Waits for a `torch.distributed.Work`."""
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

WHOLE = {"LBFGS", "Muon", "Adafactor", "LAMB", "Lamb", "LARS", "Shampoo", "DistributedShampoo", "SOAP"}
"""Classes of optimizers, torch's and others', that look at norms, rows and columns, or inner products of parameters."""


@dataclass(frozen=True)
class Sharing:
    """How a store is shared. parts: of its reductions. members, index: how many replicas, and which of them this is."""

    zero: int = 0
    parts: int = 1
    members: int = 1
    index: int = 0


class _Flat:
    """Parameters of one type, end to end."""

    def __init__(self, values: Mapping[str, torch.Tensor], sharing: Sharing):
        self.sharing = sharing
        first = next(iter(values.values()))
        count = sum(value.numel() for value in values.values())
        columns = sharing.parts * sharing.members
        self.size = math.ceil(count / columns) * columns
        self.nbytes = self.size * first.element_size()
        self.data = first.new_zeros(self.size)
        self.leaves: dict[str, torch.Tensor] = {}
        self._spans: dict[str, tuple[int, torch.Size]] = {}
        storage, offset = self.data.untyped_storage(), 0
        for name, value in values.items():
            # Not a view: each has its own version, so autograd does not mind that the memory is filled anew (ZeRO-3).
            leaf = value.new_empty(0).set_(storage, offset, value.shape)
            leaf.copy_(value)
            self.leaves[name] = leaf.requires_grad_()
            self._spans[name] = offset, value.shape
            offset += value.numel()
        self.gradients: dict[Piece, torch.Tensor] = {}
        own = self._columns(self.data)[:, sharing.index]
        self.shard = torch.nn.Parameter(own.clone() if sharing.zero == 3 else own) if sharing.zero else None
        self.shard_gradient = torch.zeros_like(own, memory_format=torch.contiguous_format) if sharing.zero else None

    def _columns(self, flat: torch.Tensor) -> torch.Tensor:
        """parts x replicas x shard."""
        return flat.view(self.sharing.parts, self.sharing.members, -1)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        offset, shape = self._spans[name]
        return flat[offset:offset + shape.numel()].view(shape)

    def add(self, name: str, gradient: torch.Tensor, piece: Piece) -> None:
        if piece not in self.gradients:
            self.gradients[piece] = torch.zeros(self.size, dtype=self.data.dtype, device=self.data.device)
        self.view(self.gradients[piece], name).add_(gradient)

    def all_reduce(self, part: int, group, finish: Finish) -> None:
        finish(dist.all_reduce(self._columns(self.gradients[()])[part], group=group, async_op=True))

    def reduce_scatter(self, part: int, piece: Piece, group, finish: Finish) -> None:
        whole = self._columns(self.gradients[piece])[part]
        own = torch.empty_like(self.shard_gradient[part])
        finish(dist.reduce_scatter_single(own, whole.reshape(-1), group=group, async_op=True))
        self.shard_gradient[part].add_(own)
        if part == self.sharing.parts - 1 and self.sharing.zero >= 2:
            del self.gradients[piece]

    def all_gather(self, part: int, group, finish: Finish) -> None:
        finish(dist.all_gather_single(self._columns(self.data)[part].view(-1), self.shard.detach()[part].clone(), group=group, async_op=True))

    def allocate(self) -> None:
        self.data.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        self.data.untyped_storage().resize_(0)


class Store:
    """Parameters that are reduced, gathered and updated together. Operations that need a group run on a stream's thread.

    Args:
        segments: what updates it, in the order of the program.
        values: this device's pieces, by name.
    """

    def __init__(self, title: str, segments: tuple[str, ...], values: Mapping[str, torch.Tensor], sharing: Sharing):
        self.title, self.segments, self.sharing = title, segments, sharing
        kinds = dict.fromkeys((value.dtype, value.device) for value in values.values())
        self._flats = [_Flat({name: v for name, v in values.items() if (v.dtype, v.device) == kind}, sharing) for kind in kinds]
        self._flat_of = {name: flat for flat in self._flats for name in flat.leaves}
        self.leaves = {name: flat.leaves[name] for name, flat in self._flat_of.items()}
        """What the segments' functions are called with; whole while gathered."""
        self.nbytes = sum(flat.nbytes for flat in self._flats)
        self._lacking: set[str] = set()
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if sharing.zero == 3:
            self.free()

    def make_optimizers(self, make: MakeOptimizer, owned: Mapping[str, Iterable[str]]) -> None:
        """One for each segment, over its own parameters; with ZeRO one over the shard."""
        if self.sharing.zero:
            self._optimizer = make([flat.shard for flat in self._flats])
        else:
            self._optimizers = {segment: make([self.leaves[name] for name in names]) for segment in self.segments if (names := list(owned[segment]))}

    def begin(self) -> None:
        """Before a step: nothing is accumulated yet."""
        self._lacking = set(self.segments)
        for flat in self._flats:
            flat.gradients.clear()
            if flat.shard_gradient is not None:
                flat.shard_gradient.zero_()

    def add(self, name: str, gradient: torch.Tensor, piece: Piece) -> None:
        self._flat_of[name].add(name, gradient, piece)

    def gradient(self, name: str) -> torch.Tensor:
        """What has been accumulated over the call."""
        flat = self._flat_of[name]
        if () not in flat.gradients:
            flat.add(name, torch.zeros((), dtype=flat.data.dtype, device=flat.data.device), ())
        return flat.view(flat.gradients[()], name)

    def reduce(self, kind: str, part: int, piece: Piece, group, finish: Finish) -> None:
        """An ALL_REDUCE or REDUCE_SCATTER of the program."""
        for flat in self._flats:
            if piece not in flat.gradients:  # of these parameters nothing has a gradient
                flat.add(next(iter(flat.leaves)), torch.zeros((), dtype=flat.data.dtype, device=flat.data.device), piece)
            if kind == ALL_REDUCE:
                flat.all_reduce(part, group, finish)
            else:
                flat.reduce_scatter(part, piece, group, finish)

    def gather(self, part: int, group, finish: Finish) -> None:
        """The whole of the parameters, from all shards."""
        for flat in self._flats:
            flat.all_gather(part, group, finish)

    def allocate(self) -> None:
        """Room for a gather (ZeRO-3). Autograd's saved weights are in this very memory: what is gathered anew, they see, as in FSDP."""
        for flat in self._flats:
            flat.allocate()

    def free(self) -> None:
        """Let go of the whole parameters (ZeRO-3)."""
        for flat in self._flats:
            flat.free()

    def update(self, segment: str) -> None:
        """The optimizer's step for a segment. A shard, which lies across segments, is updated with the last of them."""
        self._lacking.discard(segment)
        if self._optimizer is None:
            if (optimizer := self._optimizers.get(segment)) is None:
                return
            names = {id(leaf): name for name, leaf in self.leaves.items()}
            leaves = [(leaf, self.gradient(names[id(leaf)])) for group in optimizer.param_groups for leaf in group["params"]]
        elif not self._lacking:
            optimizer, leaves = self._optimizer, [(flat.shard, flat.shard_gradient) for flat in self._flats]
        else:
            return
        for leaf, gradient in leaves:
            leaf.grad = gradient
        optimizer.step()
        for leaf, _ in leaves:
            leaf.grad = None


class Parameters:
    """All stores of a device.

    Args:
        weights: every parameter of the model, whole, by name: the initial values. They are copied.
        device: this one's number in the program.
    """

    def __init__(self, program: Lowered, weights: Mapping[str, torch.Tensor], *, device: int, make_optimizer: MakeOptimizer):
        self._dag = dag = program.dag
        self.plan = plan = program.plans[program.rank_of[device]]
        self._place = plan.devices.index(device)
        used = [name for name in dag.segments if dag.homes[name] == plan.devices]
        self.stores: dict[str, Store] = {}
        """By bucket; the parts of one share a store. A segment without a bucket has one by its own name."""
        self._store_of: dict[str, Store] = {}
        by_segments: dict[tuple[str, ...], Store] = {}
        for title, bucket in dag.buckets.items():
            if bucket.segments[0] not in used:
                continue
            if bucket.segments not in by_segments:
                by_segments[bucket.segments] = self._make(title, bucket.segments, weights, _sharing(dag, title, device))
            self.stores[title] = by_segments[bucket.segments]
        bucketed = {name for store in by_segments.values() for name in store.segments}
        for name in used:
            if name not in bucketed and dag.owned(name):
                by_segments[name,] = self.stores[name] = self._make(name, (name,), weights, Sharing())
        self._segment_store = {segment: store for store in by_segments.values() for segment in store.segments}
        for store in by_segments.values():
            self._store_of.update(dict.fromkeys(store.leaves, store))
        for store in by_segments.values():
            store.make_optimizers(make_optimizer, {segment: dag.owned(segment) for segment in store.segments})

    def _make(self, title: str, segments: tuple[str, ...], weights: Mapping[str, torch.Tensor], sharing: Sharing) -> Store:
        values = {}
        for segment in segments:
            ways = self._dag.sharded.get(segment, 1)
            for name in self._dag.owned(segment):
                values[name] = weights[name].detach().chunk(ways)[self._place % ways] if ways > 1 else weights[name].detach()
        return Store(title, segments, values, sharing)

    def weights(self, segment: str) -> dict[str, torch.Tensor]:
        """What its function is called with."""
        return {name: self._store_of[name].leaves[name] for name in self._dag.segments[segment].parameters}

    def add(self, name: str, gradient: torch.Tensor, dims: Mapping[str, int]) -> None:
        """Accumulate. From ZeRO-2 on each microbatch's for itself, until they are scattered; those of a tied parameter are summed first."""
        store = self._store_of[name]
        store.add(name, gradient, tuple(dims.items()) if store.sharing.zero >= 2 and name not in self._dag.tied else ())

    def gradient(self, name: str) -> torch.Tensor:
        return self._store_of[name].gradient(name)

    def begin(self) -> None:
        for store in dict.fromkeys(self.stores.values()):
            store.begin()

    def update(self, segment: str) -> None:
        self._segment_store[segment].update(segment)

    def owned(self) -> dict[str, Store]:
        """By name, the store of every parameter that this device holds."""
        return dict(self._store_of)


def check_parameters(program: Lowered, weights: Mapping[str, torch.Tensor]) -> None:
    """What every device can hold, asked on every rank, so that all refuse alike.

    Raises:
        ConfigurationError: experts that the ways do not divide; a parameter that would not be gathered for all that read it.
    """
    dag = program.dag
    owners = {(dag.homes[segment], name): segment for segment in dag.segments for name in dag.owned(segment)}
    gathered = {segment: bucket.segments for bucket in dag.buckets.values() if bucket.zero == 3 for segment in bucket.segments}
    for segment, made in dag.segments.items():
        ways = dag.sharded.get(segment, 1)
        for name in made.parameters:
            shape, owner = weights[name].shape, owners[dag.homes[segment], name]
            if ways > 1 and (not shape or shape[0] % ways):
                raise ConfigurationError(f"shard: {segment}: {name} is {list(shape)}, and {ways} devices do not divide its first dimension;"
                                         " give other ways, or other experts")
            if owner in gathered and segment not in gathered[owner]:
                raise ConfigurationError(f"replicate: shard_params: {segment}: shares {name} with {owner}, and would not gather it; place them on"
                                         " different devices, or leave shard_params out")


def check_optimizer(program: Lowered, make: MakeOptimizer) -> None:
    """Asked on every rank, so that all refuse alike.

    Raises:
        ConfigurationError: it is known by name to treat a parameter as a whole, and a bucket of the program has flat shards.
    """
    sharded = next((bucket for bucket in program.dag.buckets.values() if bucket.zero), None)
    if sharded is None:
        return
    # A matrix: some refuse a vector in words of their own.
    found = {each.__name__ for each in type(make([torch.nn.Parameter(torch.zeros(2, 2))])).__mro__} & WHOLE
    if found:
        directive = ("shard_optimizer", "shard_grads", "shard_params")[sharded.zero - 1]
        raise ConfigurationError(f"optimizer: {found.pop()}: looks at a parameter as a whole, and with replicate: {directive} it would get flat"
                                 " shards; take one that treats each number for itself (SGD, Adam, AdamW), or leave the sharding out")


def _sharing(dag: DAG, title: str, device: int) -> Sharing:
    bucket = dag.buckets[title]
    members = next(group for node in dag.of(ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER) if node.what.partition(".")[0] == title
                   for group in node.groups if device in group)
    return Sharing(bucket.zero, bucket.parts, len(members), members.index(device))
