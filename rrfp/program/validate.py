"""What must hold of a training DAG before anything is lowered. Every refusal names the node, with its tags."""

from collections.abc import Mapping

from rrfp.errors import ConfigurationError
from rrfp.program.dag import COMPUTE, DAG, DATA, KINDS, PASSES, RECV, SEND, UPDATE, Edge, Node


def validate(dag: DAG) -> None:
    """Acyclic, complete, every tensor's producer and device known, messages in pairs.

    Raises:
        ConfigurationError: naming the node and the tensor.
    """
    for edge in dag.edges:
        for end in edge[:2]:
            if end not in dag.nodes:
                raise ConfigurationError(f"program: {end}: is no node, but an edge from {edge.source} to {edge.destination} names it")
    dag.topological  # noqa: B018  raises on a cycle
    needs = _needs(dag)
    for node in dag.nodes.values():
        _check_node(dag, node, needs.get((node.kind, node.phase, node.what), set()))
    for edge in dag.edges:
        if edge.kind == DATA:
            _check_edge(dag, edge)


def _check_node(dag: DAG, node: Node, needed: set[str]) -> None:
    if node.kind not in KINDS or node.phase not in ("", *PASSES) or (node.kind == COMPUTE and not node.phase):
        raise ConfigurationError(f"program: {node}: {node.kind} {node.phase}: is no kind of node")
    if node.kind in (COMPUTE, UPDATE) and node.what not in dag.segments:
        raise ConfigurationError(f"program: {node}: {node.what}: is no segment of the model")
    if node.kind == UPDATE and not dag.incoming[node.name]:
        raise ConfigurationError(f"program: {node}: no gradient comes to it")
    if not node.devices or not node.stream:
        raise ConfigurationError(f"program: {node}: has no {'device' if not node.devices else 'stream'}")
    if stray := [device for group in node.groups for device in group if device not in node.devices]:
        raise ConfigurationError(f"program: {node}: runs in a group with device {stray[0]}, where it is not")
    came = {edge.tensor for edge in dag.incoming[node.name] if edge.kind == DATA}
    for tensor in sorted(needed - came):
        raise ConfigurationError(f"program: {node}: needs {tensor}, which nothing brings it")
    if node.kind == SEND:
        ends = [after for after in dag.after(node.name) if after.kind == RECV]
        if len(ends) != 1 or ends[0].devices != node.peers or ends[0].peers != node.devices or len(node.peers) != len(node.devices):
            raise ConfigurationError(f"program: {node}: must have one RECV on {list(node.peers)}, has {', '.join(map(str, ends)) or 'none'}")
    if node.kind == RECV and [before.kind for before in dag.before(node.name)] != [SEND]:
        raise ConfigurationError(f"program: {node}: must come from one SEND")


def _needs(dag: DAG) -> Mapping[tuple[str, str, str], set[str]]:
    """By kind, phase and segment, the tensors that a computation or an update cannot do without."""
    trained = {node.what for node in dag.of(COMPUTE) if node.phase in ("B", "I")}
    made = {name for segment in dag.segments.values() for name in segment.outputs}
    read = {name for segment in trained for name in dag.segments[segment].inputs if dag.tensors[name].differentiable}
    needs: dict[tuple[str, str, str], set[str]] = {}
    for name, segment in dag.segments.items():
        needs[COMPUTE, "F", name] = made.intersection(segment.inputs)
        backward = {f"saved.{name}", *(f"d.{tensor}" for tensor in segment.outputs if tensor in read)}
        needs[COMPUTE, "B", name] = needs[COMPUTE, "I", name] = backward
        needs[COMPUTE, "W", name] = {f"saved.{name}", f"partial.{name}"}
    return needs


def _check_edge(dag: DAG, edge: Edge) -> None:
    source, destination = dag.nodes[edge.source], dag.nodes[edge.destination]
    together = source.devices == destination.devices or source.kind == SEND or set(destination.devices) & set(source.devices)
    if not together:
        raise ConfigurationError(f"program: {destination}: on {list(destination.devices)}: {edge.tensor} is made on {list(source.devices)}"
                                 f" by {source}, and no message brings it")
