"""A segment's backward, whole (B) or in two halves: I, the gradients of its inputs, and W, those of its weights.

The halves are torch's own (`torch.distributed.pipelining._backward`, as its zero-bubble schedules use them): I keeps, where the graph
of the inputs meets that of the weights, the gradients that W starts from, so nothing is computed twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import _backward as halves

Tensors = dict[str, torch.Tensor]


class Graph(NamedTuple):
    """What a forward keeps. inputs: those whose gradient is wanted. outputs: as autograd made them."""

    inputs: Tensors
    outputs: Tensors


class Rest(NamedTuple):
    """What an I leaves for its W. groups: torch's. alone: outputs that no input leads to, with their gradients."""

    groups: Sequence[Mapping[str, Any]]
    alone: Sequence[tuple[torch.Tensor, torch.Tensor]]
    graph: Graph


class _Alias(torch.autograd.Function):
    """The same tensor, and no view: torch's halves detach outputs in place, which no view allows."""

    @staticmethod
    def forward(_, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def whole(graph: Graph, gradients: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    """Gradients of the inputs and of the weights.

    Args:
        gradients: of outputs, by name; what is missing has none.
    """
    outputs = [(graph.outputs[name], gradient) for name, gradient in gradients.items() if graph.outputs[name].requires_grad]
    leaves = [*graph.inputs.values(), *weights.values()]
    found = _gradients(outputs, leaves)
    count = len(graph.inputs)
    return dict(zip(graph.inputs, found[:count], strict=True)), dict(zip(weights, found[count:], strict=True))


def of_inputs(graph: Graph, gradients: Tensors, weights: Tensors) -> tuple[Tensors, Rest]:
    """I: gradients of the inputs, and what W needs."""
    outputs = [(graph.outputs[name], gradient) for name, gradient in gradients.items() if graph.outputs[name].requires_grad]
    leaves = {torch.autograd.graph.get_gradient_edge(leaf).node for leaf in graph.inputs.values()}
    reached = [pair for pair in outputs if _leads_to(pair[0].grad_fn, leaves)]
    alone = [pair for pair in outputs if not any(pair is other for other in reached)]
    groups: Sequence[Mapping[str, Any]] = ()
    if reached:
        ends = [_Alias.apply(output) for output, _ in reached]
        _, groups = halves.stage_backward_input(ends, [gradient for _, gradient in reached], list(graph.inputs.values()), iter(weights.values()))
    made = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in graph.inputs.items()}
    return made, Rest(groups, alone, graph)


def of_weights(rest: Rest, weights: Tensors) -> Tensors:
    """W: gradients of the weights."""
    leaves = list(weights.values())
    if rest.groups:
        halves.stage_backward_weight(iter(leaves), rest.groups)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    for index, gradient in enumerate(_gradients(rest.alone, leaves)) if rest.alone else ():
        found[index] = gradient if found[index] is None else found[index] + gradient
    return {name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in zip(weights.items(), found, strict=True)}


def _gradients(outputs: Sequence[tuple[torch.Tensor, torch.Tensor]], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros where nothing flows."""
    if not outputs or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad([output for output, _ in outputs], leaves, [gradient for _, gradient in outputs], allow_unused=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)]


def _leads_to(node, leaves: set) -> bool:
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node in leaves:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [other for other, _ in node.next_functions]
    return False
