"""A DAG's text says everything in it: printed, read back, and printed again, it is equal."""

import pytest

from rrfp.errors import ConfigurationError
from rrfp.program.builders import BUILDERS
from rrfp.program.directives import Replicate, apply
from rrfp.program.text import parse_dag, print_dag
from rrfp.program.traced import sketch
from rrfp.program.training import training_dag
from tests.program.models import chain, diamond

PARTS = ("attention", "experts", "combine")


@pytest.mark.parametrize("name", BUILDERS)
def test_round_trip(name):
    stages = 4 if name in ("interleaved", "zb-v", "dualpipev") else 2
    for options in ({}, {"replicas": 2, "experts": True, "zero": 3}, {"replicas": 2, "bucket_size": 0.01, "slotted": True}):
        dag = apply(training_dag(sketch(stages, parts=PARTS, batch=16)), BUILDERS[name](2, 4, **options))
        text = print_dag(dag)
        assert parse_dag(text) == dag and print_dag(parse_dag(text)) == text


def test_round_trip_of_traced_models():
    """Integers, scalars, tensors without a batch, tied and frozen parameters, and before any directive."""
    for model in (chain(3, 8, tied=True), chain(2, 8, experts=True), diamond(8)):
        dag = training_dag(model.traced).sorted()
        assert parse_dag(print_dag(dag)) == dag


def test_text_of_a_small_program():
    dag = apply(training_dag(sketch(1, batch=4, hidden=2, parameters=3)), [])
    assert print_dag(dag) == """program 1
tensor batch float32 4x2 batch 0
tensor stage0.out float32 -
tensor stage0.weight float32 3
segment stage0 {PP=0} in batch out stage0.out parameters stage0.weight
node F:stage0 {PP=0} on 0 stream compute
node B:stage0 {PP=0} on 0 stream compute
  < F:stage0 saved.stage0
node UPDATE:stage0 {PP=0} on 0 stream compute
  < B:stage0 grad.stage0
"""


@pytest.mark.parametrize("old, new, message", [
    ("program 1", "program 2", "line 1: must be 'program 1'"),
    ("node F:stage0", "node G:stage0", "'G' is no kind of node: it must be F, B, I, W or one of COMPUTE"),
    ("node F:stage0", "node stage0", "'stage0' is no node: write KIND:what"),
    ("{PP=0} on 0", "{PP=x} on 0", "'{PP=x}': write tags as {PP=0,MB=1}, without spaces"),
    ("float32 4x2", "float32 4*2", r"'4\*2' is no shape: write 8x64, or - for a scalar"),
    ("on 0", "at 0", "'at': must be tags, on, to, groups or stream"),
    ("tensor stage0.weight", "tensor batch", "tensor batch stands above already"),
    ("  < F:stage0 saved", "  < F:stage9 saved", "B:stage0: comes after F:stage9, which is no node"),
    ("segment", "part", "'part': must be one of dim, tensor, segment, bucket, shard, node, < or ~"),
    ("float32 4x2 batch 0", "float32", "it ends too early"),
])  # fmt: skip
def test_what_is_wrong_in_a_text_is_named_with_its_line(old, new, message):
    text = print_dag(apply(training_dag(sketch(1, batch=4, hidden=2, parameters=3)), []))
    with pytest.raises(ConfigurationError, match=message):
        parse_dag(text.replace(old, new, 1))


def test_slots_and_parts_are_in_the_text():
    cut = Replicate({}, (0, 1), bucket_size=0.01, slotted=True, prefetch=3)
    dag = apply(training_dag(sketch(1)), [*BUILDERS["gpipe"](1, 2, replicas=2)[:2], cut])
    assert "bucket bucket0 8192 zero 0 part 0/2 prefetch 3 slotted of stage0\n" in print_dag(dag)
