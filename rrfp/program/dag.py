"""The training DAG: nodes, data edges and temporal edges. A value: directives make another one out of it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from rrfp.errors import ConfigurationError
from rrfp.program.traced import Segment, Tensor

COMPUTE, UPDATE = "COMPUTE", "UPDATE"
SEND, RECV = "SEND", "RECV"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL"
KINDS = (COMPUTE, UPDATE, SEND, RECV, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
PASSES = ("F", "B", "I", "W")
DATA, TEMPORAL = "data", "temporal"


@dataclass(frozen=True)
class Node:
    """One thing to do, on every one of its devices at once (replicas do the same on other data).

    Args:
        kind: one of `KINDS`.
        what: the segment that it runs or updates, the bucket that it reduces or gathers, or the tensor that it moves.
        phase: F, B, I or W; a filter calls it PASS. Empty: it concerns no pass (UPDATE, a reduction of the whole call).
        tags: of its segment.
        dims: split dimension -> index: which piece of the batch.
        devices: where it runs. Empty until it is placed.
        peers: SEND, RECV: the devices at the other end, by position.
        groups: collectives: the groups that it runs in, each within `devices`.
        stream: nodes of one stream of a device run one after the other.
    """

    kind: str
    what: str
    phase: str = ""
    tags: Mapping[str, int] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    stream: str = ""
    name: str = field(init=False)
    """`F:layer0[MB=3]`, `SEND:F:layer0.h>1[MB=3]`, `UPDATE:layer0`: unique, and it says kind, phase, what and dims."""

    def __post_init__(self):
        head = self.phase if self.kind == COMPUTE else ":".join(filter(None, (self.kind, self.phase)))
        dims = ",".join(f"{dim}={index}" for dim, index in self.dims.items())
        object.__setattr__(self, "name", f"{head}:{self.what}" + (f"[{dims}]" if dims else ""))

    def __str__(self) -> str:
        tags = ", ".join(f"{tag}={index}" for tag, index in self.tags.items())
        return f"{self.name} {{{tags}}}" if tags else self.name


class Edge(NamedTuple):
    """`destination` comes after `source`: it needs `tensor` of it (data), or a directive says so (temporal).

    Tensors that no segment makes: `d.X` is the gradient of X, `saved.S` what the forward of segment S keeps for its backward,
    `partial.S` what I of S keeps for W, `grad.S` the gradients of its parameters, `weights.S` its gathered parameters.
    """

    source: str
    destination: str
    kind: str = DATA
    tensor: str = ""


class Bucket(NamedTuple):
    """Parameters that are reduced or gathered in one piece.

    segments: whose parameters. nbytes: of gradients. stages: see `Replicate`: 0 to 3, what is sharded.
    part, parts: a segment larger than the bucket size is reduced in several parts, of which this is one.
    prefetch: gathered buckets beyond the one in use. slotted: its reduction goes between two all-to-alls.
    """

    segments: tuple[str, ...]
    nbytes: int
    zero: int = 0
    part: int = 0
    parts: int = 1
    prefetch: int = 1
    slotted: bool = False


@dataclass(frozen=True)
class DAG:
    """Nodes by name, edges, and what the names in them stand for.

    Args:
        dims: split dimension -> number of pieces, outermost first.
        segments, tensors: of the model.
        buckets: of the replicated segments.
        sharded: segment -> in how many pieces its parameters lie (experts).
    """

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]
    segments: Mapping[str, Segment]
    tensors: Mapping[str, Tensor]
    dims: Mapping[str, int] = field(default_factory=dict)
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    sharded: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def incoming(self) -> Mapping[str, list[Edge]]:
        return self._by(1)

    @cached_property
    def outgoing(self) -> Mapping[str, list[Edge]]:
        return self._by(0)

    def _by(self, end: int) -> Mapping[str, list[Edge]]:
        found: dict[str, list[Edge]] = {name: [] for name in self.nodes}
        for edge in self.edges:
            found[edge[end]].append(edge)
        return found

    def before(self, name: str, kind: str = DATA) -> Iterator[Node]:
        """The nodes that `name` has edges of `kind` from."""
        return (self.nodes[edge.source] for edge in self.incoming[name] if edge.kind == kind)

    def after(self, name: str, kind: str = DATA) -> Iterator[Node]:
        return (self.nodes[edge.destination] for edge in self.outgoing[name] if edge.kind == kind)

    def of(self, *kinds: str) -> list[Node]:
        """The nodes of these kinds."""
        return [node for node in self.nodes.values() if node.kind in kinds]

    @cached_property
    def topological(self) -> tuple[str, ...]:
        """Every node after all that it has edges from. Raises ConfigurationError that names a cycle."""
        lacking = {name: len(edges) for name, edges in self.incoming.items()}
        order = [name for name, count in lacking.items() if not count]
        for name in order:  # grows meanwhile
            for edge in self.outgoing[name]:
                lacking[edge.destination] -= 1
                if not lacking[edge.destination]:
                    order.append(edge.destination)
        if len(order) < len(self.nodes):
            raise ConfigurationError(f"program: waits in a circle: {' -> '.join(self._cycle(set(self.nodes) - set(order)))}; "
                                     "the order rows contradict what the nodes need")
        return tuple(order)

    def _cycle(self, left: set[str]) -> list[str]:
        """A cycle among nodes that all wait for one another: going back from any of them leads into one."""
        path = [min(left)]
        while (name := next(edge.source for edge in self.incoming[path[-1]] if edge.source in left)) not in path:
            path.append(name)
        return [str(self.nodes[n]) for n in [name, *reversed(path[path.index(name):])]]

    def sorted(self) -> "DAG":
        """The same, its nodes in topological order and its edges by the node that they lead to."""
        return replace(self, nodes={name: self.nodes[name] for name in self.topological},
                       edges=tuple(edge for name in self.topological for edge in self.incoming[name]))

    def edit(self) -> "Draft":
        """A copy that can be changed."""
        return Draft(self)

    @cached_property
    def homes(self) -> Mapping[str, tuple[int, ...]]:
        """Segment -> the devices that it is placed on."""
        return {node.what: node.devices for node in self.of(COMPUTE)}

    def owned(self, segment: str) -> tuple[str, ...]:
        """The parameters that are reduced and updated with this segment: those that no earlier segment on its devices has too."""
        earlier: set[str] = set()
        for name, other in self.segments.items():
            if name == segment:
                return tuple(parameter for parameter in other.parameters if parameter not in earlier)
            if self.homes.get(name) == self.homes.get(segment):
                earlier.update(other.parameters)
        raise KeyError(segment)

    @cached_property
    def tied(self) -> frozenset[str]:
        """Parameters that segments on different devices share."""
        homes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for name, segment in self.segments.items():
            for parameter in segment.parameters:
                homes[parameter].add(self.homes.get(name, ()))
        return frozenset(parameter for parameter, found in homes.items() if len(found) > 1)

    def parameters(self, node: Node) -> tuple[str, ...]:
        """Whose gradients a reduction sums, or which a gather brings.

        A tied parameter's gradients are complete when they have been summed over its stages. So a reduction of one microbatch
        (ZeRO-2 and 3) leaves it out, and the one behind that sum takes it.
        """
        if node.what.startswith("tied."):
            return tuple(name for name in self.segments[node.what.removeprefix("tied.")].parameters if name in self.tied)
        owned = tuple(name for segment in self.bucket_of(node).segments for name in self.owned(segment))
        if node.kind != REDUCE_SCATTER:
            return owned
        before = list(self.before(node.name))
        tied = any(other.kind == ALL_REDUCE for other in before)
        plain = any(other.kind == COMPUTE for other in before)
        return tuple(name for name in owned if (tied if name in self.tied else plain))

    def bucket_of(self, node: Node) -> Bucket:
        """Of a reduction or gather: a bucket by its name, or `bucket0.layer0`, gathered for that segment."""
        return self.buckets[node.what.partition(".")[0]]

    def pieces(self, node: Node) -> int:
        """Into how many pieces the batch is cut where `node` runs."""
        count = 1
        for dim in node.dims:
            count *= self.dims[dim]
        return count


class Draft:
    """A DAG under change. Whoever removes a node removes or moves its edges."""

    def __init__(self, dag: DAG):
        self._dag = dag
        self.nodes = dict(dag.nodes)
        self.edges: dict[Edge, None] = dict.fromkeys(dag.edges)

    def add(self, node: Node) -> str:
        """Returns its name. Raises ConfigurationError if that is taken by another node."""
        if self.nodes.setdefault(node.name, node) != node:
            raise ConfigurationError(f"program: {node} exists already; two directives make it")
        return node.name

    def link(self, source: str, destination: str, kind: str = DATA, tensor: str = "") -> None:
        self.edges[Edge(source, destination, kind, tensor)] = None

    def move(self, old: Iterable[Edge], new: Iterable[Edge]) -> None:
        """Replace edges by others."""
        for edge in old:
            del self.edges[edge]
        self.edges.update(dict.fromkeys(new))

    def dag(self, **changes) -> DAG:
        return replace(self._dag, nodes=self.nodes, edges=tuple(self.edges), **changes)


def by_devices(nodes: Iterable[Node]) -> Mapping[tuple[int, ...], list[Node]]:
    """Nodes by the devices that they run on, in the order of the smallest device."""
    found: dict[tuple[int, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        found[node.devices].append(node)
    return dict(sorted(found.items()))
