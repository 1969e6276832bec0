"""Shard and replicate: all-to-alls around experts, and the collectives of data parallelism."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rrfp.errors import ConfigurationError
from rrfp.program.dag import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPUTE, DAG, REDUCE_SCATTER, UPDATE, Bucket, Draft, Edge, Node
from rrfp.program.directives import Replicate, Shard
from rrfp.program.filters import select, text_of

MB = 2**20
_LOCAL = ("saved.", "partial.", "grad.", "weights.")


def shard(dag: DAG, directive: Shard) -> DAG:
    """An ALL_TO_ALL on every way into and out of the matched segments, in forward and backward."""
    where = f"shard {text_of(directive.filter)}"
    matched = _on(dag, directive, where)
    inside = {node.name for node in matched}
    draft = dag.edit()
    ways = directive.ways or len(directive.devices)
    for node in matched:
        if dag.sharded.get(node.what, ways) != ways or (node.what in dag.sharded and node.what not in {n.what for n in matched}):
            raise ConfigurationError(f"{where}: {node}: is sharded in {dag.sharded[node.what]} ways already; shard it once")
        for side, edges, end in (("in", dag.incoming[node.name], "source"), ("out", dag.outgoing[node.name], "destination")):
            across = [e for e in edges if not e.tensor.startswith(_LOCAL) and getattr(e, end) not in inside]
            for edge in across:
                if (neighbour := dag.nodes[getattr(edge, end)]).kind != COMPUTE:
                    raise ConfigurationError(f"{where}: {node}: its neighbour {neighbour} is no computation on the same devices;"
                                             " experts and what leads to them must be placed together, and be sharded once")
            if across:
                _exchange(draft, node, side, across, directive.devices, ways, directive.stream)
    sharded = {node.what: ways for node in matched}
    return draft.dag(sharded={**dag.sharded, **sharded})


def _exchange(draft: Draft, node: Node, side: str, edges: Sequence[Edge], devices: tuple[int, ...], ways: int, stream: str) -> None:
    groups = tuple(devices[low:low + ways] for low in range(0, len(devices), ways))
    exchange = draft.add(replace(node, kind=ALL_TO_ALL, what=f"{node.what}.{side}", stream=stream, groups=groups))
    for edge in edges:
        draft.move([edge], [edge._replace(destination=exchange), edge._replace(source=exchange)])


def _on(dag: DAG, directive: Shard | Replicate, where: str) -> list[Node]:
    """The computation that a directive speaks of, which must be on its devices."""
    matched = select(directive.filter, dag.of(COMPUTE), where=where)
    for node in matched:
        if node.devices != directive.devices:
            raise ConfigurationError(f"{where}: devices {list(directive.devices)}: {node} is placed on {list(node.devices)}; name the same devices")
    return matched


def replicate(dag: DAG, directive: Replicate) -> DAG:
    """Reductions between backwards and updates; with ZeRO also gathers of parameters."""
    where = f"replicate {text_of(directive.filter)}"
    whats = dict.fromkeys(node.what for node in _on(dag, directive, where))
    if len(directive.devices) == 1:
        return dag
    # Backwards run from the last segment to the first, and so fill the buckets.
    segments = [name for name in reversed(dag.segments) if name in whats and f"UPDATE:{name}" in dag.nodes]
    if not segments:
        raise ConfigurationError(f"{where}: no trained parameters lie in it; leave it out")
    taken = {name: bucket for bucket, made in dag.buckets.items() for name in made.segments}
    draft = dag.edit()
    buckets = dict(dag.buckets)
    for plain in (True, False):
        own = [name for name in segments if (dag.sharded.get(name, 1) == 1) == plain]
        own = [name for name in own if dag.sharded.get(name, 1) < len(directive.devices)]  # a piece that has no replica needs no sum
        for name in own:
            if name in taken:
                raise ConfigurationError(f"{where}: {name}: is replicated already ({taken[name]}); replicate a segment once")
        for made in _buckets(dag, own, directive):
            title = f"bucket{len(buckets)}"
            buckets[title] = made
            _reduce(dag, draft, title, made, directive)
    return draft.dag(buckets=buckets)


def nbytes(dag: DAG, segment: str) -> int:
    """Bytes of a segment's own parameters on one device, before ZeRO."""
    return sum(dag.tensors[name].nbytes for name in dag.owned(segment)) // dag.sharded.get(segment, 1)


def _buckets(dag: DAG, segments: Sequence[str], directive: Replicate) -> Iterator[Bucket]:
    common = {"zero": directive.zero, "prefetch": directive.prefetch, "slotted": directive.slotted}
    size = None if directive.bucket_size is None else directive.bucket_size * MB
    open_: list[str] = []
    for name in segments:
        parts = 1
        if size is not None and directive.zero < 3:  # a gathered bucket is never cut: a segment needs all its parameters at once
            parts = max(1, -(-nbytes(dag, name) // int(size)))
        total = sum(nbytes(dag, each) for each in open_)
        if open_ and (size is None or parts > 1 or total + nbytes(dag, name) > size):
            yield Bucket(tuple(open_), total, **common)
            open_ = []
        if parts > 1:
            for part in range(parts):
                yield Bucket((name,), nbytes(dag, name) // parts, part=part, parts=parts, **common)
        else:
            open_.append(name)
    if open_:
        yield Bucket(tuple(open_), sum(nbytes(dag, each) for each in open_), **common)


def _reduce(dag: DAG, draft: Draft, title: str, bucket: Bucket, directive: Replicate) -> None:
    devices, zero = directive.devices, directive.zero
    ways = dag.sharded.get(bucket.segments[0], 1)
    groups = tuple(devices[low::ways] for low in range(ways))
    tags = dag.segments[bucket.segments[0]].tags if len(bucket.segments) == 1 else {}
    common = {"tags": tags, "devices": devices, "groups": groups}
    grads = [edge for name in bucket.segments for edge in dag.incoming[f"UPDATE:{name}"]]
    for edge in grads:
        if edge in draft.edges and bucket.part == bucket.parts - 1:
            draft.move([edge], [])
        # One reduction for the call; from ZeRO-2 on one for each microbatch, or whole gradients would pile up.
        dims = dag.nodes[edge.source].dims if zero >= 2 else {}
        node = Node(REDUCE_SCATTER if zero else ALL_REDUCE, title, dims=dims, stream=directive.reduce_stream, **common)
        draft.link(edge.source, draft.add(node), tensor=edge.tensor)
        draft.link(node.name, edge.destination, tensor=edge.tensor)
    if zero in (1, 2):
        gather = draft.add(Node(ALL_GATHER, title, stream=directive.gather_stream, **common))
        for name in bucket.segments:
            draft.link(f"UPDATE:{name}", gather, tensor=f"weights.{name}")
    if zero == 3:
        for user in dag.of(COMPUTE):
            if user.what in bucket.segments:
                gather = draft.add(Node(ALL_GATHER, f"{title}.{user.what}", user.phase, dims=user.dims, stream=directive.gather_stream, **common))
                draft.link(gather, user.name, tensor=f"weights.{user.what}")


def check_parameters(dag: DAG) -> None:
    """Every trained segment on several devices must be kept equal, or sharded. Raises ConfigurationError that names it."""
    covered = {name for bucket in dag.buckets.values() for name in bucket.segments}
    for update in dag.of(UPDATE):
        if len(update.devices) > dag.sharded.get(update.what, 1) and update.what not in covered:
            raise ConfigurationError(f"place: {update}: its parameters lie on {list(update.devices)}, and nothing keeps them equal;"
                                     " replicate it, shard it, or place it on one device")

