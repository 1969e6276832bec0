"""Small real models of the program tests: their forward graph, the mathematics of each segment, parameters, and one process' answer."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rrfp.program.traced import Segment, Tensor, Traced

HIDDEN, EXPERTS, CLASSES = 6, 4, 5


@dataclass
class Model:
    """functions: by segment. parameters: whole ones. inputs: batch size -> a random batch."""

    traced: Traced
    functions: Mapping
    parameters: dict[str, torch.Tensor]

    def batch(self, size: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name in ("x", "image", "words", "target"):
            if name in self.traced.tensors:
                shape = (size, *self.traced.tensors[name].shape[1:])
                integers = self.traced.tensors[name].dtype == "int64"
                made[name] = (torch.randint(0, CLASSES, shape, generator=generator) if integers
                              else torch.randn(shape, generator=generator, dtype=torch.float64))
        return made

    def reference(self, batches, *, pieces: int, optimizer=functools.partial(torch.optim.SGD, lr=0.1)):
        """One process: per step every piece's loss and the parameters after it. `pieces`: microbatches x replicas."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
        update, steps = optimizer(list(leaves.values())), []
        for batch in batches:
            losses = []
            for piece in range(pieces):
                values = {name: value.chunk(pieces)[piece] for name, value in batch.items()}
                for segment in self.traced.segments:
                    inputs = {name: values[name] for name in segment.inputs}
                    values |= self.functions[segment.name]({name: leaves[name] for name in segment.parameters}, inputs)
                losses.append(values[self.traced.loss])
            grads = torch.autograd.grad(sum(losses) / pieces, list(leaves.values()), allow_unused=True, materialize_grads=True)
            for leaf, grad in zip(leaves.values(), grads, strict=True):
                leaf.grad = grad
            update.step()
            steps.append(([loss.item() for loss in losses], {name: leaf.detach().clone() for name, leaf in leaves.items()}))
        return steps


