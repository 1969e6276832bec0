"""Capture: an ordinary `torch.nn.Module` with `annotate`d parts -> its forward graph (`Traced`), and a function for each segment.

PyTorch's own export traces the module; annotations travel as metadata of its nodes. The batch's size is a symbol in the trace, so
nothing of the example is bound: one capture serves every microbatch size.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from rrfp.errors import ConfigurationError
from rrfp.program.traced import Segment, Tensor, Traced

_KEY = "rrfp"


class _Trace(NamedTuple):
    """The annotations met so far in the capture that is going on, and those that are open."""

    counts: Counter[str]
    open: dict[str, int]


_trace: ContextVar[_Trace | None] = ContextVar("trace", default=None)


@contextmanager
def annotate(tag: str, index: int | None = None) -> Iterator[None]:
    """Tag what is computed inside: `with annotate("PP"):` in a module's forward. The n-th one of a tag in a trace has index n; they nest.

    Outside a capture it does nothing.

    index: the tag's index where the order of the trace does not give it: several layers of one stage. Neighbours of equal tags are one segment.
    """
    trace = _trace.get()
    if trace is None:
        yield
        return
    before = dict(trace.open)
    trace.open[tag] = trace.counts[tag] if index is None else index
    trace.counts[tag] += index is None
    try:
        with fx.traceback.annotate({_KEY: dict(trace.open)}):
            yield
    finally:
        trace.open.clear()
        trace.open.update(before)


@dataclass(frozen=True)
class Captured:
    """A model, ready to be compiled.

    functions: segment -> f(weights by name, inputs by name) -> outputs by name. A weight that is not given is the module's own: buffers
        and frozen parameters need not be; they hold no other, so whoever trains may let the whole model go. Of a sharded segment's, a device gives its piece.
    weights: every parameter and buffer, whole, by the name that the module has for it (a tied one by its first).
    """

    traced: Traced
    functions: Mapping[str, Callable]
    weights: Mapping[str, torch.Tensor]


def capture(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], *, loss: Callable) -> Captured:
    """Trace a model and its loss.

    What lies under no annotation belongs to the segment before it; in front of all, to the first.

    Args:
        model: its forward may branch and join, but not depend on values (`torch.export`'s rules).
        batch: an example by name, first dimension the batch, of one replica's whole batch.
        loss: loss(model, batch) -> a scalar, the mean over the batch.

    Raises:
        ConfigurationError: if the model cannot be traced with a batch of any size, nothing in it is annotated, or it writes in place what
            lasts longer than a segment (a buffer, another segment's tensor).
    """
    whole = _Whole(model, tuple(batch), loss)
    token = _trace.set(_Trace(Counter(), {}))
    try:
        size = torch.export.Dim("batch", min=1, max=2**20)
        with fx.traceback.preserve_node_meta():  # annotations are node metadata
            exported = torch.export.export(whole, tuple(batch.values()), dynamic_shapes={"values": tuple({0: size} for _ in batch)}, strict=False)
    except ConfigurationError:
        raise
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        raise ConfigurationError(f"model: cannot be traced with a batch of any size: {type(error).__name__}: {line}") from error
    finally:
        _trace.reset(token)
    return _Cutter(exported, tuple(batch)).cut()


class _Whole(torch.nn.Module):
    """The model and its loss as one module of the batch's tensors."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...], loss: Callable):
        super().__init__()
        self.model, self._names, self._loss = model, names, loss

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self._loss(self.model, dict(zip(self._names, values, strict=True)))


class _Part(NamedTuple):
    """A segment's nodes: what it reads (tensors of others, of the batch, weights), and what it runs."""

    read: list[fx.Node]
    runs: list[fx.Node]


class _Cutter:
    """Cuts an exported graph where the tags change."""

    def __init__(self, exported: torch.export.ExportedProgram, names: tuple[str, ...]):
        signature = exported.graph_signature
        self._graph = exported.graph
        self._module = exported.graph_module
        self._inputs = dict(zip(signature.user_inputs, names, strict=True))
        state = {**exported.state_dict, **exported.constants}
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        first: dict[int, str] = {}
        self._weights = {node: first.setdefault(id(state[target]), target.removeprefix("model.")) for node, target in targets.items()}
        self._state = {self._weights[node]: state[target] for node, target in targets.items() if node in self._weights}
        self._trained = {self._weights[node] for node, target in signature.inputs_to_parameters.items() if state[target].requires_grad}
        self._loss = self._scalar(signature.user_outputs)
        self._flows: set[fx.Node] = set()
        """Through which a gradient flows: made of a trained parameter, by floating-point numbers all the way."""
        for node in self._graph.nodes:
            trained = self._weights.get(node.name) in self._trained or not self._flows.isdisjoint(node.all_input_nodes)
            made = node.meta.get("val")
            values = made if isinstance(made, (tuple, list)) else (made,)
            floating = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
            if trained and floating and node.target is not torch.ops.aten.detach.default:
                self._flows.add(node)
        self._made_anew = self._constants()

    def _scalar(self, outputs: Sequence[str]) -> str:
        """The loss, which is one number."""
        made = [node.meta.get("val") for node in self._graph.nodes if node.name in outputs]
        if len(outputs) != 1 or len(made) != 1 or not isinstance(made[0], torch.Tensor) or made[0].dim() or not made[0].is_floating_point():
            found = ", ".join(f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else str(value) for value in made) or "no tensor"
            raise ConfigurationError(f"loss: returns {found}; it must return one floating-point scalar, the mean over the batch")
        return outputs[0]

    def _constants(self) -> set[fx.Node]:
        """Tensors that neither the batch's values nor a trained parameter decide: a causal mask, a table of positions. Like sizes they are
        made anew where they are used. What is written in place, or made at random, is not among them.
        """
        changed: set[fx.Node] = set()
        for node in reversed(self._graph.nodes):
            changed.update(_written(node), node.all_input_nodes if node in changed and _may_alias(node) else ())
        found = {node for node in self._graph.nodes if node.name in self._weights and self._weights[node.name] not in self._trained} - changed
        for node in self._graph.nodes:
            fixed = node.op == "call_function" and node not in changed and not _written(node) and not _is_random(node)
            if fixed and all(other in found or _is_size(other) for other in node.all_input_nodes):
                found.add(node)
        return found

    def cut(self) -> Captured:
        runs = self._runs()
        parts = [self._part(nodes) for _, nodes in runs]
        everywhere = {node for part in parts for node in part.read}
        segments, functions, tensors = [], {}, {}
        counts: Counter[str] = Counter()
        for (tags, nodes), part in zip(runs, parts, strict=True):
            label = ".".join(f"{tag}{number}" for tag, number in tags.items())
            name = label if not counts[label] else f"{label}.part{counts[label]}"
            counts[label] += 1
            inputs = [node for node in part.read if node.name not in self._weights]
            weights = dict.fromkeys(self._weights[node.name] for node in part.read if node.name in self._weights)
            outputs = [node for node in nodes if node in everywhere or node.name == self._loss]
            segments.append(Segment(name, tags, tuple(map(self._name, inputs)), tuple(map(self._name, outputs)),
                                    tuple(weight for weight in weights if weight in self._trained)))
            functions[name] = self._function(part, outputs)
            tensors |= {self._name(node): _spec(node, node in self._flows) for node in (*inputs, *outputs)}
        for name, value in self._state.items():
            tensors[name] = Tensor(tuple(value.shape), str(value.dtype).removeprefix("torch."), batch=None)
        return Captured(Traced(tuple(segments), tensors, self._loss), functions, self._state)

    def _name(self, node: fx.Node) -> str:
        return self._inputs.get(node.name, node.name)

    def _runs(self) -> list[tuple[dict[str, int], list[fx.Node]]]:
        runs: list[tuple[dict[str, int], list[fx.Node]]] = []
        early = []
        for node in self._graph.nodes:
            if node.op in ("placeholder", "output") or not _is_real(node):
                continue
            tags = node.meta.get("custom", {}).get(_KEY)
            if tags is None and not runs:
                early.append(node)
            elif tags is None or (runs and runs[-1][0] == tags):
                runs[-1][1].append(node)
            else:
                runs.append((tags, [node]))
        if not runs:
            raise ConfigurationError('model: nothing in it is annotated; write `with annotate("PP"):` around each stage in its forward')
        runs[0][1][:0] = early
        return runs

    def _part(self, nodes: list[fx.Node]) -> "_Part":
        """What runs in a segment, and what it reads. No message carries sizes, constants and tuples of tensors: they are made where used."""
        inside, read, runs = set(nodes), {}, {}

        def need(node: fx.Node) -> None:
            if node.op == "placeholder" or (_is_tensor(node) and node not in inside and node not in self._made_anew):
                read[node] = None
            elif node not in runs:
                runs[node] = None
                for other in node.all_input_nodes:
                    need(other)

        for node in nodes:
            if node not in self._made_anew:
                need(node)
            self._check_writes(node, read)
        return _Part(list(read), [node for node in self._graph.nodes if node in runs])  # in the graph's order

    def _check_writes(self, node: fx.Node, read: Mapping[fx.Node, None]) -> None:
        """In place a segment may change only what it made itself."""
        for value in _written(node):
            if value in read:
                name = self._weights.get(value.name, self._name(value))
                raise ConfigurationError(f"model: {name}: is written by {node.target}; other microbatches, or other parts, would see that;"
                                         " write no buffer in training, and nothing in place that another part made")

    def _function(self, part: "_Part", outputs: list[fx.Node]) -> Callable:
        """The segment as a function of its weights and inputs."""
        own = fx.Graph()
        values: dict[fx.Node, fx.Node] = {node: own.placeholder(node.name) for node in part.read}
        for node in part.runs:
            values[node] = own.node_copy(node, values.__getitem__)
        own.output(tuple(values[node] for node in outputs))
        module = fx.GraphModule(self._module, own)
        state = {name: value for name, value in self._state.items() if name not in self._trained}  # the whole model may go
        order = [(self._weights.get(node.name), self._name(node)) for node in part.read]
        names = [self._name(node) for node in outputs]

        def run(weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found = module(*(inputs[name] if weight is None else weights[weight] if weight in weights else state[weight] for weight, name in order))
            return dict(zip(names, found, strict=True))

        return run


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool))


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _may_alias(node: fx.Node) -> bool:
    """Whether it may be a view of what it is made of (a dropout that drops nothing returns its input)."""
    overload = isinstance(node.target, torch._ops.OpOverload)
    return not overload or _is_random(node) or any(made.alias_info is not None for made in node.target._schema.returns)


def _written(node: fx.Node) -> list[fx.Node]:
    """What an operation writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    given = [*zip(arguments, node.args), *((argument, node.kwargs.get(argument.name)) for argument in arguments)]
    return [value for argument, value in given if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write]


def _is_real(node: fx.Node) -> bool:
    """Not a size, and no check of sizes: those are for the tracer."""
    return not _is_size(node) and (node.op != "call_function" or bool(node.users) or bool(_written(node)))


def _spec(node: fx.Node, flows: bool) -> Tensor:
    """Shape and type; the batch dimension is the first whose size depends on the batch's."""
    value = node.meta["val"]
    symbolic = [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt) and size.node.expr.free_symbols]
    shape = tuple(size.node.hint if isinstance(size, torch.SymInt) else int(size) for size in value.shape)
    return Tensor(shape, str(value.dtype).removeprefix("torch."), symbolic[0] if symbolic else None, flows)
