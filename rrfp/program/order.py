"""Order: temporal edges between the groups of a row, and the rows that they make."""

from collections.abc import Iterator, Mapping, Sequence

from rrfp.errors import ConfigurationError
from rrfp.program.dag import ALL_TO_ALL, COMPUTE, DAG, PASSES, TEMPORAL, Node, by_devices
from rrfp.program.directives import Order
from rrfp.program.filters import PASS, Filter, Index, text_of


def order(dag: DAG, directives: Sequence[Order]) -> DAG:
    """Temporal edges from the last computation of each group to the first of the next. Communication follows its data.

    Raises:
        ConfigurationError: a row that spans devices, lists a computation twice or not at all, or cannot be obeyed.
    """
    draft = dag.edit()
    nodes = Index(dag.of(COMPUTE))
    owner: dict[tuple[int, ...], int] = {}
    everywhere: set[str] = set()
    for number, directive in enumerate(directives):
        listed: dict[str, int] = {}
        last: list[str] = []
        for position, group in enumerate(directive.row):
            where = f"order {number}, position {position}"
            found = [node for filter in group for node in _entry(dag, nodes, filter, where)]
            for node in found:
                if node.name in listed:
                    raise ConfigurationError(f"{where}: {node}: stands at position {listed[node.name]} already; list it once")
                listed[node.name] = position
                home = dag.nodes[next(iter(listed))]
                if node.devices != home.devices:
                    raise ConfigurationError(f"{where}: {node}: runs on {list(node.devices)}, {home} on {list(home.devices)};"
                                             " a row orders one device, or one group of replicas")
                if owner.setdefault(node.devices, number) != number:
                    raise ConfigurationError(f"{where}: {node}: its devices {list(node.devices)} have order {owner[node.devices]} already")
            if not found:
                continue
            inside = {node.name for node in found}
            first = [name for name in inside if not inside.intersection(_computed(dag, name, forward=False))]
            for source in last:
                for destination in sorted(first):
                    draft.link(source, destination, TEMPORAL)
            last = sorted(name for name in inside if not inside.intersection(_computed(dag, name, forward=True)))
        everywhere |= listed.keys()
    for node in dag.of(COMPUTE):
        if node.devices in owner and node.name not in everywhere:
            raise ConfigurationError(f"order {owner[node.devices]}: {node}: is missing; list every computation on {list(node.devices)}")
    ordered = draft.dag()
    ordered.topological  # noqa: B018  a row that cannot be obeyed is refused here
    return ordered


def _entry(dag: DAG, nodes: Index, filter: Filter, where: str) -> list[Node]:
    if filter.get(PASS) == "W" and not nodes.find(filter) and nodes.find({**filter, PASS: "I"}):
        return []  # nothing in it trains
    if filter.get(PASS) == "B" and not nodes.find(filter) and nodes.find({**filter, PASS: "I"}):
        raise ConfigurationError(f"{where}: {text_of(filter)}: another entry splits this backward in I and W; name either B, or I and W")
    return nodes.select(filter, where=where)


def _computed(dag: DAG, name: str, *, forward: bool) -> Iterator[str]:
    """The computation next to `name`, past communication on its own devices."""
    devices = dag.nodes[name].devices
    step = dag.after if forward else dag.before
    for node in step(name):
        if node.kind == COMPUTE:
            yield node.name
        elif node.devices == devices:
            yield from (other.name for other in step(node.name) if other.kind == COMPUTE)


def _levels(dag: DAG, devices: tuple[int, ...]) -> Mapping[str, int]:
    """The position of each node of a device in its row: how many temporal edges between computations lie before it there."""
    level: dict[str, int] = {}
    for name in dag.topological:
        if dag.nodes[name].devices != devices:
            continue
        level[name] = max((level[edge.source] + (edge.kind == TEMPORAL and dag.nodes[edge.source].kind == COMPUTE)
                           for edge in dag.incoming[name] if edge.source in level), default=0)
    return level


def rows(dag: DAG) -> Mapping[tuple[int, ...], list[list[Node]]]:
    """Per group of devices its groups of computation in order, each an interleaving of what may run side by side.

    A device without an `Order` has one group per computation, in an order that is possible.
    """
    found = {}
    for devices, nodes in by_devices(dag.of(COMPUTE)).items():
        ordered = any(edge.kind == TEMPORAL for node in nodes for edge in dag.incoming[node.name])
        names = {node.name for node in nodes}
        if not ordered:
            found[devices] = [[dag.nodes[name]] for name in dag.topological if name in names]
            continue
        level = _levels(dag, devices)
        groups: dict[int, list[Node]] = {}
        for node in nodes:
            groups.setdefault(level[node.name], []).append(node)
        found[devices] = [interleave(dag, groups[position]) for position in sorted(groups)]
    return found


def interleave(dag: DAG, group: Sequence[Node]) -> list[Node]:
    """The computation of a group in an order that changes from one sub-DAG to the other wherever an all-to-all lies between.

    Nodes of one sub-DAG are those of one pass and piece. Each keeps the order of its data; a forward begins.
    """
    position = {name: index for index, name in enumerate(dag.topological)}
    parts: dict[tuple, list[Node]] = {}
    for node in sorted(group, key=lambda node: (PASSES.index(node.phase), position[node.name])):
        parts.setdefault((node.phase, *node.dims.items()), []).append(node)
    if len(parts) == 1:
        return next(iter(parts.values()))
    inside, done, merged = {node.name for node in group}, set(), []
    queues = list(parts.values())

    def ready(queue: list[Node]) -> bool:
        return inside.intersection(_computed(dag, queue[0].name, forward=False)) <= done

    while queues:
        queue = next(filter(ready, queues))  # of what is left, the first in topological order heads some queue
        queues.remove(queue)
        # Up to the next all-to-all, then it is the others' turn.
        while queue and ready(queue):
            node = queue.pop(0)
            merged.append(node)
            done.add(node.name)
            if any(after.kind == ALL_TO_ALL for after in dag.after(node.name)):
                break
        if queue:
            queues.append(queue)
    return merged
