"""Split: the batch into microbatches, and a backward into I and W."""

from collections.abc import Sequence
from dataclasses import replace

from rrfp.errors import ConfigurationError
from rrfp.program.dag import COMPUTE, DAG, Edge, Node
from rrfp.program.directives import Order, Split
from rrfp.program.filters import PASS, Filter, matches, select, text_of


def split(dag: DAG, directive: Split) -> DAG:
    """`count` clones of every matched F and B, tagged with the dimension.

    An edge between two clones joins equal pieces. An edge into the split part gives every clone its slice, one out of it joins the
    pieces of all clones: which of the two, the `dims` at its ends say.
    """
    dim, count = directive.dim, directive.count
    where = f"split {text_of(directive.filter)}"
    inside = {node.name for node in select(directive.filter, dag.of(COMPUTE), where=where)}
    _check_split(dag, directive, inside, where)
    draft = dag.edit()
    clones: dict[str, list[str]] = {}
    for name in inside:
        node = draft.nodes.pop(name)
        clones[name] = [draft.add(replace(node, dims={**node.dims, dim: index})) for index in range(count)]
    # The nodes stand in the order of the old ones, piece by piece: what is printed reads as it runs.
    draft.nodes = {new: draft.nodes[new] for old in dag.nodes for new in clones.get(old, [old])}
    for edge in dag.edges:
        if edge.source not in inside and edge.destination not in inside:
            continue
        sources, destinations = clones.get(edge.source, [edge.source]), clones.get(edge.destination, [edge.destination])
        pairs = zip(sources, destinations) if len(sources) == len(destinations) else ((s, d) for s in sources for d in destinations)
        draft.move([edge], [Edge(s, d, edge.kind, edge.tensor) for s, d in pairs])
    return draft.dag(dims={**dag.dims, dim: count})


def _check_split(dag: DAG, directive: Split, inside: set[str], where: str) -> None:
    dim, count = directive.dim, directive.count
    if PASS in directive.filter:
        raise ConfigurationError(f"{where}: PASS: a forward and its backward are split together; leave PASS out")
    if dim in dag.dims or dim == PASS or any(dim in node.tags for node in dag.nodes.values()):
        raise ConfigurationError(f"{where}: dim_name {dim}: is a tag already; choose another name")
    for node in (node for name, node in dag.nodes.items() if name in inside):
        segment = dag.segments[node.what]
        for tensor in (*segment.inputs, *segment.outputs):
            spec = dag.tensors[tensor]
            if spec.batch is None or not spec.shape:
                continue
            size = spec.shape[spec.batch]
            if size % (dag.pieces(node) * count):
                raise ConfigurationError(
                    f"{where}: {node}: {tensor} has {size} along dimension {spec.batch}, which {dag.pieces(node) * count} pieces do not divide")
    # What leaves the part may not come back in the same pass: a piece would wait for all pieces.
    for phase in "FB":
        tainted: set[str] = set()
        for name in dag.topological:
            node = dag.nodes[name]
            if node.phase != phase:
                continue
            from_inside = any(b.name in inside or b.name in tainted for b in dag.before(name) if b.phase == phase)
            if name in inside and any(b.name in tainted for b in dag.before(name)):
                raise ConfigurationError(f"{where}: {node}: lies behind a node that is not split and comes after one that is;"
                                         " the split part must be contiguous")
            if name not in inside and from_inside:
                tainted.add(name)


def split_backwards(dag: DAG, orders: Sequence[Order]) -> DAG:
    """Every backward that an order names by I or W runs as two: I (gradients of inputs) and W (gradients of parameters).

    A segment without trained parameters has no W.
    """
    wanted = {name for order in orders for group in order.row for filter in group for name in _halves(dag, filter)}
    if not wanted:
        return dag
    draft = dag.edit()
    for name in dag.nodes:
        if name not in wanted:
            continue
        node = draft.nodes.pop(name)
        grads = [edge for edge in dag.outgoing[name] if edge.tensor.startswith("grad.")]
        first = draft.add(replace(node, phase="I"))
        if not grads:
            continue
        second = draft.add(replace(node, phase="W"))
        draft.link(first, second, tensor=f"partial.{node.what}")
        saved = [edge for edge in dag.incoming[name] if edge.tensor.startswith("saved.")]
        draft.edges.update(dict.fromkeys(edge._replace(destination=second) for edge in saved))
        draft.move(grads, [edge._replace(source=second) for edge in grads])
    renamed = {name: "I" + name[1:] for name in wanted}
    draft.edges = {edge._replace(source=renamed.get(edge.source, edge.source), destination=renamed.get(edge.destination, edge.destination)): None
                   for edge in draft.edges}
    halves = [[f"I{name[1:]}", f"W{name[1:]}"] if name in wanted else [name] for name in dag.nodes]
    draft.nodes = {new: draft.nodes[new] for pair in halves for new in pair if new in draft.nodes}
    return draft.dag()


def _halves(dag: DAG, filter: Filter) -> list[str]:
    if filter.get(PASS) not in ("I", "W"):
        return []
    whole = {**filter, PASS: "B"}
    return [node.name for node in _backwards(dag) if matches(whole, node)]


def _backwards(dag: DAG) -> list[Node]:
    return [node for node in dag.of(COMPUTE) if node.phase == "B"]
