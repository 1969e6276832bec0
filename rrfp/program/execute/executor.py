"""Runs the actions of one device: segments under autograd, reductions and gathers issued on their streams, updates.

Invariant 8: everything here runs on the engine's thread; collectives run on the streams'.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import torch

from rrfp.comm.tensors import from_arrival, to_payload
from rrfp.comm.transport import Arrival, Payload
from rrfp.engine.executor import Done
from rrfp.errors import ConfigurationError
from rrfp.program.dag import ALL_TO_ALL, COMPUTE, REDUCE_SCATTER, UPDATE, Node
from rrfp.program.execute import backward
from rrfp.program.execute.backward import Graph
from rrfp.program.execute.collectives import Collectives
from rrfp.program.execute.parameters import Parameters
from rrfp.program.execute.pool import Pool
from rrfp.program.execute.streams import Operation, Streams
from rrfp.program.execute.wiring import Key, Origin, Read, Wiring, losses
from rrfp.program.plan import Lowered, Plan
from rrfp.scheduler.dependencies import Task

AHEAD = 1
"""ZeRO-2 and 3: reductions that may be under way when a backward begins: one bucket is whole while it is scattered, one while it is made."""


class ProgramExecutor:
    """See `rrfp.engine.executor.Executor`.

    Args:
        functions: by segment (`rrfp.program.capture.Captured`).
        loss: the tensor that is the loss.
        release: gives a message's buffer back.
        device: where tensors are.
        seconds: emulated durations, for tests and benchmarks only: a computation or an update takes at least so long.
    """

    capacity = 1

    def __init__(self, program: Lowered, plan: Plan, *, functions: Mapping[str, Callable], loss: str, wiring: Wiring, parameters: Parameters,
                 pool: Pool, streams: Streams, collectives: Collectives, release: Callable[[Arrival], None], device: torch.device,
                 seconds: Callable[[Node], float]):
        self._dag, self._plan, self._functions, self._loss = program.dag, plan, functions, loss
        self._wiring, self._parameters, self._pool, self._streams, self._collectives = wiring, parameters, pool, streams, collectives
        self._release, self._device, self._seconds = release, device, seconds
        self._pieces = losses(program, loss)
        self.padded = 0.0

    def begin(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Before a call. Returns how many rows what this device reads has, by name.

        Args:
            batch: this replica's, by name.

        Raises:
            ConfigurationError: a tensor that this device reads is missing, or the pieces do not divide it.
        """
        if not isinstance(batch, Mapping):
            raise ConfigurationError(f"step: batch: is a {type(batch).__name__}; give tensors by name")
        rows = {}
        for reads in self._wiring.batch.values():
            for name, (dim, cuts) in reads.items():
                self._check(batch, name, dim, cuts)
                if self._dag.tensors[name].batch is not None:
                    rows[name] = batch[name].shape[dim]
        self._batch = batch
        self._values: dict[Key, torch.Tensor] = {}
        self._readers = Counter(self._wiring.readers)
        self._graphs: dict[tuple, Graph] = {}
        self._rests: dict[tuple, backward.Rest] = {}
        self._operations: dict[str, Operation] = {}
        self._scatters: deque[Operation] = deque()
        """ZeRO-2 and 3: those issued whose whole gradients may still be there."""
        self.losses: dict[int, torch.Tensor] = {}
        """This device's, by piece of the batch."""
        self._parameters.begin()
        self._pool.begin()
        return rows

    def _check(self, batch: Mapping[str, torch.Tensor], name: str, dim: int, cuts: tuple) -> None:
        if name not in batch:
            raise ConfigurationError(f"step: batch: has no {name}, which this rank reads; give it, with {', '.join(batch) or 'nothing else'}")
        captured, given, free = self._dag.tensors[name].shape, tuple(batch[name].shape), self._dag.tensors[name].batch
        if len(given) != len(captured) or any(own != size for at, (own, size) in enumerate(zip(given, captured, strict=True)) if at != free):
            wanted = " x ".join("any" if at == free else str(size) for at, size in enumerate(captured)) or "a scalar"
            raise ConfigurationError(f"step: batch: {name} is {' x '.join(map(str, given)) or 'a scalar'}, and was captured as {wanted}; give that")
        pieces = 1
        for cut in cuts:
            pieces *= cut.count
        if captured and batch[name].shape[dim] % pieces:
            raise ConfigurationError(f"step: batch: {name} has {batch[name].shape[dim]} along dimension {dim}, which {pieces} pieces do not divide;"
                                     f" give a multiple of {pieces}")

    def launch(self, task: Task, inputs: tuple[Arrival, ...], done: Done) -> None:
        start = time.monotonic()
        node = self._plan.nodes[task.action]
        for edge, arrival in zip(task.arrivals, inputs, strict=True):
            self._take(edge, task.action.microbatch, arrival)
        made: dict[Key, torch.Tensor] = {}
        if node.kind == COMPUTE:
            self._pool.acquire(task.action)
            made = self._compute(node)
            self._pool.release(task.action)
        elif node.kind == UPDATE:
            self._update(node)
        else:
            operation = self._operations[node.name] = self._collectives.issue(node, after=self._before(node))
            if node.kind == REDUCE_SCATTER and self._bounded(node.what):
                self._scatters.append(operation)
        outputs = {edge: self._payload(edge, task.action.microbatch, made) for edge in task.sends}
        self.padded = max(0.0, start + self._seconds(node) - time.monotonic()) if node.kind in (COMPUTE, UPDATE) else 0.0
        if self.padded:
            time.sleep(self.padded)
        done(outputs)

    def finish(self) -> None:
        """After a call: every collective is done."""
        for operation in self._operations.values():
            self._streams.wait(operation)

    # ------------------------------------------------------------------ messages
    def _take(self, edge, microbatch: int, arrival: Arrival) -> None:
        if self._plan.messages[edge].kind == ALL_TO_ALL:
            tensors = arrival.payload
        else:
            tensors = from_arrival(arrival, release=self._release, device=torch.device("cpu"))
        for item, tensor in zip(self._wiring.items[edge, microbatch], tensors, strict=True):
            self._values[item.becomes] = tensor.to(self._device)

    def _payload(self, edge, microbatch: int, made: Mapping[Key, torch.Tensor]) -> Payload:
        tensors = [made[item.made] for item in self._wiring.items[edge, microbatch]]
        return tuple(tensors) if self._plan.messages[edge].kind == ALL_TO_ALL else to_payload([tensor.cpu() for tensor in tensors])

    # ------------------------------------------------------------------ computation
    def _compute(self, node: Node) -> dict[Key, torch.Tensor]:
        found = self._forward(node) if node.phase == "F" else self._backward(node)
        made = {(node.name, name): value for name, value in found.items()}
        self._values.update((key, made[key]) for name in self._wiring.keeps.get(node.name, ()) if (key := (node.name, name)) in made)
        return made

    def _forward(self, node: Node) -> dict[str, torch.Tensor]:
        segment, wired = self._dag.segments[node.what], self._wiring.segments[node.what]
        read = {name: self._read(read) for name, read in self._wiring.reads[node.name].items()}
        for name, (dim, cuts) in self._wiring.batch[node.name].items():
            read[name] = _cut(self._batch[name], dim, cuts).to(self._device)
        inputs = {name: read[name].detach().requires_grad_(name in wired.wanted) for name in segment.inputs}
        with torch.set_grad_enabled(wired.trained):
            outputs = self._functions[node.what](self._parameters.weights(node.what), inputs)
        if wired.trained:
            self._graphs[_place(node)] = Graph({name: inputs[name] for name in wired.wanted}, outputs)
        if node.name in self._pieces:
            self.losses[self._pieces[node.name]] = outputs[self._loss].detach()
        return {name: value.detach() for name, value in outputs.items()}

    def _bounded(self, title: str) -> bool:
        """Whether whole gradients must not pile up. A slotted one waits for its all-to-all, which this thread may have yet to issue."""
        bucket = self._dag.buckets[title]
        return bucket.zero >= 2 and not bucket.slotted

    def _backward(self, node: Node) -> dict[str, torch.Tensor]:
        while len(self._scatters) > AHEAD:  # computation would run away from its reductions, and all gradients lie there whole
            self._streams.wait(self._scatters.popleft())
        place, weights = _place(node), self._parameters.weights(node.what)
        if node.phase == "W":
            self._add(node, backward.of_weights(self._rests.pop(place), weights))
            return {}
        graph = self._graphs.pop(place)
        gradients = {name: self._read(self._wiring.reads[node.name][f"d.{name}"]) for name in graph.outputs
                     if f"d.{name}" in self._wiring.reads[node.name]}
        if self._loss in graph.outputs:
            output = graph.outputs[self._loss]
            gradients[self._loss] = torch.full_like(output, 1 / (self._dag.pieces(node) * len(node.devices)))
        if node.phase == "B" or not weights:
            found, of_weights = backward.whole(graph, gradients, weights)
            self._add(node, of_weights)
        else:
            found, self._rests[place] = backward.of_inputs(graph, gradients, weights)
        return {f"d.{name}": gradient for name, gradient in found.items()}

    def _add(self, node: Node, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self._parameters.add(name, gradient, node.dims)

    def _read(self, read: Read) -> torch.Tensor:
        return sum(self._contribution(origin) for origin in read[1:]) + self._contribution(read[0]) if len(read) > 1 else self._contribution(read[0])

    def _contribution(self, origin: Origin) -> torch.Tensor:
        values = [self._values[key] for key in origin.keys]
        for key in origin.keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._values[key]
        if len(values) == 1:
            value = values[0]
        else:
            value = sum(values[1:], values[0]) if origin.dim is None else torch.cat(values, origin.dim)
        return value if origin.dim is None else _cut(value, origin.dim, origin.cuts)

    # ------------------------------------------------------------------ the rest
    def _before(self, node: Node) -> list[Operation]:
        return [self._operations[before.name] for before in self._dag.before(node.name) if before.name in self._operations]

    def _update(self, node: Node) -> None:
        for operation in self._before(node):
            self._streams.wait(operation)
        self._parameters.update(node.what)


def _cut(value: torch.Tensor, dim: int, cuts: tuple) -> torch.Tensor:
    for count, index in cuts:
        value = value.chunk(count, dim)[index]
    return value


def _place(node: Node) -> tuple:
    return (node.what, *node.dims.items())
