"""Runs a training DAG in one process, with torch: every device has its own memory, and only communication nodes touch two of them.

It knows nodes, edges and tensors, nothing of strategies; it is the meaning that the DAG's rewrites must keep. A node runs when all that
it has edges from has run, in the order of the virtual clock.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from rrfp.program.clock import run
from rrfp.program.dag import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPUTE, DAG, RECV, REDUCE_SCATTER, SEND, UPDATE, Node

Function = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""(parameters, inputs) -> outputs of a segment. Parameters of a sharded segment are this device's pieces."""


class Devices:
    """The memory of all devices over several steps.

    Args:
        functions: by segment.
        parameters: whole ones, by name.
    """

    def __init__(self, dag: DAG, functions: Mapping[str, Function], parameters: Mapping[str, torch.Tensor], loss: str, *, rate: float = 0.1):
        self.dag, self.functions, self.loss, self.rate = dag, functions, loss, rate
        self.order = sorted(run(dag).spans.items(), key=lambda item: item[1].start)
        self.weights: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self.shards: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        """ZeRO: this device's part of a parameter, flat."""
        self.zero = {p: bucket for bucket in dag.buckets.values() for s in bucket.segments for p in dag.owned(s)}
        self.most_gathered: dict[int, int] = defaultdict(int)
        self._groups: dict[tuple[str, int], tuple[int, ...]] = {}
        for segment in dag.segments.values():
            devices, ways = dag.homes[segment.name], dag.sharded.get(segment.name, 1)
            for index, device in enumerate(devices):
                for name in segment.parameters:
                    own = parameters[name].chunk(ways)[index % ways].clone()
                    self.weights[device][name] = own
                    if self.zero_of(name) == 3:
                        self.shards[device][name] = self.part(own, name, device)
                        self.weights[device][name] = torch.full_like(own, float("nan"))  # nothing may be used that was not gathered

    def zero_of(self, name: str) -> int:
        return self.zero[name].zero if name in self.zero else 0

    def group(self, name: str, device: int) -> tuple[int, ...]:
        """The replicas of a parameter's piece."""
        if (name, device) not in self._groups:
            reductions = (n for n in self.dag.of(ALL_REDUCE, REDUCE_SCATTER) if not n.what.startswith("tied.") and name in self.dag.parameters(n))
            self._groups[name, device] = next(group for node in reductions for group in node.groups if device in group)
        return self._groups[name, device]

    def part(self, tensor: torch.Tensor, name: str, device: int) -> torch.Tensor:
        group = self.group(name, device)
        flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % len(group)))
        return flat.chunk(len(group))[group.index(device)].clone()

    def step(self, batch: Mapping[str, torch.Tensor]) -> dict[int, list[float]]:
        """One step on the batch of all replicas. Returns every piece's loss by device."""
        self.batch, self.values, self.graphs = batch, {}, {}
        self.grads: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        self.done: set[str] = set()
        self.gathered: dict[int, dict[str, int]] = defaultdict(dict)
        self.losses: dict[int, list[float]] = defaultdict(list)
        for name, _ in self.order:
            node = self.dag.nodes[name]
            missing = [edge.source for edge in self.dag.incoming[name] if edge.source not in self.done]
            assert not missing, f"{name} runs before {missing}"
            for index, device in enumerate(node.devices):
                self.values.setdefault(name, {})[device] = {}
                self._run(node, device, index)
            if node.kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER):
                self._collective(node)
            if node.kind == ALL_TO_ALL:
                self._exchange(node)
            self.done.add(name)
        return self.losses

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _origin(self, name: str, tensor: str) -> Node:
        node = self.dag.nodes[name]
        while node.kind in (SEND, RECV, ALL_TO_ALL):
            node = self.dag.nodes[next(e.source for e in self.dag.incoming[node.name] if e.tensor == tensor)]
        return node

    def _get(self, node: Node, device: int, tensor: str) -> torch.Tensor | None:
        """The tensor as this piece needs it: slices of wholes, joints of pieces, sums of what several consumers send back."""
        dims, total = self.dag.dims, None
        spec = self.dag.tensors[tensor.removeprefix("d.")]
        by_origin = defaultdict(list)
        for edge in self.dag.incoming[node.name]:
            if edge.tensor == tensor:
                source = self.dag.nodes[edge.source]
                here = device if device in source.devices else source.devices[node.devices.index(device)]
                by_origin[self._origin(edge.source, tensor).what].append((source, self.values[edge.source][here][tensor]))
        for pieces in by_origin.values():
            extra = [dim for dim in dims if dim in pieces[0][0].dims and dim not in node.dims]
            pieces.sort(key=lambda piece: [piece[0].dims[dim] for dim in extra])
            if spec.batch is None:
                value = sum(piece for _, piece in pieces)
            else:
                value = torch.cat([piece for _, piece in pieces], spec.batch) if extra else pieces[0][1]
                for dim in [dim for dim in dims if dim in node.dims and dim not in pieces[0][0].dims]:
                    value = value.chunk(dims[dim], spec.batch)[node.dims[dim]]
            total = value if total is None else total + value
        return total

    def _from_batch(self, node: Node, index: int, name: str) -> torch.Tensor:
        value, spec = self.batch[name], self.dag.tensors[name]
        value = value.chunk(len(node.devices), spec.batch)[index]
        for dim in [dim for dim in self.dag.dims if dim in node.dims]:
            value = value.chunk(self.dag.dims[dim], spec.batch)[node.dims[dim]]
        return value

    # -- what runs -----------------------------------------------------------------------------------------------------

    def _run(self, node: Node, device: int, index: int) -> None:
        out = self.values[node.name][device]
        if node.kind == COMPUTE:
            self._compute(node, device, index, out)
            if node.kind == COMPUTE and (bucket := self._zero_bucket(node)) is not None:
                self._release(node, device, bucket)
        elif node.kind in (SEND, RECV):
            source = next(self.dag.before(node.name))
            tensor = self.dag.incoming[node.name][0].tensor
            out[tensor] = self.values[source.name][device if node.kind == SEND else node.peers[index]][tensor]
        elif node.kind == UPDATE:
            for name in self.dag.owned(node.what):
                if self.zero_of(name):
                    old = self.shards[device].get(name)
                    old = self.part(self.weights[device][name], name, device) if old is None else old
                    self.shards[device][name] = old - self.rate * self.grads[device].get(f"shard {name}", torch.zeros_like(old))
                else:
                    self.weights[device][name] = self.weights[device][name] - self.rate * self.grads[device][name]

    def _compute(self, node: Node, device: int, index: int, out: dict[str, torch.Tensor]) -> None:
        segment = self.dag.segments[node.what]
        at = (node.what, device, tuple(node.dims.items()))
        if node.phase == "F":
            inputs = {}
            for name in segment.inputs:
                value = self._get(node, device, name)
                value = self._from_batch(node, index, name) if value is None else value
                inputs[name] = value.detach().requires_grad_(value.is_floating_point())
            weights = {name: self.weights[device][name].detach().requires_grad_() for name in segment.parameters}
            assert not any(weight.isnan().any() for weight in weights.values()), f"{node.name}: parameters were not gathered"
            outputs = self.functions[node.what](weights, inputs)
            self.graphs[at] = (inputs, weights, outputs)
            out.update({name: value.detach() for name, value in outputs.items()})
            if self.loss in outputs:
                self.losses[device].append(outputs[self.loss].item())
            return
        inputs, weights, outputs = self.graphs[at]
        wanted = {"B": [*inputs.items(), *weights.items()], "I": list(inputs.items()), "W": list(weights.items())}[node.phase]
        wanted = [(name, value) for name, value in wanted if value.requires_grad]
        grads = {}
        for name, value in outputs.items():
            grad = self._get(node if node.phase != "W" else self.dag.nodes["I" + node.name[1:]], device, f"d.{name}")
            if name == self.loss:
                grad = torch.full_like(value, 1 / (self.dag.pieces(node) * len(node.devices)))
            if grad is not None:
                grads[name] = grad
        if not wanted:
            return  # I of a segment that reads no numbers has nothing to do
        found = torch.autograd.grad([outputs[name] for name in grads], [value for _, value in wanted], list(grads.values()),
                                    retain_graph=True, allow_unused=True)
        for (name, value), grad in zip(wanted, found, strict=True):
            grad = torch.zeros_like(value) if grad is None else grad
            if name in weights:
                key = self._key(name, node)
                self.grads[device][key] = self.grads[device].get(key, 0) + grad
            else:
                out[f"d.{name}"] = grad

    def _key(self, name: str, node: Node) -> str:
        """Where gradients of a pass are kept: from ZeRO-2 on those of each microbatch for themselves, until they are scattered."""
        return f"{name} {node.dims}" if self.zero_of(name) >= 2 and name not in self.dag.tied else name

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _collective(self, node: Node) -> None:
        if node.what.startswith("tied."):
            return self._sum(node.groups, self.dag.parameters(node))
        bucket = self.dag.bucket_of(node)
        names = self.dag.parameters(node)
        if node.kind == ALL_REDUCE and bucket.part == bucket.parts - 1:
            self._sum(node.groups, names)
        if node.kind == REDUCE_SCATTER and bucket.part == bucket.parts - 1:
            for name in names:
                for group in node.groups:
                    total = sum(self.grads[device].pop(self._key(name, node)) for device in group)
                    for device in group:
                        so_far = self.grads[device].get(f"shard {name}", 0)
                        self.grads[device][f"shard {name}"] = so_far + self.part(total, name, device)
        if node.kind == ALL_GATHER:
            for name in names:
                for group in node.groups:
                    flat = torch.cat([self.shards[device][name] for device in group])
                    for device in group:
                        shape = self.weights[device][name].shape
                        self.weights[device][name] = flat[:shape.numel()].reshape(shape).clone()
                        if bucket.zero < 3:
                            self.shards[device].pop(name, None) if device == group[-1] else None
            if bucket.zero == 3:
                title = node.what.partition(".")[0]
                for device in node.devices:
                    self.gathered[device][title] = self.gathered[device].get(title, 0) + len(list(self.dag.after(node.name)))
                    self.most_gathered[device] = max(self.most_gathered[device], sum(1 for n in self.gathered[device].values() if n))

    def _sum(self, groups, names) -> None:
        for name in names:
            for group in groups:
                total = sum(self.grads[device][name] for device in group)
                for device in group:
                    self.grads[device][name] = total.clone()

    def _zero_bucket(self, node: Node) -> str | None:
        return next((title for title, bucket in self.dag.buckets.items() if node.what in bucket.segments and bucket.zero == 3), None)

    def _release(self, node: Node, device: int, bucket: str) -> None:
        self.gathered[device][bucket] -= 1
        if not self.gathered[device][bucket]:
            for segment in self.dag.buckets[bucket].segments:
                for name in self.dag.owned(segment):
                    self.weights[device][name] = torch.full_like(self.weights[device][name], float("nan"))

    def _exchange(self, node: Node) -> None:
        for tensor in {edge.tensor for edge in self.dag.incoming[node.name]}:
            for group in node.groups:
                # Experts lie along the first dimension, tokens along the second: into the experts, and back.
                apart, together = (0, 1) if node.what.endswith(".in") else (1, 0)
                chunks = {device: self._get(node, device, tensor).chunk(len(group), apart) for device in group}
                for index, device in enumerate(group):
                    self.values[node.name][device][tensor] = torch.cat([chunks[other][index] for other in group], together)

    def whole(self, name: str) -> list[torch.Tensor]:
        """A parameter as each replica group's devices hold it now, put together: equal copies, one per group of its devices."""
        found = []
        for segment in self.dag.segments.values():
            if name not in segment.parameters:
                continue
            devices, ways = self.dag.homes[segment.name], self.dag.sharded.get(segment.name, 1)
            own = [self._own(name, device) for device in devices]
            found += [torch.cat(own[low:low + ways]) if ways > 1 else own[low] for low in range(0, len(devices), ways)]
        return found

    def _own(self, name: str, device: int) -> torch.Tensor:
        if self.zero_of(name) != 3:
            return self.weights[device][name]
        shape = self.weights[device][name].shape
        return torch.cat([self.shards[other][name] for other in self.group(name, device)])[:shape.numel()].reshape(shape)
