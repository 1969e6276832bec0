"""Lowering: from a training DAG to plans (`rrfp.program.plan`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rrfp.action import Action, Edge
from rrfp.program.clock import nominal, run
from rrfp.program.dag import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPUTE, DAG, RECV, REDUCE_SCATTER, SEND, UPDATE, Node
from rrfp.program.order import rows
from rrfp.program.plan import Lowered, Message, Plan
from rrfp.scheduler.dependencies import Dependencies, Task
from rrfp.scheduler.hints import Row
from rrfp.scheduler.validate import check_rows


def lower(dag: DAG) -> Lowered:
    """Plans for every pipeline rank.

    Raises:
        ConfigurationError: for rows that cannot be obeyed, naming rank, position and action.
    """
    lowering = _Lowering(dag)
    plans = lowering.plans()
    pipeline = [plan.dependencies for plan in plans]
    check_rows([plan.row for plan in plans], pipeline, source="program")
    kept = all(_keeps_microbatch_order(plan.row) for plan in plans)
    return Lowered(dag, tuple(lowering.units), tuple(lowering.owners), plans, "microbatch" if kept else "free")


def _keeps_microbatch_order(row: Row) -> bool:
    newest: dict[tuple[int, str], int] = {}
    for group in row:
        for action in group:
            if action.microbatch is not None:
                if action.microbatch < newest.get((action.stage, action.kind), 0):
                    return False
                newest[action.stage, action.kind] = action.microbatch
    return True


class _Lowering:
    def __init__(self, dag: DAG):
        self.dag = dag
        self.groups = list(rows(dag))
        self.rank_of = {device: rank for rank, devices in enumerate(self.groups) for device in devices}
        self.position = {name: index for index, name in enumerate(dag.topological)}
        self.microbatch = self._microbatch_dimension()
        self.units: list[str] = []
        self.owners: list[int] = []
        self._number: dict[tuple[str, int], int] = {}
        model = {name: index for index, name in enumerate(dag.segments)}
        for node in sorted(dag.of(COMPUTE), key=lambda node: model[node.what]):
            self.unit(node, self.rank_of[node.devices[0]])
        self.actions = {node.name: self._action(node, self.rank_of[node.devices[0]]) for node in dag.of(COMPUTE, UPDATE)}
        self._peers: dict[str, dict[int, Action]] = {}
        numbers = {title: index for index, title in enumerate(dag.buckets)}
        for node in sorted(filter(self._is_reduction, dag.nodes.values()), key=lambda node: (numbers.get(node.what, -1), self.position[node.name])):
            ranks = dict.fromkeys(self.rank_of[device] for device in node.devices)
            self._peers[node.name] = {rank: self._action(node, rank) for rank in ranks}

    def _microbatch_dimension(self) -> str | None:
        """The split that cuts all computation: its index is the microbatch of actions and messages. Further ones make more units."""
        compute = self.dag.of(COMPUTE)
        return next((dim for dim in self.dag.dims if all(dim in node.dims for node in compute)), None)

    def _is_reduction(self, node: Node) -> bool:
        """Reductions, and gathers of updated parameters: actions that issue a collective. A gather before a pass is none."""
        return node.kind not in (COMPUTE, UPDATE, SEND, RECV, ALL_TO_ALL) and not (node.kind == ALL_GATHER and node.phase)

    def unit(self, node: Node, rank: int) -> int:
        dims = ",".join(f"{dim}={index}" for dim, index in node.dims.items() if dim != self.microbatch)
        name = f"{node.what}[{dims}]" if dims else node.what
        if node.kind == REDUCE_SCATTER and not node.dims and self.dag.bucket_of(node).zero >= 2:
            name = f"{node.what}[tied]"  # it comes last: not in a row with those of the microbatches
        if (name, rank) not in self._number:
            self._number[name, rank] = len(self.units)
            self.units.append(name)
            self.owners.append(rank)
        return self._number[name, rank]

    def _action(self, node: Node, rank: int) -> Action:
        kind = node.phase if node.kind == COMPUTE else node.kind
        return Action(kind, self.unit(node, rank), node.dims.get(self.microbatch, 0) if node.kind == COMPUTE or node.dims else None)

    # -- one rank ------------------------------------------------------------------------------------------------------

    def plans(self) -> tuple[Plan, ...]:
        self._make_messages()
        streams: list[dict[str, list[str]]] = [{} for _ in self.groups]
        for name in run(self.dag, nominal).spans:
            node = self.dag.nodes[name]
            for rank in dict.fromkeys(self.rank_of[device] for device in node.devices):
                streams[rank].setdefault(node.stream, []).append(name)
        return tuple(self._plan(rank, {stream: tuple(names) for stream, names in streams[rank].items()}) for rank in range(len(self.groups)))

    def _make_messages(self) -> None:
        """Contract communication between computations into edges. A tensor that several read there is brought to the first of them;
        the others come after it.
        """
        self.arrivals: dict[str, list[Edge]] = {}
        self.sends: dict[str, list[Edge]] = {}
        self.waits: dict[str, list[str]] = {}
        found: dict[Edge, dict] = {}
        for name in self.dag.topological:
            carrier = self.dag.nodes[name]
            if carrier.kind not in (SEND, ALL_TO_ALL):
                continue
            out = carrier.name if carrier.kind == ALL_TO_ALL else next(self.dag.after(name)).name
            readers = sorted({edge.destination for edge in self.dag.outgoing[out]}, key=self.position.__getitem__)
            sources = sorted({edge.source for edge in self.dag.incoming[name]}, key=self.position.__getitem__)
            first = readers[0]
            for reader in readers[1:]:
                self.waits.setdefault(reader, []).append(first)
            for source in sources:
                edge = Edge(self.actions[source].stage, self.actions[first].stage)
                if edge not in self.arrivals.setdefault(first, []):
                    self.arrivals[first].append(edge)
                    self.sends.setdefault(source, []).append(edge)
                made = found.setdefault(edge, {"kind": carrier.kind, "tensors": {}, "stream": carrier.stream, "nodes": {}})
                made["tensors"] |= dict.fromkeys(e.tensor for e in self.dag.incoming[name] if e.source == source)
                nodes = made["nodes"].setdefault(self.actions[source].microbatch, {})
                nodes[name] = None
        self.messages = {edge: Message(edge, made["kind"], tuple(made["tensors"]), made["stream"], {m: tuple(n) for m, n in made["nodes"].items()})
                         for edge, made in found.items()}

    def _plan(self, rank: int, streams: Mapping[str, tuple[str, ...]]) -> Plan:
        dag, devices = self.dag, self.groups[rank]
        nodes = {self.actions[node.name]: node for node in dag.of(COMPUTE, UPDATE) if node.devices == devices}
        nodes |= {peers[rank]: dag.nodes[name] for name, peers in self._peers.items() if rank in peers}
        tasks = self._in_one_order({action: self._task(action, node, rank) for action, node in nodes.items()}, nodes)
        units = tuple(sorted({action.stage for action in nodes}))
        row = self._row(rank, rows(dag)[devices], nodes)
        gathers = {action: gather.what.partition(".")[0] for action, node in nodes.items() for gather in dag.before(node.name)
                   if gather.kind == ALL_GATHER and gather.phase}
        messages = {edge: message for edge, message in self.messages.items() if rank in (self.owners[edge.source], self.owners[edge.destination])}
        dependencies = Dependencies(rank, units, tasks)
        return Plan(rank, devices, row, dependencies, nodes, messages, gathers, streams, _peak(row, dependencies))

    def _row(self, rank: int, groups: Sequence[Sequence[Node]], nodes: Mapping[Action, Node]) -> Row:
        """Computation as ordered; a reduction right behind what completes it, inside its group; updates, and what follows them, at the end.

        Behind the whole group it would come too late: whole gradients of every segment of a stage would lie there (ZeRO-2).
        """
        row = [tuple(self.actions[node.name] for node in group) for group in groups]
        place = {action: (position, index) for position, group in enumerate(row) for index, action in enumerate(group)}
        behind: dict[tuple[int, int], list[Action]] = {}
        end = (len(row), 0)
        for action in sorted((action for action, node in nodes.items() if node.kind != COMPUTE), key=lambda action: self._at_the_end(nodes[action])):
            at = end
            if nodes[action].kind in (ALL_REDUCE, REDUCE_SCATTER) and not is_tied(nodes[action]):
                before = (self.actions.get(node.name) or self._peers[node.name].get(rank) for node in self.dag.before(nodes[action].name))
                at = max(place.get(other, (0, 0)) for other in before)
            place[action] = at
            behind.setdefault(at, []).append(action)
        ordered = []
        for position, group in enumerate(row):
            last = len(group) - 1
            ordered.append(tuple(each for index, action in enumerate(group)
                                 for each in (action, *(behind.get((position, index), ()) if index < last else ()))))
            ordered += [(action,) for action in behind.get((position, last), ())]
        return (*ordered, *((action,) for action in behind.get(end, ())))

    def _at_the_end(self, node: Node) -> tuple[int, int]:
        """The order of what is no computation: sums over several ranks, other reductions, updates and what follows them."""
        return 0 if is_tied(node) else 1 if node.kind in (ALL_REDUCE, REDUCE_SCATTER) else 2, self.position[node.name]

    def _in_one_order(self, tasks: dict[Action, Task], nodes: Mapping[Action, Node]) -> dict[Action, Task]:
        """Sums over several ranks come after all computation of a rank, in one order everywhere; updates after both, one by one.

        Whoever waits in an update has issued all that others could wait for: no two ranks wait for each other. Megatron's
        `finalize_model_grads` has this order too.
        """
        computed = [action for action, node in nodes.items() if node.kind == COMPUTE]
        read = {before for action in computed for before in tasks[action].after}
        last = tuple(action for action in computed if action not in read)
        for action in sorted((action for action, node in nodes.items() if is_tied(node) or node.kind == UPDATE),
                             key=lambda action: self._at_the_end(nodes[action])):
            tasks[action] = replace(tasks[action], after=tuple(dict.fromkeys((*tasks[action].after, *last))))
            last = (action,)
        return tasks

    def _task(self, action: Action, node: Node, rank: int) -> Task:
        dag, after = self.dag, []
        for before in dag.before(node.name):
            if before.name in self.actions:
                after.append(self.actions[before.name])
            elif rank in self._peers.get(before.name, {}):
                after.append(self._peers[before.name][rank])
        after += [self.actions[name] for name in self.waits.get(node.name, ())]
        own = tuple(dict.fromkeys(other for other in after if self.owners[other.stage] == rank))
        held = node.kind == COMPUTE and node.phase != "F"
        trains = node.kind == COMPUTE and any(other.phase in ("B", "I") and other.what == node.what for other in dag.after(node.name))
        splits = node.phase == "I" and any(other.phase == "W" for other in dag.after(node.name))
        return Task(action, own, tuple(self.arrivals.get(node.name, ())), tuple(self.sends.get(node.name, ())),
                    in_flight=1 if node.phase == "F" and trains else -1 if held and not splits else 0,
                    backlog=1 if splits else -1 if node.kind == COMPUTE and node.phase == "W" else 0)


def is_tied(node: Node) -> bool:
    """Whether it sums the gradients of a parameter that several pipeline ranks have."""
    return node.kind == ALL_REDUCE and node.what.startswith("tied.")


def _peak(row: Row, dependencies: Dependencies) -> int:
    level = peak = 0
    for group in row:
        for action in group:
            level += dependencies.tasks[action].in_flight
            peak = max(peak, level)
    return peak

