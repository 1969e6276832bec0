"""Captured models: real modules, annotated, run by the interpreter under strategies, against the module itself."""

import copy

import pytest
import torch
from torch import nn

from rrfp.errors import ConfigurationError
from rrfp.program.builders import BUILDERS
from rrfp.program.capture import annotate, capture
from rrfp.program.directives import Place, Replicate, Split, apply
from rrfp.program.training import training_dag
from tests.program.interpreter import Devices
from tests.program.transformer import EXPERTS, GPT, HIDDEN, LENGTH, loss, make_batch

RATE = 0.1


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(3)
    model = GPT(4).double()
    return model, capture(model, make_batch(8, 0), loss=loss)


def test_segments_and_tensors(gpt):
    model, captured = gpt
    names = [segment.name for segment in captured.traced.segments]
    assert names == [name for i in range(4) for name in (f"PP{i}", f"PP{i}.EP{i}", f"PP{i}.part1")]
    first, experts, last = captured.traced.segments[0], captured.traced.segments[1], captured.traced.segments[-1]
    assert first.tags == {"PP": 0} and experts.tags == {"PP": 0, "EP": 0} and first.inputs == ("words",)
    assert "embedding.weight" in first.parameters and "embedding.weight" in last.parameters, "one parameter, two segments"
    assert set(experts.parameters) == {"blocks.0.1.up", "blocks.0.1.down"}
    tokens = captured.traced.tensors[experts.inputs[0]]
    assert (tokens.shape, tokens.batch, tokens.dtype) == ((EXPERTS, 8 * LENGTH, HIDDEN), 1, "float64")
    assert "next" in last.inputs and not any("place" in segment.parameters for segment in captured.traced.segments)


@pytest.mark.parametrize("name, ranks, options", [
    ("1f1b", 4, {}), ("dualpipev", 2, {"replicas": 2, "experts": True}), ("interleaved", 2, {"replicas": 2, "zero": 3}), ("zb-v", 2, {}),
    ("zb-1", 4, {"replicas": 2, "experts": True, "zero": 2}),
])  # fmt: skip
def test_a_captured_transformer_trains_as_the_module_does(gpt, name, ranks, options):
    """Losses of every microbatch and all parameters after three steps, on other data each; microbatches of another size than traced."""
    model, captured = gpt
    replicas, microbatches, rows = options.get("replicas", 1), 4, 2
    dag = apply(training_dag(captured.traced), BUILDERS[name](ranks, microbatches, **options))
    devices = Devices(dag, captured.functions, {n: w.detach() for n, w in captured.weights.items()}, captured.traced.loss, rate=RATE)
    reference = copy.deepcopy(model)
    pieces = microbatches * replicas
    for step in range(3):
        batch = make_batch(rows * pieces, step)
        found = sorted(value for values in devices.step(batch).values() for value in values)
        losses = [loss(reference, {key: value.chunk(pieces)[piece] for key, value in batch.items()}) for piece in range(pieces)]
        reference.zero_grad()
        (sum(losses) / pieces).backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= RATE * parameter.grad
        assert found == pytest.approx(sorted(value.item() for value in losses), abs=1e-12)
    for parameter_name, parameter in reference.named_parameters():
        copies = devices.whole(parameter_name)
        assert copies and all(torch.allclose(own, parameter, rtol=0, atol=1e-12) for own in copies), parameter_name


class Two(nn.Module):
    """Two encoders that join: branches, each under its own tag."""

    def __init__(self):
        super().__init__()
        self.image, self.text, self.join = nn.Linear(4, 6), nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, image, text):
        with annotate("VIT"):
            a = self.image(image).tanh()
        with annotate("TEXT"):
            b = self.text(text).sin()
        with annotate("LLM"):
            return self.join(a * b).square().mean()


def test_branches_stay_branches():
    batch = {"image": torch.randn(4, 4), "text": torch.randn(4, 5)}
    captured = capture(Two(), batch, loss=lambda model, given: model(given["image"], given["text"]))
    dag = apply(training_dag(captured.traced), [Split({}, "MB", 2), Place({"VIT": 0}, (0,)), Place({"TEXT": 0}, (1,)), Place({"LLM": 0}, (2,))])
    assert [node.name for node in dag.before("F:TEXT0[MB=0]")] == [] and len(list(dag.before("F:LLM0[MB=0]"))) == 2


def test_annotations_count_by_tag_and_nest_and_do_nothing_outside_a_capture():
    with annotate("PP"), annotate("EP"):
        assert torch.ones(1).item() == 1.0
    batch = {"image": torch.randn(4, 4), "text": torch.randn(4, 5)}

    class Inner(Two):
        def forward(self, image, text):
            with annotate("A"):
                with annotate("B"):
                    a = self.image(image)
                b = self.text(text)
                with annotate("B"):
                    a = a * b
            return self.join(a).mean()

    captured = capture(Inner(), batch, loss=lambda model, given: model(given["image"], given["text"]))
    assert [segment.tags for segment in captured.traced.segments] == [{"A": 0, "B": 0}, {"A": 0}, {"A": 0, "B": 1}]


