"""Place: devices for every node, and messages where data goes from one to another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rrfp.errors import ConfigurationError
from rrfp.program.dag import ALL_REDUCE, COMPUTE, DAG, RECV, SEND, UPDATE, Draft, Edge, Node
from rrfp.program.directives import Place
from rrfp.program.filters import PASS, select, text_of

COMPUTE_STREAM, TIED_STREAM = "compute", "tied"


def place(dag: DAG, directives: Sequence[Place]) -> DAG:
    """Devices for computation, and SEND and RECV between them. Without directives everything runs on device 0.

    An update runs where its segment does. A parameter that segments on different devices share is reduced over them, and updated on
    each.
    """
    draft = dag.edit()
    chosen = _choose(dag, directives or [Place({}, (0,))])
    homes: dict[str, tuple[int, ...]] = {}
    for node in dag.of(COMPUTE):
        devices = chosen[node.name].devices
        if homes.setdefault(node.what, devices) != devices:
            raise ConfigurationError(f"place: {node}: would run on {list(devices)}, but other pieces of its segment on"
                                     f" {list(homes[node.what])}; place a segment as a whole")
        draft.nodes[node.name] = replace(node, devices=devices, stream=COMPUTE_STREAM)
    for node in dag.of(UPDATE):
        draft.nodes[node.name] = replace(node, devices=homes[node.what], stream=COMPUTE_STREAM)
    _check_groups(draft.nodes)
    _tie(dag, draft, homes)
    _connect(draft, {name: directive.stream for name, directive in chosen.items()})
    return draft.dag()


def _choose(dag: DAG, directives: Sequence[Place]) -> Mapping[str, Place]:
    chosen: dict[str, Place] = {}
    for directive in directives:
        where = f"place {text_of(directive.filter)}"
        if PASS in directive.filter:
            raise ConfigurationError(f"{where}: PASS: a backward runs where its forward ran; leave PASS out")
        for node in select(directive.filter, dag.of(COMPUTE), where=where):
            other = chosen.setdefault(node.name, directive)
            if (other.devices, other.stream) != (directive.devices, directive.stream):
                raise ConfigurationError(f"{where}: {node}: is placed on {list(other.devices)} already; place it once")
    for node in dag.of(COMPUTE):
        if node.name not in chosen:
            raise ConfigurationError(f"place: {node}: is on no device; place its tag")
    return chosen


def _check_groups(nodes: Mapping[str, Node]) -> None:
    """A device runs one pipeline rank's work: groups are equal or have no device in common."""
    group_of: dict[int, tuple[int, ...]] = {}
    for node in nodes.values():
        for device in node.devices:
            if group_of.setdefault(device, node.devices) != node.devices:
                raise ConfigurationError(f"place: {node}: runs on {list(node.devices)}, but device {device} is also in"
                                         f" {list(group_of[device])}; groups of devices must be equal or apart")


def _tie(dag: DAG, draft: Draft, homes: Mapping[str, tuple[int, ...]]) -> None:
    for update in dag.of(UPDATE):
        home = homes[update.what]
        grads = dag.incoming[update.name]
        abroad = [edge for edge in grads if homes[dag.nodes[edge.source].what] != home]
        if not abroad:
            continue
        members = tuple(dict.fromkeys([home, *(homes[dag.nodes[edge.source].what] for edge in abroad)]))
        _same_size(update, members)
        reduction = draft.add(Node(ALL_REDUCE, f"tied.{update.what}", devices=tuple(d for group in members for d in group),
                                   groups=tuple(zip(*members, strict=True)), stream=TIED_STREAM))
        draft.move(abroad, [edge._replace(destination=reduction) for edge in grads])
        draft.link(reduction, update.name, tensor=f"grad.tied.{update.what}")
        for segment in dict.fromkeys(dag.nodes[edge.source].what for edge in abroad):
            other = draft.nodes.get(f"UPDATE:{segment}")
            if other is None:
                other = Node(UPDATE, segment, tags=_tags(dag, segment), devices=homes[segment], stream=COMPUTE_STREAM)
                draft.add(other)
            draft.link(reduction, other.name, tensor=f"grad.tied.{update.what}")


def _tags(dag: DAG, segment: str) -> Mapping[str, int]:
    return dag.segments[segment].tags


def _same_size(node: Node, groups: Sequence[tuple[int, ...]]) -> None:
    if len({len(group) for group in groups}) > 1:
        raise ConfigurationError(f"place: {node}: data goes between {' and '.join(str(list(group)) for group in groups)};"
                                 " groups that talk to each other must have equally many devices")


def _connect(draft: Draft, streams: Mapping[str, str | None]) -> None:
    """Every data edge between different devices becomes SEND -> RECV: one per tensor and receiving group, however many read it."""
    abroad: dict[tuple[str, str, tuple[int, ...]], list[Edge]] = {}
    for edge in draft.edges:
        source, destination = draft.nodes[edge.source], draft.nodes[edge.destination]
        if source.kind == COMPUTE == destination.kind and source.devices != destination.devices:
            if edge.tensor.startswith("saved."):
                raise ConfigurationError(f"place: {destination}: on {list(destination.devices)}, its forward on {list(source.devices)};"
                                         " what a forward keeps for its backward does not leave the device")
            abroad.setdefault((edge.source, edge.tensor, destination.devices), []).append(edge)
    for (name, tensor, target), edges in abroad.items():
        source = draft.nodes[name]
        _same_size(source, (source.devices, target))
        stream = streams[name] or ("up" if target > source.devices else "down")
        common = {"phase": source.phase, "tags": source.tags, "dims": source.dims, "stream": stream}
        what = f"{source.what}.{tensor.removeprefix('d.')}>{target[0]}"
        send = draft.add(Node(SEND, what, devices=source.devices, peers=target, **common))
        recv = draft.add(Node(RECV, what, devices=target, peers=source.devices, **common))
        draft.link(name, send, tensor=tensor)
        draft.link(send, recv, tensor=tensor)
        draft.move(edges, [edge._replace(source=recv) for edge in edges])
