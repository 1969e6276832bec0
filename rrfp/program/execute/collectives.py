"""The communicators of a program, and what each kind of collective does on them.

Communicators are made up front, in one order on all ranks: one for each stream and group, so that no stream waits for another.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
from torch import distributed as dist

from rrfp.program.dag import ALL_GATHER, Node
from rrfp.program.execute.exchange import exchange
from rrfp.program.execute.parameters import Parameters
from rrfp.program.execute.streams import Operation, Streams
from rrfp.program.lower import is_tied
from rrfp.program.plan import Lowered

OWN = "own"
"""The stream of what no directive speaks of: losses go round, rows are compared, the state is gathered."""


class Collectives:
    """Every rank of the job makes one, at the same point.

    Args:
        device: this rank's number in the program.
        timeout: seconds that a collective may take.
    """

    def __init__(self, program: Lowered, *, device: int, timeout: float):
        self._dag, self._device = program.dag, device
        rank = program.rank_of[device]
        replicas = program.plans[rank].devices
        self._pipeline = tuple(plan.devices[replicas.index(device)] for plan in program.plans)
        self._replicas = replicas
        wanted = {(node.stream, group) for node in program.dag.nodes.values() for group in node.groups}
        wanted |= {(OWN, tuple(plan.devices[k] for plan in program.plans)) for k in range(len(replicas))}
        wanted |= {(OWN, plan.devices) for plan in program.plans}
        self.gathers = {f"ALL_GATHER:{node.what.partition('.')[0]}": node for node in program.dag.of(ALL_GATHER)
                        if node.phase and device in node.devices}
        """ZeRO-3: by the name that a gather of a bucket has as an operation, one of the nodes that ask for it."""
        self._groups = {}
        for stream, members in sorted(wanted):
            if len(members) > 1:
                group = dist.new_group(list(members), timeout=timedelta(seconds=timeout))
                if device in members:
                    self._groups[stream, members] = group

    def connect(self, parameters: Parameters, streams: Streams, exchanges: Mapping[str, int]) -> None:
        """What the collectives move, where they run, and by stream how many all-to-alls a call issues there."""
        self._parameters, self._streams, self._exchanges = parameters, streams, exchanges

    def begin(self) -> None:
        """Before a call."""
        self._left = dict(self._exchanges)
        self._slotted: dict[str, deque[Operation]] = {stream: deque() for stream in self._left}

    def _group(self, node: Node):
        """(communicator, members) of this device."""
        members = next(group for group in node.groups if self._device in group)
        return self._groups.get((node.stream, members)), members

    def issue(self, node: Node, *, after: Iterable[Operation]) -> Operation:
        """A reduction, or a gather of updated parameters."""
        group, _ = self._group(node)
        finish, parameters = self._streams.finish, self._parameters
        if is_tied(node):
            gradients = [parameters.gradient(name) for name in self._dag.parameters(node)]

            def run():
                for gradient in gradients:
                    finish(dist.all_reduce(gradient, group=group, async_op=True))
        else:
            store, part = parameters.stores[node.what], self._dag.buckets[node.what].part
            piece = tuple(node.dims.items())

            def run():
                if node.kind == ALL_GATHER:
                    store.gather(part, group, finish)
                else:
                    store.reduce(node.kind, part, piece, group, finish)

        operation = Operation(node.name, run, tuple(after))
        slotted = node.what in self._dag.buckets and node.kind != ALL_GATHER and self._dag.buckets[node.what].slotted
        if slotted and self._left.get(node.stream):
            self._slotted[node.stream].append(operation)
        else:
            self._streams.put(node.stream, operation)
        return operation

    def exchanged(self, stream: str) -> None:
        """An all-to-all was issued: one slotted reduction goes behind it; behind the last, all that are left.

        Counted in the order of issue, which is the members' own: their streams stay equal.
        """
        self._left[stream] -= 1
        waiting = self._slotted[stream]
        for _ in range(min(1, len(waiting)) if self._left[stream] else len(waiting)):
            self._streams.put(stream, waiting.popleft())

    def gather(self, bucket: str) -> Operation:
        """ZeRO-3: bring a bucket."""
        node = self.gathers[name := f"ALL_GATHER:{bucket}"]
        store, (group, _) = self._parameters.stores[bucket], self._group(node)
        store.allocate()
        return self._streams.issue(node.stream, name, lambda: store.gather(0, group, self._streams.finish))

    def exchange(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What an ALL_TO_ALL does with a tensor."""
        node = self._dag.nodes[name]
        group, members = self._group(node)

        def move(received: torch.Tensor, sent: torch.Tensor) -> None:
            if group is None:
                received.copy_(sent)
            else:
                self._streams.finish(dist.all_to_all_single(received, sent, group=group, async_op=True))

        return lambda tensor: exchange(tensor, inwards=node.what.endswith(".in"), members=len(members), move=move)

    def from_rank(self, value: torch.Tensor, device: int) -> torch.Tensor:
        """Everybody in the pipeline gets what `device` has. Fills and returns `value`."""
        if (group := self._groups.get((OWN, self._pipeline))) is not None:
            self._own("losses", lambda: self._streams.finish(dist.broadcast(value, src=device, group=group, async_op=True)))
        return value

    def of_replicas(self, what: str, value: torch.Tensor) -> list[torch.Tensor]:
        """What each replica of this rank has, in their order. what: its name in traces and failures."""
        if (group := self._groups.get((OWN, self._replicas))) is None:
            return [value]
        found, sent = value.new_empty((len(self._replicas), *value.shape)), value.reshape(-1).contiguous()
        self._own(what, lambda: self._streams.finish(dist.all_gather_single(found.view(-1), sent, group=group, async_op=True)))
        return list(found)

    def _own(self, name: str, run: Callable[[], None]) -> None:
        self._streams.wait(self._streams.issue(OWN, name, run))

    def close(self, streams: Iterable[str]) -> None:
        """Let go of the communicators of these streams, on which nothing runs. Whoever still waits on the other end gets an error."""
        for stream, members in [key for key in self._groups if key[0] in streams]:
            dist.destroy_process_group(self._groups.pop((stream, members)))

    @property
    def streams(self) -> set[str]:
        """Those that have communicators."""
        return {stream for stream, _ in self._groups}