def _model(segments, tensors, loss, functions, shapes) -> Model:
    generator = torch.Generator().manual_seed(7)
    parameters = {name: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    tensors = tensors | {name: Tensor(tuple(shape), "float64", batch=None) for name, shape in shapes.items()}
    return Model(Traced(tuple(segments), tensors, loss), functions, parameters)


def chain(stages: int, batch: int, *, experts: bool = False, tied: bool = False) -> Model:
    """A chain of residual blocks, tagged PP, with a head that makes the loss in the last stage; with experts each block is three segments.

    Routing is real: each row goes to the expert that its gate prefers. tied: the last block's weight is the first one's.
    """
    width = Tensor((batch, HIDDEN), "float64")
    tensors = {"x": width, "target": Tensor((batch,), "int64"), "loss": Tensor((), "float64", batch=None)}
    segments, functions, shapes, last = [], {}, {}, "x"

    def add(name, tags, inputs, outputs, parameters, function):
        segments.append(Segment(name, tags, tuple(inputs), tuple(outputs), tuple(parameters)))
        functions[name] = function

    for stage in range(stages):
        name, before = f"block{stage}", last
        weight = "block0.w" if tied and stage == stages - 1 else f"{name}.w"
        shapes[weight] = (HIDDEN, HIDDEN)
        tensors[f"h{stage}"] = width
        last = f"h{stage}"
        if not experts:
            add(name, {"PP": stage}, [before], [last], [weight], lambda w, v, weight=weight, before=before, last=last: {
                last: v[before] + torch.tanh(v[before] @ w[weight])})
            continue
        shapes[f"{name}.gate"], shapes[f"{name}.e"] = (HIDDEN, EXPERTS), (EXPERTS, HIDDEN, HIDDEN)
        tensors |= {f"a{stage}": width, f"g{stage}": Tensor((batch, EXPERTS), "float64"), f"t{stage}": Tensor((EXPERTS, batch, HIDDEN), "float64", 1),
                    f"y{stage}": Tensor((EXPERTS, batch, HIDDEN), "float64", 1)}
        add(f"{name}.attention", {"PP": stage}, [before], [f"a{stage}", f"g{stage}", f"t{stage}"], [weight, f"{name}.gate"],
            _attention(stage, before, weight, f"{name}.gate"))
        add(f"{name}.experts", {"PP": stage, "EP": stage}, [f"t{stage}"], [f"y{stage}"], [f"{name}.e"], _experts(stage, f"{name}.e"))
        add(f"{name}.combine", {"PP": stage}, [f"a{stage}", f"g{stage}", f"y{stage}"], [last], [], _combine(stage))
    shapes["head.w"] = (HIDDEN, CLASSES)
    add("head", {"PP": stages - 1}, [last, "target"], ["loss"], ["head.w"], lambda w, v, last=last: {
        "loss": torch.nn.functional.cross_entropy(v[last] @ w["head.w"], v["target"])})
    return _model(segments, tensors, "loss", functions, shapes)


def _attention(stage, before, weight, gate):
    def run(w, v):
        a = v[before] + torch.tanh(v[before] @ w[weight])
        scores = torch.softmax(a @ w[gate], dim=1)
        chosen = torch.nn.functional.one_hot(scores.argmax(1), EXPERTS).to(a.dtype)
        g = scores * chosen  # rows x experts, zero where a row does not go
        tokens = chosen.t().unsqueeze(2) * a.unsqueeze(0)  # experts x rows x hidden, zeros where a row does not go
        return {f"a{stage}": a, f"g{stage}": g, f"t{stage}": tokens}

    return run


def _experts(stage, name):
    def run(w, v):
        # This device's experts, and the rows of every device of the group.
        return {f"y{stage}": torch.tanh(torch.bmm(v[f"t{stage}"], w[name]))}

    return run


def _combine(stage):
    def run(w, v):
        return {f"h{stage}": v[f"a{stage}"] + torch.einsum("te,eth->th", v[f"g{stage}"], v[f"y{stage}"])}

    return run


def diamond(batch: int) -> Model:
    """Two encoders of unlike depth, a join, and a head: `image` (two blocks) and `words` (one) meet in `join`."""
    width = Tensor((batch, HIDDEN), "float64")
    tensors = {name: width for name in ("image", "words", "i0", "i1", "w0", "j")}
    tensors["words"] = Tensor((batch, HIDDEN), "float64", gradient=False)
    tensors |= {"target": Tensor((batch,), "int64"), "loss": Tensor((), "float64", batch=None)}
    functions = {
        "image0": lambda w, v: {"i0": torch.tanh(v["image"] @ w["image0.w"])},
        "image1": lambda w, v: {"i1": torch.tanh(v["i0"] @ w["image1.w"])},
        "words0": lambda w, v: {"w0": torch.sin(v["words"] @ w["words0.w"])},
        "join": lambda w, v: {"j": torch.tanh((v["i1"] * v["w0"] + v["i0"]) @ w["join.w"])},
        "head": lambda w, v: {"loss": torch.nn.functional.cross_entropy(v["j"] @ w["head.w"], v["target"])},
    }
    segments = [
        Segment("image0", {"VIT": 0}, ("image",), ("i0",), ("image0.w",)),
        Segment("image1", {"VIT": 1}, ("i0",), ("i1",), ("image1.w",)),
        Segment("words0", {"TEXT": 0}, ("words",), ("w0",), ("words0.w",)),
        Segment("join", {"LLM": 0}, ("i0", "i1", "w0"), ("j",), ("join.w",)),
        Segment("head", {"LLM": 1}, ("j", "target"), ("loss",), ("head.w",)),
    ]
    shapes = {f"{name}.w": (HIDDEN, HIDDEN) for name in ("image0", "image1", "words0", "join")} | {"head.w": (HIDDEN, CLASSES)}
    return _model(segments, tensors, "loss", functions, shapes)
