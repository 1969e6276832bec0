"""Which tensors an action of a plan reads, makes and sends, worked out once from the DAG. Pure.

A *value* is a tensor as a node hands it on, keyed by that node (a computation here, a RECV, or an ALL_TO_ALL) and the tensor's name.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rrfp.action import Edge
from rrfp.program.dag import ALL_TO_ALL, COMPUTE, RECV, SEND, Node
from rrfp.program.plan import Lowered

Key = tuple[str, str]
"""(node, tensor)."""


class Cut(NamedTuple):
    """Take piece `index` of `count` equal ones."""

    count: int
    index: int


class Origin(NamedTuple):
    """One producer's contribution to what is read: its pieces, joined along `dim` (None: summed), then cut."""

    keys: tuple[Key, ...]
    dim: int | None
    cuts: tuple[Cut, ...]


Read = tuple[Origin, ...]
"""What a node reads of one tensor: the sum over these. An activation has one; a gradient has one per reader of what it belongs to."""


class Item(NamedTuple):
    """A tensor of a message: what the sender made, and the value that it becomes at the other end. via: the node that moves it."""

    made: Key
    becomes: Key
    via: str


@dataclass(frozen=True)
class Segment:
    """What a segment's passes have in common.

    wanted: the inputs whose gradients somebody reads. trained: it has a backward.
    """

    wanted: tuple[str, ...]
    trained: bool


class Wiring:
    """One pipeline rank's."""

    def __init__(self, program: Lowered, rank: int):
        self._dag, self._plan = program.dag, program.plans[rank]
        self._stage = {node.name: action.stage for plan in program.plans for action, node in plan.nodes.items()}
        self.reads: dict[str, dict[str, Read]] = {}
        """By computation: what it reads of other nodes, by tensor. A backward reads `d.X` of its outputs X."""
        self.batch: dict[str, dict[str, tuple[int, tuple[Cut, ...]]]] = {}
        """By forward: what it reads of the batch: dimension and cuts."""
        self.readers: Counter[Key] = Counter()
        """How many computations here read a value."""
        self.segments: dict[str, Segment] = {}
        for node in self._plan.nodes.values():
            if node.kind == COMPUTE:
                self._wire(node)
        self.items: dict[tuple[Edge, int], tuple[Item, ...]] = {
            (edge, m): tuple(self._items(edge, names)) for edge, message in self._plan.messages.items() for m, names in message.nodes.items()}
        self.keeps: dict[str, tuple[str, ...]] = self._keeps()

    def _wire(self, node: Node) -> None:
        segment = self._dag.segments[node.what]
        names = segment.inputs if node.phase == "F" else tuple(f"d.{name}" for name in segment.outputs) if node.phase != "W" else ()
        reads = {name: read for name in names if (read := self._read(node, name))}
        self.reads[node.name] = reads
        self.readers.update(key for read in reads.values() for origin in read for key in origin.keys)
        if node.phase == "F":
            self.batch[node.name] = {name: self._from_batch(node, name) for name in names if name not in reads}
        backward = self.segments.get(node.what, Segment((), False))
        if node.phase in ("B", "I"):
            sent = {edge.tensor for edge in self._dag.outgoing[node.name]}
            backward = Segment(tuple(name for name in segment.inputs if f"d.{name}" in sent), True)
        self.segments[node.what] = backward

    def _read(self, node: Node, tensor: str) -> Read:
        dims = self._dag.dims
        spec = self._dag.tensors[tensor.removeprefix("d.")]
        by_origin: dict[str, list[Node]] = defaultdict(list)
        for edge in self._dag.incoming[node.name]:
            if edge.tensor == tensor:
                by_origin[self._origin(edge.source, tensor).what].append(self._dag.nodes[edge.source])
        found = []
        for sources in by_origin.values():
            extra = [dim for dim in dims if dim in sources[0].dims and dim not in node.dims]
            sources.sort(key=lambda source: [source.dims[dim] for dim in extra])
            cuts = [Cut(dims[dim], node.dims[dim]) for dim in dims if dim in node.dims and dim not in sources[0].dims]
            keys = tuple((source.name, tensor) for source in sources)
            found.append(Origin(keys, spec.batch, () if spec.batch is None else tuple(cuts)))
        return tuple(found)

    def _origin(self, name: str, tensor: str) -> Node:
        """The computation that made it."""
        node = self._dag.nodes[name]
        while node.kind in (SEND, RECV, ALL_TO_ALL):
            node = self._dag.nodes[next(edge.source for edge in self._dag.incoming[node.name] if edge.tensor == tensor)]
        return node

    def _from_batch(self, node: Node, name: str) -> tuple[int, tuple[Cut, ...]]:
        batch = self._dag.tensors[name].batch
        return (0, ()) if batch is None else (batch, tuple(Cut(count, node.dims[dim]) for dim, count in self._dag.dims.items() if dim in node.dims))

    def _items(self, edge: Edge, carriers: tuple[str, ...]):
        for name in carriers:
            out = name if self._dag.nodes[name].kind == ALL_TO_ALL else next(self._dag.after(name)).name
            for each in self._dag.incoming[name]:
                if self._stage.get(each.source) == edge.source:
                    yield Item((each.source, each.tensor), (out, each.tensor), name)

    def _keeps(self) -> dict[str, tuple[str, ...]]:
        """By computation: the tensors that other computations here read of it as they are."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, tensor in self.readers:
            found[name].append(tensor)
        return {name: tuple(tensors) for name, tensors in found.items()}


def losses(program: Lowered, loss: str) -> Mapping[str, int]:
    """Node that makes a loss -> the piece of the batch that it is of, counted in the order of the split dimensions."""
    dag = program.dag
    found = {}
    for node in dag.of(COMPUTE):
        if node.phase == "F" and loss in dag.segments[node.what].outputs:
            piece = 0
            for dim, count in dag.dims.items():
                piece = piece * count + node.dims[dim] if dim in node.dims else piece
            found[node.name] = piece
    return found

