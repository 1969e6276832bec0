"""I and W together are B, and neither does the other's work. They use private functions of torch: here these are pinned."""

import inspect

import pytest
import torch
from torch.distributed.pipelining import _backward as halves

from rrfp.program.execute import backward
from rrfp.program.execute.backward import Graph


class Counted(torch.autograd.Function):
    """The identity, which counts its backwards."""

    calls = 0

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        Counted.calls += 1
        return gradient


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(5)]


def chain(x, a, b, bias):
    return {"y": torch.tanh(Counted.apply(x @ a) + bias) @ b}


def views(x, a, b, bias):
    one, two = (x @ a).chunk(2)
    return {"one": one.t(), "two": (two * bias[:2] @ b).view(-1), "again": (two @ b).reshape(2, 4)[:1]}


def alone(x, a, b, bias):
    """An output that no input leads to, of weights that another one uses too."""
    return {"y": x @ a @ b, "penalty": (a * bias).sum() + b.square().sum()}


def reused(x, a, b, bias):
    return {"y": torch.tanh(x @ a) @ a + (x @ b) @ (b + bias), "z": a @ x}


@pytest.mark.parametrize("function", [chain, views, alone, reused])
@pytest.mark.parametrize("differentiable", [True, False], ids=["input", "no-input"])
def test_the_halves_are_the_whole(function, differentiable):
    x, a, b, bias, _ = tensors(1)
    x.requires_grad_(differentiable)
    weights = {"a": a, "b": b, "bias": bias}

    def graph():
        return Graph({"x": x} if differentiable else {}, function(x, a, b, bias))

    one = graph()
    gradients = {name: torch.randn_like(output) for name, output in one.outputs.items()}
    gradients.pop("again", None)  # nobody reads it
    inputs, of_weights = backward.whole(one, gradients, weights)
    found, rest = backward.of_inputs(graph(), gradients, weights)
    again = backward.of_weights(rest, weights)
    assert found.keys() == inputs.keys() and again.keys() == of_weights.keys()
    for name, value in (inputs | of_weights).items():
        torch.testing.assert_close((found | again)[name], value, rtol=0, atol=1e-12)
    assert all(leaf.grad is None for leaf in weights.values())


def test_no_gradient_is_computed_twice():
    """The path of the inputs runs in I only. Negative control: W by plain autograd goes down it again."""
    x, a, b, bias, gradient = tensors(2)
    weights = {"a": a, "b": b, "bias": bias}
    Counted.calls = 0
    _, rest = backward.of_inputs(Graph({"x": x}, chain(x, a, b, bias)), {"y": gradient.detach()}, weights)
    assert Counted.calls == 1
    backward.of_weights(rest, weights)
    assert Counted.calls == 1
    torch.autograd.grad(chain(x, a, b, bias)["y"], list(weights.values()), gradient.detach())
    assert Counted.calls == 2


def test_what_nothing_flows_to_is_zero():
    x, a, b, bias, unused = tensors(3)
    inputs, weights = backward.whole(Graph({"x": x}, {"y": a * b}), {"y": torch.ones_like(a)}, {"a": a, "unused": unused})
    assert not inputs["x"].any() and not weights["unused"].any() and torch.equal(weights["a"], b)


def test_torchs_halves_are_as_they_were():
    assert list(inspect.signature(halves.stage_backward_input).parameters) == ["stage_outputs_or_loss", "output_grads", "input_values", "weights"]
    assert list(inspect.signature(halves.stage_backward_weight).parameters) == ["weights", "param_groups", "retain_graph"]