def test_a_tuple_and_a_size_that_cross_an_annotation():
    """One part chunks, others take the chunks and ask for sizes: gradients flow through every one of them, sums are the module's."""

    class Crossing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x):
            with annotate("PP"):
                a, b = self.one(x).chunk(2, dim=1)
            with annotate("PP"):
                c = self.two(a) / x.shape[0]
            with annotate("PP"):
                return (b.tanh() * c * a.shape[0]).mean()

    model = Crossing().double()
    captured = capture(model, {"x": torch.randn(6, 4).double()}, loss=lambda module, batch: module(batch["x"]))
    assert all(captured.traced.tensors[name].differentiable for segment in captured.traced.segments for name in segment.outputs)
    dag = apply(training_dag(captured.traced), [Split({}, "MB", 2), *(Place({"PP": stage}, (stage,)) for stage in range(3))])
    devices = Devices(dag, captured.functions, {n: w.detach() for n, w in captured.weights.items()}, captured.traced.loss, rate=RATE)
    batch = {"x": torch.randn(8, 4).double()}
    devices.step(batch)
    (sum(model(part) for part in batch["x"].chunk(2)) / 2).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(devices.whole(name)[0], parameter - RATE * parameter.grad, rtol=0, atol=1e-12), name


def test_what_cannot_be_captured_is_refused():
    batch = {"image": torch.randn(4, 4), "text": torch.randn(4, 5)}

    class Fixed(Two):
        def forward(self, image, text):
            return super().forward(image.view(4, 4) if image.sum() > 0 else image, text)

    def call(model, given):
        return model(given["image"], given["text"])

    with pytest.raises(ConfigurationError, match="model: cannot be traced with a batch of any size: "):
        capture(Fixed(), batch, loss=call)

    class Normed(Two):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, image, text):
            return super().forward(self.norm(image), text)

    with pytest.raises(ConfigurationError, match=r"model: norm\.\w+: is written by aten.add_.Tensor; other microbatches"):
        capture(Normed(), batch, loss=call)
    with pytest.raises(ConfigurationError, match="model: nothing in it is annotated; write `with annotate"):
        capture(nn.Linear(4, 1), {"image": batch["image"]}, loss=lambda model, given: model(given["image"]).mean())


@pytest.mark.parametrize("shape, loss", [
    (r"torch.float32 \[4\]", lambda loss, rows: loss + rows), (r"torch.float32 \[\], torch.float32 \[4\]", lambda loss, rows: (loss, rows)),
    (r"torch.int64 \[\]", lambda loss, rows: loss.long()), ("no tensor", lambda loss, rows: None),
])  # fmt: skip
def test_a_loss_that_is_no_scalar_is_refused(shape, loss):
    batch = {"image": torch.randn(4, 4), "text": torch.randn(4, 5)}
    with pytest.raises(ConfigurationError, match=f"loss: returns {shape.replace('[4', '[s?[0-9]+')}; it must return one floating-point scalar"):
        capture(Two(), batch, loss=lambda model, given: loss(model(**given).mean(), given["image"].mean(1)))


def test_one_replicas_reduction_left_out_is_seen(gpt):
    """Negative control of the proof above: without a reduction the copies of a parameter part."""
    _, captured = gpt
    dag = apply(training_dag(captured.traced), [Split({}, "MB", 2), Place({}, (0, 1)), Replicate({}, (0, 1))])
    draft = dag.edit()
    reduction = dag.of("ALL_REDUCE")[0]
    for edge in dag.incoming[reduction.name]:
        draft.move([edge], [other._replace(source=edge.source) for other in dag.outgoing[reduction.name] if other.tensor == edge.tensor])
    draft.move(dag.outgoing[reduction.name], [])
    del draft.nodes[reduction.name]
    devices = Devices(draft.dag(), captured.functions, {n: w.detach() for n, w in captured.weights.items()}, captured.traced.loss)
    devices.step(make_batch(8, 0))
    parameter = dag.parameters(reduction)[0]
    one, other = devices.whole(parameter)
    assert (one - other).abs().max() > 1e-4


def test_what_no_value_of_the_batch_decides_is_made_where_it_is_used():
    """A mask and a table, from a buffer, of one part for another: no message carries them. What is written in place is no such constant."""

    class Masked(nn.Module):
        def __init__(self, write):
            super().__init__()
            self.one, self.two, self._write = nn.Linear(4, 4), nn.Linear(4, 4), write
            self.register_buffer("table", torch.linspace(0, 1, 4))

        def forward(self, x):
            with annotate("PP"):
                mask = torch.ones(x.shape[0], 4, device=x.device).tril() + self.table
                x = self.one(x)
                if self._write:
                    mask[:, 1:].mul_(x[:, 1:].detach())
            with annotate("PP"):
                return (self.two(x) * mask).square().mean()

    for write in (False, True):
        model = Masked(write).double()
        captured = capture(model, {"x": torch.randn(6, 4).double()}, loss=lambda module, batch: module(batch["x"]))
        first, second = captured.traced.segments
        assert len(first.outputs) == 1 + write and set(second.inputs) >= set(first.outputs)
        values = {"x": torch.randn(3, 4).double()}
        wanted = model(values["x"])
        for segment in (first, second):
            values |= captured.functions[segment.name]({name: captured.weights[name] for name in segment.parameters}, values)
        assert values[captured.traced.loss].item() == pytest.approx(wanted.item(), abs=1e-12)


def test_an_index_may_be_given():
    """Neighbours of one index are one segment, whatever lies between them."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for index, layer in enumerate(self.layers):
                with annotate("PP", index // 3):
                    x = layer(x)
                x = x.tanh()
            return x.mean()

    captured = capture(Layers(), {"x": torch.randn(6, 4)}, loss=lambda module, batch: module(batch["x"]))
    assert [(segment.name, len(segment.parameters)) for segment in captured.traced.segments] == [("PP0", 6), ("PP1", 2)]
