"""Ranks that disagree, and messages of another shape or dtype: each refused on every rank, in the same words, at once."""

import re

import numpy as np
import pytest
import torch
from group import Group

from rrfp.action import Edge
from rrfp.comm.tensors import Expected, check_arrival
from rrfp.comm.transport import Arrival, Part
from rrfp.errors import PipelineError

RANKS = 4


@pytest.fixture(scope="module")
def group():
    with Group(RANKS) as group:
        yield group


def everywhere(group, **different) -> str:
    """What all ranks raise, which must be one and the same; it must not take long."""
    results = group.run("disagreement", **different)
    lines = {re.split(r"\n", text or "", maxsplit=1)[0] for text, _ in results}
    assert len(lines) == 1, lines
    print(f"{max(seconds for _, seconds in results):.2f} s: {min(lines)}")
    assert max(seconds for _, seconds in results) < 30.0
    return lines.pop()


def test_equal_ranks_run(group):
    """The control: the same job with nothing different."""
    assert everywhere(group, calls={"all": [{"microbatches": 4}, {"microbatches": 6}, {"microbatches": 4, "forward_only": True}]}) == ""


HELLO = {
    "lanes": ({"options": {1: {"lanes": 4}}}, "--rrfp-lanes", "1 on ranks 0, 2, 3; 4 on rank 1; give every rank the same --rrfp-lanes"),
    "hint": ({"options": {2: {"hint": "bf"}}}, "--rrfp-hint",
             "auto on ranks 0, 1, 3; bf on rank 2; give every rank the same --rrfp-hint"),
    "mode": ({"options": {3: {"mode": "strict"}}}, "--rrfp-mode",
             "ready on ranks 0, 1, 2; strict on rank 3; give every rank the same --rrfp-mode"),
    "limit": ({"options": {0: {"limit": "2p"}}}, "--rrfp-limit", "2p on rank 0; auto on ranks 1, 2, 3; give every rank the same --rrfp-limit"),
    "order": ({"options": {0: {"order": "free"}}}, "--rrfp-order",
              "free on rank 0; microbatch on ranks 1, 2, 3; give every rank the same --rrfp-order"),
    "timeout": ({"options": {0: {"timeout": 5.0}}}, "--rrfp-timeout",
                "5.0 on rank 0; 10.0 on ranks 1, 2, 3; give every rank the same --rrfp-timeout"),
    "emulate": ({"options": {1: {"emulate": "uniform"}}}, "--rrfp-emulate",
                "None on ranks 0, 2, 3; uniform on rank 1; give every rank the same --rrfp-emulate"),
    "inject": ({"options": {1: {"inject": "J1"}}}, "--rrfp-inject", "None on ranks 0, 2, 3; J1 on rank 1; give every rank the same --rrfp-inject"),
    "rrfp": ({"versions": {0: {"rrfp": "9.9"}}}, "rrfp", "9.9 on rank 0; 0.1.0 on ranks 1, 2, 3; install one rrfp on all hosts"),
    "torch": ({"versions": {3: {"torch": "1.0.0"}}}, "torch",
              f"{torch.__version__.partition('+')[0]} on ranks 0, 1, 2; 1.0.0 on rank 3; install one torch on all hosts"),
    "two": ({"options": {1: {"lanes": 2, "mode": "strict"}}}, "--rrfp-mode",
            "ready on ranks 0, 2, 3; strict on rank 1 (also different: --rrfp-lanes); give every rank the same --rrfp-mode"),
}


@pytest.mark.parametrize("name", HELLO)
def test_flags_and_versions_are_compared_when_the_pipeline_connects(group, name):
    different, fact, values = HELLO[name]
    assert everywhere(group, **different) == f"ConfigurationError: {fact} must be the same on every rank of a pipeline: {values}"


def test_megatron_of_another_release_is_named(group):
    line = everywhere(group, versions={1: {"megatron.core": "0.18.2"}})
    assert re.fullmatch(r"ConfigurationError: megatron-core must be the same on every rank of a pipeline: \S+ on ranks 0, 2, 3; "
                        r"0\.18\.2 on rank 1; install one megatron-core on all hosts", line)


