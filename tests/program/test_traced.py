"""The forward graph and its training DAG: what is refused, which segments train, which gradients flow."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.program.traced import Segment, Tensor, Traced, sketch
from rrfp.program.training import training_dag

X = {name: Tensor((4, 2)) for name in ("x", "a", "b", "c", "ids")} | {"ids": Tensor((4,), "int64"), "w": Tensor((2, 2), batch=None)}


def traced(*segments, loss="c"):
    return Traced(tuple(segments), X, loss)


def segment(name, inputs, outputs, parameters="w", **more):
    return Segment(name, {}, tuple(inputs.split()), tuple(outputs.split()), tuple(parameters.split()), **more)


@pytest.mark.parametrize("segments, message", [
    ([segment("one", "x", "a"), segment("one", "a", "c")], "model: segment 'one': must have a name of its own"),
    ([segment("o ne", "x", "c")], "model: segment 'o ne': must have a name of its own, of letters"),
    ([segment("one", "y", "c")], "model: segment one: nothing is known of tensor y; give its shape and type"),
    ([segment("two", "a", "c"), segment("one", "x", "a")], "model: segment two: uses a before a segment makes it; reorder"),
    ([segment("one", "x", "a"), segment("two", "x", "a c")], "model: segment two: makes a, which one made; name it otherwise"),
    ([segment("one", "x", "a")], "model: loss c: no segment makes it; name an output"),
])  # fmt: skip
def test_what_is_no_model_is_refused(segments, message):
    with pytest.raises(ConfigurationError, match=message):
        traced(*segments)


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(ConfigurationError, match="model: loss c: no trained parameter lies below it"):
        training_dag(traced(segment("one", "x", "c", "w", frozen=True)))


def test_gradients_flow_where_they_are_needed():
    """Not below the first trained parameter, not through integers, not beside the loss; a frozen segment passes them on."""
    model = traced(segment("plain", "x", "a", ""), segment("route", "a", "b ids"), segment("head", "b ids", "c", "w", frozen=True))
    dag = training_dag(model)
    assert [name for name in dag.nodes if name[0] == "B"] == ["B:head", "B:route"]
    assert {edge.tensor for edge in dag.incoming["B:route"]} == {"saved.route", "d.b"}
    assert [node.name for node in dag.of("UPDATE")] == ["UPDATE:route"]


def test_two_users_of_a_tensor_both_send_a_gradient():
    dag = training_dag(traced(segment("one", "x", "a"), segment("left", "a", "b"), segment("join", "a b", "c")))
    assert {(edge.source, edge.tensor) for edge in dag.incoming["B:one"]} == {("F:one", "saved.one"), ("B:left", "d.a"), ("B:join", "d.a")}


def test_bytes():
    assert [Tensor((3, 2), dtype).nbytes for dtype in ("float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "bool")] == [48, 24, 12, 6, 48, 6]


def test_a_sketch_is_a_chain_whose_residual_passes_the_experts():
    model = sketch(2, parts=("attention", "experts", "combine"))
    assert [s.tags for s in model.segments] == [{"PP": 0}, {"PP": 0, "EP": 0}, {"PP": 0}, {"PP": 1}, {"PP": 1, "EP": 1}, {"PP": 1}]
    assert model.segments[2].inputs == ("stage0.experts.out", "stage0.attention.out")