FIRST = {
    "microbatches": ({"calls": {3: [{"microbatches": 6}]}}, "the number of microbatches in the first call",
                     "4 on ranks 0, 1, 2; 6 on rank 3 (also different: the hint's rows); "
                     "give every rank the same --global-batch-size, --micro-batch-size and --rampup-batch-size"),
    "evaluation": ({"calls": {0: [{"microbatches": 4, "forward_only": True}]}}, "evaluation instead of training in the first call",
                   "True on rank 0; False on ranks 1, 2, 3; call the schedule alike on every rank"),
    "width": ({"config": {1: {"hidden_size": 64}}}, "--hidden-size",
              "32 on ranks 0, 2, 3; 64 on rank 1; give every rank the same --hidden-size"),
    "dtype": ({"config": {1: {"pipeline_dtype": torch.bfloat16}}}, "the pipeline's dtype",
              "float32 on ranks 0, 2, 3; bfloat16 on rank 1; give every rank the same --bf16 or --fp16"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_call_is_compared_before_its_first_action(group, name):
    different, fact, values = FIRST[name]
    assert everywhere(group, **different) == f"ConfigurationError: {fact} must be the same on every rank of a pipeline: {values}"


@pytest.mark.parametrize("rank", range(RANKS))
def test_another_number_of_microbatches_in_a_later_call(group, rank):
    calls = {"all": [{"microbatches": 4}, {"microbatches": 4}], rank: [{"microbatches": 4}, {"microbatches": 6}]}
    line = everywhere(group, calls=calls)
    near = [(low, low + 1) for low in (rank - 1, rank) if 0 <= low and low + 1 < RANKS]
    said = [f"PipelineError: stage {low} (rank {low}) failed (call 1): ranks {low} and {high} disagree on what call 1 is: microbatches "
            f"{6 if low == rank else 4} on rank {low}, {6 if high == rank else 4} on rank {high}; every rank must make the same calls "
            "in the same order" for low, high in near]
    assert line in said


def test_evaluation_on_one_rank_and_training_on_the_others(group):
    line = everywhere(group, calls={"all": [{"microbatches": 4}] * 2, 3: [{"microbatches": 4}, {"microbatches": 4, "forward_only": True}]})
    assert line == ("PipelineError: stage 2 (rank 2) failed (call 1): ranks 2 and 3 disagree on what call 1 is: forward_only False on "
                    "rank 2, True on rank 3; every rank must make the same calls in the same order")


@pytest.mark.timeout(90)
def test_a_rank_that_never_enters_the_first_call_is_named(group):
    assert everywhere(group, absent=(2, 0), timeout=0.5) == (
        "PipelineError: stage 2 (rank 2) failed (call 0): has not entered this call within 2 s, and is not known to be lost: it is "
        "elsewhere, for example in its data loader")


@pytest.mark.timeout(90)
def test_a_rank_that_never_enters_a_later_call_is_named(group):
    """Its neighbours say it; whoever says it first is heard by all."""
    results = group.run("disagreement", calls={"all": [{"microbatches": 4}] * 3}, absent=(2, 2), timeout=1.0)
    lines = [text.splitlines()[0] for text, _ in results]
    assert sum("rank 2 has not entered it, its last was call 1" in line for line in lines) >= 3, lines
    print(f"{max(seconds for _, seconds in results):.2f} s: {lines}")


# ---------------------------------------------------------------------------------------------------- shapes and dtypes


def _arrival(*parts: Part) -> Arrival:
    return Arrival(0, Edge(1, 2), 0, 5, parts, 0.0)


def _part(dtype: str, *shape: int) -> Part:
    return Part(dtype, shape, np.zeros(int(np.prod(shape)) * {"float32": 4, "bfloat16": 2}[dtype], np.uint8))


ACTIVATION = Expected("bfloat16", (16, 2, 32), "from this rank's configuration")
MISSING = Part("float32", (), None)
SHAPES = {
    "another shape": ((_part("bfloat16", 16, 2, 64),), "bfloat16 [16, 2, 64] came"),
    "as many elements": ((_part("bfloat16", 32, 32),), "bfloat16 [32, 32] came"),
    "another dtype": ((_part("float32", 16, 2, 32),), "float32 [16, 2, 32] came"),
    "two tensors": ((_part("bfloat16", 16, 2, 32),) * 2, "bfloat16 [16, 2, 32], bfloat16 [16, 2, 32] came"),
    "no tensor": ((MISSING,), "no tensor came"),
    "nothing": ((), "nothing came"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_activation_that_is_not_what_was_configured_is_named(name):
    parts, came = SHAPES[name]
    with pytest.raises(PipelineError) as refused:
        check_arrival(_arrival(*parts), ACTIVATION, may_be_missing=False)
    assert str(refused.value) == f"edge 1>2, microbatch 5: {came}, expected bfloat16 [16, 2, 32] (from this rank's configuration)"


def test_what_is_as_configured_passes():
    check_arrival(_arrival(_part("bfloat16", 16, 2, 32)), ACTIVATION, may_be_missing=False)
    check_arrival(_arrival(MISSING), ACTIVATION, may_be_missing=True)
    check_arrival(_arrival(_part("bfloat16", 3, 1)), ACTIVATION._replace(shape=None), may_be_missing=False)


def test_with_variable_shapes_the_dtype_is_still_checked():
    with pytest.raises(PipelineError, match=r"float32 \[3, 1\] came, expected bfloat16 of any shape"):
        check_arrival(_arrival(_part("float32", 3, 1)), ACTIVATION._replace(shape=None), may_be_missing=False)


@pytest.mark.parametrize("what, came, expected", [
    ("shape", "float32 [16, 2, 16]", "edge 0>1, microbatch 0: {} came, expected float32 [16, 2, 32] (from this rank's configuration)"),
    ("dtype", "bfloat16 [16, 2, 32]", "edge 0>1, microbatch 0: {} came, expected float32 [16, 2, 32] (from this rank's configuration)"),
])
def test_a_stage_that_sends_another_tensor_is_named_on_every_rank(group, what, came, expected):
    results = group.run("disagreement", sends={0: what})
    said = {text.splitlines()[0].removeprefix("PipelineError: ") for text, _ in results}
    print(f"{max(seconds for _, seconds in results):.2f} s: {said}")
    line = expected.format(came)
    assert said <= {line, f"stage 1 (rank 1) failed (1F0): PipelineError: {line}"} and len(said) == 2, said
